"""Stop texts end with the same token as `stop_strings` of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.helpers.tokenizer_folders import train_tokenizer
from trainer.data.incremental_decoder import StopFinder
from trainer.data.tokenizer import TextTokenizer, load_tokenizer


def tokenizer_of(folder: Path, kind: str) -> TextTokenizer:
    """Return a tokenizer of a kind with the special token `<s>`."""
    train_tokenizer(kind, 1).save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def first_stop(
    tokenizer: TextTokenizer, stops: list[str], prompt: list[int], ids: list[int]
) -> int | None:
    """Return the number of new tokens up to the end of the first stop text."""
    find = StopFinder(stops, tokenizer, prompt)
    return next((count for count, token in enumerate(ids, 1) if find(token)), None)


def test_stop_text_may_be_spread_over_tokens(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path, "byte-level")
    ids = [tokenizer.codec.token_id(letter) for letter in "abxyd"]
    assert None not in ids
    tokens = [token for token in ids if token is not None]
    assert first_stop(tokenizer, ["bxy"], [], tokens) == 4
    assert first_stop(tokenizer, ["zz", "x"], [], tokens) == 3
    assert first_stop(tokenizer, ["zz"], [], tokens) is None


def test_stop_text_may_begin_but_not_end_in_the_prompt(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path, "byte-level")
    (prompt,) = tokenizer.encode(["x\n"])
    (ids,) = tokenizer.encode(["a\n"])
    assert first_stop(tokenizer, ["\n\n", "x\n", "\na"], prompt.tolist(), ids.tolist()) == 1
    assert first_stop(tokenizer, ["long enough", "\n"], prompt.tolist(), ids.tolist()) == 2


def test_stop_text_may_be_a_special_token(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path, "byte-level")
    special = tokenizer.codec.token_id("<s>")
    assert special is not None
    (ids,) = tokenizer.encode(["ab"])
    assert first_stop(tokenizer, ["<s>"], [], [*ids.tolist(), special]) == len(ids) + 1


@pytest.mark.parametrize("kind", ["byte-level"])
def test_stop_texts_equal_those_of_transformers(tmp_path: Path, kind: str):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = tokenizer_of(tmp_path, kind)
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    rng = random.Random(0)
    num_found = 0
    for _ in range(60):
        ids = [rng.randint(2, tokenizer.max_id) for _ in range(16)]
        text = tokenizer.decode(ids)
        start = rng.randrange(len(text))
        # Bytes without the rest of their character have no text to search for.
        stops = [
            part
            for part in (text[start : start + rng.randint(1, 6)], "\n\n")
            if "\ufffd" not in part
        ]
        criterion = transformers.StopStringCriteria(reference, stops)
        ends = (
            count
            for count in range(5, 17)
            if criterion(torch.tensor([ids[:count]]), torch.zeros(1, 1)).item()
        )
        expected = next(ends, None)
        found = first_stop(tokenizer, stops, ids[:4], ids[4:])
        assert found == (expected and expected - 4), (stops, ids)
        num_found += expected is not None
    assert num_found > 20
