"""`prep models`: the aliases of checkpoints."""

from __future__ import annotations

import math

from prepcli.console.formatting import format_bytes
from prepcli.console.ui import Report, format_table
from prepcli.errors import usage_error
from prepcli.sources.aliases import ALIAS_FAMILIES, ALIASES, Alias
from trainer.models.suggest import did_you_mean

DEVICE_COUNTS = (
    8,
    128,
)  # common numbers of devices: the table has the number of equal vocabulary shards on each
# Columns that a narrow terminal leaves out, the first one first.
OPTIONAL_COLUMNS = ("shards on 128", "shards on 8", "vocabulary", "parameters", "family", "size")


def models(family: str | None, columns: int | None = None) -> Report:
    """Report the aliases of one family, or of all families.

    Args:
        family: Family to list; None lists all.
        columns: Width of the table. None means unlimited.

    Returns:
        Report with a table, and fields with sizes in bytes.

    Raises:
        UsageError: No alias has this family.
    """
    if family is not None and family not in ALIAS_FAMILIES:
        why = f"known: {', '.join(ALIAS_FAMILIES)}"
        hint = did_you_mean(family, ALIAS_FAMILIES)
        raise usage_error(f"no aliases of family `{family}`", why, hint)
    aliases = [alias for alias in ALIASES if family in (None, alias.family)]
    return Report(
        text=_alias_table(aliases, columns),
        fields={"models": [_fields(alias) for alias in aliases]},
    )


def _alias_table(aliases: list[Alias], columns: int | None) -> str:
    header = [
        "alias",
        "hub id",
        "family",
        "parameters",
        "size",
        "vocabulary",
        *(f"shards on {count}" for count in DEVICE_COUNTS),
    ]
    rows = [
        [
            alias.name,
            alias.hub_id,
            alias.family,
            alias.parameters,
            format_bytes(alias.nbytes),
            alias.vocab,
            *(math.gcd(alias.vocab, count) for count in DEVICE_COUNTS),
        ]
        for alias in aliases
    ]
    return format_table(
        rows, header, right_aligned=["size"], width=columns, optional=OPTIONAL_COLUMNS
    )


def _fields(alias: Alias) -> dict[str, object]:
    return {
        "alias": alias.name,
        "hub_id": alias.hub_id,
        "family": alias.family,
        "parameters": alias.parameters,
        "bytes": alias.nbytes,
        "vocab": alias.vocab,
        "gcd": {str(count): math.gcd(alias.vocab, count) for count in DEVICE_COUNTS},
    }
