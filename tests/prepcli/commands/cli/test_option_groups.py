"""Commands: Typer sees each option, and the function of a command receives the groups and the Ui."""

from __future__ import annotations

import inspect
from typing import Annotated, TypedDict

import pytest

from prepcli.commands.cli.option_groups import CheckpointArgument, ProgressUi, command
from prepcli.commands.cli.root import all_commands
from prepcli.commands.console.ui import Report
from prepcli.core.errors import PrepError
from prepcli.core.option_spec import flag, option


class HubOptions(TypedDict, total=False):
    """A group of options with a text and flags."""

    revision: Annotated[str | None, option("NAME", "Read this branch.")]
    offline: Annotated[bool, flag("Use only the cache.")]
    stream: Annotated[bool, flag("Read without a copy.", position=1)]


@command("example", guide="convert")
def example_command(
    checkpoint: CheckpointArgument,
    *,
    hub_options: HubOptions,
    size: Annotated[int, option("N", "Take N.", default=3)],
    ui: ProgressUi,
) -> Report:
    """Look."""
    assert (checkpoint, size) == ("model", 4)
    assert hub_options == {"revision": "main", "offline": False, "stream": True}
    assert (ui.command, ui.as_json, ui.level, ui.progress_mode) == ("example", True, 2, "none")
    return Report(error=PrepError("stopped", code=75))


PARAMETERS = inspect.signature(example_command.function).parameters
OUTPUT_NAMES = ["as_json", "quiet", "verbose"]


def test_options_replace_their_group() -> None:
    names = ["checkpoint", "stream", "revision", "offline", "size", *OUTPUT_NAMES, "progress"]
    assert [*PARAMETERS] == names
    assert example_command.help == "Look.\n\nGuide: prep docs convert"
    assert PARAMETERS["verbose"].default == 0
    assert PARAMETERS["checkpoint"].default is inspect.Parameter.empty


def test_command_receives_its_option_groups(capsys: pytest.CaptureFixture[str]) -> None:
    hub_values = {"revision": "main", "offline": False, "stream": True}
    output_values = {"as_json": True, "quiet": False, "verbose": 2, "progress": "none"}
    code = example_command.function(checkpoint="model", size=4, **hub_values, **output_values)
    assert code == 75
    assert '"command": "example", "ok": false' in capsys.readouterr().out


@pytest.mark.parametrize("command", [*all_commands()], ids=lambda command: command.name)
def test_every_command_has_output_options(command) -> None:
    assert {*OUTPUT_NAMES} <= {*inspect.signature(command.function).parameters}
