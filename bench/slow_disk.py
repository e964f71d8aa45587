"""A disk held to a rate: a loop device with an ext4 file system, throttled by the blkio controller of cgroup v1.

The throttle holds direct I/O and writeback alike, since both are in the root group there. It takes root.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prepcli.console.formatting import format_bytes

MB = 10**6
CONTROLLER = Path("/sys/fs/cgroup/blkio")
LIMITS = "blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device"
TOOLS = "losetup", "mkfs.ext4", "mount", "umount"
PROBE_NBYTES = 1000 * MB  # written and read to show the rates


@dataclass(frozen=True, slots=True)
class DiskRates:
    """MB/s of a disk, each over one file."""

    copied: float  # cp && sync, of a file that is in memory
    written: float  # direct
    read: float  # direct

    def __str__(self) -> str:
        return f"cp && sync {self.copied:.0f} MB/s, direct writes {self.written:.0f}, direct reads {self.read:.0f}"


@contextlib.contextmanager
def slow_disk(work: Path, mb_s: int, nbytes: int) -> Iterator[Path]:
    """Make a disk of `nbytes` that moves `mb_s` MB/s each way, and remove it at the end.

    Args:
        work: The folder that holds its image, on a disk that is faster.
        mb_s: MB/s of its reads, and of its writes.
        nbytes: Size of its file system; the image takes the disk space of what is written.

    Yields:
        The folder at which it is mounted.

    Raises:
        SystemExit: The system lacks a tool, the controller, a right or the disk space.
    """
    _check(work, nbytes)
    image, folder = work / "bench-slow.img", work / "bench-slow"
    with contextlib.ExitStack() as undo:
        undo.callback(image.unlink, missing_ok=True)
        with image.open("wb") as file:
            file.truncate(nbytes)
        device = _run("losetup", "--find", "--show", "--direct-io=on", image)
        undo.callback(_run, "losetup", "--detach", device)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        folder.mkdir(exist_ok=True)
        undo.callback(folder.rmdir)
        _run("mount", device, folder)
        undo.callback(_run, "umount", folder)
        number = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
        undo.callback(_throttle, number, 0)
        _throttle(number, mb_s * MB)
        yield folder


def measure_rates(folder: Path) -> DiskRates:
    """Measure what a disk does, with a file of the given folder and one in memory."""
    memory = Path("/dev/shm/bench-slow")
    block = os.urandom(MB)
    try:
        with memory.open("wb") as file:
            for _ in range(PROBE_NBYTES // MB):
                file.write(block)
        target = shlex.quote(str(folder / "bench-rate"))
        steps = (
            f"cp {memory} {target} && sync",
            f"dd if={memory} of={target} bs=16M oflag=direct conv=fsync status=none",
            f"dd if={target} of=/dev/null bs=16M iflag=direct status=none",
        )
        return DiskRates(*[PROBE_NBYTES / MB / _seconds(step) for step in steps])
    finally:
        memory.unlink(missing_ok=True)
        (folder / "bench-rate").unlink(missing_ok=True)


def _seconds(step: str) -> float:
    os.sync()
    began = time.perf_counter()
    _run("bash", "-c", step)
    return time.perf_counter() - began


def _check(work: Path, nbytes: int) -> None:
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise SystemExit(f"--slow-disk needs {', '.join(missing)}")
    if not all(os.access(CONTROLLER / limit, os.W_OK) for limit in LIMITS):
        raise SystemExit(f"--slow-disk needs root and the blkio controller of cgroup v1 at {CONTROLLER}")
    if (free := shutil.disk_usage(work).free) < nbytes:
        raise SystemExit(f"{work} has {format_bytes(free)} free, the slow disk takes {format_bytes(nbytes)}")


def _throttle(number: str, nbytes_s: int) -> None:
    """Set the most bytes a second of a device, 0 for no bound, for the root group and that of this process."""
    own = next((line.split(":", 2)[2] for line in _groups() if line.split(":", 2)[1] == "blkio"), "/")
    for group in {CONTROLLER, CONTROLLER / own.lstrip("/")}:
        for limit in LIMITS:
            (group / limit).write_text(f"{number} {nbytes_s}")


def _groups() -> list[str]:
    return Path("/proc/self/cgroup").read_text().splitlines()


def _run(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(map(str, words))} ended with {done.returncode}\n{done.stderr}")
    return done.stdout.strip()
