"""Operations on files and folders of outputs, runs and uploads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder with its contents, if it exists. The target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_same_file(file_stat: os.stat_result, path: Path) -> bool:
    """Return whether a path leads to the file or folder of the stat result."""
    try:
        return os.path.samestat(file_stat, path.stat())
    except FileNotFoundError:
        return False
