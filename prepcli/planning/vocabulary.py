"""Vocabulary sizes: the true and the padded number of rows, and their keys in a config."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.models.parameters import read_size
from prepcli.planning.manifest_fields import MAX_ROWS

VOCAB_SIZE_KEY = "vocab_size"
TRUE_VOCAB_SIZE_KEY = "true_vocab_size"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary sizes of a model.

    Attributes:
        true_size: Number of rows used by the tokenizer.
        stored_size: Number of rows in the tensors, including padding.
    """

    true_size: int
    stored_size: int

    def padded_size(self, multiple: int) -> int:
        """Return the smallest multiple of `multiple` not below the true size."""
        return -(-self.true_size // multiple) * multiple


# Of a model without a known embedding.
NO_VOCABULARY = Vocabulary(0, 0)


def read_vocabulary(
    config: HFConfig, default_size: int, *, true_size: int | None = None
) -> Vocabulary:
    """Read the vocabulary sizes from a config.

    Args:
        config: The model's config.
        default_size: The family's default vocabulary size.
        true_size: The true size given by the user (`--true-vocab`), for a padded model.

    Returns:
        The sizes.

    Raises:
        PrepError: A size is not a positive integer, or the true size is larger than the stored size.
    """
    stored_size = read_size(config, VOCAB_SIZE_KEY, default_size)
    if true_size is None:
        size = read_size(config, TRUE_VOCAB_SIZE_KEY, stored_size)
    else:
        size = true_size
    if 1 <= size <= stored_size:
        return Vocabulary(size, stored_size)
    why = f"the vocabulary has {stored_size} rows"
    if true_size is None:
        what = f"config.json's {TRUE_VOCAB_SIZE_KEY} {size} is out of range"
        raise PrepError(what, why, f"set it to a number from 1 to {stored_size}")
    what = text("{} is out of range", Option("true_vocab", size))
    raise usage_error(what, why, text("{} or less", Option("true_vocab", stored_size)))


def check_padded_size(rows: int, option: Option) -> int:
    """Return `rows` if a padded vocabulary may have this size.

    Args:
        rows: Number of rows.
        option: The option that asks for them, with its value.

    Raises:
        UsageError: There are more rows than 32-bit token ids.
    """
    if rows > MAX_ROWS:
        why = f"a vocabulary has at most {MAX_ROWS:,} rows"
        raise usage_error(text("{} is too large", option), why, "use a smaller value")
    return rows


def with_vocabulary(config: HFConfig, vocabulary: Vocabulary) -> JsonObject:
    """Return the config with the given vocabulary sizes. Without padding, the config has no true size."""
    updated = {**config, VOCAB_SIZE_KEY: vocabulary.stored_size}
    updated.pop(TRUE_VOCAB_SIZE_KEY, None)
    if vocabulary.true_size != vocabulary.stored_size:
        updated[TRUE_VOCAB_SIZE_KEY] = vocabulary.true_size
    return updated
