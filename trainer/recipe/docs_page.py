"""Write the rows of all keys into the reference page of recipes: `python -m trainer.recipe.docs_page`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainer.recipe.data_table import SOURCE_SCHEMAS, SOURCES_KEY
from trainer.recipe.hints import OTHER_NAMES, keys_in
from trainer.recipe.key_types import KeySchema, describe_type, to_toml
from trainer.recipe.lr_schedule import DECAYS
from trainer.recipe.tables import KEY_SCHEMAS, OPTIMIZER_SCHEMAS, TABLE_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recipes.md"


def update_page(page: str) -> str:
    """Return the page with the current rows of its generated tables. All other text is written by hand."""
    sections = {
        "Above the first table": _key_rows(""),
        f"`[[{SOURCES_KEY}]]`": _rows(SOURCE_SCHEMAS, "that of `[data]`"),
        "The learning rate": _schedule_rows(),
        "Optimizers": _optimizer_rows(),
        "Names from other trainers": _other_name_rows(),
    }
    sections |= {f"`[{table}]`": _key_rows(table) for table in TABLE_NAMES}
    for title, rows in sections.items():
        # The heading, the text up to the header of the first table, and the rows of that table
        pattern = rf"(^## {re.escape(title)}\n(?:(?!\|---|## ).*\n)*\|---.*\n)(?:\|.*\n)*"
        match = re.search(pattern, page, re.MULTILINE)
        assert match, f"{PAGE} needs a section `{title}` with the header of a table"
        page = page[: match.end(1)] + "".join(rows) + page[match.end() :]
    return page


def _key_rows(table: str) -> Iterator[str]:
    schemas = {name: KEY_SCHEMAS[key] for name, key in keys_in(table).items()}
    yield from _rows(schemas)


def _rows(schemas: Mapping[str, KeySchema], default: str = "") -> Iterator[str]:
    """Yield a row per key. Optional keys without a meaning of their absence have the default."""
    for name, schema in schemas.items():
        cell = _default_text(schema)
        if "default" in schema and "absent" not in schema:
            cell = default or f"`{cell}`"
        yield _row(f"`{name}`", describe_type(schema), cell, schema["description"])


def _schedule_rows() -> Iterator[str]:
    """Yield a row for each schedule."""
    for kind, decay in DECAYS.items():
        meaning = decay.meaning
        if decay.is_open:
            meaning += ". `end_lr` and `decay_steps` have no effect"
        yield _row(f"`{kind}`", meaning)


def _optimizer_rows() -> Iterator[str]:
    """Yield for each optimizer a row with its keys, and with its defaults that differ from those of `[optimizer]`."""
    common = set.intersection(*map(set, OPTIMIZER_SCHEMAS.values()))
    for kind, schemas in OPTIMIZER_SCHEMAS.items():
        keys: list[str] = []
        differing: list[str] = []
        for name, schema in schemas.items():
            default = _default_text(schema)
            if name not in common:
                keys.append(f"`{name} = {default}`")
            elif name != "type" and default != _default_text(KEY_SCHEMAS[f"optimizer.{name}"]):
                differing.append(f"`{name} = {default}`")
        yield _row(f"`{kind}`", ", ".join(keys), ", ".join(differing))


def _other_name_rows() -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for name, key in OTHER_NAMES.items():
        names.setdefault(key, []).append(f"`{name}`")
    for key, cells in names.items():
        if key in KEY_SCHEMAS:
            yield _row(f"`{key}`", ", ".join(cells))


def _default_text(schema: KeySchema) -> str:
    """Return the default of a key, or the meaning of its absence."""
    if "absent" in schema:
        return schema["absent"]
    return to_toml(schema["default"]) if "default" in schema else "required"


def _row(*cells: str) -> str:
    """Return a row of a Markdown table. A `|` would end a cell, also inside backticks."""
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |\n"


if __name__ == "__main__":
    PAGE.write_text(update_page(PAGE.read_text("utf-8")), "utf-8")
