"""Commands for fault tests, from a model and an init checkpoint in the folder of a test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.engine import pipeline
from prepcli.engine.files import Files
from tests.helpers.killing import read_files
from tests.helpers.tiny_checkpoints import make_checkpoint

COMMANDS = {
    "pad-vocab": ["pad-vocab", "./model", "--multiple", "8", "--init", "mean"],
    "save-init": ["save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "auto"],
    "reshard": ["reshard", "init", "--mesh", "1,4,1"],
    "export": ["export", "init"],
}


@dataclass(frozen=True)
class FaultSources:
    """A folder with `model` and `init`, and the outputs of commands without faults."""

    folder: Path
    outputs: dict[tuple[str, ...], dict[str, bytes]] = field(default_factory=dict)

    def copy_to(self, folder: Path) -> None:
        """Copy the sources with their times, which outputs record."""
        for name in ("model", "init"):
            shutil.copytree(self.folder / name, folder / name)

    def expected(self, command: Sequence[str]) -> dict[str, bytes]:
        """Return the files that a command writes without faults; the first call runs the command."""
        key = tuple(command)
        if key not in self.outputs:
            with chdir(self.folder):
                assert main([*command, "--out", "whole", "-q"]) == 0
                self.outputs[key] = read_files(Path("whole"))
                shutil.rmtree("whole")
        return self.outputs[key]


def make_sources(folder: Path) -> FaultSources:
    """Make `model` and `init` in a folder."""
    make_checkpoint(folder / "model")
    with chdir(folder):
        assert main(["save-init", "./model", "--out", "init", "--pad-vocab", "8", "-q"]) == 0
    return FaultSources(folder)


class Killed(BaseException):
    """Simulated SIGKILL."""


def kill(*args: object, **more: object) -> None:
    """Raise Killed. In place of another function, it ends a run there as SIGKILL does."""
    raise Killed


def run_until_killed(
    monkeypatch: pytest.MonkeyPatch, command: Sequence[str], *, syncs: int, folder: str = "done"
) -> Path:
    """Kill a run after a number of syncs, and return its staging folder, with notes in a folder of the run."""
    real_sync, remaining = Files.sync, iter(range(syncs))

    def sync(files: Files) -> None:
        if next(remaining, None) is None:
            raise Killed
        real_sync(files)

    with monkeypatch.context() as patched:
        patched.setattr(Files, "sync", sync)
        patched.setattr(pipeline, "MOST_UNSYNCED_NBYTES", 10_000)
        with pytest.raises(Killed):
            main([*command, "--out", "out", "-q"])
    assert list(Path("out.partial/.prep", folder).iterdir())
    return Path("out.partial")


def change_and_restore_time(path: Path) -> None:
    """Change the first byte of the tensors, and restore the file's time."""
    file_stat = path.stat()
    with path.open("r+b") as file:
        first = 8 + int.from_bytes(file.read(8), "little")  # offset of the first tensor
        file.seek(first)
        byte = file.read(1)[0]
        file.seek(first)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(file_stat.st_atime_ns, file_stat.st_mtime_ns))


def make_other_values(folder: Path, other: Path) -> None:
    """Copy a model with zeros in place of its values. Sizes, times and headers are equal."""
    shutil.copytree(folder, other)
    for path in other.glob("*.safetensors"):
        file_stat, data = path.stat(), path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        path.write_bytes(data[:start] + bytes(len(data) - start))
        os.utime(path, ns=(file_stat.st_atime_ns, file_stat.st_mtime_ns))


def replace_by_copy(path: Path) -> None:
    """Replace a file by a copy with the same time."""
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    os.replace(copy, path)
