"""Commands of jobs: their words and their numbers of processes."""

from __future__ import annotations

import pytest

from prepcli.core.errors import UsageError
from prepcli.launch.command import LaunchedCommand, check_process_count
from tests.helpers.launched_jobs import train_command


def test_words_of_a_training_have_another_path_of_the_recipe():
    command = train_command("run.toml", ["--out", "run"])
    assert command.words_with_recipe("/etc/r.toml") == ("train", "/etc/r.toml", "--out", "run")


def test_words_of_a_conversion_have_no_recipe():
    command = LaunchedCommand(name="save-init", arguments=("model",), has_shares=True)
    assert command.words == ("save-init", "model")


@pytest.mark.parametrize(
    ("name", "has_shares"), [("train", False), ("eval", False), ("reshard", True)]
)
def test_processes_divide_trainings_and_conversions(name: str, has_shares: bool):
    check_process_count(LaunchedCommand(name=name, has_shares=has_shares), 4, "one")


def test_processes_of_other_commands_are_refused():
    command = LaunchedCommand(name="inspect", arguments=("model",))
    check_process_count(command, 1, "one")
    with pytest.raises(UsageError, match="`prep inspect` runs in one process"):
        check_process_count(command, 2, "one")


@pytest.mark.parametrize(
    "values", [{"recipe": "a\nb.toml"}, {"recipe": "a\0"}, {"arguments": ("a\0",)}]
)
def test_words_that_no_script_can_hold_are_refused(values: dict[str, object]):
    with pytest.raises(UsageError):
        LaunchedCommand(**{"name": "train", **values})  # pyright: ignore[reportArgumentType]
