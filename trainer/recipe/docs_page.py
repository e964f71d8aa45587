"""Generate the reference page of recipes: `python -m trainer.recipe.docs_page > docs/reference/recipes.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainer.recipe.data_sources import SOURCE_SCHEMAS, SOURCES_KEY, DataSource
from trainer.recipe.formatting import describe_type, to_toml
from trainer.recipe.synonyms import SYNONYMS
from trainer.recipe.tables import KEY_SCHEMAS, schema, table_members

INTRO = """\
# Recipes

This page is for users of `prep train`. It lists every key of a recipe, the TOML file that describes a run.
`prep recipes` lists examples; the checkpoints that they name are made by conversions:

```console
$ prep pad-vocab gpt-neo-1.3B --multiple 8
gpt-neo-1.3B-padded
$ prep save-init gpt-neo-1.3B-padded --mesh 1,1,8
gpt-neo-1.3B-padded-init
```

Unknown keys, values of the wrong type and conflicting keys are errors. One message lists all errors with their lines.
A recipe does not include other files. `--set optimizer.lr=1e-5` overrides one value. The value after `=` is TOML; it is
taken as text if it is not valid TOML or if the key takes text (`--set mesh=1,8,1`). The run keeps the complete recipe,
with all defaults and overrides, as `recipe.toml`, which is a valid recipe itself.

Paths are relative to the working directory. In paths, and only there, `~` stands for the home folder and `${NAME}` for
an environment variable, which must be set.
"""

OUTRO = """
## Sequences per step

A step takes `size` sequences, divided into `accumulate` micro-batches. The model processes one micro-batch at a time. A
micro-batch has `per_device` sequences for each device, or `per_replica` sequences for each replica of the model (dp x
fsdp). For example, with mp 8 on 8 devices, `per_device = 3` gives 24 sequences and `per_replica = 3` gives 3. Set one
or two of `size`, the micro-batch (`per_device` or `per_replica`) and `accumulate`. The third is computed and must be a
whole number. The number of replicas must divide the micro-batch.

## Sizes chosen for the devices

Without `q_chunk_size`, `k_chunk_size` or `head_chunk_size` the size depends on the devices, the length and the batch:

| devices | tile of blockwise attention | head chunk |
|---|---|---|
| CPU | 64 x 64 tokens; 128 x 128 for sequences of more than 1,024 tokens | 256 tokens of the micro-batch on a device |
| all others | 512 x 512 tokens | 512 tokens of each sequence |

The sizes change results by rounding only. `prep plan` assumes accelerators.

## The learning rate

The learning rate rises linearly from 0 for `warmup_steps`, then decays to `end_lr`, which it reaches at step
`decay_steps`, and stays there. Steps count from 0 and include warm-up. With `schedule = "constant"` it stays at `lr`,
and `end_lr` and `decay_steps` have no effect.

## Names from other trainers

An unknown key or option that another trainer uses is an error whose hint names the recipe key and its value.

| recipe key | names in other trainers |
|---|---|
"""


def render_page() -> str:
    """Return the page as Markdown."""
    recipe_schema = schema()
    parts = [INTRO]
    current_table = None
    for key in KEY_SCHEMAS:
        table, _, name = key.rpartition(".")
        if table != current_table:
            title = f"`[{table}]`" if table else "Above the first table"
            description = _table_description(recipe_schema, table) if table else recipe_schema["description"]
            parts.append(f"\n## {title}\n\n{description}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
            current_table = table
        parts.append(_key_row(key, name))
    return "".join([*parts, *_sources_section(), OUTRO, *map(_synonym_row, SYNONYMS.items())])


def _sources_section() -> Iterator[str]:
    """Yield the section about the tables of `data.sources`."""
    yield f"\n## `[[{SOURCES_KEY}]]`\n\n{DataSource.__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
    for name, key_schema in SOURCE_SCHEMAS.items():
        default = key_schema.get("absent") or ("that of `[data]`" if "default" in key_schema else "required")
        yield f"| `{name}` | {describe_type(key_schema)} | {default} | {key_schema['description']} |\n"


def _table_description(recipe_schema: Mapping[str, Any], table: str) -> str:
    property_schema = recipe_schema["properties"][table]
    return property_schema.get("description") or table_members(recipe_schema, table)[0]["description"]


def _synonym_row(entry: tuple[str, tuple[str, ...]]) -> str:
    key, names = entry
    return f"| `{key}` | {', '.join(f'`{name}`' for name in names)} |\n"


def _key_row(key: str, name: str) -> str:
    key_schema = KEY_SCHEMAS[key]
    default = f"`{to_toml(key_schema['default'])}`" if "default" in key_schema else "required"
    default = key_schema.get("absent") or default
    return f"| `{name}` | {describe_type(key_schema)} | {default} | {key_schema['description']} |\n"


if __name__ == "__main__":
    print(render_page(), end="")
