"""Files of a training run besides its checkpoints."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.commands.operations.recipes import recipes_folder
from prepcli.core.errors import PrepError
from trainer.recipe import load_recipe
from trainer.run.resume import changed_keys
from trainer.run.storage import write_run_file


def make_run(folder: Path) -> Any:
    return SimpleNamespace(folder=folder, storage=SimpleNamespace(store_file=lambda name: None))


def test_write_run_file_replaces_a_file(tmp_path: Path):
    run = make_run(tmp_path / "run")
    for text in ("old", "é"):
        write_run_file(run, "environment.json", text)
        assert (run.folder / "environment.json").read_text("utf-8") == text
    assert os.listdir(run.folder) == ["environment.json"]


@pytest.mark.parametrize("name", ["environment.json", "environment.json.new"])
def test_write_run_file_changes_no_file_outside(tmp_path: Path, name: str):
    (tmp_path / "private").write_text("private")
    run = make_run(tmp_path / "run")
    run.folder.mkdir()
    (run.folder / name).symlink_to(tmp_path / "private")
    with suppress(PrepError):
        write_run_file(run, "environment.json", "new")
    assert (tmp_path / "private").read_text() == "private"


def test_recipe_of_a_run_must_be_a_regular_file(tmp_path: Path):
    os.mkfifo(tmp_path / "recipe.toml")
    with pytest.raises(PrepError, match=r"recipe\.toml is not a file"):
        changed_keys(tmp_path / "recipe.toml", load_recipe(recipes_folder() / "gpt2.toml").recipe)
