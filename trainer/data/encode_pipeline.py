"""Encode batches of examples in threads, so that reading and writing do not keep the cores waiting.

The `tokenizers` library spreads the texts of a batch over all cores (RAYON_NUM_THREADS limits them) without Python's
interpreter lock. It leaves cores idle at the end of a batch, and while its ids are converted and the next texts are
read. A second batch is therefore encoded at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from trainer.data.encode import EncodedDocument, encode_batch
from trainer.data.examples import Example
from trainer.data.tokenizer import TextTokenizer

ENCODE_THREADS = 2
BATCHES_AHEAD = 3  # batches that are read before the first of them is written: two encode, one waits

Batch: TypeAlias = list[Example]


def encode_batches(
    batches: Iterable[Batch], tokenizer: TextTokenizer
) -> Generator[tuple[Batch, list[EncodedDocument]], None, None]:
    """Yield batches of examples with their documents, in order.

    Batches are read ahead by a constant number, so errors do not depend on the speed of the threads.

    Args:
        batches: The batches; they are read in the calling thread.
        tokenizer: Tokenizer of their texts.

    Raises:
        PrepError: The tokenizer fails.
    """
    executor = ThreadPoolExecutor(ENCODE_THREADS, "encode")
    pending: deque[tuple[Batch, Future[list[EncodedDocument]]]] = deque()
    try:
        for batch in batches:
            pending.append((batch, executor.submit(_encode, batch, tokenizer)))
            if len(pending) > BATCHES_AHEAD:
                yield _take_first(pending)
        while pending:
            yield _take_first(pending)
    finally:
        executor.shutdown(cancel_futures=True)


def _encode(batch: Batch, tokenizer: TextTokenizer) -> list[EncodedDocument]:
    return list(encode_batch(batch, tokenizer))


def _take_first(
    pending: deque[tuple[Batch, Future[list[EncodedDocument]]]],
) -> tuple[Batch, list[EncodedDocument]]:
    """Remove the first batch; return it with its documents once they are encoded."""
    batch, documents = pending.popleft()
    return batch, documents.result()
