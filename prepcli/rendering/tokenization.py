"""The tokens of a recipe as text and JSON."""

from __future__ import annotations

from prepcli.console.formatting import count_text
from prepcli.console.ui import Report
from prepcli.operations.results import Tokenization, TokenizedData


def tokenization_report(result: Tokenization) -> Report:
    """Return one line per token store, and the JSON object.

    Args:
        result: Result of the operation.
    """
    fields = {
        "process": result.process,
        "complete": result.is_complete,
        "data": {part.name: _data_fields(part) for part in result.data},
        "seconds": round(result.seconds, 3),
    }
    lines = [_data_line(part) for part in result.data]
    # Only process 0 prints the report of a job. Here another process may have completed the tokens.
    process = result.process
    if result.is_complete:
        process = None
    return Report("\n".join(lines), fields, process=process)


def _data_fields(part: TokenizedData) -> dict[str, str | int | None]:
    return {
        "path": None if part.path is None else str(part.path),
        "shards": part.shards,
        "missing_shards": part.missing_shards,
        "tokens": part.tokens,
        "documents": part.documents,
    }


def _data_line(part: TokenizedData) -> str:
    """Return the output of a store, or the number of its missing shards."""
    if part.path is None:
        missing = count_text(part.missing_shards, "shard")
        return f"{part.name}: {missing} of {part.shards:,} left to other processes"
    return str(part.path)
