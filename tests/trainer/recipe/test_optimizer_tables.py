"""The tagged union of optimizers in a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from prepcli.core.errors import PrepError
from trainer.recipe import load_recipe, recipe_to_toml
from trainer.recipe.formatting import describe_type
from trainer.recipe.lr_schedule import build_lr_schedule
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES, AdamWTable, PalmTable
from trainer.recipe.tables import KEY_SCHEMAS, Recipe, keys_of

TABLES = {
    "model": {"path": "tiny-init"},
    "data": {"type": "text", "path": "train.txt", "seq_length": 8},
    "batch": {"size": 4},
    "train": {"steps": 20},
}


def make_recipe(**optimizer: object) -> Recipe:
    """Return a small recipe with an optimizer."""
    return Recipe.model_validate(
        {"name": "small", **TABLES, "optimizer": {"lr": 1e-3, **optimizer}}
    )


def test_optimizer_type_defaults_to_adamw():
    assert make_recipe().optimizer == make_recipe(type="adamw").optimizer == AdamWTable(lr=1e-3)


def test_optimizer_tables_are_named_by_their_type():
    types = {name: table.model_fields["type"] for name, table in OPTIMIZER_TABLES.items()}
    assert {name: get_args(field.annotation) for name, field in types.items()} == {
        name: (name,) for name in types
    }
    assert [name for name, field in types.items() if not field.is_required()] == ["adamw"]


@pytest.mark.parametrize(
    ("value", "text"), [("adam", '"adam"'), (3, '"3"'), (["adamw"], '["adamw"]')]
)
def test_unknown_optimizer_is_reported_with_other_errors(tmp_path: Path, value: object, text: str):
    path = tmp_path / "small.toml"
    path.write_text(recipe_to_toml(make_recipe(), {}))
    with pytest.raises(PrepError) as caught:
        load_recipe(path, [f"optimizer.type={value}", "optimizer.lr=0", "optimizer.b1=2"])
    lines = caught.value.why.splitlines()
    assert len(lines) == 3
    (line,) = (line for line in lines if "`optimizer.type`" in line)
    assert line.startswith(
        f'`--set`: `optimizer.type` is {text} - it takes "adamw", "adafactor", "lion", '
    )


def test_type_lists_all_members_of_the_union():
    schema = KEY_SCHEMAS["optimizer.type"]
    assert describe_type(schema) == '"adamw", "adafactor", "lion", "muon", "sgd" or "palm"'
    assert (
        "`adamw`: Adam with decoupled weight decay. `adafactor`: second moments of row"
        in schema["description"]
    )
    assert schema.get("default") == "adamw"
    assert {
        "optimizer.weight_decay",
        "optimizer.momentum",
        "optimizer.update_rms",
    } <= KEY_SCHEMAS.keys()


def test_recipe_has_only_keys_of_its_optimizer():
    recipe = make_recipe(type="lion")
    missing = {*KEY_SCHEMAS} - {*keys_of(recipe)}
    names = (
        "eps",
        "momentum",
        "nesterov",
        "decay_rate",
        "factored",
        "min_factored_size",
        "clip_threshold",
    )
    others = (
        "scale_by_parameter",
        "scale_by",
        "newton_schulz_steps",
        "update_rms",
        "bias_correction",
    )
    assert missing == {f"optimizer.{name}" for name in (*names, *others)}
    assert "\neps" not in recipe_to_toml(recipe, {})


def test_palm_has_the_defaults_of_easylm():
    table = make_recipe(type="palm").optimizer
    assert isinstance(table, PalmTable)
    values = (
        table.lr,
        table.momentum,
        table.decay_rate,
        table.weight_decay,
        table.clip_norm,
        table.schedule,
    )
    assert values[1:] == (0.9, 0.99, 1e-4, 1.0, "rsqrt")
    assert PalmTable(type="palm").lr == 0.01
    assert build_lr_schedule(table, 20).warmup == 10_000


@pytest.mark.parametrize(
    ("optimizer", "key", "hint"),
    [
        ("lion", "eps=1e-8", "`eps` is a key of adamw and muon"),
        ("adamw", "momentum=0.9", "`momentum` is a key of adafactor, muon, sgd and palm"),
        ("sgd", "update_rms=0.1", "`update_rms` is a key of muon"),
    ],
)
def test_keys_of_other_optimizers_are_unknown(tmp_path: Path, optimizer: str, key: str, hint: str):
    path = tmp_path / "small.toml"
    path.write_text(recipe_to_toml(make_recipe(type=optimizer), {}))
    with pytest.raises(
        PrepError, match=f"unknown key `optimizer.{key.partition('=')[0]}`"
    ) as caught:
        load_recipe(path, [f"optimizer.{key}"])
    assert hint in str(caught.value)


@pytest.mark.parametrize("key", ["freeze", "decay_exclude", "decay_include"])
def test_invalid_patterns_are_reported(tmp_path: Path, key: str):
    path = tmp_path / "small.toml"
    path.write_text(recipe_to_toml(make_recipe(), {}))
    with pytest.raises(PrepError, match=f"`optimizer.{key}` has the invalid pattern `re:\\(`"):
        load_recipe(path, [f"optimizer.{key}=re:("])


def test_loss_scale_needs_float16(tmp_path: Path):
    path = tmp_path / "small.toml"
    path.write_text(recipe_to_toml(make_recipe(), {}))
    with pytest.raises(
        PrepError,
        match=r"`optimizer\.loss_scale` is 64\.0 - `model\.dtype` is float32, which needs none",
    ):
        load_recipe(path, ["optimizer.loss_scale=64.0"])
    assert (
        load_recipe(
            path, ["optimizer.loss_scale=dynamic", "model.dtype=float16"]
        ).recipe.model.dtype
        == "float16"
    )
