"""Links in a checkpoint's folder: which of them prep follows.

Files that prep parses (weights, their index, `config.json`, `params.json`) may be links to anywhere: only a model's
data can be taken from them. Files that are copied or uploaded unread (tokenizer, licence, ...) may be links only within
the folder that the user named, or, in the cache of the hub, into `blobs` of the same model.
"""

from __future__ import annotations

import os
from pathlib import Path

from prepcli.errors import PrepError

SNAPSHOTS, BLOBS, MODEL_FOLDER_PREFIX = (
    "snapshots",
    "blobs",
    "models--",
)  # `models--OWNER--NAME/snapshots/COMMIT` and `.../blobs`


def resolve_small_file(path: Path, root: Path) -> Path:
    """The real path of a file that is copied or uploaded unread.

    Args:
        path: The file, as it was listed.
        root: The checkpoint that the user named, itself a link or not. A file that lies elsewhere, beside a config
            that was given, belongs to its own folder.

    Raises:
        PrepError: The file is reached by a link that leaves that folder.
    """
    folder = root if root.is_dir() else root.parent
    folder = folder if folder in path.parents else path.parent
    real, home = path.resolve(), folder.resolve()
    if home in real.parents or any(blobs in real.parents for blobs in _blobs(home)):
        return real
    why = f"it leaves {folder}, and such files are copied as they are"
    raise PrepError(f"{path} is a link to {_target(path, real)}", why, "replace the link by the file, or remove it")


def _target(path: Path, real: Path) -> str:
    return os.readlink(path) if path.is_symlink() else str(real)  # else a folder on the way is a link


def _blobs(home: Path) -> tuple[Path, ...]:
    """Where the files of a snapshot in the hub's cache lie."""
    model = home.parent.parent
    is_snapshot = home.parent.name == SNAPSHOTS and model.name.startswith(MODEL_FOLDER_PREFIX)
    return (model / BLOBS,) if is_snapshot else ()
