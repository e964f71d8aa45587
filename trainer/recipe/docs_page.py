"""Generate the reference page of recipes: `python -m trainer.recipe.docs_page > docs/reference/recipes.md`."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.recipe.data_table import SOURCE_SCHEMAS, SOURCES_KEY, DataSource
from trainer.recipe.formatting import describe_type, to_toml
from trainer.recipe.key_types import KeySchema
from trainer.recipe.lr_schedule import DECAYS
from trainer.recipe.other_trainers import NAMES
from trainer.recipe.tables import KEY_SCHEMAS, OPTIMIZER_SCHEMAS, schema, table_members

INTRO = """\
# Recipes

For users of `prep train`: every key of a recipe, the TOML file that describes a run.
`prep recipes` lists examples. Conversions make the checkpoints that they name:

```console
$ prep pad-vocab gpt-neo-1.3B --multiple 8
gpt-neo-1.3B-padded
$ prep save-init gpt-neo-1.3B-padded --mesh 1,1,8
gpt-neo-1.3B-padded-init
```

Unknown keys, values of the wrong type and conflicting keys are errors. One message lists all errors with their lines.
A recipe does not include other files. `--set optimizer.lr=1e-5` overrides one value. The value after `=` is TOML. It
is taken as text if it is not valid TOML or if the key takes text (`--set mesh=1,8,1`). The run keeps the complete
recipe, with all defaults and overrides, as `recipe.toml`, which is a valid recipe itself.

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
| CPU | 64 x 64 tokens, 128 x 128 for sequences of more than 1,024 tokens | 256 tokens of the micro-batch on a device |
| all others | 512 x 512 tokens | 512 tokens of each sequence |

The sizes change results by rounding only. `prep plan` assumes accelerators.

## The learning rate

The learning rate rises from `init_lr` for `warmup_steps`, then decays to `end_lr`, which it reaches at step
`decay_steps`, and stays there. Steps count from 0 and include warm-up.

| `schedule` | after warm-up |
|---|---|
"""

SCHEDULES_OF_OTHERS = """
With `rsqrt`, `init_lr = lr` keeps the rate constant in warm-up, as T5 does.

Two schedules of transformers have other names for the same parameters:

| `get_cosine_with_hard_restarts_schedule_with_warmup` | `schedule = "cosine_restarts"` |
|---|---|
| `num_warmup_steps` | `warmup_steps` |
| `num_training_steps` | `decay_steps`, or the run's steps |
| `num_cycles` | `cycles` |

| `get_wsd_schedule` | `schedule = "wsd"` |
|---|---|
| `num_warmup_steps`, `warmup_type` | `warmup_steps`, `warmup_shape` |
| `num_training_steps` | `decay_steps`, or the run's steps |
| `num_stable_steps` | `decay_steps` - `warmup_steps` - `cooldown_steps` |
| `num_decay_steps`, `decay_type` (default: `cosine`) | `cooldown_steps`, `cooldown_shape` (default: `linear`) |
| `num_cycles` | `cooldown_waves` |
| `min_lr_ratio` | `init_lr` and `end_lr`, each `min_lr_ratio` * `lr` |
"""

OPTIMIZERS = """
## Optimizers

All optimizers have decoupled weight decay, clipping, frozen leaves and moving averages. A key of another optimizer is
an unknown key. Means and root mean squares are over the matrices of each layer, whether layers are stacked or not.
With `scale_by = "stacked"`, root mean squares are over all stacked layers together, as in optax.

- `adafactor` without factors, with `momentum = 0.9` and `clip_threshold = 0`, is the AdamW of llamabpt with
  `multiply_by_parameter_scale`, which scales stacked layers together: `scale_by = "stacked"`.
- `muon` updates the matrices of layers. Embeddings, the head, norms and biases have AdamW with `b1`, `b2` and `eps`.
  Its momentum is corrected for its bias, as in optax. `bias_correction = false` disables it, as in the original post.
- `palm` has the settings of llamabpt. llamabpt scales its layers together: `scale_by = "stacked"`. Its `lr` is relative
  to 0.01: with `rsqrt` the learning rate is lr / 0.01 / sqrt(max(step, warmup_steps)). The weight decay of a step is
  weight_decay / 1e-4 times the square of the learning rate.

Frozen leaves have no gradients and no optimizer state. The moving average of `ema` is `opt_state.ema` in a checkpoint.
It is resumed and resharded. `prep export` and `prep generate` take it with `--ema`. Evaluation does not use it.
`train.reduction = "exact"` supports `adamw`, `lion` and `sgd`.

| type | keys besides those of all | other defaults |
|---|---|---|
"""

OTHER_NAMES = """
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
            if table:
                members = table_members(recipe_schema, table)
                property_schema = recipe_schema["properties"][table]
                description = property_schema.get("description") or members[0]["description"]
            else:
                description = recipe_schema["description"]
            parts.append(
                f"\n## {title}\n\n{description}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
            )
            current_table = table
        key_schema = KEY_SCHEMAS[key]
        default = _default_text(key_schema)
        if "default" in key_schema and "absent" not in key_schema:
            default = f"`{default}`"
        cells = (f"`{name}`", describe_type(key_schema), default, key_schema["description"])
        parts.append(_table_row(*cells))
    optimizers = [OPTIMIZERS, *_optimizer_rows()]
    synonyms = [OTHER_NAMES]
    for key, names in NAMES.items():
        synonyms.append(_table_row(f"`{key}`", ", ".join(f"`{name}`" for name in names.split())))
    return "".join(
        [
            *parts,
            *_sources_section(),
            OUTRO,
            *_schedule_rows(),
            SCHEDULES_OF_OTHERS,
            *optimizers,
            *synonyms,
        ]
    )


def _schedule_rows() -> Iterator[str]:
    """Yield a row for each schedule."""
    for kind, decay in DECAYS.items():
        meaning = decay.meaning
        if decay.is_open:
            meaning += ". `end_lr` and `decay_steps` have no effect"
        yield _table_row(f"`{kind}`", meaning)


def _optimizer_rows() -> Iterator[str]:
    """Yield for each optimizer a row with its keys, and with its defaults that differ from those above."""
    common = set.intersection(*map(set, OPTIMIZER_SCHEMAS.values()))
    for name, schemas in OPTIMIZER_SCHEMAS.items():
        keys = ", ".join(
            f"`{key} = {_default_text(item)}`" for key, item in schemas.items() if key not in common
        )
        differing = (
            f"`{key} = {_default_text(item)}`"
            for key, item in schemas.items()
            if key in common - {"type"}
            and _default_text(item) != _default_text(KEY_SCHEMAS[f"optimizer.{key}"])
        )
        yield _table_row(f"`{name}`", keys, ", ".join(differing))


def _default_text(key_schema: KeySchema) -> str:
    """Return the default of a key, or the meaning of its absence."""
    if "absent" in key_schema:
        return str(key_schema["absent"])
    if "default" in key_schema:
        return to_toml(key_schema["default"])
    return "required"


def _sources_section() -> Iterator[str]:
    """Yield the section about the tables of `data.sources`."""
    yield f"\n## `[[{SOURCES_KEY}]]`\n\n{DataSource.__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
    for name, key_schema in SOURCE_SCHEMAS.items():
        default = key_schema.get("absent") or (
            "that of `[data]`" if "default" in key_schema else "required"
        )
        yield _table_row(f"`{name}`", describe_type(key_schema), default, key_schema["description"])


def _table_row(*cells: str) -> str:
    """Return a row of a Markdown table. A `|` would end a cell, also inside backticks."""
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |\n"


if __name__ == "__main__":
    print(render_page(), end="")
