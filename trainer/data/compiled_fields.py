"""Compile a list of fields into the parts that make the segments of a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trainer.data.column_values import check_columns, ids_value, text_value
from trainer.data.example_settings import ExampleSettings, begin_segments, token_segment
from trainer.data.examples import Example, Segment
from trainer.data.readers.reader import Record
from trainer.recipe.field_grammar import Field, FieldList, FieldsError, IdsField, TextField, TokenField


class _Part(Protocol):
    """Makes a segment of each record."""

    @property
    def weight(self) -> int:
        """Loss weight of its tokens."""
        ...

    @property
    def max_id(self) -> int:
        """Largest id that it may have in addition to the tokenizer's; -1 for none."""
        ...

    def segment(self, record: Record) -> Segment:
        """Return the segment of a record."""
        ...


@dataclass(frozen=True, slots=True)
class _TextPart:
    """Joins the texts of columns."""

    columns: tuple[str, ...]
    separator: str
    prefix: str
    weight: int
    max_id: int = -1

    def segment(self, record: Record) -> Segment:
        texts = [text_value(record, column) for column in self.columns]
        return Segment(self.prefix + self.separator.join(texts), self.weight)


@dataclass(frozen=True, slots=True)
class _IdsPart:
    """Reads the token ids of a column."""

    column: str
    vocab: int
    weight: int

    @property
    def max_id(self) -> int:
        return self.vocab - 1

    def segment(self, record: Record) -> Segment:
        return Segment(ids_value(record, self.column, self.vocab), self.weight)


@dataclass(frozen=True, slots=True)
class _ConstantPart:
    """Has the same segment for every record: a token or a prefix."""

    constant: Segment

    @property
    def weight(self) -> int:
        return self.constant.weight

    @property
    def max_id(self) -> int:
        content = self.constant.content
        return -1 if isinstance(content, str) else int(content.max(initial=0))

    def segment(self, record: Record) -> Segment:
        return self.constant


@dataclass(frozen=True, slots=True)
class CompiledFields:
    """Makes an example of each record.

    Attributes:
        target: Parts of the target.
        source: Parts of the source; None without an encoder.
        columns: Columns that a record must have.
    """

    target: tuple[_Part, ...]
    source: tuple[_Part, ...] | None
    columns: tuple[str, ...]

    def build(self, record: Record) -> Example:
        """Return the example of a record; raise PrepError if a column is missing or invalid."""
        hint = "`--set data.fields=COLUMN`" if self.source is None else "`--set data.fields='[SOURCE], TARGET'`"
        check_columns(record, self.columns, hint=hint)
        source = None if self.source is None else tuple(part.segment(record) for part in self.source)
        return Example(tuple(part.segment(record) for part in self.target), record.nbytes, source=source)


def compile_list(fields: FieldList, settings: ExampleSettings, *, vocab: int) -> CompiledFields:
    """Compile a list of fields.

    Args:
        fields: The fields.
        settings: Whether the model has an encoder, its special tokens, and the texts to add.
        vocab: Size of the model's vocabulary without padding.

    Raises:
        FieldsError: The model does not have a token of the list, the list has no source for the encoder, or its first
            field cannot follow `prepend_text`.
    """
    compiler = _Compiler(settings, vocab)
    if not settings.has_encoder:
        weighted = [(field, 0 if is_bracketed else 1) for field, is_bracketed in fields.items]
        return CompiledFields(compiler.parts(weighted, settings.prepend_text), None, fields.columns)
    if not fields.source:
        raise FieldsError("the model has an encoder, so it needs source columns in brackets")
    source = compiler.parts(_join_texts(fields.source), settings.source_prefix)
    return CompiledFields(compiler.parts(_join_texts(fields.target), ""), source, fields.columns)


def _join_texts(fields: tuple[Field, ...]) -> list[tuple[Field, int]]:
    """Join neighbouring text fields of a source or target, which are tokenized together; all have weight 1."""
    joined: list[tuple[Field, int]] = []
    for field in fields:
        before = joined[-1][0] if joined else None
        if isinstance(field, TextField) and isinstance(before, TextField):
            joined[-1] = TextField((*before.columns, *field.columns)), 1
        else:
            joined.append((field, 1))
    return joined


@dataclass(frozen=True, slots=True)
class _Compiler:
    """Compiles fields of one model."""

    settings: ExampleSettings
    vocab: int

    def parts(self, weighted: list[tuple[Field, int]], prefix: str) -> tuple[_Part, ...]:
        """Return the parts of a document."""
        if prefix and not isinstance(weighted[0][0], TextField):
            raise FieldsError("its first field must be a text, which follows the text put before it")
        begin = [_ConstantPart(segment) for segment in begin_segments(self.settings)]
        end = [_ConstantPart(segment) for segment in token_segment(self.settings.end_id)]
        parts = [self._part(field, weight, "" if i else prefix) for i, (field, weight) in enumerate(weighted)]
        return (*begin, *parts, *end)

    def _part(self, field: Field, weight: int, prefix: str) -> _Part:
        if isinstance(field, TextField):
            return _TextPart(field.columns, self.settings.subfield_separator, prefix, weight)
        if isinstance(field, IdsField):
            return _IdsPart(field.column, self.vocab, weight)
        (segment,) = token_segment(self._token_id(field), weight)
        return _ConstantPart(segment)

    def _token_id(self, field: TokenField) -> int:
        ids = {"bos": self.settings.bos_id, "eos": self.settings.eos_id}
        token_id = field.token if isinstance(field.token, int) else ids[field.token]
        if token_id is None:
            raise FieldsError(f"the model's config.json has no {field.token}_token_id")
        if token_id >= self.vocab:
            raise FieldsError(f"<|{field.token}|> is not in the vocabulary of {self.vocab:,} tokens without padding")
        return token_id
