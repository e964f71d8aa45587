"""Encode examples in batches and in threads, and fit documents that are longer than a sequence."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from prepcli.core.json_values import JsonValue
from trainer.data.examples import (
    CUT_DOCUMENTS,
    DROPPED_DOCUMENTS,
    NO_LOSS,
    NO_STOP_TOKEN,
    Example,
    LossSpan,
    Segment,
    lacks_stop_token,
)
from trainer.data.readers.text_files import TEXT_CHUNK_NBYTES
from trainer.data.tokenizer import TextTokenizer, TokenIds
from trainer.recipe.text_fields import WHOLE_TOKENS, Overlong


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBatch:
    """Tokens of consecutive examples."""

    ids: TokenIds  # Token ids of all documents, one document after the other
    # Loss weight of each token as a target, 0 to 1, float32. None if all are 1.
    weights: npt.NDArray[np.float32] | None
    # End of each complete document in `ids`. Tokens after the last end are the first part of a document of the next
    # batch.
    ends: npt.NDArray[np.int64]
    ignored: Mapping[str, int]  # Number of each ignored part of the examples, by name


# Bytes of text of a batch: a chunk for every core, also on a machine with fewer than 4. Encoding takes
# about 100 times as much memory, so 64 chunks of 256 KiB are 1.6 GB.
ENCODE_BATCH_NBYTES = TEXT_CHUNK_NBYTES * min(max(os.cpu_count() or 1, 4), 64)
NO_IDS = np.array([], np.uint32)
# Loss weight of a segment: one number for all tokens, or an array with one per token.
Weights: TypeAlias = int | npt.NDArray[np.float32]


class ExampleBatch(NamedTuple):
    """Consecutive examples of a shard."""

    shard: int
    examples: list[Example]


def batch_examples(examples: Iterable[tuple[int, Example]]) -> Iterator[ExampleBatch]:
    """Group examples with their shards in order, up to ENCODE_BATCH_NBYTES of one shard per group.

    A larger one is a group by itself.
    """
    batch = ExampleBatch(0, [])
    nbytes = 0
    for shard, example in examples:
        # Examples of compressed files have more characters than bytes.
        example_nbytes = max(example.nbytes, example.size)
        is_full = nbytes + example_nbytes > ENCODE_BATCH_NBYTES
        if batch.examples and (is_full or shard != batch.shard):
            yield batch
            batch = ExampleBatch(shard, [])
            nbytes = 0
        if not batch.examples:
            batch = ExampleBatch(shard, [])
        batch.examples.append(example)
        nbytes += example_nbytes
    if batch.examples:
        yield batch


def encode_batch(batch: Sequence[Example], tokenizer: TextTokenizer) -> EncodedBatch:
    """Return the tokens of examples. The source of an example is a document before its target."""
    # One call of the library encodes all segments of the batch, and spreads them over the cores. Python
    # does constant work per segment, and NumPy the rest.
    segments: list[Segment] = []
    document_ends: list[int] = []
    for example in batch:
        if example.source is not None:
            segments += example.source
            document_ends.append(len(segments))
        segments += example.target
        if example.ends_document:
            document_ends.append(len(segments))
    encoded = list(_encode_segments(segments, tokenizer))
    # E.g. segments of 3, 1 and 2 tokens have the bounds [0, 3, 4, 6]. Documents that end after 2 and 3
    # segments have the ends [4, 6].
    lengths = np.array([len(ids) for ids, _ in encoded], np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.concatenate([NO_IDS, *(ids for ids, _ in encoded)])
    weights = None
    if not all(isinstance(value, int) and value for _, value in encoded):
        weights = np.empty(bounds[-1], np.float32)
        for start, end, (_, value) in zip(bounds[:-1].tolist(), bounds[1:].tolist(), encoded):
            weights[start:end] = value
    ends = bounds[document_ends]
    return EncodedBatch(ids, weights, ends, _count_ignored(batch, ids, weights, ends))


def _count_ignored(
    batch: Sequence[Example],
    ids: TokenIds,
    weights: npt.NDArray[np.float32] | None,
    ends: npt.NDArray[np.int64],
) -> dict[str, int]:
    """Return the number of each ignored part of examples, by name. The arguments are as in `EncodedBatch`."""
    counts = Counter(name for example in batch for name in example.ignored)
    # Only conversations have stop tokens to check, and each is one document.
    if weights is not None and all(example.stop_ids for example in batch):
        for example, start, end in zip(batch, [0, *ends.tolist()], ends.tolist()):
            if not weights[start:end].any():
                counts[NO_LOSS] += 1
            elif lacks_stop_token(ids[start:end], weights[start:end], example.stop_ids):
                counts[NO_STOP_TOKEN] += 1
    return dict(counts)


def _encode_segments(
    segments: Sequence[Segment], tokenizer: TextTokenizer
) -> Iterator[tuple[TokenIds, Weights]]:
    """Yield the ids and the weights of each segment."""
    texts: list[str] = []
    span_texts: list[str] = []
    for segment in segments:
        if isinstance(segment.content, str):
            group = texts if segment.loss_spans is None else span_texts
            group.append(segment.content)
    text_ids = iter(tokenizer.encode(texts))
    span_ids = iter(tokenizer.encode_with_offsets(span_texts))
    for segment in segments:
        if segment.loss_spans is not None:
            ids, offsets = next(span_ids)
            yield ids, span_weights(offsets, segment.loss_spans)
        elif isinstance(segment.content, str):
            yield next(text_ids), segment.weight
        else:
            yield segment.content, segment.weight


def span_weights(
    offsets: npt.NDArray[np.int64], spans: Sequence[LossSpan]
) -> npt.NDArray[np.float32]:
    """Return the loss weight of each token with the offsets [T, 2] in characters.

    Tokens that overlap a span have its weight, and all tokens between the first and the last of them.
    """
    weights = np.zeros(len(offsets), np.float32)
    starts = offsets[:, 0]
    ends = offsets[:, 1]
    for start, end, weight in spans:
        # Starts and ends ascend. E.g. a span (3, 8) and tokens (0, 4), (4, 4), (4, 9): the first and the third
        # overlap it, and the second, without characters, is between them.
        first, last = np.searchsorted(ends, start, "right"), np.searchsorted(starts, end, "left")
        overlapping = first + np.flatnonzero(ends[first:last] > starts[first:last])
        if len(overlapping):
            weights[overlapping[0] : overlapping[-1] + 1] = weight
    return weights


# The process of the tokenizer encodes one batch after another, on all cores (RAYON_NUM_THREADS limits the threads of
# the `tokenizers` library). A second thread joins the texts of the next batch and the ids of the last one meanwhile.
ENCODE_THREADS = 2
# Batches that are read before the first of them is written: two encode, one waits.
BATCHES_AHEAD = 3


def encode_batches(
    batches: Iterable[ExampleBatch], tokenizer: TextTokenizer
) -> Generator[tuple[ExampleBatch, EncodedBatch], None, None]:
    """Yield batches of examples with their tokens, in order. They are read in the calling thread.

    Batches are read ahead by a constant number, so errors do not depend on the speed of the threads.
    """
    executor = ThreadPoolExecutor(ENCODE_THREADS, "encode")
    pending: deque[tuple[ExampleBatch, Future[EncodedBatch]]] = deque()
    try:
        for batch in batches:
            pending.append((batch, executor.submit(encode_batch, batch.examples, tokenizer)))
            if len(pending) > BATCHES_AHEAD:
                first, encoded = pending.popleft()
                yield first, encoded.result()
        for batch, encoded in pending:
            yield batch, encoded.result()
    finally:
        executor.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class OverlongRule:
    """How long documents are made to fit."""

    choice: Overlong  # The recipe's `data.overlong`
    seq_length: int  # Maximum tokens of a document
    # The beginning-of-sequence token, which stays at the start of a document. None without one.
    bos_id: int | None = None

    def identity_inputs(self) -> list[JsonValue] | None:
        """Return the inputs of a store's identity. None if the store has all tokens."""
        if self.choice == WHOLE_TOKENS:
            return None
        return [self.choice, self.seq_length, self.bos_id]


def fit_documents(batch: EncodedBatch, rule: OverlongRule) -> EncodedBatch:
    """Return a batch without the tokens that are too many, and count what is cut and dropped.

    >>> batch = EncodedBatch(np.arange(7), None, np.array([5, 7]), {})
    >>> fit_documents(batch, OverlongRule("truncate", 3)).ids.tolist()
    [0, 1, 2, 5, 6]

    Args:
        batch: Tokens of whole documents.
        rule: The rule for those with more tokens than a sequence.
    """
    starts = np.concatenate([[0], batch.ends[:-1]])
    lengths = batch.ends - starts
    too_long = np.flatnonzero(lengths > rule.seq_length)
    if rule.choice == WHOLE_TOKENS or not len(too_long):
        return batch
    keeps = np.ones(len(batch.ids), bool)
    for document in too_long.tolist():
        part = slice(int(starts[document]), int(batch.ends[document]))
        weights = None
        if batch.weights is not None:
            weights = batch.weights[part]
        keeps[part] = _kept_tokens(batch.ids[part], weights, rule)
    # E.g. documents of 5 and 2 tokens of which 3 and 2 stay have the ends [3, 5].
    ends = np.concatenate([[0], np.cumsum(keeps)])[batch.ends]
    weights = batch.weights
    if weights is not None:
        weights = weights[keeps]
    name = CUT_DOCUMENTS
    if rule.choice == "drop":
        name = DROPPED_DOCUMENTS
        ends = np.delete(ends, too_long)
    ignored = {**batch.ignored, name: len(too_long)}
    return EncodedBatch(batch.ids[keeps], weights, ends, ignored)


def _kept_tokens(
    ids: npt.NDArray[np.uint32], weights: npt.NDArray[np.float32] | None, rule: OverlongRule
) -> npt.NDArray[np.bool_]:
    """Return which tokens of a long document stay [T]."""
    keeps = np.zeros(len(ids), bool)
    if rule.choice == "drop":
        return keeps
    first = 0
    n_kept = rule.seq_length
    if rule.choice == "truncate_prompt" and weights is not None:
        # The prompt is what precedes the first token with loss. Its start is cut, without its
        # beginning-of-sequence token, and the end of the document only if the rest does not fit alone.
        n_prompt = int(np.argmax(weights > 0)) if weights.any() else len(ids)
        if n_prompt and ids[0] == rule.bos_id:
            keeps[0] = True
            n_kept -= 1
        first = min(n_prompt, len(ids) - n_kept)
    keeps[first : first + n_kept] = True
    return keeps
