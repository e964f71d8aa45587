"""Changed manifests of outputs, with their own digest recomputed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prepcli.formats.manifest import MANIFEST_FILE, encode_manifest


@contextmanager
def changed_manifest(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the manifest of an output, and write it with the changes of the block."""
    path = folder / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    yield manifest
    path.write_bytes(encode_manifest(manifest))


def remove_file_records(folder: Path) -> None:
    """Change an output to the format of earlier versions, without digests of small files and of the manifest."""
    with changed_manifest(folder) as manifest:
        del manifest["files"], manifest["digest"]
