"""The samples of training data as text, with marks around the tokens with loss, and the table of their counts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from prepcli.core.formatting import (
    MARK_END,
    count_text,
    escape_marks,
    marked,
    printable,
    printable_line,
)
from prepcli.core.tables import Cell, format_table, wrap_line
from trainer.data.data_samples import SampleCounts, SamplePart, TokenSample

COUNT_HEADER = (
    *("data", "samples", "tokens", "with loss"),
    *("cut", "dropped", "longest", "without loss"),
)
# Shows where a line of a sample ends, and whether its newline has loss.
NEWLINE = "↵"
# A mark ends after the sign of a newline, so that the next line begins with its own text.
NEWLINE_AND_END = re.compile(f"\n({MARK_END}?)")


def count_cells(name: str, counts: SampleCounts) -> list[Cell]:
    """Return a row below COUNT_HEADER."""
    return [
        *(name, counts.samples, counts.tokens, counts.loss_tokens),
        *(counts.cut, counts.dropped, counts.longest, counts.without_loss),
    ]


def counts_table(counts: Mapping[str, SampleCounts], width: int | None) -> str:
    """Return the table with the counts of each data set by name."""
    rows = [count_cells(name, part) for name, part in counts.items()]
    return format_table(rows, COUNT_HEADER, width=width)


def sample_title(name: str, number: int, sample: TokenSample) -> str:
    """Return e.g. `train 1: 57 tokens, 21 with loss, longer than a sequence`."""
    title = f"{name} {number}: {count_text(sample.tokens, 'token')}, {loss_text(sample)}"
    if sample.is_cut:
        title += ", longer than a sequence"
    return title


def loss_text(sample: TokenSample) -> str:
    """Return the number of tokens with loss as text."""
    if not sample.loss_tokens:
        return "none with loss"
    return f"{sample.loss_tokens:,} with loss"


def sample_lines(sample: TokenSample, *, shows_ids: bool, width: int | None) -> Iterator[str]:
    """Yield the text of a sample, and the ids of its tokens.

    Args:
        sample: The sample.
        shows_ids: Also show the ids.
        width: Characters of a line of ids, or None for as many as they need.
    """
    for label, parts in sample_texts(sample):
        if label:
            yield f"{label}:"
        yield NEWLINE_AND_END.sub(rf"{NEWLINE}\1\n", marked_text(parts)).removesuffix("\n")
        if shows_ids:
            yield wrap_line(f"ids: {_marked_ids(parts)}", width)


def sample_texts(sample: TokenSample) -> Iterator[tuple[str, Sequence[SamplePart]]]:
    """Yield name and parts of each text of a sample. The only text has no name."""
    if sample.source:
        yield "source", sample.source
        yield "target", sample.parts
    else:
        yield "", sample.parts


def weight_groups(parts: Sequence[SamplePart]) -> Iterator[tuple[float, list[SamplePart]]]:
    """Yield each loss weight with the consecutive parts that have it."""
    for weight, group in itertools.groupby(parts, lambda part: part.weight):
        yield weight, list(group)


def marked_text(parts: Sequence[SamplePart]) -> str:
    """Return the text of a sample with marks around its parts with loss, e.g. `Hi? ⟦Yes⟧ ⟦0.5:no⟧`."""
    pieces: list[str] = []
    for weight, group in weight_groups(parts):
        # A bracket in the data is not a mark.
        text = "".join(escape_marks(_printable_part(part)) for part in group)
        pieces.append(_marked_by_weight(text, weight))
    return "".join(pieces)


def part_text(part: SamplePart) -> str:
    """Return the text of a part with control characters escaped, and newlines shown."""
    return _printable_part(part).replace("\n", f"{NEWLINE}\n")


def _printable_part(part: SamplePart) -> str:
    if part.omitted:
        return f" [… {count_text(part.omitted, 'token')} …] "
    return printable(part.text)


def part_ids(part: SamplePart) -> str:
    """Return the ids of a part as text."""
    if part.omitted:
        return "…"
    return " ".join(map(str, part.ids))


def _marked_ids(parts: Sequence[SamplePart]) -> str:
    """Return the ids of a sample with the marks of its text, e.g. `1 7 ⟦8 2⟧`."""
    pieces: list[str] = []
    for weight, group in weight_groups(parts):
        pieces.append(_marked_by_weight(" ".join(map(part_ids, group)), weight))
    return " ".join(pieces)


def _marked_by_weight(text: str, weight: float) -> str:
    if not weight:
        return text
    if weight == 1:
        return marked(text)
    return marked(f"{weight:g}:{text}")


def sample_line(sample: TokenSample) -> str:
    """Return a sample as one line, for the log of a run."""
    texts: list[str] = []
    for label, parts in sample_texts(sample):
        text = printable_line(marked_text(parts))
        texts.append(f"{label} {text}".strip())
    return " -> ".join(texts)
