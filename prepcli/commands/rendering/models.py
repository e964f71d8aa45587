"""Aliases of checkpoints as text and JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from prepcli.commands.console.ui import Report
from prepcli.core.formatting import format_bytes
from prepcli.core.tables import format_table
from prepcli.models.registry import FAMILIES
from prepcli.models.verbatim import CANNOT_TRAIN
from prepcli.sources.aliases import Alias

# Common numbers of devices. The table has the number of equal shards of the vocabulary on each.
DEVICE_COUNTS = (8, 128)
# Columns of text without a terminal.
TEXT_WIDTH = 120
# Columns that a narrow terminal leaves out, the first one first.
OPTIONAL_COLUMNS = ("shards on 128", "shards on 8", "vocabulary", "parameters", "family", "size")


def aliases_report(aliases: Sequence[Alias], columns: int | None) -> Report:
    """Return the table of aliases with the supported model types, and fields with sizes in bytes.

    Args:
        aliases: The aliases.
        columns: Width of the terminal. None means unlimited.
    """
    supported = {"convert": "any", "train": [*FAMILIES], "generate": [*FAMILIES]}
    fields = {
        "models": [_alias_fields(alias) for alias in aliases],
        "families": [*FAMILIES],
        "supported": supported,
    }
    names = ", ".join(FAMILIES)
    families = f"{len(FAMILIES)} model types convert, train and generate: {names}"
    multimodal = (
        "a multimodal model with a text part of such a type (model_type of its text_config) converts with its towers,"
        " and trains and generates as its text part"
    )
    others = f"all other model types convert: {CANNOT_TRAIN}"
    width = columns or TEXT_WIDTH
    lines = [
        _alias_table(aliases, columns),
        "",
        textwrap.fill(families, width),
        textwrap.fill(multimodal, width),
        textwrap.fill(others, width),
    ]
    return Report("\n".join(lines), fields)


def _alias_table(aliases: Sequence[Alias], columns: int | None) -> str:
    """Return the table of aliases, with the vocabulary shards on each number of devices."""
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
            # gcd(50257, 8) = 1: an odd vocabulary stays whole. gcd(50400, 128) = 32: each shard is on 4 devices.
            *(math.gcd(alias.vocab, count) for count in DEVICE_COUNTS),
        ]
        for alias in aliases
    ]
    return format_table(
        rows, header, right_aligned=["size"], width=columns, optional=OPTIONAL_COLUMNS
    )


def _alias_fields(alias: Alias) -> dict[str, object]:
    return {
        "alias": alias.name,
        "hub_id": alias.hub_id,
        "family": alias.family,
        "parameters": alias.parameters,
        "bytes": alias.nbytes,
        "vocab": alias.vocab,
        "gcd": {str(count): math.gcd(alias.vocab, count) for count in DEVICE_COUNTS},
    }
