"""Encode batches of examples to the tokens of their documents."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.data.examples import Example, Segment, TokenIds
from trainer.data.readers.text_file import TEXT_CHUNK_NBYTES
from trainer.data.tokenizer import TextTokenizer

# Bytes of text of a batch: a chunk for every core. Encoding takes about 100 times as much memory.
ENCODE_BATCH_NBYTES = TEXT_CHUNK_NBYTES * min(max(os.cpu_count() or 1, 4), 64)
NO_IDS = np.array([], np.uint32)

Weights: TypeAlias = int | npt.NDArray[np.uint8]  # of a segment: one for all tokens, or one per token


@dataclass(frozen=True, slots=True, eq=False)
class EncodedDocument:
    """Tokens of a document, or of a part of one.

    Attributes:
        ids: Token ids.
        weights: Loss weight of each token as a target, 0 or 1, uint8; None if all are 1.
        ends_document: Whether the document ends with them.
    """

    ids: TokenIds
    weights: npt.NDArray[np.uint8] | None
    ends_document: bool


def batch_examples(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Group examples in order, up to ENCODE_BATCH_NBYTES per group; a larger example is a group by itself.

    Examples of compressed files have more characters than bytes.
    """
    batch: list[Example] = []
    nbytes = 0
    for example in examples:
        example_nbytes = max(example.nbytes, example.size)
        if batch and nbytes + example_nbytes > ENCODE_BATCH_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(example)
        nbytes += example_nbytes
    if batch:
        yield batch


def encode_batch(batch: Sequence[Example], tokenizer: TextTokenizer) -> Iterator[EncodedDocument]:
    """Yield the documents of examples: of each its source, if it has one, then its target.

    Args:
        batch: The examples.
        tokenizer: Tokenizer of their texts.

    Raises:
        PrepError: The tokenizer fails.
    """
    documents = [document for example in batch for document in _documents(example)]
    segments = [part for parts, _ in documents for part in parts]
    encoded = iter(_encode_segments(segments, tokenizer))
    for parts, ends_document in documents:
        pairs = [next(encoded) for _ in parts]
        ids = np.concatenate([ids for ids, _ in pairs]) if pairs else NO_IDS
        yield EncodedDocument(ids, _join_weights(pairs), ends_document)


def _encode_segments(segments: Sequence[Segment], tokenizer: TextTokenizer) -> Iterator[tuple[TokenIds, Weights]]:
    """Yield the ids and the weights of each segment."""
    texts, span_texts = _texts(segments, with_spans=False), _texts(segments, with_spans=True)
    text_ids, span_ids = iter(tokenizer.encode(texts)), iter(tokenizer.encode_with_offsets(span_texts))
    for segment in segments:
        if segment.loss_spans is not None:
            ids, offsets = next(span_ids)
            yield ids, span_weights(offsets, segment.loss_spans)
        else:
            yield next(text_ids) if isinstance(segment.content, str) else segment.content, segment.weight


def _texts(segments: Sequence[Segment], *, with_spans: bool) -> list[str]:
    return [
        segment.content
        for segment in segments
        if isinstance(segment.content, str) and (segment.loss_spans is not None) == with_spans
    ]


def span_weights(offsets: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint8]:
    """Return the loss weight of each token of a text.

    Args:
        offsets: Start and end of each token in the text, in characters [T, 2].
        spans: Start and end of each part of the text that has loss. Tokens that overlap it have weight 1, and those
            between the first and the last of them.
    """
    weights = np.zeros(len(offsets), np.uint8)
    starts, ends = offsets[:, 0], offsets[:, 1]
    for start, end in spans:
        overlapping = np.flatnonzero((ends > start) & (starts < end) & (ends > starts))
        if len(overlapping):
            weights[overlapping[0] : overlapping[-1] + 1] = 1
    return weights


def _documents(example: Example) -> Iterator[tuple[tuple[Segment, ...], bool]]:
    """Yield the segments of each document of an example, and whether they end it."""
    if example.source is not None:
        yield example.source, True
    yield example.target, example.ends_document


def _join_weights(pairs: Sequence[tuple[TokenIds, Weights]]) -> npt.NDArray[np.uint8] | None:
    """Return the loss weight of each token of segments; None if all are 1."""
    if all(isinstance(weights, int) and weights for _, weights in pairs):
        return None
    return np.concatenate([np.broadcast_to(np.asarray(weights, np.uint8), ids.shape) for ids, weights in pairs])
