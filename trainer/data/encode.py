"""Encode examples in batches, and write their tokens to a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.examples import Example, Segment, TokenIds
from trainer.data.readers.text_file import TEXT_CHUNK_NBYTES
from trainer.data.store_writer import TokenWriter
from trainer.data.tokenizer import TextTokenizer

# Bytes of text that are encoded at once: a chunk for every core. Encoding takes about 100 times as much memory.
ENCODE_BATCH_NBYTES = TEXT_CHUNK_NBYTES * min(max(os.cpu_count() or 1, 8), 64)
NO_IDS = np.array([], np.uint32)


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


def write_examples(
    examples: Iterable[Example],
    tokenizer: TextTokenizer,
    writer: TokenWriter,
    *,
    vocab: int,
    progress: Callable[[int], None],
) -> None:
    """Tokenize examples and append them to a store, in order and in bounded memory.

    Args:
        examples: The examples.
        tokenizer: Tokenizer of their texts.
        writer: Writer of the store.
        vocab: Size of the model's vocabulary without padding.
        progress: Called with the bytes of each batch that is written.

    Raises:
        PrepError: An example is invalid, the tokenizer fails, or an id is not in the vocabulary.
    """
    for batch in batch_examples(examples):
        for document in encode_batch(batch, tokenizer):
            writer.append(document.ids, document.weights)
            if document.ends_document:
                writer.end_document()
        tokenizer.check_in_vocab(writer.max_id, vocab)
        progress(sum(example.nbytes for example in batch))


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
    texts = [part.content for segments, _ in documents for part in segments if isinstance(part.content, str)]
    text_ids = iter(tokenizer.encode(texts))
    for segments, ends_document in documents:
        parts = [next(text_ids) if isinstance(part.content, str) else part.content for part in segments]
        ids = np.concatenate(parts) if parts else NO_IDS
        yield EncodedDocument(ids, _weights(segments, parts), ends_document)


def _documents(example: Example) -> Iterator[tuple[tuple[Segment, ...], bool]]:
    """Yield the segments of each document of an example, and whether they end it."""
    if example.source is not None:
        yield example.source, True
    yield example.target, example.ends_document


def _weights(segments: Sequence[Segment], parts: Sequence[TokenIds]) -> npt.NDArray[np.uint8] | None:
    """Return the loss weight of each token; None if all are 1."""
    if all(segment.weight for segment in segments):
        return None
    return np.repeat(np.array([segment.weight for segment in segments], np.uint8), [len(part) for part in parts])
