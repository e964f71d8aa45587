"""`prep recipes` on the recipes of the checkout."""

from __future__ import annotations

import json
import tomllib

import pytest

from prepcli.cli.main import main
from prepcli.commands.recipes import recipes_folder

NAMES = sorted(path.stem for path in recipes_folder().glob("*.toml"))


def test_recipes_lists_every_recipe(capsys: pytest.CaptureFixture[str]):
    assert NAMES
    assert main(["recipes", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["recipes"]
    assert [entry["name"] for entry in entries] == NAMES
    assert all(entry["summary"] for entry in entries)


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
