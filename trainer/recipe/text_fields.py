"""The recipe keys `data.type` and `data.fields`: columns that form a text, or a source and a target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.models.errors import usage_error

FileType = Literal["text", "json", "csv", "parquet", "arrow", "ids"]
DataType = Literal["auto", FileType]  # auto: by the suffix of the files
IdsDtype = Literal["uint16", "uint32", "int32", "int64"]  # of token ids in files without a header
DEFAULT_IDS_DTYPE: IdsDtype = "uint16"
# Default of `data.fields` of each type that has columns, or may have some.
DEFAULT_FIELDS: Mapping[str, str] = dict.fromkeys(("auto", "json", "csv", "parquet", "arrow"), "text")


@dataclass(frozen=True, slots=True)
class TextFields:
    """Columns of a JSON object that form a text; several columns are joined by a space.

    Attributes:
        target: Columns of the text, or of the decoder's target.
        source: Columns of the encoder's source; empty without an encoder.
    """

    target: tuple[str, ...]
    source: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, source columns first."""
        return *self.source, *self.target


def parse_fields(text: str) -> TextFields:
    """Parse `data.fields`.

    Args:
        text: A column name, or, if it contains brackets, a list of columns such as `[title], [article], summary`:
            columns in brackets form the source, the rest form the target.

    Raises:
        UsageError: The list is malformed, or has no source or no target.
    """
    if not re.search(r"[\[\]]", text):
        return TextFields((text,))
    items = [item.strip() for item in text.split(",")]
    source = tuple(item[1:-1].strip() for item in items if re.fullmatch(r"\[[^\[\]]+\]", item))
    target = tuple(item for item in items if re.fullmatch(r"[^\[\]]+", item))
    if not source or not target or len(source) + len(target) < len(items) or not all(source):
        why = "it needs source columns in brackets, and target columns outside brackets"
        raise usage_error(f'`data.fields` is "{text:.60}"', why, '`fields = "[article], summary"`')
    return TextFields(target, source)
