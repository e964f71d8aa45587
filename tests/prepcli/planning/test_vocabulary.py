"""Vocabulary sizes: true and stored rows, read from and written to configs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import FAILED, USAGE, PrepError
from prepcli.core.json_values import JsonValue
from prepcli.planning.vocabulary import Vocabulary, read_vocabulary, with_vocabulary


@pytest.mark.parametrize(
    ("config", "true", "expected"),
    [
        ({}, None, (50, 50)),  # the family's default
        ({"vocab_size": 131}, None, (131, 131)),
        ({"vocab_size": 136, "true_vocab_size": 131}, None, (131, 136)),
        ({"vocab_size": 136}, 131, (131, 136)),  # padded without a record of the true size
        ({"vocab_size": 136, "true_vocab_size": 133}, 131, (131, 136)),
        ({"vocab_size": 136}, 136, (136, 136)),
        ({"vocab_size": 1}, 1, (1, 1)),
        ({"true_vocab_size": 49}, None, (49, 50)),
    ],
)
def test_read_vocabulary_reads_config_and_option(
    config: dict[str, Any], true: int | None, expected: tuple[int, int]
):
    vocabulary = read_vocabulary(config, 50, true_size=true)
    assert (vocabulary.true_size, vocabulary.stored_size) == expected


@pytest.mark.parametrize("value", [0, -5, 3.0, "131", True, [131]])
@pytest.mark.parametrize("key", ["vocab_size", "true_vocab_size"])
def test_read_vocabulary_rejects_invalid_sizes(key: str, value: JsonValue):
    with pytest.raises(PrepError, match="is invalid") as raised:
        read_vocabulary({key: value}, 50)
    assert key in raised.value.why
    assert raised.value.code == FAILED


@pytest.mark.parametrize("true", [0, -1, 137])
def test_read_vocabulary_rejects_true_size_out_of_range(true: int):
    with pytest.raises(PrepError, match=f"true_vocab={true}` is out of range") as raised:
        read_vocabulary({"vocab_size": 136}, 50, true_size=true)
    assert "136 rows" in raised.value.why
    assert raised.value.code == USAGE


def test_read_vocabulary_rejects_true_above_stored():
    with pytest.raises(PrepError, match="true_vocab_size 137 is out of range") as raised:
        read_vocabulary({"vocab_size": 136, "true_vocab_size": 137}, 50)
    assert raised.value.code == FAILED


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_padded_size_starts_from_true_size(true: int, multiple: int):
    padded = Vocabulary(true, true + 7).padded_size(multiple)
    assert padded % multiple == 0
    assert 0 <= padded - true < multiple


def test_padded_size_ignores_earlier_padding():
    first = Vocabulary(131, 131).padded_size(8)
    assert Vocabulary(131, first).padded_size(128) == Vocabulary(131, 131).padded_size(128) == 256


@given(st.integers(1, 500), st.integers(0, 50))
def test_with_vocabulary_round_trips_both_sizes(true: int, added: int):
    config = {"vocab_size": 7, "true_vocab_size": 5, "hidden_size": 3}
    vocabulary = Vocabulary(true, true + added)
    padded = with_vocabulary(config, vocabulary)
    assert read_vocabulary(padded, 1) == vocabulary
    assert ("true_vocab_size" in padded) == bool(added)
    assert with_vocabulary(padded, Vocabulary(true, true)) == {"vocab_size": true, "hidden_size": 3}
    assert config == {"vocab_size": 7, "true_vocab_size": 5, "hidden_size": 3}
