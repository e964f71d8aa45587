"""Ctrl-C in each part of a command, and the exit codes of other signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prepcli.core.errors import INTERRUPTED, STOPPED
from tests.helpers.fork_server import PREP, read_until, start_python
from tests.helpers.slow_cases import slow_except
from tests.helpers.waiting import MAX_S, wait_until

# The process sends SIGINT to itself when it looks for a module.
PREP_INTERRUPTED_IN_IMPORTS = """
import os, runpy, signal, sys

class Finder:
    def find_spec(name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

module = sys.argv.pop(1)
sys.meta_path.insert(0, Finder)
runpy.run_module("prepcli", run_name="__main__", alter_sys=True)
"""
COMMANDS = {
    "help": ["--help"],
    "train": ["train", "recipe.toml"],
    "eval": ["eval", "tiny", "--data", "text.txt"],
    "generate": ["generate", "tiny", "--prompt", "a"],
    "save-init": ["save-init", "tiny"],
    "export": ["export", "tiny"],
    "verify": ["verify", "tiny", "tiny"],
    "inspect": ["inspect", "tiny"],
    "plan": ["plan", "recipe.toml"],
    "tokenize": ["tokenize", "recipe.toml"],
    "report": ["report", "run"],
    "demo": ["demo"],
    "launch": ["launch", "local", "recipe.toml"],
}
# Modules of the command line, and modules that functions of commands import
CASES = [
    *((name, "typer") for name in COMMANDS),
    *((name, "prepcli.commands.cli.root") for name in COMMANDS),
    ("train", "trainer.recipe.tables"),
    ("train", "prepcli.commands.operations.train"),
    ("train", "numpy"),
    ("train", "jax"),
    ("eval", "prepcli.commands.operations.evaluate"),
    ("generate", "prepcli.commands.operations.generate"),
    ("save-init", "prepcli.commands.operations.save_init"),
    ("inspect", "prepcli.commands.operations.inspect"),
    ("demo", "prepcli.commands.demo.run"),
]
DEFAULT_CASES = [("help", "typer"), ("train", "prepcli.commands.cli.root"), ("train", "numpy")]


@pytest.mark.parametrize(("command", "module"), slow_except(CASES, DEFAULT_CASES))
def test_ctrl_c_while_importing_prints_no_traceback(work_dir: Path, command: str, module: str):
    words = [sys.executable, "-c", PREP_INTERRUPTED_IN_IMPORTS, module, *COMMANDS[command]]
    process = subprocess.run(words, capture_output=True, text=True, timeout=MAX_S, check=False)
    assert (process.returncode, process.stdout) == (INTERRUPTED, "")
    assert "error: interrupted" in process.stderr
    assert "Traceback" not in process.stderr
    assert "ignored" not in process.stderr


def test_ctrl_c_in_a_destructor_ends_the_command(tmp_path: Path):
    """Python drops the exception there, and prints a traceback unless prep raises it again."""
    script = f"""
import os, signal, time
import prepcli.commands.operations.about as module

class Signals:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

def wait(*arguments, **options):
    Signals()
    while True:  # a signal just before one long sleep would be handled after it
        time.sleep(0.1)

module.list_aliases = wait
{PREP}
"""
    process = start_python(script, "models", cwd=tmp_path)
    _, err = process.communicate(timeout=MAX_S)
    assert process.returncode == INTERRUPTED
    assert err.decode() == "error: interrupted\n"


# The main thread runs no Python code, as in a compilation by XLA: the C library's `pause` returns at a handled signal
# only, and the main thread receives none.
PREP_IN_A_LONG_CALL = f"""
import ctypes, signal, sys, threading
from pathlib import Path
import prepcli.commands.operations.evaluate as module
from prepcli.core.signals import NUDGE

def wait(*arguments, **options):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, NUDGE])
    # On a busy machine, the call may begin late.
    threading.Timer(1, Path("waiting").touch).start()
    ctypes.CDLL(None).pause()

module.evaluate = wait
{PREP}
"""


def test_ctrl_c_in_a_long_call_is_answered_and_quits(tmp_path: Path):
    process = start_python(PREP_IN_A_LONG_CALL, "eval", "tiny", "--data", "x", cwd=tmp_path)
    wait_until((tmp_path / "waiting").exists, process)
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping; again to quit\n")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=MAX_S)
    assert (process.returncode, err.decode()) == (INTERRUPTED, "error: interrupted\n")


# The exit of the interpreter waits for the second signal, as it may wait for the threads of libraries.
PREP_WITH_LONG_EXIT = """
import atexit, os, runpy, sys, time
import prepcli.commands.operations.about as module

def wait(*arguments, **options):
    atexit.register(wait_for_second_signal)
    print("running", file=sys.stderr, flush=True)
    while True:
        time.sleep(0.1)

def wait_for_second_signal():
    print("exiting", file=sys.stderr, flush=True)
    sys.stdin.readline()

module.list_aliases = wait
sys.argv[0] = "prep"
runpy.run_module("prepcli", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("number", "code", "what"),
    slow_except(
        [
            (signal.SIGTERM, STOPPED, "stopped by SIGTERM"),
            (signal.SIGINT, INTERRUPTED, "interrupted"),
        ],
        [(signal.SIGTERM, STOPPED, "stopped by SIGTERM")],
    ),
)
def test_repeated_signal_at_the_exit_changes_nothing(number: signal.Signals, code: int, what: str):
    process = subprocess.Popen(
        [sys.executable, "-c", PREP_WITH_LONG_EXIT, "models"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "running\n"
    process.send_signal(number)
    assert process.stderr.readline() == f"error: {what}\n"
    assert process.stderr.readline() == "exiting\n"
    process.send_signal(number)
    _, err = process.communicate("\n", timeout=MAX_S)
    assert (process.returncode, err) == (code, "")


# Ctrl-C in a call of Python: while a function is compiled, or between two batches.
CALL_IN_PYTHON = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax
import prepcli as prep
import trainer.training.evaluation as module

compile_lowered, evaluate_batches = jax.stages.Lowered.compile, module.eval_batches

def interrupt_compilation(lowered, *arguments):
    os.kill(os.getpid(), signal.SIGINT)
    assert has_returned.wait(120)
    return compile_lowered(lowered, *arguments)

def interrupt_batches(*arguments, **options):
    for batch in evaluate_batches(*arguments, **options):
        print("batch", flush=True)
        yield batch
        os.kill(os.getpid(), signal.SIGINT)

has_returned = threading.Event()
if sys.argv[2] == "compile":
    jax.stages.Lowered.compile = interrupt_compilation
else:
    module.eval_batches = interrupt_batches
try:
    if sys.argv[1] == "generate":
        prep.generate("tiny", tokens=[[1, 2]], max_new_tokens=2)
    else:
        prep.evaluate("tiny", "text.txt", seq_length=16, batch_size=1)
except KeyboardInterrupt:
    has_returned.set()
    print("interrupted", flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("function", "moment", "out"),
    slow_except(
        [
            ("evaluate", "compile", "interrupted\n"),
            ("evaluate", "batch", "batch\ninterrupted\n"),
            ("generate", "compile", "interrupted\n"),
        ],
        [("generate", "compile", "interrupted\n")],
    ),
)
def test_ctrl_c_ends_a_call_in_python(work_dir: Path, function: str, moment: str, out: str):
    """The work ends with the call, and the process with its own exit code."""
    words = [sys.executable, "-c", CALL_IN_PYTHON, function, moment]
    process = subprocess.run(words, capture_output=True, text=True, timeout=MAX_S, check=False)
    assert (process.returncode, process.stdout) == (3, out), process.stderr
    assert not process.stderr


WAIT_S = 240.0
SIGNALLED_COMMANDS = {
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


@pytest.mark.parametrize("function", slow_except(SIGNALLED_COMMANDS, ["generate", "plan"]))
def test_signal_ends_a_reading_command_with_75(function: str, tmp_path: Path) -> None:
    process = start_python(
        f"{WAITING_PREP}\n{PREP}", function, *SIGNALLED_COMMANDS[function], "--json", cwd=tmp_path
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
