"""Signals end every command with the exit code of the reference, commands that only read too."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from prepcli.core.errors import STOPPED
from tests.helpers.fork_server import PREP, start_python
from tests.helpers.slow_cases import slow_except

WAIT_S = 240.0
COMMANDS = {
    "evaluate": ("prepcli.commands.operations.evaluate", "eval", "tiny", "--data", "text.txt"),
    "generate": ("prepcli.commands.operations.generate", "generate", "tiny", "--prompt", "a"),
    "report": ("prepcli.commands.operations.report", "report", "run"),
    "plan": ("prepcli.commands.operations.plan", "plan", "recipe.toml"),
}
# The command has been parsed, and waits in its function.
WAITING_PREP = """
import importlib, sys, time
from pathlib import Path

def wait(*arguments, **options):
    Path("waiting").touch()
    while True:  # a signal just before one long sleep would be handled after it
        time.sleep(0.1)

name = sys.argv.pop(1)
setattr(importlib.import_module(sys.argv.pop(1)), name, wait)
"""


@pytest.mark.parametrize("function", slow_except(COMMANDS, ["generate", "plan"]))
def test_signal_ends_a_reading_command_with_75(function: str, tmp_path: Path) -> None:
    process = start_python(
        f"{WAITING_PREP}\n{PREP}", function, *COMMANDS[function], "--json", cwd=tmp_path
    )
    deadline_s = time.monotonic() + WAIT_S
    while not (tmp_path / "waiting").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == STOPPED, err
    error = json.loads(out)["error"]
    assert (error["what"], error["code"]) == ("stopped by SIGTERM", STOPPED)
