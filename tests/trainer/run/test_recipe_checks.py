"""Checks of a recipe that every command runs which reads it."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prepcli.core.errors import PrepError
from tests.helpers.tiny_configs import LLAMA, MIXTRAL, T5
from tests.trainer.training.test_preflight import RECIPE
from trainer.data.files import DataFile
from trainer.data.remote_files import RemoteFiles
from trainer.planning.model_shapes import model_of_config
from trainer.recipe import Recipe, load_recipe
from trainer.run.checks import check_inputs, check_model

SPANS = ["data.objective=span_corruption", "data.source_length=40"]
MIXTURE = ["data.path=", 'data.sources=[{name = "a", path = "train.txt"}]']
MIXED_SPANS = [*SPANS, *MIXTURE]
PAIRS = ["data.type=json", "data.fields=[a], b"]
MIXED_PAIRS = [*PAIRS, *MIXTURE]


@pytest.fixture(autouse=True)
def _in_recipe_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("w1 w2")
    Path("recipe.toml").write_text(RECIPE)


def load_test_recipe(*overrides: str) -> Recipe:
    """Load recipe.toml with overrides."""
    return load_recipe(Path("recipe.toml"), overrides).recipe


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["data.eval_path=nowhere.txt"], "no data in `nowhere.txt`"),
        (["data.eval_path=empty.txt"], "empty.txt is empty"),
        (["data.path=[train.txt, empty.txt]"], "no data in `[train.txt, empty.txt]`"),
        (['data.path=["empty.txt", "empty.txt"]'], "empty.txt is empty"),
        (["data.split=train"], "`data.split` is 'train'"),
        (["data.path=s3://bucket/a.txt"], "cannot read s3://bucket/a.txt"),
        (
            ["data.type=auto", 'data.path=["train.txt", "recipe.toml"]'],
            "the type of recipe.toml is unknown",
        ),
        (["data.eval_split=test"], "`data.eval_split` is 'test'"),
        (["data.tokenizer=nowhere"], "no tokenizer at nowhere"),
        (["data.tokenizer=."], ". has no tokenizer"),
    ],
)
def test_check_inputs_rejects_invalid_input(overrides: list[str], what: str):
    Path("empty.txt").touch()
    with pytest.raises(PrepError) as caught:
        check_inputs(load_test_recipe(*overrides))
    assert caught.value.what == what


def test_check_inputs_accepts_valid_inputs():
    check_inputs(load_test_recipe())


def test_check_inputs_accepts_an_empty_file_among_others():
    Path("empty.txt").touch()
    check_inputs(load_test_recipe('data.path=["train.txt", "empty.txt"]'))


def test_check_inputs_checks_every_source():
    tables = [
        f'[[data.sources]]\nname = "{name}"\npath = "{name}.txt"' for name in ("train", "nowhere")
    ]
    text = RECIPE.replace('path = "train.txt"\n', "").replace(
        "[batch]", "\n".join([*tables, "[batch]"])
    )
    Path("recipe.toml").write_text(text)
    with pytest.raises(PrepError, match=r"no data in `nowhere\.txt`"):
        check_inputs(load_test_recipe())


def test_absent_inputs_of_a_plan_are_no_error():
    recipe = load_test_recipe("data.path=nowhere.txt", "data.tokenizer=nowhere")
    check_inputs(recipe, may_be_absent=True)
    present = load_test_recipe("data.split=train", "data.tokenizer=nowhere")
    with pytest.raises(PrepError, match=r"`data\.split` is 'train'"):
        check_inputs(present, may_be_absent=True)


@pytest.mark.parametrize("part", ["data.config=all", "data.revision=refs/convert/parquet"])
def test_dataset_with_holdout_may_have_a_configuration(part: str):
    hub = "hf://datasets/o/n"
    recipe = load_test_recipe(f"data.path={hub}", part, "data.holdout=0.1", "data.type=json")
    file = DataFile(f"{hub}/a.jsonl", 3, "digest", lambda: io.BytesIO(b"{}\n"))
    remote = SimpleNamespace(find=lambda url, accepts, selection: [file])
    check_inputs(recipe, cast(RemoteFiles, remote))
    check_inputs(recipe, may_be_absent=True)


@pytest.mark.parametrize(
    ("config", "overrides", "what", "why"),
    [
        (T5, ["data.packing=documents"], '`data.packing` is "documents"', "has an encoder"),
        (T5, ["data.packing=none"], '`data.packing` is "none"', "has an encoder"),
        (LLAMA, SPANS, '`data.objective` is "span_corruption"', "has no encoder"),
        (LLAMA, MIXED_SPANS, '`data.objective` is "span_corruption"', "has no encoder"),
        (T5, PAIRS, "`data.source_length` is missing", "has an encoder"),
        (T5, MIXED_PAIRS, "`data.source_length` is missing", "has an encoder"),
    ],
)
def test_check_model_rejects_data_that_does_not_fit(
    config: dict[str, Any], overrides: list[str], what: str, why: str
):
    with pytest.raises(PrepError) as caught:
        check_model(load_test_recipe(*overrides), model_of_config(config))
    assert caught.value.what == what
    assert why in caught.value.why


@pytest.mark.parametrize("policy", ["dots_saveable", '["mlp_output"]', '["mlp_hidden"]'])
def test_check_model_rejects_hidden_units_of_experts(policy: str):
    recipe = load_test_recipe(f"model.remat_policy={policy}")
    dense, moe = (model_of_config(config) for config in (LLAMA, MIXTRAL))
    check_model(recipe, dense)
    if "mlp_hidden" not in policy:
        check_model(recipe, moe)
        return
    with pytest.raises(PrepError) as caught:
        check_model(recipe, moe)
    why = "the experts of mixtral compute their hidden units again"
    assert (
        str(caught.value)
        == f"`model.remat_policy` has mlp_hidden - {why} - remove it from the list"
    )
