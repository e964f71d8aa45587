"""The vocabulary: how many of its rows are true, how many there are, and what a config says of both. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prepcli.errors import PrepError, usage
from trainer.models.parameters import size

SIZE, TRUE_SIZE = "vocab_size", "true_vocab_size"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`true` rows that a tokenizer knows, of `stored` rows in the tensors."""

    true: int
    stored: int

    def padded_to(self, multiple: int) -> int:
        """The smallest multiple that holds the true rows."""
        return -(-self.true // multiple) * multiple


def read_vocabulary(config: Mapping[str, Any], default: int, true: int | None = None) -> Vocabulary:
    """What a config says; `true` is what the user says, who knows it where a model came padded."""
    stored = size(config, SIZE, default)
    known = true if true is not None else size(config, TRUE_SIZE, stored)
    if not 1 <= known <= stored:
        origin = "--true-vocab" if true is not None else f"config.json's {TRUE_SIZE}"
        make = usage if true is not None else PrepError
        raise make(f"{origin} {known} is not within the vocabulary", f"the tensors have {stored} rows")
    return Vocabulary(known, stored)


def with_vocabulary(config: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """The config for tensors of that many rows; unpadded, it says nothing of padding."""
    changed = {**config, SIZE: vocabulary.stored}
    changed.pop(TRUE_SIZE, None)
    return changed | ({TRUE_SIZE: vocabulary.true} if vocabulary.true != vocabulary.stored else {})
