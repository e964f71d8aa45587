"""`prep recipes` on the recipes of the checkout."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.recipes import (
    find_recipe,
    find_training_recipe,
    recipes_folder,
)
from prepcli.core.errors import FAILED, OK, USAGE, UsageError

NAMES = sorted(path.stem for path in recipes_folder().glob("*.toml"))


def test_recipes_lists_every_recipe(capsys: pytest.CaptureFixture[str]):
    assert NAMES
    assert main(["recipes", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["recipes"]
    assert [entry["name"] for entry in entries] == NAMES
    assert all(entry["summary"] and entry["devices"] >= 1 for entry in entries)
    models = {entry["name"]: entry["model"] for entry in entries}
    assert (models["gpt-neo-1.3b"], models["llama-7b-32k"]) == ("gpt-neo-1.3B", "llama-7b")


@pytest.mark.parametrize("name", NAMES)
def test_recipes_prints_one_recipe(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["recipes", name]) == 0
    text = capsys.readouterr().out
    assert tomllib.loads(text) == tomllib.loads((recipes_folder() / f"{name}.toml").read_text())


def test_recipes_suggests_a_similar_name(capsys: pytest.CaptureFixture[str]):
    assert main(["recipes", "lama-7b"]) == 2
    error = capsys.readouterr().err
    assert "unknown recipe `lama-7b`" in error
    assert "did you mean `llama-7b`?" in error


def test_recipes_copy_writes_the_file_and_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    shipped = (recipes_folder() / "gpt2.toml").read_bytes()
    assert main(["recipes", "copy", "gpt2"]) == OK
    assert main(["recipes", "copy", "gpt2", "--out", "mine.toml"]) == OK
    assert capsys.readouterr().out == "gpt2.toml\nmine.toml\n"
    assert Path("gpt2.toml").read_bytes() == Path("mine.toml").read_bytes() == shipped
    Path("mine.toml").write_text("changed")
    assert main(["recipes", "copy", "gpt2", "--out", "mine.toml"]) == FAILED
    assert Path("mine.toml").read_text() == "changed"
    assert main(["recipes", "copy", "gpt2", "--out", "no/folder.toml"]) == FAILED


@pytest.mark.parametrize(
    "words", [["copy"], ["copy", "gtp2"], ["gpt2", "llama-7b"], ["gpt2", "--out", "a.toml"]]
)
def test_recipes_rejects_words_without_meaning(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", *words]) == USAGE
    assert "prep recipes copy" in capsys.readouterr().err or words[-1] == "gtp2"
    assert not list(tmp_path.iterdir())


def test_find_recipe_takes_the_bare_name_of_a_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(Path("gpt2")) == recipes_folder() / "gpt2.toml"
    assert find_recipe(Path("gpt2.toml")) == Path("gpt2.toml")
    assert find_recipe(Path("folder/gpt2")) == Path("folder/gpt2")
    Path("gpt2.toml").touch()
    with pytest.raises(UsageError, match="`gpt2` is ambiguous"):
        find_recipe(Path("gpt2"))
    Path("gpt2").mkdir()
    assert find_recipe(Path("gpt2")) == Path("gpt2")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpt2.toml", "did you mean `gpt2`, the shipped recipe?"),
        ("recipes/gpt2.toml", "did you mean `gpt2`, the shipped recipe?"),
        ("recipes/gtp2.toml", "did you mean `gpt2`?"),
        ("gpt-neo", "did you mean `gpt-neo-1.3b`, `gpt-neo-1.3b-wikitext`?"),
        ("gtp2", "did you mean `gpt2`?"),
    ],
)
def test_missing_training_recipe_suggests_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        find_training_recipe(Path(name))
    assert (caught.value.what, caught.value.hint) == (f"{name} does not exist", hint)


@pytest.mark.parametrize("name", ["gpt2", "gpt2.toml"])
def test_recipe_with_the_name_of_a_folder_is_copied_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    with pytest.raises(UsageError) as caught:
        find_training_recipe(Path(name))
    assert caught.value.hint == "`prep recipes copy gpt2` writes the recipe to gpt2.toml"
    assert main(["recipes", "copy", "gpt2", "-q"]) == OK
    assert find_training_recipe(Path("gpt2.toml")) == Path("gpt2.toml")
    with pytest.raises(UsageError, match=r"`gpt2\.toml`, the recipe in this folder"):
        find_training_recipe(Path("gpt2"))


@pytest.mark.parametrize("name", ["folder/unlike.toml", "unlike", "gpt2-mine.toml"])
def test_missing_recipe_keeps_its_path_if_a_file_is_similar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.chdir(tmp_path)
    Path("gpt2-mime.toml").touch()
    assert find_training_recipe(Path(name)) == Path(name)


def test_train_takes_the_name_of_a_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["train", "gpt2", "--set", "mesh=8,1,1"]) != OK
    assert "data/train.jsonl" in capsys.readouterr().err
