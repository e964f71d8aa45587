"""Memory and its limits, from files as the system writes them."""

from __future__ import annotations

from pathlib import Path

from prepcli.engine.budget import cgroup_memory_limit, system_memory

GIB = 1 << 30


def write(root: Path, **texts: str) -> Path:
    """Write files under `root`. In names `__` means a slash and `_DOT_` a dot."""
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_system_memory_is_in_bytes(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemTotal:       24686380 kB\nMemFree: 1 kB\nMemAvailable:   23000000 kB\n",
    )
    assert system_memory(tmp_path) == {"total": 24686380 * 1024, "available": 23000000 * 1024}


def test_memory_is_unknown_without_files(tmp_path: Path) -> None:
    assert system_memory(tmp_path) == {}
    assert cgroup_memory_limit(tmp_path) is None


def test_cgroup_limit_is_the_smallest_of_all_groups(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="0::/job/step\n",
        sys__fs__cgroup__job__step__memory_DOT_max="max\n",
        sys__fs__cgroup__job__memory_DOT_max=f"{8 * GIB}\n",
        sys__fs__cgroup__memory_DOT_max=f"{16 * GIB}\n",
    )
    assert cgroup_memory_limit(tmp_path) == 8 * GIB


def test_cgroup_limit_is_read_from_a_container_root(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__memory_DOT_max=f"{4 * GIB}\n")
    assert cgroup_memory_limit(tmp_path) == 4 * GIB


def test_cgroup_limit_is_read_from_version_1_groups(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="3:cpu,cpuacct:/job\n5:memory:/job\n1:name=systemd:/job\n",
        sys__fs__cgroup__memory__job__memory_DOT_limit_in_bytes=f"{2 * GIB}\n",
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="9223372036854771712\n",
    )
    assert cgroup_memory_limit(tmp_path) == 2 * GIB
    write(tmp_path, sys__fs__cgroup__memory__job__memory_DOT_limit_in_bytes="9223372036854771712\n")
    assert cgroup_memory_limit(tmp_path) is None
