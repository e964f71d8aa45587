"""The tagged union of optimizers in a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from trainer.models.errors import PrepError
from trainer.recipe import load_recipe, recipe_to_toml
from trainer.recipe.formatting import describe_type
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES, AdamWTable, OptimizerTable
from trainer.recipe.tables import KEY_SCHEMAS, Recipe, keys_of, merge_members

TABLES = {
    "model": {"path": "tiny-init"},
    "data": {"type": "text", "path": "train.txt", "seq_length": 8},
    "batch": {"size": 4},
    "train": {"steps": 20},
}


class OtherTable(OptimizerTable):
    """Another optimizer, with a key of its own."""

    type: Literal["other"]
    momentum: float = 0.9


def make_recipe(**optimizer: object) -> Recipe:
    """Return a small recipe with an optimizer."""
    return Recipe.model_validate({"name": "small", **TABLES, "optimizer": {"lr": 1e-3, **optimizer}})


def test_optimizer_type_defaults_to_adamw():
    assert make_recipe().optimizer == make_recipe(type="adamw").optimizer == AdamWTable(lr=1e-3)


def test_optimizer_tables_are_named_by_their_type():
    assert {name: table.model_fields["type"].default for name, table in OPTIMIZER_TABLES.items()} == {"adamw": "adamw"}


@pytest.mark.parametrize(("value", "text"), [("lion", '"lion"'), (3, '"3"'), (["adamw"], '["adamw"]')])
def test_unknown_optimizer_is_reported_with_other_errors(tmp_path: Path, value: object, text: str):
    path = tmp_path / "small.toml"
    path.write_text(recipe_to_toml(make_recipe(), {}))
    with pytest.raises(PrepError) as caught:
        load_recipe(path, [f"optimizer.type={value}", "optimizer.lr=0", "optimizer.b1=2"])
    lines = caught.value.why.splitlines()
    assert len(lines) == 3
    hint = "`--set optimizer.type=adamw`"
    assert f'--set: `optimizer.type` is {text} - it takes "adamw": Adam with decoupled weight decay - {hint}' in lines


def test_type_lists_all_members_of_the_union():
    members = [table.model_json_schema()["properties"] for table in (AdamWTable, OtherTable)]
    members[1]["type"]["description"] = "another optimizer"
    merged = merge_members(members)
    assert describe_type(merged["type"]) == '"adamw" or "other"'
    assert merged["type"]["description"] == "Adam with decoupled weight decay; another optimizer"
    assert merged["type"]["default"] == "adamw"
    assert {"type", "lr", "weight_decay", "momentum"} <= merged.keys()


def test_keys_of_a_recipe_are_those_of_its_optimizer():
    recipe = make_recipe()
    assert [*keys_of(recipe)] == [*KEY_SCHEMAS]
    other = recipe.model_copy(update={"optimizer": OtherTable(type="other", lr=1e-3)})
    missing = {"weight_decay", "decay_embeddings", "b1", "b2", "eps", "clip_norm"}
    assert {*KEY_SCHEMAS} - {*keys_of(other)} == {f"optimizer.{name}" for name in missing}
    assert "weight_decay" not in recipe_to_toml(other, {})
