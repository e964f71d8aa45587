"""The view of a result in a notebook: a table of its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from prepcli.core.errors import PrepError
from prepcli.core.formatting import format_bytes, format_duration, shorten

# Characters of a value in a table
MAX_VALUE_WIDTH = 200


class HtmlTable:
    """Base of the results: notebooks show their fields as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the fields as an HTML table, with the title of the class."""
        # Its tables of names take a millisecond to import.
        import html

        rows: list[str] = []
        for item in dataclasses.fields(cast(Any, self)):
            value = getattr(self, item.name)
            if not item.repr or value is None or value == ():
                continue
            cell = html.escape(_value_text(item.name, value))
            rows.append(f"<tr><th>{html.escape(item.name)}</th><td>{cell}</td></tr>")
        title = html.escape(type(self).__name__)
        return f"<table><caption>{title}</caption>{''.join(rows)}</table>"


def _value_text(name: str, value: object) -> str:
    """Return the value of a field as text for a table."""
    if isinstance(value, int) and "bytes" in name.split("_"):
        return format_bytes(value)
    if isinstance(value, int | float) and name.endswith("seconds"):
        return format_duration(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        values: Mapping[str, object] = value
        texts = [f"{key} {_value_text(name, each)}" for key, each in values.items()]
        return shorten(", ".join(texts), MAX_VALUE_WIDTH)
    if isinstance(value, PrepError | str | Path | bool | int):
        return str(value)
    return shorten(repr(value), MAX_VALUE_WIDTH)
