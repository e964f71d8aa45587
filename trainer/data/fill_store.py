"""Fill a token store with the examples that it lacks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from trainer.data.encode import batch_examples
from trainer.data.encode_pipeline import encode_batches
from trainer.data.examples import Example
from trainer.data.read_position import FileStart, ReadPosition
from trainer.data.store_writer import TokenWriter
from trainer.data.tokenizer import TextTokenizer


class ReadExamples(Protocol):
    """Function that reads the examples of a dataset."""

    def __call__(self, *, start: FileStart, on_file: Callable[[FileStart], None]) -> Iterator[Example]:
        """Yield the examples from the start of a file on, as `read_examples` does."""
        ...


def fill_store(
    writer: TokenWriter,
    read: ReadExamples,
    tokenizer: TextTokenizer,
    *,
    vocab: int,
    progress: Callable[[int, int], None],
) -> None:
    """Tokenize examples and append them to a store, in order and in bounded memory.

    The file of the store's position is read again from its start. Its examples before the position are skipped, without
    tokenizing them.

    Args:
        writer: Writer of the store, at the position of the examples that the store has.
        read: Reads the examples.
        tokenizer: Tokenizer of their texts.
        vocab: Size of the model's vocabulary without padding.
        progress: Called with the bytes and the tokens in the store: at the start, and after each batch.

    Raises:
        PrepError: An example is invalid, the tokenizer fails, or an id is not in the vocabulary.
    """
    position = writer.position
    starts = [position.start]
    examples = read(start=position.start, on_file=starts.append)
    missing = itertools.islice(examples, position.n_examples - position.start.n_examples, None)
    progress(position.nbytes, writer.n_tokens)
    for batch, documents in encode_batches(batch_examples(missing), tokenizer):
        for document in documents:
            writer.append(document.ids, document.weights)
            if document.ends_document:
                writer.end_document()
        tokenizer.check_in_vocab(writer.max_id, vocab)
        position = _position_after(position, batch, starts)
        writer.commit(position)
        progress(position.nbytes, writer.n_tokens)


def _position_after(position: ReadPosition, batch: Sequence[Example], starts: list[FileStart]) -> ReadPosition:
    """Return the position after a batch, and drop the starts of files that are complete before it."""
    n_examples = position.n_examples + len(batch)
    while len(starts) > 1 and starts[1].n_examples <= n_examples:
        del starts[0]
    return ReadPosition(n_examples, position.nbytes + sum(example.nbytes for example in batch), starts[0])
