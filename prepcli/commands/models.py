"""`prep models`: the checkpoints that have a short name."""

from __future__ import annotations

import math

from prepcli.console.formatting import format_bytes
from prepcli.console.ui import Report, format_table
from prepcli.errors import usage_error
from prepcli.sources.aliases import ALIAS_FAMILIES, ALIASES, Alias
from trainer.models.suggest import suggest

DEVICE_COUNTS = (8, 128)  # usual numbers of devices; the table says into how many equal shards a vocabulary splits on them


def models(family: str | None, columns: int | None = None) -> Report:
    """The aliases of one family, or of all; raises a usage PrepError for a family that has none."""
    if family is not None and family not in ALIAS_FAMILIES:
        meant = suggest(family, ALIAS_FAMILIES)
        hint = f"did you mean `{meant}`?" if meant else ""
        raise usage_error(f"no aliases of family `{family}`", f"known: {', '.join(ALIAS_FAMILIES)}", hint)
    found = [alias for alias in ALIASES if family in (None, alias.family)]
    return Report(text=_alias_table(found, columns), fields={"models": [_fields(alias) for alias in found]})


def _alias_table(aliases: list[Alias], columns: int | None) -> str:
    head = ["alias", "hub id", "family", "parameters", "size", "vocabulary", *(f"shards on {ways}" for ways in DEVICE_COUNTS)]
    rows = [
        [
            alias.name,
            alias.hub_id,
            alias.family,
            alias.parameters,
            format_bytes(alias.nbytes),
            alias.vocab,
            *(math.gcd(alias.vocab, ways) for ways in DEVICE_COUNTS),
        ]
        for alias in aliases
    ]
    return format_table(rows, head, right_aligned=["size"], width=columns)


def _fields(alias: Alias) -> dict[str, object]:
    return {
        "alias": alias.name,
        "hub_id": alias.hub_id,
        "family": alias.family,
        "parameters": alias.parameters,
        "bytes": alias.nbytes,
        "vocab": alias.vocab,
        "gcd": {str(ways): math.gcd(alias.vocab, ways) for ways in DEVICE_COUNTS},
    }
