"""From a folder to a Source, by what the folder holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from prepcli.detect import Kind, detect
from prepcli.openers.orbax_item import open_item
from prepcli.openers.safetensors_folder import open_folder
from prepcli.sources import Source

OPENERS: Mapping[Kind, Callable[[Path, str], Source]] = {"safetensors": open_folder, "orbax": open_item}


def open_source(path: Path, name: str) -> Source:
    """Read headers and settings of a checkpoint, no weights; messages call it `name`. PrepError names what is broken
    or not understood."""
    return OPENERS[detect(path, name)](path, name)
