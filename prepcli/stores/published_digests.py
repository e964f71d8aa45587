"""Check downloaded files against the digests published by the hub.

huggingface_hub compares only sizes. A proxy, a mirror or a bad disk may change bytes without changing their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.core.errors import RERUN_HINT, DamagedError
from prepcli.stores.paths import AnyPath
from prepcli.stores.reading import io_error, open_regular_file

if TYPE_CHECKING:
    from hashlib import _Hash

SHA256 = "sha256:"
# SHA-1 of a small file with git's header, e.g. `blob 12\0` and 12 bytes.
GIT_BLOB = "git:"
PIECE_NBYTES = 4 << 20


def check_download(path: Path, digest: str, display_name: str) -> None:
    """Compare a downloaded file with its published digest, and delete it if they differ.

    Args:
        path: The file in the hub's cache, usually a link to its content.
        digest: `sha256:HEX` or `git:HEX`. Other texts are not digests of content: the file is not read.
        display_name: Name of the repository, for the message.

    Raises:
        DamagedError: The content has another digest.
    """
    for prefix, start in _HASHES.items():
        if not digest.startswith(prefix):
            continue
        computed = _hash_file(path, start(path.stat().st_size))
        if computed != digest.removeprefix(prefix):
            # The next run would find the file in the cache, and would not download or check it.
            _delete_from_cache(path)
            why = f"the hub lists {digest}, the downloaded bytes have {prefix}{computed}"
            what = f"{path.name} of {display_name} is damaged"
            raise DamagedError(what, why, f"{RERUN_HINT}: the file is downloaded again")


def sha256_of_file(path: AnyPath) -> str:
    """Return the SHA-256 of a file in hexadecimal digits. Raise PrepError if it cannot be read."""
    try:
        return _hash_file(path, hashlib.sha256())
    except OSError as error:
        raise io_error(path, error) from error


def _start_git_blob(nbytes: int) -> _Hash:
    """Return the hash of a blob's header in git's object format."""
    return hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)


_HASHES: dict[str, Callable[[int], _Hash]] = {
    SHA256: lambda _: hashlib.sha256(),
    GIT_BLOB: _start_git_blob,
}


def _hash_file(path: AnyPath, content_hash: _Hash) -> str:
    """Hash a file in bounded memory, and return the hexadecimal digest."""
    with open_regular_file(path, buffering=0) as stream:
        while piece := stream.read(PIECE_NBYTES):
            content_hash.update(piece)
    return content_hash.hexdigest()


def _delete_from_cache(path: Path) -> None:
    """Delete a file of a snapshot and the blob to which it links."""
    blob = path.resolve()
    path.unlink(missing_ok=True)
    # On file systems without links the snapshot holds the content itself.
    with suppress(FileNotFoundError):
        blob.unlink()
