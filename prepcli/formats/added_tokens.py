"""The record of added tokens, with which `prep remove-tokens` restores the files and sizes from before.

{"format": 1, "additions": [{
  "tokens": [{"id": 50257, "content": "<tool>"}], "init": "mean", "true_vocab_size": 50257, "padded_vocab_size": 50257,
  "files": {"tokenizer.json": {"inserted": [[312, 440]], "before": "5f...", "after": "9a..."}}
}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.planning.manifest_fields import MAX_ROWS
from prepcli.stores.paths import AnyPath

# Next to the tokenizer, so that later commands copy it with the files of the model.
RECORD_FILE = "prep-added-tokens.json"

Xxh3 = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]

STRICT = ConfigDict(frozen=True, extra="forbid")


class RecordedToken(BaseModel):
    """A token and its id."""

    model_config = STRICT

    id: NonNegativeInt
    content: str


class FileEdit(BaseModel):
    """Insertions into a file.

    Attributes:
        inserted: Byte range of each insertion in the file after it, in the order of the insertions.
        before: XXH3-128 of the file before the first insertion.
        after: XXH3-128 of the file after the last insertion.
    """

    model_config = STRICT

    inserted: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    before: Xxh3
    after: Xxh3


class Addition(BaseModel):
    """One run of `prep add-tokens`.

    Attributes:
        tokens: The added tokens. Their ids follow each other.
        init: Values of the new rows: `mean`, `zeros` or `normal`.
        true_vocab_size: Number of tokens before the addition.
        padded_vocab_size: Rows of the vocabulary before the addition, with padding.
        files: Changed files, by name.
    """

    model_config = STRICT

    tokens: Annotated[tuple[RecordedToken, ...], Field(min_length=1)]
    init: str
    true_vocab_size: PositiveInt
    padded_vocab_size: PositiveInt
    files: Mapping[str, FileEdit]

    @property
    def new_vocab_size(self) -> int:
        """Number of tokens after the addition."""
        return self.true_vocab_size + len(self.tokens)

    @model_validator(mode="after")
    def _check_sizes_and_ids(self) -> Self:
        """Raise ValueError unless the sizes are ordered and the tokens follow the old vocabulary."""
        if not self.true_vocab_size <= self.padded_vocab_size <= MAX_ROWS:
            raise ValueError(
                f"{self.true_vocab_size} tokens do not fit {self.padded_vocab_size} rows"
            )
        for token_id, token in enumerate(self.tokens, self.true_vocab_size):
            if token.id != token_id:
                raise ValueError(
                    f"the token {token.content!r:.60} has id {token.id}, not {token_id}"
                )
        return self


class AddedTokens(BaseModel):
    """Content of a record: each run of `prep add-tokens`, the last one at the end."""

    model_config = STRICT

    format: Literal[1] = 1
    additions: Annotated[tuple[Addition, ...], Field(min_length=1)]


def encode_record(additions: tuple[Addition, ...]) -> bytes:
    """Return the bytes of a record."""
    return AddedTokens(additions=additions).model_dump_json(indent=2).encode() + b"\n"


def parse_record(path: AnyPath, data: bytes) -> tuple[Addition, ...]:
    """Return the additions in the record `data` of the file `path`.

    Raises:
        DamagedError: It is no record, or has another format.
    """
    try:
        return AddedTokens.model_validate_json(data).additions
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        why = f"`{place}`: {first['msg']}" if place else first["msg"]
        raise DamagedError(f"{path} is not a record of this prep", why, GET_AGAIN_HINT) from error
