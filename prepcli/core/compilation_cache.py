"""The folder of programs that XLA has compiled, so that a later process loads them instead of compiling them again.

JAX reads its settings from environment variables when it is imported. Here they are set before that, and a value of the
user always counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
import time
import warnings
from collections.abc import MutableMapping
from importlib.metadata import version
from pathlib import Path

FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MIN_SECONDS_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
XLA_VARIABLE = "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"
# Minimum compilation time of a kept program, in seconds. JAX's own minimum of 1 s leaves out the programs that check a
# kernel before each run.
MIN_SECONDS = "0.1"
# Path inside the user's cache folder
DEFAULT_NAME = "prep/compiled"
MAX_AGE_DAYS = 30
# On a disk with less space no program is kept or loaded: JAX would leave a part of a new one, and every later start
# would warn. JAX has no setting to load programs only.
MIN_FREE_NBYTES = 1 << 30


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
        if not _is_private(folder):
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        delete_old_entries(folder.parent, MAX_AGE_DAYS)
        if shutil.disk_usage(folder).free < MIN_FREE_NBYTES:
            return
    except (OSError, RuntimeError, ImportError):
        # There is no home folder, it is read-only, or jaxlib is not installed.
        return
    environ[FOLDER_VARIABLE] = str(folder)
    environ.setdefault(MIN_SECONDS_VARIABLE, MIN_SECONDS)
    # XLA's own files of trials of kernels have no age, and a full disk would be an error of the compilation.
    environ.setdefault(XLA_VARIABLE, "none")
    # The disk may become full meanwhile. The next start compiles the program again.
    warnings.filterwarnings("ignore", message="Error writing persistent compilation cache entry")


def is_default_folder(environ: MutableMapping[str, str]) -> bool:
    """Return whether `use_compilation_cache` has chosen the folder of this process."""
    folder = environ.get(FOLDER_VARIABLE, "")
    try:
        return Path(folder).parent == _cache_folder() / DEFAULT_NAME
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
        ImportError: jaxlib is not installed.
    """
    processor: set[str] = set()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        processor = {line for line in file if line.startswith(("model name", "flags", "Features"))}
    facts = [*sorted(processor), str(len(os.sched_getaffinity(0)))]
    digest = hashlib.sha256("".join(facts).encode()).hexdigest()[:12]
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return _cache_folder() / name / f"{python}-jaxlib{version('jaxlib')}-{digest}"


def delete_old_entries(root: Path, max_age_days: float) -> None:
    """Delete the entries in all folders of compiled programs that were written more than `max_age_days` ago."""
    oldest = time.time() - max_age_days * 24 * 3600
    for path in root.glob("*/*"):
        # Another process may delete the same entry. XLA makes folders on accelerators.
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def _cache_folder() -> Path:
    """Return the user's cache folder. Raise RuntimeError if the user has no home folder."""
    # The XDG specification ignores relative paths.
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return folder if folder.is_absolute() else Path.home() / ".cache"


def _is_private(folder: Path) -> bool:
    """Return whether a folder, or the nearest existing one above it, belongs to this user alone. Raise OSError.

    A loaded program runs with the rights of this user, so that nobody else may write it. A root user with the home
    folder of another user must not create folders there.
    """
    if not _cache_folder().parent.is_dir():
        return False
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    status = existing.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
