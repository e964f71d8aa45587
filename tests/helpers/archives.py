"""Archives in tests."""

from __future__ import annotations

import tarfile
from pathlib import Path


def extract_all(archive: tarfile.TarFile, folder: Path) -> None:
    """Extract an archive of the project. Python 3.11.0 to 3.11.3 has no filters, which later versions ask for."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)
