"""Commands and the nodes of their jobs. The commands of `prep launch` show the checks of meshes."""

from __future__ import annotations

import pytest

from prepcli.core.errors import UsageError
from prepcli.launch.hardware import check_hardware, plain_hardware
from prepcli.launch.job import LaunchedCommand


@pytest.mark.parametrize(
    ("name", "has_shares"), [("train", False), ("eval", False), ("reshard", True)]
)
def test_processes_divide_trainings_and_conversions(name: str, has_shares: bool):
    command = LaunchedCommand(name=name, has_shares=has_shares)
    check_hardware(command, None, plain_hardware(4, None))


def test_processes_of_other_commands_are_refused():
    command = LaunchedCommand(name="inspect", arguments=("model",))
    check_hardware(command, None, plain_hardware(1, None))
    with pytest.raises(UsageError, match="`prep inspect` runs in one process") as caught:
        check_hardware(command, None, plain_hardware(2, None, option="workers"))
    assert caught.value.hint == "`--workers 1`"
