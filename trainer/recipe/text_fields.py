"""Which columns of an object make up its text, or a source and the target that is to be made of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.models.errors import usage_error


@dataclass(frozen=True, slots=True)
class TextFields:
    """Columns, joined by a space where there are several; `source`: those that an encoder reads."""

    target: tuple[str, ...]
    source: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return *self.source, *self.target


def parse_fields(text: str) -> TextFields:
    """`text` is the column of that name; with brackets it is a list, `[title], [article], summary`: what stands in
    brackets is the source. Usage PrepError for a list that lacks one of the two, or is none."""
    if not re.search(r"[\[\]]", text):
        return TextFields((text,))
    items = [item.strip() for item in text.split(",")]
    source = tuple(item[1:-1].strip() for item in items if re.fullmatch(r"\[[^\[\]]+\]", item))
    target = tuple(item for item in items if re.fullmatch(r"[^\[\]]+", item))
    if not source or not target or len(source) + len(target) < len(items) or not all(source):
        why = "brackets are around what an encoder reads; what it is to make of that stands without"
        raise usage_error(f'`data.fields` is "{text:.60}"', why, '`fields = "[article], summary"`')
    return TextFields(target, source)
