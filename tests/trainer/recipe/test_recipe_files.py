"""Recipe files that do not exist, cannot be read, or are not recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import FAILED, USAGE, PrepError
from tests.trainer.recipe.test_errors import GOOD
from trainer.recipe import complete_recipe, load_recipe
from trainer.recipe.loading import RawRecipe, read_recipe


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def test_missing_recipe_suggests_similar_name():
    Path("llama-7b.toml").write_text(GOOD)
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("lama-7b.toml"))
    assert (
        str(caught.value)
        == "lama-7b.toml does not exist - a recipe is a TOML file - did you mean `llama-7b.toml`?"
    )
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("no/where.toml"))
    assert (
        str(caught.value)
        == "no/where.toml does not exist - a recipe is a TOML file - `prep recipes` lists recipes"
    )
    assert caught.value.code == USAGE


def test_folder_is_rejected_as_recipe():
    Path("llama-7b.toml").write_text(GOOD)
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("."))
    assert (
        str(caught.value)
        == ". is a folder - a recipe is a TOML file - recipes in it: llama-7b.toml"
    )


@pytest.mark.parametrize("file", ["config.json", "prep-manifest.json", "_METADATA"])
def test_checkpoint_as_recipe_hints_at_model_path(file: str):
    Path("init").mkdir()
    Path("init", file).write_text("{}")
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("init"))
    assert str(caught.value) == (
        "init is a checkpoint - a recipe is a TOML file"
        ' - `prep.train("RECIPE.toml", overrides="model.path=init")`; `prep recipes` lists recipes'
    )


def test_io_error_is_not_a_usage_error():
    name = "x" * 300
    with pytest.raises(PrepError) as caught:
        load_recipe(Path(name))
    assert (
        str(caught.value)
        == f"{name} cannot be read - File name too long - check the path and its permissions"
    )
    assert caught.value.code == FAILED


def test_byte_order_mark_and_crlf_are_accepted():
    Path("x.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe(Path("x.toml")).recipe.mesh == "1,2,4"


def test_invalid_file_name_requires_a_name():
    Path(".toml").write_text(GOOD)
    with pytest.raises(PrepError) as caught:
        load_recipe(Path(".toml"))
    assert caught.value.what == '.toml: `name` is ".toml"'
    assert load_recipe(Path(".toml"), ["name=x"]).recipe.name == "x"


def test_complete_recipe_needs_no_file():
    Path("x.toml").write_text(GOOD)
    tables = read_recipe(Path("x.toml")).tables
    loaded = complete_recipe(RawRecipe(Path("other.toml"), tables), ["seed=7"])
    assert (loaded.recipe.name, loaded.recipe.seed) == ("other", 7)
    with pytest.raises(PrepError) as caught:
        complete_recipe(RawRecipe(Path("other.toml"), {**tables, "seeds": 1}))
    assert caught.value.what == "other.toml: unknown key `seeds`"
