"""Build the examples of records and texts, as the settings of a recipe describe them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from prepcli.core.errors import Key, PrepError, Text, usage_error
from trainer.data.chat import ChatBuilder
from trainer.data.columns import check_columns, ids_value, text_value
from trainer.data.examples import (
    Example,
    ExampleSettings,
    Segment,
    begin_segments,
    largest_added_id,
    token_segment,
)
from trainer.data.readers.reader import DataPiece, Record, TextChunk
from trainer.recipe.text_fields import (
    Field,
    FieldList,
    FieldsError,
    TextField,
    TokenField,
    TokenIdsField,
    parse_fields,
    split_fields,
)

FIELDS_HINT = 'such as "[question], answer"'
PAIR_HINT = Text(Key("data.fields", "[SOURCE], TARGET", is_override=True))
FIELDS_COLUMN_HINT = Text(Key("data.fields_from_example", "COLUMN", is_override=True))


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a document: the texts of columns, a column of token ids, or the same tokens for every record."""

    content: TextField | TokenIdsField | Segment
    weight: int
    vocab: int
    separator: str = ""
    prefix: str = ""

    @property
    def max_extra_token_id(self) -> int:
        """Largest id that is not the tokenizer's, or -1."""
        if isinstance(self.content, Segment):
            assert not isinstance(self.content.content, str)
            return int(self.content.content.max())
        return -1 if isinstance(self.content, TextField) else self.vocab - 1

    def segment(self, record: Record) -> Segment:
        """Return the segment of a record. One serves all records if the tokens are constant."""
        if isinstance(self.content, Segment):
            return self.content
        if isinstance(self.content, TokenIdsField):
            return Segment(ids_value(record, self.content.column, self.vocab), self.weight)
        texts = [text_value(record, column) for column in self.content.columns]
        return Segment(self.prefix + self.separator.join(texts), self.weight)


@dataclass(frozen=True, slots=True)
class CompiledFields:
    """Builds examples of records that all have the same fields."""

    target: tuple[_Part, ...]  # Parts of the target
    source: tuple[_Part, ...] | None  # Parts of the source. None without an encoder.
    columns: tuple[str, ...]  # Required columns of a record

    @property
    def has_weights(self) -> bool:
        """Whether tokens of the target may have loss weight 0."""
        return any(not part.weight for part in self.target)

    @property
    def max_extra_token_id(self) -> int:
        """Largest id from fields and settings, or -1. The tokenizer's ids may be larger."""
        parts = (*self.target, *(self.source or ()))
        return max((part.max_extra_token_id for part in parts), default=-1)

    def build(self, piece: DataPiece) -> Example:
        """Return the example of a record. Raise PrepError if a column is missing or invalid."""
        assert isinstance(piece, Record)
        source = None
        if self.source is None:
            check_columns(piece, self.columns)
        else:
            check_columns(piece, self.columns, default_hint=PAIR_HINT)
            source = tuple(part.segment(piece) for part in self.source)
        target = tuple(part.segment(piece) for part in self.target)
        return Example(target, piece.nbytes, source=source)


def compile_list(fields: FieldList, settings: ExampleSettings, *, vocab: int) -> CompiledFields:
    """Turn a list of fields into the parts of its source and target.

    E.g. without an encoder, "[question], answer" has a part of weight 0 and a part of weight 1.
    With an encoder, the part in brackets is the source.

    Raises:
        FieldsError: The model does not have a token of the list, the list has no source for the
            encoder, or its first field cannot follow `prepend_text`.
    """
    if not settings.has_encoder:
        weighted = [(field, int(not is_bracketed)) for field, is_bracketed in fields.items]
        target = _compile_parts(weighted, settings, vocab=vocab, prefix=settings.prepend_text)
        return CompiledFields(target, None, fields.columns)
    if not fields.source:
        raise FieldsError("the model has an encoder, so it needs source columns in brackets")
    source = _compile_parts(
        _join_texts(fields.source), settings, vocab=vocab, prefix=settings.source_prefix
    )
    target = _compile_parts(_join_texts(fields.target), settings, vocab=vocab)
    return CompiledFields(target, source, fields.columns)


def _join_texts(fields: tuple[Field, ...]) -> list[tuple[Field, int]]:
    """Join adjacent text fields, to tokenize them as one text. All fields have weight 1."""
    joined: list[tuple[Field, int]] = []
    for field in fields:
        before = joined[-1][0] if joined else None
        if isinstance(field, TextField) and isinstance(before, TextField):
            joined[-1] = TextField((*before.columns, *field.columns)), 1
        else:
            joined.append((field, 1))
    return joined


def _compile_parts(
    weighted: list[tuple[Field, int]], settings: ExampleSettings, *, vocab: int, prefix: str = ""
) -> tuple[_Part, ...]:
    """Return the parts of fields with their loss weights. The prefix is a text put before the first field."""
    if prefix and not isinstance(weighted[0][0], TextField):
        raise FieldsError("its first field must be a text, which follows the text put before it")
    parts: list[_Part] = []

    def add_tokens(ids: tuple[int, ...], weight: int) -> None:
        parts.append(_Part(Segment(np.array(ids, np.uint32), weight), weight, vocab))

    if begin_ids := settings.begin_ids(weighted[0][0]):
        add_tokens(begin_ids, 0)
    for field, weight in weighted:
        if isinstance(field, TokenField):
            add_tokens((_token_id(field, settings, vocab),), weight)
        else:
            parts.append(_Part(field, weight, vocab, settings.subfield_separator, prefix))
        # Only the first field has the prefix.
        prefix = ""
    if settings.end_id is not None:
        add_tokens((settings.end_id,), 1)
    return tuple(parts)


def _token_id(field: TokenField, settings: ExampleSettings, vocab: int) -> int:
    """Return the id of a token field. Raise FieldsError if the model lacks this token."""
    if isinstance(field.token, int):
        token_id = field.token
    else:
        token_id = {"bos": settings.bos_id, "eos": settings.eos_id}[field.token]
    if token_id is None:
        raise FieldsError(f"the model's config.json has no {field.token}_token_id")
    if token_id >= vocab:
        raise FieldsError(
            f"<|{field.token}|> is not in the vocabulary of {vocab:,} tokens without padding"
        )
    return token_id


# Different field lists that are kept compiled: records of a file usually share few.
COMPILED_LISTS = 1024


class ExampleBuilder(Protocol):
    """Builds the examples of a dataset."""

    @property
    def has_weights(self) -> bool:
        """Whether tokens of an example may have loss weight 0."""
        ...

    @property
    def max_extra_token_id(self) -> int:
        """Largest id from fields and settings, or -1. The tokenizer's ids may be larger."""
        ...

    def build(self, piece: DataPiece) -> Example:
        """Return the example of a record or of a text chunk. Raise PrepError if it is invalid."""
        ...


def compile_fields(settings: ExampleSettings, *, vocab: int) -> ExampleBuilder:
    """Return a builder of examples for the settings.

    Raises:
        UsageError: The fields are not in the grammar, or name a token unknown to the model.
    """
    if settings.chat_template is not None:
        return ChatBuilder(settings, settings.chat_template)
    if settings.fields_from_example:
        return _RecordFieldsBuilder(settings, vocab)
    if not settings.fields:
        return _TextBuilder(settings)
    try:
        return compile_list(parse_fields(settings.fields), settings, vocab=vocab)
    except FieldsError as error:
        what = Text(Key("data.fields"), f' is "{settings.fields:.60}"')
        raise usage_error(what, str(error), FIELDS_HINT) from None


class _TextBuilder:
    """Builds examples of data without columns."""

    def __init__(self, settings: ExampleSettings) -> None:
        self.settings = settings
        self.has_weights = bool(settings.begin_ids())
        self.max_extra_token_id = largest_added_id(settings)

    def build(self, piece: DataPiece) -> Example:
        assert isinstance(piece, TextChunk)
        segments: list[Segment] = []
        prefix = ""
        # A long document comes in several chunks: only the first one has what is put before a
        # document, and only the last one what is put after it.
        if piece.starts_document:
            segments += begin_segments(self.settings)
            prefix = self.settings.prepend_text
        segments.append(Segment(prefix + piece.text))
        if piece.ends_document:
            segments += token_segment(self.settings.end_id)
        return Example(tuple(segments), piece.nbytes, ends_document=piece.ends_document)


class _RecordFieldsBuilder:
    """Builds examples of records with a column for their fields."""

    has_weights = True

    def __init__(self, settings: ExampleSettings, vocab: int) -> None:
        self.settings = settings
        self.vocab = vocab
        self.max_extra_token_id = vocab - 1

    def build(self, piece: DataPiece) -> Example:
        assert isinstance(piece, Record)
        column = self.settings.fields_from_example
        check_columns(piece, [column], hint=FIELDS_COLUMN_HINT)
        text = text_value(piece, column)
        try:
            return _compile_text(text, self.settings, self.vocab).build(piece)
        except FieldsError as error:
            what = f'{piece.place}: column `{column}` is "{text:.60}"'
            raise PrepError(what, str(error), FIELDS_HINT) from None


@lru_cache(maxsize=COMPILED_LISTS)
def _compile_text(text: str, settings: ExampleSettings, vocab: int) -> CompiledFields:
    return compile_list(split_fields(text), settings, vocab=vocab)
