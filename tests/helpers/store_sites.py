"""Commands that run beside a fake object store."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.stores.byte_ranges import LOCK_FILE
from tests.helpers.fork_server import ForkedProcess, start_python
from tests.helpers.killing import read_files
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import make_checkpoint

# Objects are small, so that a tiny model has many of them. No local file may have more than 1 MiB, if
# the first argument is `small-files`.
PREP_SCRIPT = """
import resource, sys
from prepcli.planning import object_files
from prepcli.stores import byte_ranges
from prepcli.commands.cli.main import main
byte_ranges.FIRST_WAIT_S = 0.001
object_files.OBJECT_NBYTES = OBJECT_NBYTES
if sys.argv[1] == "small-files":
    del sys.argv[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sys.exit(main())
"""
OBJECT_NBYTES = 1 << 20
MESH = ("--mesh", "1,2,2", "--pad-vocab", "8")
WIDE: dict[str, Any] = {"vocab_size": 16384, "hidden_size": 512, "num_heads": 4, "num_layers": 1}


@dataclass(frozen=True)
class StoreSite:
    """Object store, which the environment names, and the working folder."""

    store: FakeObjectStore
    cwd: Path
    capsys: pytest.CaptureFixture[str]

    def run_prep(self, *arguments: str) -> dict[str, Any]:
        """Run a command in this process, and return its JSON."""
        self.capsys.readouterr()
        main([*arguments, "--json"])
        captured = self.capsys.readouterr()
        return parse_report(captured.out, captured.err)

    def start_prep(self, *arguments: str, small_files: bool = False) -> ForkedProcess:
        """Start a command in its own process. With `small_files` it cannot write a local file above 1 MiB."""
        limit = ["small-files"] if small_files else []
        script = PREP_SCRIPT.replace("= OBJECT_NBYTES", f"= {OBJECT_NBYTES}")
        return start_python(script, *limit, *arguments, "--json")

    def run_process(self, *arguments: str, small_files: bool = False) -> dict[str, Any]:
        """Run a command in its own process, and return its JSON."""
        return finish(self.start_prep(*arguments, small_files=small_files))

    def writes(self) -> list[str]:
        """Return the requests that changed objects other than locks."""
        lines = [line for line in self.store.requests if LOCK_FILE not in line]
        return [line for line in lines if line.startswith(("PUT", "POST", "DELETE"))]


def finish(process: ForkedProcess) -> dict[str, Any]:
    """Wait for the end of a command, and return its JSON."""
    out, err = process.communicate()
    return parse_report(out.decode(), err.decode())


def parse_report(out: str, err: str) -> dict[str, Any]:
    """Return the JSON on stdout. Neither output may have the token of the store."""
    assert "secret" not in out + err, "the token leaked"
    return json.loads(out)


def make_home(folder: Path) -> Path:
    """Make a model `m` of 13 MB and its init `init` in a folder."""
    make_checkpoint(folder / "m", vocab_size=4001, hidden_size=256, num_heads=4)
    with chdir(folder):
        run_ok("save-init", "./m", "--mesh", "1,2,2", "--pad-vocab", "8", "--out", "init")
    return folder


@contextmanager
def open_site(
    home: Path, folder: Path, patches: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[StoreSite]:
    """Serve a store with the model and the init of a home, and make `folder` the working folder."""
    objects: dict[str, bytes] = {}
    for name, prefix in (("m", "models/m"), ("init", "init")):
        for path, data in read_files(home / name).items():
            objects[f"bucket/{prefix}/{path}"] = data
    patches.chdir(folder)
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "PREP_"))]:
        patches.delenv(name)
    with use_objects(patches, objects) as store:
        yield StoreSite(store, folder, capsys)


def wait_for_writes(store: FakeObjectStore, num_writes: int, running: list[ForkedProcess]) -> None:
    """Wait until processes have written so many objects, or have ended."""
    while len(store.received) < num_writes and any(p.poll() is None for p in running):
        time.sleep(0.001)


def stop_or_finish(process: ForkedProcess, *, kill: bool) -> dict[str, Any] | None:
    """Kill a process, or wait for its end. Return its report, or None if it was killed."""
    if kill:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return None
    return finish(process)
