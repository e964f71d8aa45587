"""The vocabulary: how many of its rows are true, how many there are, and what a config says of both. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prepcli.errors import PrepError, usage_error
from trainer.models.parameters import read_size

VOCAB_SIZE_KEY, TRUE_VOCAB_SIZE_KEY = "vocab_size", "true_vocab_size"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`true` rows that a tokenizer knows, of `stored` rows in the tensors."""

    true_size: int
    stored_size: int

    def padded_size(self, multiple: int) -> int:
        """The smallest multiple that holds the true rows."""
        return -(-self.true_size // multiple) * multiple


def read_vocabulary(config: Mapping[str, Any], default_size: int, true_size: int | None = None) -> Vocabulary:
    """What a config says; `true` is what the user says, who knows it where a model came padded."""
    stored = read_size(config, VOCAB_SIZE_KEY, default_size)
    known = true_size if true_size is not None else read_size(config, TRUE_VOCAB_SIZE_KEY, stored)
    if not 1 <= known <= stored:
        origin = "--true-vocab" if true_size is not None else f"config.json's {TRUE_VOCAB_SIZE_KEY}"
        make = usage_error if true_size is not None else PrepError
        raise make(f"{origin} {known} is not within the vocabulary", f"the tensors have {stored} rows")
    return Vocabulary(known, stored)


def with_vocabulary(config: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """The config for tensors of that many rows; unpadded, it says nothing of padding."""
    changed = {**config, VOCAB_SIZE_KEY: vocabulary.stored_size}
    changed.pop(TRUE_VOCAB_SIZE_KEY, None)
    return changed | (
        {TRUE_VOCAB_SIZE_KEY: vocabulary.true_size} if vocabulary.true_size != vocabulary.stored_size else {}
    )
