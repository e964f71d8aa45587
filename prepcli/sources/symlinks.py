"""Rules for symbolic links in a checkpoint folder.

Files that prep parses (weights, their index, `config.json`, `params.json`) may link to any path: unparsable files are
errors. Files to copy or upload unparsed (tokenizer, licence, ...) may link only within the folder named by the user,
or, in the Hugging Face cache, into `blobs` of the same model.
"""

from __future__ import annotations

import os
from pathlib import Path

from prepcli.core.errors import PrepError
from prepcli.stores.paths import AnyPath, StorePath

# Layout of the Hugging Face cache: `models--OWNER--NAME/snapshots/COMMIT` and `models--OWNER--NAME/blobs`
SNAPSHOTS = "snapshots"
BLOBS = "blobs"
MODEL_FOLDER_PREFIX = "models--"


def resolve_small_file(path: AnyPath, root: AnyPath) -> Path:
    """Return the real path of a file to copy or upload unparsed, or of its local copy if it is in a store.

    Args:
        path: The file, as it was listed.
        root: The checkpoint named by the user, possibly a link. A file outside of it (next to the user's config) is
            checked against its own folder.

    Raises:
        PrepError: The file is a link that leaves the folder.
    """
    if isinstance(path, StorePath):
        return path.local().resolve()
    if root.is_dir():
        folder = root
    else:
        folder = root.parent
    if folder not in path.parents:
        folder = path.parent
    # Compare real paths: the checkpoint may itself be named through a link, and a text such as
    # `folder/../x` begins with the folder without lying in it.
    real_path = path.resolve()
    real_folder = folder.resolve()
    if real_folder in real_path.parents:
        return real_path
    # All files of a snapshot in the Hugging Face cache are links to `../../blobs/HASH`. Other models'
    # blobs stay out of reach.
    model = real_folder.parent.parent
    is_in_cache = model.name.startswith(MODEL_FOLDER_PREFIX)
    is_snapshot = is_in_cache and real_folder.parent.name == SNAPSHOTS
    if is_snapshot and model / BLOBS in real_path.parents:
        return real_path
    why = f"it leaves {folder}, and its bytes would be copied into the output"
    what = f"{path} is a link to {_link_target(path, real_path)}"
    raise PrepError(what, why, "replace the link by the file, or remove it")


def _link_target(path: Path, real_path: Path) -> str:
    if path.is_symlink():
        return os.readlink(path)
    # A parent folder of the path is the link.
    return str(real_path)
