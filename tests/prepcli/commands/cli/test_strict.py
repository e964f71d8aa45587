"""Empty values, and several processes of a command for one, are usage errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.cli.option_groups import FREE_TEXT_OPTIONS
from prepcli.commands.cli.root import command_group
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.tiny_checkpoints import make_checkpoint

TOP_COMMANDS = vars(command_group())["commands"]
GROUPS = ("launch", "map")
COMMANDS = {name: command for name, command in TOP_COMMANDS.items() if name not in GROUPS}
for _group in GROUPS:
    for _name, _command in vars(TOP_COMMANDS[_group])["commands"].items():
        COMMANDS[f"{_group} {_name}"] = _command
VALUE_PARAMETERS = [
    (command, parameter)
    for command, click_command in COMMANDS.items()
    for parameter in click_command.params
    if parameter.name not in FREE_TEXT_OPTIONS
    and not any(vars(parameter).get(key) for key in ("is_flag", "count"))
]


def _command_with_empty_value(command: str, parameter: Any) -> list[str]:
    """Return a command line with an empty value for the parameter and values for the arguments before it."""
    arguments = [
        argument for argument in COMMANDS[command].params if argument.param_type_name == "argument"
    ]
    if parameter in arguments:
        return [*command.split(), *["x"] * arguments.index(parameter), ""]
    return [*command.split(), *["x"] * len(arguments), parameter.opts[-1], ""]


def test_empty_values_are_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, parameter in VALUE_PARAMETERS:
        line = _command_with_empty_value(command, parameter)
        assert main(line) == 2, line
        assert "is empty" in capsys.readouterr().err, line
        assert list(tmp_path.iterdir()) == [], line


def test_empty_option_error_has_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["save-init", "m", "--mesh", ""]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: `--mesh` is empty",
        "  why: a shell variable in the command may be unset",
        " hint: remove `--mesh`, or give it a value",
    ]


@pytest.mark.parametrize(
    "words", [["--mesh="], ["--mesh", "1,1,1", "--rule", "embed=mp", "--rule", ""]]
)
def test_empty_values_are_found_in_every_form(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["save-init", "m", *words]) == 2
    assert "is empty" in capsys.readouterr().err


def test_empty_required_argument_needs_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", ""]) == 2
    out = capsys.readouterr().err.splitlines()
    assert (out[0], out[2]) == ("error: CHECKPOINT is empty", " hint: give CHECKPOINT a value")


def test_empty_prompt_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "./m", "--prompt", ""]) == 2
    assert "`./m` does not exist" in capsys.readouterr().err


def test_demo_refuses_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "1")
    err = run_failing(capsys, 2, "demo")
    assert "`prep demo` runs in one process" in err
    assert "process 1 of 4, according to SLURM" in err
    assert list(tmp_path.iterdir()) == []
    run_ok("models")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["save-init", "m", "--memory", "abc"], "`--memory abc` is not a size in bytes"),
        (["verify", "m", "--memory", "abc"], "`--memory abc` is not a size in bytes"),
        (["export", "m", "--shard-size", "-5GB"], "`--shard-size -5GB` is not a size in bytes"),
        (["pad-vocab", "m", "--size", "9" * 30], f"`--size {'9' * 30}` is too large"),
        (["pad-vocab", "m", "--size", "9" * 5000], "invalid value for '--size'"),
    ],
)
def test_invalid_number_names_its_option(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run_failing(capsys, 2, *words).splitlines()
    assert lines[0] == f"error: {what}"


@pytest.mark.parametrize(
    ("variable", "value", "what", "hint"),
    [
        (
            "PREP_MEMORY",
            "abc",
            "`PREP_MEMORY=abc` is not a size in bytes",
            "for example `PREP_MEMORY=512MiB`",
        ),
        (
            "PREP_MEMORY",
            "1MiB",
            "`PREP_MEMORY=1MiB` is below the minimum",
            "`PREP_MEMORY=32MiB` or more",
        ),
        (
            "PREP_PROCESSES",
            "x",
            "`PREP_PROCESSES=x` is invalid",
            "write as process 0 of 4 with `PREP_PROCESSES=4/0`",
        ),
        (
            "PREP_PROGRESS",
            "fancy",
            "`PREP_PROGRESS=fancy` is invalid",
            "`unset PREP_PROGRESS`, or give it a value of `--progress`",
        ),
    ],
)
def test_error_names_the_environment_variable_that_was_set(
    variable: str,
    value: str,
    what: str,
    hint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(variable, value)
    make_checkpoint(tmp_path / "tiny")
    lines = run_failing(
        capsys, 2, "save-init", str(tmp_path / "tiny"), "--out", str(tmp_path / "out")
    ).splitlines()
    assert lines[0] == f"error: {what}"
    assert lines[-1] == f" hint: {hint}"


@pytest.mark.parametrize("variable", ["PREP_MEMORY", "PREP_PROCESSES", "PREP_PROGRESS"])
def test_long_value_of_an_environment_variable_is_shortened(
    variable: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(variable, "x y" * 7000)
    make_checkpoint(tmp_path / "tiny")
    err = run_failing(
        capsys, 2, "save-init", str(tmp_path / "tiny"), "--out", str(tmp_path / "out")
    )
    assert variable in err
    assert len(err) < 1500
