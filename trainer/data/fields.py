"""Build the examples of records and texts, as the settings of a recipe describe them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from trainer.data.chat import ChatBuilder
from trainer.data.column_values import check_columns, text_value
from trainer.data.compiled_fields import CompiledFields, compile_list
from trainer.data.example_settings import ExampleSettings, begin_segments, largest_added_id, token_segment
from trainer.data.examples import Example, Segment
from trainer.data.readers.reader import DataPiece, Record, TextChunk
from trainer.models.errors import PrepError, usage_error
from trainer.recipe.field_grammar import FieldsError, parse_fields, split_fields

COMPILED_LISTS = 1024  # field lists of records that are kept compiled


class ExampleBuilder(Protocol):
    """Builds the examples of a dataset."""

    @property
    def has_weights(self) -> bool:
        """Whether tokens of an example may have loss weight 0."""
        ...

    @property
    def max_id(self) -> int:
        """Largest id that examples may have in addition to the tokenizer's; -1 for none."""
        ...

    def build(self, piece: DataPiece) -> Example:
        """Return the example of a record or of a part of a text; raise PrepError if it is invalid."""
        ...


def compile_fields(settings: ExampleSettings, *, vocab: int) -> ExampleBuilder:
    """Return the builder of the examples of the settings.

    Args:
        settings: The settings.
        vocab: Size of the model's vocabulary without padding.

    Raises:
        UsageError: The fields are not in the grammar, or name a token that the model does not have.
    """
    if settings.chat_template is not None:
        return ChatBuilder(settings, settings.chat_template)
    if settings.fields_from_example:
        return _RecordFieldsBuilder(settings, vocab)
    if not settings.fields:
        return _TextBuilder(settings)
    try:
        fields = compile_list(parse_fields(settings.fields), settings, vocab=vocab)
    except FieldsError as error:
        raise usage_error(f'`data.fields` is "{settings.fields:.60}"', str(error)) from None
    return _FieldsBuilder(fields)


@dataclass(frozen=True, slots=True)
class _TextBuilder:
    """Builds examples of data without columns."""

    settings: ExampleSettings

    @property
    def has_weights(self) -> bool:
        return self.settings.add_bos

    @property
    def max_id(self) -> int:
        return largest_added_id(self.settings)

    def build(self, piece: DataPiece) -> Example:
        assert isinstance(piece, TextChunk)
        begin = begin_segments(self.settings) if piece.starts_document else ()
        end = token_segment(self.settings.end_id) if piece.ends_document else ()
        text = Segment((self.settings.prepend_text if piece.starts_document else "") + piece.text)
        return Example((*begin, text, *end), piece.nbytes, ends_document=piece.ends_document)


@dataclass(frozen=True, slots=True)
class _FieldsBuilder:
    """Builds examples of records that all have the same fields."""

    fields: CompiledFields

    @property
    def has_weights(self) -> bool:
        return any(not part.weight for part in self.fields.target)

    @property
    def max_id(self) -> int:
        return max((part.max_id for part in (*self.fields.target, *(self.fields.source or ()))), default=-1)

    def build(self, piece: DataPiece) -> Example:
        assert isinstance(piece, Record)
        return self.fields.build(piece)


@dataclass(frozen=True, slots=True)
class _RecordFieldsBuilder:
    """Builds examples of records that have a column with their fields."""

    settings: ExampleSettings
    vocab: int

    @property
    def has_weights(self) -> bool:
        return True

    @property
    def max_id(self) -> int:
        return self.vocab - 1

    def build(self, piece: DataPiece) -> Example:
        assert isinstance(piece, Record)
        column = self.settings.fields_from_example
        check_columns(piece, [column], hint="`--set data.fields_from_example=COLUMN`")
        text = text_value(piece, column)
        try:
            return _compile_text(text, self.settings, self.vocab).build(piece)
        except FieldsError as error:
            what = f'{piece.place}: column `{column}` is "{text:.60}"'
            raise PrepError(what, str(error), 'such as "[question], answer"') from None


@lru_cache(maxsize=COMPILED_LISTS)
def _compile_text(text: str, settings: ExampleSettings, vocab: int) -> CompiledFields:
    return compile_list(split_fields(text), settings, vocab=vocab)
