"""A kill right after an output got its name: the next command removes the work folder inside it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.helpers.fork_server import run_python
from tests.helpers.run_cli import run_failing, run_ok

pytestmark = pytest.mark.usefixtures("sources")

KILLED = """\
import os, signal, sys
from prepcli.commands.cli.main import main
from prepcli.execution import folder_run, folder_store
{function} = lambda *_, **options: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main())
"""
EXPORT = ("export", "init", "--out", "out")


def export_until(function: str) -> None:
    """Export, and kill the process when it calls a function."""
    process = run_python(KILLED.format(function=function), *EXPORT, cwd=".")
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "words", [EXPORT, ("verify", "out"), ("save-init", "out", "--out", "other")]
)
def test_next_command_removes_work_folder_of_killed_run(words: tuple[str, ...]):
    export_until("folder_store.remove_work_folder")
    assert Path("out/.prep").is_dir()
    run_ok(*words)
    assert not Path("out/.prep").exists()
    run_ok("verify", "out")


def test_work_folder_of_unpublished_output_is_kept():
    export_until("folder_store.FolderStore.publish")
    assert Path("out.partial/prep-manifest.json").is_file()
    run_ok("verify", "out.partial")
    assert Path("out.partial/.prep").is_dir()
    run_ok(*EXPORT)


def test_damaged_output_is_not_already_done(capsys: pytest.CaptureFixture[str]):
    run_ok(*EXPORT)
    path = Path("out/config.json")
    path.write_bytes(path.read_bytes().replace(b"2", b"3", 1))
    assert "its files are damaged" in run_failing(capsys, 1, *EXPORT)
    run_ok(*EXPORT, "--overwrite")
    run_ok("verify", "out")
