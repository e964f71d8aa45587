"""Jobs of two processes, one of which has another clock, disk, recipe, version or data, for `bench.job_kills`."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prepcli.launch import local
from tests.helpers.job_faults import ROOT, Fault
from tests.helpers.processes import COMPILATION
from tests.helpers.waiting import wait_until

DISK_NBYTES = 8 << 20  # size of the small disk. A saved step has 0.7 MB.
FILE_NBYTES = 300_000  # less than the data of a saved step
FILLER = "filler"
# `time.sleep` does not work under faketime, so `select` replaces it.
SLEEP = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds)\n"
FULL_TMPDIR = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=16k none "$TMPDIR" && cat /dev/zero > "$TMPDIR/filler" 2> /dev/null; exec "$@"',
    "sh",
)


@dataclass(frozen=True, slots=True)
class Change:
    """A difference of one process from the other one of its job.

    Attributes:
        words: Further words of its command line.
        env: Further environment variables.
        prefix: Command that runs it, such as `prlimit --fsize=100000`.
    """

    words: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    prefix: tuple[str, ...] = ()


NO_CHANGE = Change()


def start_changed(
    changes: Mapping[int, Change],
    *words: str,
    count: int,
    devices: int,
    cwd: Path,
    env: Mapping[str, str],
) -> list[subprocess.Popen[bytes]]:
    """Start `prep WORDS` in `count` processes, some of them changed.

    Args:
        changes: Change of each changed process, by index.
        *words: Words of the command line.
        count: Number of processes.
        devices: CPU devices of each.
        cwd: Working folder.
        env: Additional environment variables.
    """
    port = local.free_port()
    compilation = {name: os.environ[name] for name in COMPILATION if name in os.environ}
    processes: list[subprocess.Popen[bytes]] = []
    for index in range(count):
        change = changes.get(index, NO_CHANGE)
        variables = local.process_environment(
            os.environ, index=index, count=count, port=port, devices=devices
        )
        processes.append(
            subprocess.Popen(
                [*change.prefix, sys.executable, "-m", "prepcli", *words, *change.words],
                cwd=cwd,
                env={**variables, **compilation, **env, **change.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        )
    return processes


def make_differences(folder: Path) -> Iterator[Fault]:
    """Write the files of the cases, and yield the cases.

    Args:
        folder: Folder of the recipe and of the undisturbed run.
    """
    (folder / "tmp").mkdir()
    (folder / "other.txt").write_text((folder / "text.txt").read_text()[::-1])
    other_version = folder / "other-version"
    (other_version / "prepcli-0.0.1.dist-info").mkdir(parents=True)
    (other_version / "prepcli-0.0.1.dist-info/METADATA").write_text(
        "Name: prepcli\nVersion: 0.0.1\n"
    )
    (folder / "sleep").mkdir()
    (folder / "sleep/sitecustomize.py").write_text(SLEEP)
    clock = {
        "PYTHONPATH": f"{folder / 'sleep'}:{ROOT}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }
    changes = {
        "files of 1 limited to 300 kB": Change(prefix=("prlimit", f"--fsize={FILE_NBYTES}")),
        "temporary folder of 1 full": Change(
            prefix=FULL_TMPDIR, env={"TMPDIR": str(folder / "tmp")}
        ),
        "clock of 1 an hour ahead": Change(prefix=("faketime", "-f", "+1h"), env=clock),
        "clock of 1 an hour behind": Change(prefix=("faketime", "-f", "-1h"), env=clock),
        "clock of 0 an hour ahead": Change(prefix=("faketime", "-f", "+1h"), env=clock),
        "process 0 never comes": Change(prefix=("true",)),
        "process 1 never comes": Change(prefix=("true",)),
        "other recipe on 1": Change(words=("--set", "optimizer.lr=0.02")),
        "other version on 1": Change(env={"PYTHONPATH": f"{other_version}:{ROOT}"}),
        "other start checkpoint on 1": Change(words=("--set", "model.path=undisturbed")),
        "other data on 1": Change(words=("--set", "data.path=other.txt")),
    }
    for name, change in changes.items():
        if not change.prefix or shutil.which(change.prefix[0]):
            victim = 0 if " 0 " in name else 1
            yield Fault(name, "", victim, start=partial(start_changed, {victim: change}))
        else:
            print(f"{name}: {change.prefix[0]} is not installed", flush=True)


def full_disk_cases() -> Iterator[Fault]:
    """Yield the cases that need `small_disk` for the folder of the run."""
    yield Fault("disk full before a save", "step +13/", 1, action=fill_disk)
    yield Fault("disk full during a save", "step +13/", 1, action=fill_disk_during_save)


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount an empty file system of DISK_NBYTES on a folder, and yield whether this is permitted."""
    folder.mkdir()
    options = ("-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "tmpfs")
    is_mounted = subprocess.run(["mount", *options, str(folder)], check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True)


def fill_disk(run: Path) -> None:
    """Write a file until the disk of a run's folder is full."""
    with (run / FILLER).open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def fill_disk_during_save(run: Path) -> None:
    """Fill the disk as soon as a step is staged, after its space was checked."""
    wait_until(lambda: list(run.glob("*.partial/state/*")))
    fill_disk(run)
