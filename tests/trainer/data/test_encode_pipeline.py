"""Encoding batches in threads: in order, a few batches ahead, and errors in the calling thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.corpus import encode, make_tokenizer
from trainer.data import encode_pipeline
from trainer.data.encode_pipeline import BATCHES_AHEAD, Batch, encode_batches
from trainer.data.examples import Example, Segment
from trainer.data.tokenizer import TextTokenizer, load_tokenizer
from trainer.models.errors import PrepError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


def make_batches(count: int, read: list[int]) -> Iterator[Batch]:
    """Yield batches of one text each, and record their numbers when they are read."""
    for number in range(count):
        read.append(number)
        yield [Example((Segment(f"the cat {number}"),), nbytes=1)]


@pytest.mark.parametrize("count", [0, 1, BATCHES_AHEAD, 9])
def test_encode_batches_keeps_the_order(tokenizer: TextTokenizer, count: int):
    encoded = [document.ids.tolist() for _, (document,) in encode_batches(make_batches(count, []), tokenizer)]
    assert encoded == [encode(tokenizer.path, f"the cat {number}") for number in range(count)]


def test_encode_batches_reads_a_constant_number_ahead(tokenizer: TextTokenizer):
    read: list[int] = []
    batches = encode_batches(make_batches(9, read), tokenizer)
    for number in range(3):
        next(batches)
        assert len(read) == number + 1 + BATCHES_AHEAD
    batches.close()


def test_encode_batches_raises_errors_of_threads(tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch):
    def fails(batch: Batch, _: TextTokenizer) -> None:
        raise PrepError(str(batch[0].target[0].content))

    monkeypatch.setattr(encode_pipeline, "encode_batch", fails)
    with pytest.raises(PrepError, match="the cat 0"):
        list(encode_batches(make_batches(9, []), tokenizer))
