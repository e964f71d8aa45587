"""The page on recipes, docs/recipes.md, from the keys: `python -m trainer.recipe.docs_page > docs/recipes.md`."""

from __future__ import annotations

from trainer.recipe.formatting import describe_type, to_toml
from trainer.recipe.synonyms import SYNONYMS
from trainer.recipe.tables import KEY_SCHEMAS, schema

INTRO = """\
# Recipes

`prep train RECIPE` carries out what one TOML file says. [recipes/](../recipes) has some to begin with; the checkpoints
that they name are made by conversions:

```console
$ prep pad-vocab gpt-neo-1.3B --multiple 8
gpt-neo-1.3B-padded
$ prep save-init gpt-neo-1.3B-padded --mesh 1,1,8
gpt-neo-1.3B-padded-init
```

Every key is known and of one type: an unknown key, a number in quotes or two keys that say the same are errors. One
message lists all of them with their lines. There are no other files of settings. `--set optimizer.lr=1e-5` takes the
place of one value: what stands behind `=` is TOML, and text where it is not or where the key takes text
(`--set mesh=1,8,1`). The complete recipe, with all defaults and what came from `--set`, is kept in the run as
`recipe.toml`, and is a recipe itself.

Paths are relative to the working directory. In them, and nowhere else, `~` is your home and `${NAME}` a variable of the
environment, which must be set.
"""

OUTRO = """
## Sequences a step

A step takes `size` sequences, in `accumulate` micro-batches of which each goes through the model at once. A micro-batch
is `per_device` x all devices, or `per_replica` x the replicas of the model (dp x fsdp): with mp 8 on 8 devices,
`per_device = 3` is 24 sequences and `per_replica = 3` is 3. Of `size`, one of these two, and `accumulate` give one or
two; the third follows, and must be whole. A micro-batch must divide among the replicas.

## The learning rate

It rises from 0 for `warmup_steps`, then goes to `end_lr`, which it reaches at `decay_steps`, and stays there. Steps
count from 0, and warm-up is part of them. With `schedule = "constant"` it stays at `lr`, and `end_lr` and `decay_steps`
say nothing.

## Names from other trainers

An unknown key or option that another trainer has is answered with the key here, and the value that it takes.

| here | elsewhere |
|---|---|
"""


def render_page() -> str:
    """The page as Markdown."""
    whole = schema()
    tables = whole["$defs"]
    parts = [INTRO]
    above = None
    for key in KEY_SCHEMAS:
        table, _, name = key.rpartition(".")
        if table != above:
            title = f"`[{table}]`" if table else "Above the first table"
            meaning = (tables[table.title()] if table else whole)["description"]
            parts.append(f"\n## {title}\n\n{meaning}\n\n| key | takes | default | meaning |\n|---|---|---|---|\n")
            above = table
        parts.append(_key_row(key, name))
    return "".join([*parts, OUTRO, *map(_synonym_row, SYNONYMS.items())])


def _synonym_row(entry: tuple[str, tuple[str, ...]]) -> str:
    key, names = entry
    return f"| `{key}` | {', '.join(f'`{name}`' for name in names)} |\n"


def _key_row(key: str, name: str) -> str:
    part = KEY_SCHEMAS[key]
    default = part.get("absent") or (f"`{to_toml(part['default'])}`" if "default" in part else "must be given")
    return f"| {' | '.join((f'`{name}`', describe_type(part), default, part['description']))} |\n"


if __name__ == "__main__":
    print(render_page(), end="")
