"""Option groups: Typer sees each option, and a command receives the groups."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import pytest

from prepcli.commands.cli.option_groups import (
    CheckpointArgument,
    OutputOptions,
    ProgressOption,
    expand_option_groups,
)
from prepcli.commands.cli.root import COMMANDS, LAUNCH_COMMANDS


@dataclass(frozen=True)
class HubOptions:
    """A group of options with a text and flags."""

    revision: str | None = None
    offline: bool = False
    stream: bool = False


@expand_option_groups
def example_command(
    checkpoint: CheckpointArgument,
    size: int = 3,
    *,
    hub_options: HubOptions,
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Look."""
    assert (checkpoint, size, progress) == ("model", 4, "none")
    assert hub_options == HubOptions(revision="main", offline=False, stream=True)
    assert output_options == OutputOptions(json=True, quiet=False, verbose=2)
    return 7


def test_options_replace_their_group() -> None:
    names = [
        "checkpoint",
        "size",
        "revision",
        "offline",
        "stream",
        "json",
        "quiet",
        "verbose",
        "progress",
    ]
    assert [*inspect.signature(example_command).parameters] == names
    assert example_command.__doc__ == "Look."
    assert inspect.signature(example_command).parameters["verbose"].default == 0
    assert (
        inspect.signature(example_command).parameters["checkpoint"].default
        is inspect.Parameter.empty
    )


def test_command_receives_its_option_groups() -> None:
    hub_values = {"revision": "main", "offline": False, "stream": True}
    output_values = {"json": True, "quiet": False, "verbose": 2}
    assert (
        example_command(checkpoint="model", size=4, progress="none", **hub_values, **output_values)
        == 7
    )


@pytest.mark.parametrize(
    "command", [*COMMANDS, *LAUNCH_COMMANDS], ids=lambda command: command.__name__
)
def test_every_command_has_output_options(command) -> None:
    assert {"json", "quiet", "verbose"} <= {*inspect.signature(command).parameters}
