"""Memory of this machine, and the limits that containers and jobs set below it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from prepcli.engine.budget import anonymous_nbytes

UNLIMITED = 1 << 60  # cgroup v1 reports "no limit" as a number of this size


def system_memory(root: Path = Path("/")) -> dict[str, int]:
    """Return `total` and `available` bytes of the machine, as far as the system reports them."""
    names = {"MemTotal": "total", "MemAvailable": "available"}
    memory = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in names:
            memory[names[name]] = int(value.split()[0]) << 10
    return memory


def cgroup_memory_limit(root: Path = Path("/")) -> int | None:
    """Return the smallest memory limit in bytes of the control groups of this process; None without a limit."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _limits(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min((limit for limit in limits if limit < UNLIMITED), default=None)


def free_memory() -> int | None:
    """Return the bytes that this process can still use; None if the system does not report them."""
    available, limit = system_memory().get("available"), cgroup_memory_limit()
    bounds = [available, None if limit is None else limit - anonymous_nbytes()]
    return min((max(0, bound) for bound in bounds if bound is not None), default=None)


def _limits(mount: Path, path: str, name: str) -> list[int]:
    """Return the limits of a group and all groups above it. In a container its own group is the mount itself."""
    group = PurePosixPath(path).relative_to("/")
    texts = [_read(mount / parent / name).strip() for parent in (group, *group.parents)]
    return [int(text) for text in texts if text.isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
