"""Compile the settings of a recipe's fields into a builder of examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from trainer.data.column_values import check_columns, text_value
from trainer.data.examples import Example, Segment
from trainer.data.readers.reader import DataPiece, Record, TextChunk
from trainer.recipe.text_fields import TextFields, parse_fields


@dataclass(frozen=True, slots=True)
class ExampleSettings:
    """Everything that determines the examples of a record.

    Attributes:
        fields: Columns of the text, or of a source and a target, as `parse_fields` takes them; empty for types of data
            without columns.
        has_encoder: Whether an encoder reads the source.
        eos_id: Token appended to each document; None for none.
        source_prefix: Text put before each source.
    """

    fields: str = ""
    has_encoder: bool = False
    eos_id: int | None = None
    source_prefix: str = ""


class ExampleBuilder(Protocol):
    """Builds the examples of a dataset."""

    @property
    def has_weights(self) -> bool:
        """Whether tokens of an example may have loss weight 0."""
        ...

    @property
    def max_id(self) -> int:
        """Largest id that examples may have besides those of the tokenizer; -1 for none."""
        ...

    def build(self, piece: DataPiece) -> Example:
        """Return the example of a record or of a part of a text; raise PrepError if it is invalid."""
        ...


def compile_fields(settings: ExampleSettings) -> ExampleBuilder:
    """Return the builder of the examples that the settings describe."""
    eos = () if settings.eos_id is None else (Segment(np.array([settings.eos_id], np.uint32)),)
    fields = parse_fields(settings.fields) if settings.fields else TextFields(())
    return _FieldsBuilder(fields, settings.source_prefix, eos)


@dataclass(frozen=True, slots=True)
class _FieldsBuilder:
    """Builds examples of the columns of records, and of texts.

    Attributes:
        fields: Columns of source and target.
        source_prefix: Text put before each source.
        end: Segments put after each document.
    """

    fields: TextFields
    source_prefix: str
    end: tuple[Segment, ...]
    has_weights: bool = field(default=False, init=False)

    @property
    def max_id(self) -> int:
        return max((int(part.content[0]) for part in self.end if not isinstance(part.content, str)), default=-1)

    def build(self, piece: DataPiece) -> Example:
        return self._of_chunk(piece) if isinstance(piece, TextChunk) else self._of_record(piece)

    def _of_chunk(self, chunk: TextChunk) -> Example:
        end = self.end if chunk.ends_document else ()
        return Example((Segment(chunk.text), *end), chunk.nbytes, ends_document=chunk.ends_document)

    def _of_record(self, record: Record) -> Example:
        has_source = bool(self.fields.source)
        hint = "`--set data.fields='[SOURCE], TARGET'`" if has_source else "`--set data.fields=COLUMN`"
        check_columns(record, self.fields.columns, hint=hint)
        source = " ".join(text_value(record, column) for column in self.fields.source)
        target = " ".join(text_value(record, column) for column in self.fields.target)
        return Example(
            target=(Segment(target), *self.end),
            nbytes=record.nbytes,
            source=(Segment(self.source_prefix + source), *self.end) if has_source else None,
        )
