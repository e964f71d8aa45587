"""The tokens of a recipe as text and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.results import Tokenization, TokenizedData
from prepcli.core.formatting import count_text
from trainer.data.sample_text import counts_table, sample_lines, sample_title


def tokenization_report(
    result: Tokenization, columns: int | None, *, shows_ids: bool = False
) -> Report:
    """Return one line per token store, and the JSON object. The samples and the table of their counts come first.

    Args:
        result: Result of the operation.
        columns: Width of the terminal. None means unlimited.
        shows_ids: Also show the token ids of the samples.
    """
    fields = {
        "process": result.process,
        "complete": result.is_complete,
        "data": {part.name: _data_fields(part) for part in result.data},
        "seconds": round(result.seconds, 3),
    }
    lines = [*_sample_lines(result.data, columns, shows_ids=shows_ids)]
    lines += [_data_line(part) for part in result.data]
    # Only process 0 prints the report of a job. Here another process may have completed the tokens.
    process = result.process
    if result.is_complete:
        process = None
    return Report("\n".join(lines), fields, process=process, has_marks=True)


def _sample_lines(
    data: Sequence[TokenizedData], columns: int | None, *, shows_ids: bool
) -> Iterator[str]:
    """Yield the samples of each source, and the table of all counts. Nothing if they were not read."""
    counts = {part.name: part.counts for part in data if part.counts is not None}
    if not counts:
        return
    for part in data:
        for number, sample in enumerate(part.samples, 1):
            yield f"--- {sample_title(part.name, number, sample)}"
            yield from sample_lines(sample, shows_ids=shows_ids, width=columns)
            yield ""
    yield counts_table(counts, columns)
    yield ""


def _data_fields(part: TokenizedData) -> dict[str, object]:
    fields: dict[str, object] = {
        "path": None if part.path is None else str(part.path),
        "shards": part.shards,
        "missing_shards": part.missing_shards,
        "tokens": part.tokens,
        "documents": part.documents,
    }
    if part.counts is not None:
        fields["counts"] = asdict(part.counts)
        fields["samples"] = [asdict(sample) for sample in part.samples]
    return fields


def _data_line(part: TokenizedData) -> str:
    """Return the output of a store, the number of its missing shards, or that a dry run keeps no tokens."""
    if part.path is None and not part.missing_shards:
        return f"{part.name}: no tokens are kept"
    if part.path is None:
        missing = count_text(part.missing_shards, "shard")
        return f"{part.name}: {missing} of {part.shards:,} left to other processes"
    return str(part.path)
