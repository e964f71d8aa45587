"""This machine: its memory, the lower limits of containers and jobs, and the installed packages."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath

from prepcli.engine.budget import anonymous_nbytes

PACKAGES = (
    "prepcli", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "safetensors", "numpy", "ml_dtypes",
    "huggingface_hub", "tokenizers", "typer", "rich", "transformers", "torch",
)  # fmt: skip
UNLIMITED = 1 << 60  # cgroup v1 reports "no limit" as a number of this size


def system_memory(root: Path = Path("/")) -> dict[str, int]:
    """Return `total` and `available` bytes of the machine, as far as the system reports them."""
    names = {"MemTotal": "total", "MemAvailable": "available"}
    memory = {}
    for line in _read_or_empty(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in names:
            memory[names[name]] = int(value.split()[0]) << 10
    return memory


def cgroup_memory_limit(root: Path = Path("/")) -> int | None:
    """Return the smallest memory limit in bytes of the control groups of this process, or None without a limit."""
    # A line is HIERARCHY:CONTROLLERS:PATH. `0::/user.slice` is the only hierarchy of cgroup v2, and
    # `7:memory:/docker/1f` the memory controller of v1, which has its own mount.
    limits = []
    for line in _read_or_empty(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _memory_limits(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _memory_limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min((limit for limit in limits if limit < UNLIMITED), default=None)


def free_memory() -> int | None:
    """Return the bytes free for this process, or None if the system does not report them."""
    # MemAvailable is what is left. A limit is the size of the whole group, so that the memory of this
    # process is subtracted.
    bounds: list[int] = []
    available = system_memory().get("available")
    if available is not None:
        bounds.append(available)
    limit = cgroup_memory_limit()
    if limit is not None:
        bounds.append(max(0, limit - anonymous_nbytes()))
    return min(bounds, default=None)


def package_versions() -> dict[str, str | None]:
    """Return the version of each package of prep, or None if it is not installed."""
    return {name: _package_version(name) for name in PACKAGES}


# An installed version does not change while a process runs, and parsing its metadata takes a millisecond.
@cache
def _package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_limits(mount: Path, path: str, name: str) -> list[int]:
    """Return the limits of a group and all groups above it. In a container its own group is the mount itself."""
    # The limit of a parent also applies to its children, e.g. the limit of a job to the steps of the job.
    # cgroup v2 writes the text `max` if there is no limit.
    group = PurePosixPath(path).relative_to("/")
    texts = [_read_or_empty(mount / parent / name).strip() for parent in (group, *group.parents)]
    return [int(text) for text in texts if text.isdigit()]


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
