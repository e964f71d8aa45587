"""Define the files of a Levanter checkpoint: one OCDBT database of zarr 3 arrays, and `metadata.json` with the step.

The keys of an array begin with its path in the tree, e.g. `model/lm_head/weight/zarr.json`. Facts of marin-levanter
0.2.20: checkpoint.py and tensorstore_serialization.py.
"""

from __future__ import annotations

from pathlib import Path

from prepcli.formats.ocdbt import OCDBT_MANIFEST

LEVANTER_METADATA_FILE = "metadata.json"


def is_levanter_checkpoint(folder: Path) -> bool:
    """Return whether a folder is one checkpoint of Levanter, e.g. `RUN/step-1000`."""
    return (folder / LEVANTER_METADATA_FILE).is_file() and (folder / OCDBT_MANIFEST).is_file()
