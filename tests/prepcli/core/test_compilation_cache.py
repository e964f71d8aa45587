"""The folder of compiled programs: which one a command uses, and that later commands compile nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from prepcli.core.compilation_cache import (
    FOLDER_VARIABLE,
    MIN_SECONDS_VARIABLE,
    compilation_cache_folder,
)
from tests.helpers.fork_server import PREP
from tests.helpers.train_runs import read_step_files
from tests.helpers.waiting import MAX_S

CHOSEN_FOLDER = f"""
import os
from prepcli.core.compilation_cache import use_compilation_cache
use_compilation_cache(os.environ)
print(os.environ.get({FOLDER_VARIABLE!r}))
"""

ONE_STEP = ("--set", "train.steps=1")
# Tiny programs are kept, too.
COMPILE_TIMES = {MIN_SECONDS_VARIABLE: "0"}


def run_with_caches(caches: Path, *words: str, **variables: str) -> str:
    """Run Python in a new process with this folder of caches, and return its standard output."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(caches)}
    environ.pop(FOLDER_VARIABLE, None)
    result = subprocess.run(
        [sys.executable, "-c", *words],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=MAX_S,
    )
    assert result.returncode == 0, result.stderr
    assert "cache" not in result.stderr
    return result.stdout


def find_entries(caches: Path) -> dict[str, int]:
    """Return the time of modification of each compiled program, by its name."""
    return {path.name: path.stat().st_mtime_ns for path in caches.glob("prep/compiled/*/*-cache")}


@pytest.mark.slow
def test_second_command_loads_the_compiled_programs(work_dir: Path):
    caches = work_dir / "caches"
    words = ("train", "recipe.toml", "--quiet", *ONE_STEP, "--out")
    run_with_caches(caches, PREP, *words, "first", **COMPILE_TIMES)
    entries = find_entries(caches)
    assert entries
    run_with_caches(caches, PREP, *words, "second", **COMPILE_TIMES)
    assert find_entries(caches) == entries
    assert read_step_files("first") == read_step_files("second")


@pytest.mark.slow
def test_job_of_two_processes_keeps_no_programs(work_dir: Path):
    caches = work_dir / "caches"
    words = ("launch", "local", "--processes", "2", "--devices", "4", "--")
    run_with_caches(
        caches,
        PREP,
        *words,
        "train",
        "recipe.toml",
        "--out",
        "run",
        *ONE_STEP,
        **COMPILE_TIMES,
    )
    assert Path("run").exists()
    assert not find_entries(caches)


def test_folder_belongs_to_the_user_alone(tmp_path: Path):
    folder = Path(run_with_caches(tmp_path, CHOSEN_FOLDER).strip())
    assert folder.is_relative_to(tmp_path / "prep" / "compiled")
    assert folder.stat().st_mode & 0o777 == 0o700
    # Another user of its group could replace a program.
    folder.chmod(0o770)
    assert run_with_caches(tmp_path, CHOSEN_FOLDER) == "None\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes owners")
def test_home_of_another_user_stays_as_it_is(tmp_path: Path):
    os.chown(tmp_path, 12345, 12345)
    home = {"HOME": str(tmp_path)}
    assert run_with_caches(Path(), CHOSEN_FOLDER, **home) == "None\n"
    assert not any(tmp_path.iterdir())
    os.chown(tmp_path, os.geteuid(), os.getegid())
    # The XDG specification ignores a relative path.
    folder = Path(run_with_caches(Path("relative"), CHOSEN_FOLDER, **home).strip())
    assert folder.is_relative_to(tmp_path / ".cache")


def test_folder_of_the_user_and_an_unwritable_one(tmp_path: Path):
    assert run_with_caches(tmp_path, CHOSEN_FOLDER, **{FOLDER_VARIABLE: "mine"}) == "mine\n"
    assert not any(tmp_path.iterdir())
    (tmp_path / "file").write_bytes(b"")
    assert run_with_caches(tmp_path / "file", CHOSEN_FOLDER) == "None\n"


def test_old_programs_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compilation_cache_folder("prep/compiled")
    other = folder.with_name("python3.11-jaxlib0.1")
    for path, days in ((folder / "old-cache", 31), (folder / "new-cache", 29), (other / "a", 31)):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(b"")
        seconds = path.stat().st_mtime - days * 24 * 3600
        os.utime(path, (seconds, seconds))
    run_with_caches(tmp_path, CHOSEN_FOLDER)
    assert [path.name for path in folder.iterdir()] == ["new-cache"]
    assert not [*other.iterdir()]


def test_full_disk_keeps_no_programs(tmp_path: Path):
    """JAX would leave a part of a program, and every later start would warn about it."""
    code = (
        "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(9, 9, 99 << 20)"
    )
    assert run_with_caches(tmp_path, f"{code}\n{CHOSEN_FOLDER}") == "None\n"


def test_jax_imported_before_keeps_its_settings(tmp_path: Path):
    assert run_with_caches(tmp_path, f"import jax\n{CHOSEN_FOLDER}") == "None\n"
