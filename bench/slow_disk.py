"""Create a disk of a limited rate: an ext4 loop device, throttled by the blkio controller of cgroup v1.

The limit applies to direct I/O and writeback, since both are in the root group. Root is required.
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

from prepcli.core.formatting import format_bytes

MB = 10**6
CONTROLLER = Path("/sys/fs/cgroup/blkio")
LIMITS = "blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device"
TOOLS = "losetup", "mkfs.ext4", "mount", "umount"
PROBE_NBYTES = 1000 * MB  # bytes written and read to measure the rates


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Rates of a disk in MB/s, each measured with one file."""

    copied: float  # cp && sync of a file in memory
    written: float  # direct I/O
    read: float  # direct I/O

    def __str__(self) -> str:
        return f"cp && sync {self.copied:.0f} MB/s, direct writes {self.written:.0f}, direct reads {self.read:.0f}"


@contextlib.contextmanager
def slow_disk(work: Path, mb_s: int, nbytes: int) -> Iterator[Path]:
    """Create a disk of `nbytes` with a limit of `mb_s` MB/s for reads and writes, and remove it at the end.

    Args:
        work: Folder for its image, on a faster disk.
        mb_s: Limit of its reads, and of its writes, in MB/s.
        nbytes: Size of its file system. The image is sparse.

    Yields:
        Mount point of the disk.

    Raises:
        SystemExit: The system lacks a tool, the controller, a permission or disk space.
    """
    _check_requirements(work, nbytes)
    image, folder = work / "bench-slow.img", work / "bench-slow"
    with contextlib.ExitStack() as undo:
        undo.callback(image.unlink, missing_ok=True)
        with image.open("wb") as file:
            file.truncate(nbytes)
        device = _run("losetup", "--find", "--show", "--direct-io=on", image)
        undo.callback(_run, "losetup", "--detach", device)
        _run(
            "mkfs.ext4",
            "-q",
            "-F",
            "-m",
            "0",
            "-E",
            "lazy_itable_init=0,lazy_journal_init=0",
            device,
        )
        folder.mkdir(exist_ok=True)
        undo.callback(folder.rmdir)
        _run("mount", device, folder)
        undo.callback(_run, "umount", folder)
        number = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
        undo.callback(_throttle, number, 0)
        _throttle(number, mb_s * MB)
        yield folder


def measure_rates(folder: Path) -> DiskRates:
    """Measure the rates of a disk with a file in the given folder and one in memory."""
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
        return DiskRates(*[PROBE_NBYTES / MB / _time_shell_command(step) for step in steps])
    finally:
        memory.unlink(missing_ok=True)
        (folder / "bench-rate").unlink(missing_ok=True)


def _time_shell_command(step: str) -> float:
    os.sync()
    began = time.perf_counter()
    _run("bash", "-c", step)
    return time.perf_counter() - began


def _check_requirements(work: Path, nbytes: int) -> None:
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        raise SystemExit(f"--slow-disk needs {', '.join(missing)}")
    if not all(os.access(CONTROLLER / limit, os.W_OK) for limit in LIMITS):
        raise SystemExit(
            f"--slow-disk needs root and the blkio controller of cgroup v1 at {CONTROLLER}"
        )
    if (free := shutil.disk_usage(work).free) < nbytes:
        raise SystemExit(
            f"{work} has {format_bytes(free)} free, the slow disk takes {format_bytes(nbytes)}"
        )


def _throttle(number: str, nbytes_s: int) -> None:
    """Limit a device to `nbytes_s` bytes/s (0: no limit), in the root group and the group of this process."""
    own_group = next(
        (line.split(":", 2)[2] for line in _cgroup_lines() if line.split(":", 2)[1] == "blkio"), "/"
    )
    for group in {CONTROLLER, CONTROLLER / own_group.lstrip("/")}:
        for limit in LIMITS:
            (group / limit).write_text(f"{number} {nbytes_s}")


def _cgroup_lines() -> list[str]:
    return Path("/proc/self/cgroup").read_text().splitlines()


def _run(*words: str | Path) -> str:
    process = subprocess.run(words, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(
            f"{shlex.join(map(str, words))} ended with {process.returncode}\n{process.stderr}"
        )
    return process.stdout.strip()
