"""The folder of programs that XLA has compiled, so that a later process loads them instead of compiling them again.

JAX reads its settings from environment variables when it is imported. Here they are set before that, and a value of the
user always counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import time
import warnings
from collections.abc import MutableMapping
from importlib.metadata import version
from pathlib import Path

FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MIN_SECONDS_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
# Of a program that is kept. JAX's own minimum of 1 s leaves out the programs that check a kernel before each run.
MIN_SECONDS = "0.1"
# Folders of each user are inside this one of `~/.cache`.
DEFAULT_NAME = "prep/compiled"
# Older entries are deleted, which bounds the folder and ends entries that a killed process left incomplete.
MAX_AGE_DAYS = 30


def use_compilation_cache(environ: MutableMapping[str, str]) -> None:
    """Let JAX keep compiled programs in the user's cache folder, unless the user has set a folder.

    JAX's own variable `JAX_ENABLE_COMPILATION_CACHE=false` switches all folders off. If JAX is imported already, or the
    folder cannot be written, nothing changes.

    Args:
        environ: Environment variables of this process.
    """
    if "jax" in sys.modules or FOLDER_VARIABLE in environ:
        return
    try:
        folder = compilation_cache_folder(DEFAULT_NAME)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        # There is no home folder, or it is read-only.
        return
    # A loaded program runs with the rights of this user, so that nobody else may write it.
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    delete_old_entries(folder, MAX_AGE_DAYS)
    environ[FOLDER_VARIABLE] = str(folder)
    environ.setdefault(MIN_SECONDS_VARIABLE, MIN_SECONDS)
    # JAX compiles a program again if it cannot read or write an entry, e.g. on a full disk.
    warnings.filterwarnings("ignore", message="Error .* persistent compilation cache entry")


def is_default_folder(environ: MutableMapping[str, str]) -> bool:
    """Return whether `use_compilation_cache` has chosen the folder of this process."""
    try:
        return environ.get(FOLDER_VARIABLE) == str(compilation_cache_folder(DEFAULT_NAME))
    except RuntimeError:
        return False


def compilation_cache_folder(name: str) -> Path:
    """Return a folder of compiled programs for this processor and these versions of Python and jaxlib.

    JAX's cache key does not contain the instruction set of the processor, nor the number of its cores that this process
    may use. XLA's kernels of a CPU divide sums by that number.

    Args:
        name: Path inside the user's cache folder.

    Raises:
        RuntimeError: The user has no home folder.
    """
    processor: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        processor = {line for line in file if line.startswith(("model name", "flags", "Features"))}
    facts = [*sorted(processor), str(len(os.sched_getaffinity(0)))]
    digest = hashlib.sha256("".join(facts).encode()).hexdigest()[:12]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return caches / name / f"{python}-jaxlib{version('jaxlib')}-{digest}"


def delete_old_entries(folder: Path, max_age_days: float) -> None:
    """Delete the entries of a folder of compiled programs that were written more than `max_age_days` ago."""
    oldest = time.time() - max_age_days * 24 * 3600
    for path in folder.glob("*"):
        # Another process may delete the same entry. Folders are those of XLA on accelerators.
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
