"""The samples of a token store as a model sees them: read, counted, and as text with marks around tokens with loss.

A sample is a document of the store, or with an encoder a source and its target.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prepcli.core.formatting import (
    MARK_END,
    count_text,
    escape_marks,
    marked,
    printable,
    printable_line,
)
from prepcli.core.tables import Cell, format_table, wrap_line
from trainer.data.store import MappedTokens, document_end_blocks
from trainer.data.tokenizer import TextTokenizer


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


# Documents counted together. The number is even, so that each block begins with a source.
COUNT_DOCUMENTS = 1 << 12
# Tokens of a text to show. The middle of a longer one is omitted.
MAX_SAMPLE_TOKENS = 1024
# Tokens that are decoded with the ones after them. Tokenizers strip the first space of a text.
CONTEXT_TOKENS = 32


def count_samples(tokens: MappedTokens, *, source_length: int, has_blocks: bool) -> SampleCounts:
    """Count the samples of a store, and their tokens.

    With `has_blocks`, documents are concatenated and cut into blocks, and the rest of the last block is dropped. The
    `source_length` is 0 without an encoder.
    """
    sums: Counter[str] = Counter()
    longest = start = 0
    for ends in document_end_blocks(tokens, COUNT_DOCUMENTS):
        bounds = np.concatenate([[start], ends])
        start = int(ends[-1])
        lengths = np.diff(bounds)
        loss_counts = lengths
        if tokens.weight_codes is not None:
            # Code 0 is a weight of 0.
            positions = np.flatnonzero(tokens.weight_codes[int(bounds[0]) : int(bounds[-1])])
            loss_counts = np.diff(np.searchsorted(positions, bounds - bounds[0]))
        longest = max(longest, int(lengths.max()))
        if source_length:
            sources = lengths[::2]
            lengths, loss_counts = lengths[1::2], loss_counts[1::2]
            sums["cut_sources"] += int((sources > source_length).sum())
            sums["cut_targets"] += int((lengths > tokens.seq_length).sum())
            sums["cut"] += int(((sources > source_length) | (lengths > tokens.seq_length)).sum())
            sums["dropped"] += int((sources - source_length).clip(0).sum())
            sums["dropped"] += int((lengths - tokens.seq_length).clip(0).sum())
        else:
            sums["cut"] += int((lengths > tokens.seq_length).sum())
        sums["samples"] += len(lengths)
        sums["loss_tokens"] += int(loss_counts.sum())
        sums["without_loss"] += int((loss_counts == 0).sum())
    if has_blocks and not source_length:
        sums["dropped"] = tokens.n_tokens % tokens.seq_length
    return SampleCounts(tokens=tokens.n_tokens, longest=longest, **sums)


def read_samples(
    tokens: MappedTokens,
    tokenizer: TextTokenizer,
    n_samples: int,
    *,
    source_length: int = 0,
    max_tokens: int = MAX_SAMPLE_TOKENS,
) -> Iterator[TokenSample]:
    """Yield the first samples of a store. Without an encoder the `source_length` is 0.

    The middle of a text of more than `max_tokens` tokens is left out.

    Raises:
        PrepError: The tokenizer cannot decode the tokens.
    """
    bounds = [0, *tokens.ends[: 2 * n_samples].tolist()]
    spans = list(itertools.pairwise(bounds))
    if not source_length:
        for low, high in spans[:n_samples]:
            yield TokenSample(
                parts=_read_parts(tokens, tokenizer, (low, high), max_tokens=max_tokens),
                source=(),
                tokens=high - low,
                loss_tokens=tokens.count_loss(low, high),
                is_cut=high - low > tokens.seq_length,
            )
        return
    for (start, middle), (_, end) in zip(spans[::2], spans[1::2]):
        source = (start, middle)
        yield TokenSample(
            parts=_read_parts(tokens, tokenizer, (middle, end), max_tokens=max_tokens),
            source=_read_parts(tokens, tokenizer, source, max_tokens=max_tokens, has_loss=False),
            tokens=end - start,
            loss_tokens=tokens.count_loss(middle, end),
            is_cut=middle - start > source_length or end - middle > tokens.seq_length,
        )


def _read_parts(
    tokens: MappedTokens,
    tokenizer: TextTokenizer,
    span: tuple[int, int],
    *,
    max_tokens: int,
    has_loss: bool = True,
) -> tuple[SamplePart, ...]:
    """Return the parts of a document from its start and its end in the store. Sources have no loss."""
    low, high = span
    if high - low <= max_tokens:
        return tuple(_decode_parts(tokens, tokenizer, low, high, has_loss=has_loss))
    head = low + max_tokens // 2
    tail = high - (max_tokens - max_tokens // 2)
    return (
        *_decode_parts(tokens, tokenizer, low, head, has_loss=has_loss),
        SamplePart("", (), 0.0, omitted=tail - head),
        *_decode_parts(tokens, tokenizer, tail, high, has_loss=has_loss),
    )


def _decode_parts(
    tokens: MappedTokens, tokenizer: TextTokenizer, low: int, high: int, *, has_loss: bool
) -> Iterator[SamplePart]:
    """Yield the parts of consecutive tokens: a new one where the weight changes, and around special tokens."""
    ids = tokens.ids[low:high].tolist()
    weights = [float(has_loss)] * len(ids)
    if has_loss and tokens.weight_codes is not None:
        weights = [tokens.loss_weights[code] for code in tokens.weight_codes[low:high].tolist()]
    special_ids = tokenizer.special_ids({*ids})
    marks = [(weight, token_id in special_ids) for token_id, weight in zip(ids, weights)]
    preceding: list[int] = []
    for (weight, is_special), group in itertools.groupby(zip(marks, ids), lambda item: item[0]):
        part_ids = [token_id for _, token_id in group]
        if is_special:
            text = "".join(map(tokenizer.spelling, part_ids))
            preceding = []
        else:
            text = tokenizer.decode(part_ids, preceding)
            preceding = part_ids[-CONTEXT_TOKENS:]
        yield SamplePart(text, tuple(part_ids), weight, is_special)


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
