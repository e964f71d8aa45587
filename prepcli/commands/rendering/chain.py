"""Chains of checkpoints as text and JSON."""

from __future__ import annotations

from dataclasses import asdict

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.results import Chain, ChainLink
from prepcli.core.errors import GET_AGAIN_HINT, Option, PrepError, text
from prepcli.core.formatting import count_text, join_names
from prepcli.core.tables import format_table

HEADER = ("link", "equal digests", "status")


def chain_report(chain: Chain, width: int | None) -> Report:
    """Return the report of a chain: a table of the links, and their changes. It has an error if a link is broken.

    Args:
        chain: Result of the operation.
        width: Width of the terminal, or None for full width.
    """
    rows = [(_link_text(link), link.proof, link.status) for link in chain.links]
    lines: list[str] = []
    if rows:
        lines.append(format_table(rows, HEADER, width=width, wrapped=HEADER[:2]))
    for link in chain.links:
        if link.changed:
            lines.append(f"changed by {link.command} in {link.output}: {link.changed}")
        if link.not_shown:
            check = f" (`{link.check}` compares it)" if link.check else ""
            lines.append(f"not shown for {link.output}: {link.not_shown}{check}")
    fields: dict[str, object] = {
        "links": [asdict(link) for link in chain.links],
        "origins": list(chain.origins),
        "proven": all(link.status == "proven" for link in chain.links),
    }
    broken = chain.broken_link
    if broken is not None:
        return Report("\n".join(lines), fields, error=_broken_error(broken))
    origins = join_names(chain.origins)
    start = f" from {origins}" if origins else ""
    lines.append(f"ok: {count_text(len(chain.links), 'link')}{start} ({chain.seconds:.1f} s)")
    return Report("\n".join(lines), fields)


def _link_text(link: ChainLink) -> str:
    """Return the ends of a link, e.g. `m-hf <- export of m-init`."""
    if not link.source:
        return link.output
    return f"{link.output} <- {link.command} of {link.source}"


def _broken_error(link: ChainLink) -> PrepError:
    """Return the error for the first broken link."""
    if link.status == "failed":
        return PrepError(f"the link {_link_text(link)} failed", link.reason, GET_AGAIN_HINT)
    hint = text(
        "{} finds moved checkpoints, {} accepts the link",
        Option("search", "FOLDER"),
        Option("allow_unproven", True),
    )
    return PrepError(f"the link {_link_text(link)} is not proven", link.reason, hint)
