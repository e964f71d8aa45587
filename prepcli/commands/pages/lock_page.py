"""A lock file as a self-contained HTML page: its source, the files with their digests, and the tensors by dtype."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from prepcli.commands.pages.html_page import html_table, write_html_page
from prepcli.formats.lock_file import Lock, encode_lock
from prepcli.planning.tensors import array_bits


def write_lock_page(path: Path, lock: Lock) -> None:
    """Write the page of a lock file.

    Raises:
        PrepError: The file cannot be written, or the path is something other than a page of prep.
    """
    write_html_page(path, f"prep lock {lock.source}", _page_body(lock))


def _page_body(lock: Lock) -> Iterator[str]:
    file_nbytes = sum(file.bytes for file in lock.files.values())
    yield f"<h1>{escape(lock.source)}</h1>"
    facts = [
        ("revision", lock.revision or "-"),
        ("files", f"{len(lock.files):,}"),
        ("bytes", f"{file_nbytes:,}"),
        ("tensors", f"{len(lock.tensors):,}"),
        # The page shows which lock file it describes, as `sha256sum` prints it.
        ("SHA-256 of the lock file", hashlib.sha256(encode_lock(lock)).hexdigest()),
    ]
    yield from html_table(["lock", ""], facts)
    yield "<h2>Files</h2>"
    rows: list[list[str]] = []
    for name, file in lock.files.items():
        rows.append([name, f"{file.bytes:,}", file.digest or "-"])
    yield from html_table(["file", "bytes", "SHA-256"], rows)
    yield "<h2>Tensors by dtype</h2>"
    yield from html_table(["dtype", "tensors", "bytes"], _dtype_rows(lock))
    yield "<p>The lock file has the XXH3-128 of each tensor.</p>"


def _dtype_rows(lock: Lock) -> Iterator[list[str]]:
    """Yield dtype, number of tensors and bytes, the dtype with the most bytes first."""
    sizes: dict[str, list[int]] = {}
    for tensor in lock.tensors.values():
        nbytes = math.ceil(array_bits(tensor.dtype, tensor.shape) / 8)
        sizes.setdefault(tensor.dtype, []).append(nbytes)
    for dtype in sorted(sizes, key=lambda name: -sum(sizes[name])):
        yield [dtype, f"{len(sizes[dtype]):,}", f"{sum(sizes[dtype]):,}"]
