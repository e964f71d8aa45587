"""Read the samples of a token store as text with loss weights, and count them.

A sample is a document of the store, or with an encoder a source and its target.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np

from trainer.data.sample_text import SampleCounts, SamplePart, TokenSample
from trainer.data.store import MappedTokens, document_end_blocks
from trainer.data.tokenizer import TextTokenizer

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
