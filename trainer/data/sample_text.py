"""The samples of training data as a model sees them, and as text with marks around the tokens with loss."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.core.formatting import (
    MARK_END,
    count_text,
    escape_marks,
    marked,
    printable,
    printable_line,
)
from prepcli.core.tables import Cell, format_table, wrap_line


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Counts of the samples of a token store.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens, of sources too.
        loss_tokens: Number of tokens with a loss weight above 0.
        cut: Number of samples that are longer than a sequence. With an encoder, the source or the target is.
        dropped: Number of tokens that no sequence has.
        longest: Tokens of the longest sample. With an encoder, of the longest source or target.
        without_loss: Number of samples without a token with loss.
        cut_sources: Number of sources that are longer than `source_length`.
        cut_targets: Number of targets that are longer than `seq_length`.
    """

    samples: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    cut: int = 0
    dropped: int = 0
    longest: int = 0
    without_loss: int = 0
    cut_sources: int = 0
    cut_targets: int = 0


@dataclass(frozen=True, slots=True)
class SamplePart:
    """Consecutive tokens of a sample with one loss weight.

    Attributes:
        text: The decoded text, or the spelling of special tokens.
        ids: The token ids.
        weight: Loss weight of each token, 0 to 1.
        is_special: Whether the tokens are special ones, or ids that the tokenizer does not have.
        omitted: Number of tokens left out here. The part has no text then.
    """

    text: str
    ids: tuple[int, ...]
    weight: float
    is_special: bool = False
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A sample of a token store. The texts of its parts, joined, are what a model sees.

    Attributes:
        parts: The parts of the document, or with an encoder of the target.
        source: The parts of the source. Empty without an encoder.
        tokens: Number of tokens, of the source too.
        loss_tokens: Number of tokens with a loss weight above 0.
        is_cut: Whether it is longer than a sequence.
    """

    parts: tuple[SamplePart, ...]
    source: tuple[SamplePart, ...]
    tokens: int
    loss_tokens: int
    is_cut: bool


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
    loss = f"{sample.loss_tokens:,}" if sample.loss_tokens else "none"
    title = f"{name} {number}: {count_text(sample.tokens, 'token')}, {loss} with loss"
    if sample.is_cut:
        title += ", longer than a sequence"
    return title


def sample_lines(sample: TokenSample, *, shows_ids: bool, width: int | None) -> Iterator[str]:
    """Yield the text of a sample, and the ids of its tokens in lines of `width` characters."""
    for label, parts in sample_texts(sample):
        if label:
            yield f"{label}:"
        yield NEWLINE_AND_END.sub(rf"{NEWLINE}\1\n", marked_text(parts)).removesuffix("\n")
        if shows_ids:
            # With the marks of the text, e.g. `1 7 ⟦8 2⟧`.
            ids: list[str] = []
            for weight, group in weight_groups(parts):
                ids.append(_marked_by_weight(" ".join(map(part_ids, group)), weight))
            yield wrap_line(f"ids: {' '.join(ids)}", width)


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
