"""Define the layout of an Orbax item, the folder that holds one tree of arrays, for the reader and the writer.

Arrays are stored as zarr v2: a document `NAME/.zarray` and one value `NAME/i.j.k` per chunk, where NAME is the path in
the tree joined by dots. These are keys of one OCDBT database, or without OCDBT paths of files. The writer stores raw
chunks in C order, little endian. The last chunk of an axis is padded to full size.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prepcli.formats.levanter import LEVANTER_METADATA_FILE, is_levanter_checkpoint
from prepcli.formats.ocdbt import OCDBT_MANIFEST
from prepcli.formats.untrusted import list_folder
from prepcli.planning.libraries import LIBRARIES
from prepcli.planning.tensors import itemsize

METADATA_FILE = "_METADATA"
# Files that mark an item, a conversion and a run. The modules that define the last two names import
# this one.
CHECKPOINT_FILES = {METADATA_FILE, "prep-manifest.json", "recipe.toml"}
# Metadata file of an item -> all files that identify the item. Other formats may have a `metadata.json`.
ITEM_MARKERS = {
    METADATA_FILE: (METADATA_FILE,),
    LEVANTER_METADATA_FILE: (LEVANTER_METADATA_FILE, OCDBT_MANIFEST),
}
READABLE_SUFFIXES = {".safetensors", ".bin", ".msgpack", ".pt", ".pth"}
STRINGS_FILE = "_strings.json"
# Places of items in a step of another trainer, for the checkpoints that prep exports.
ITEM_PLACES = [library.item for library in LIBRARIES if library.item and library.item.item]
# Names of the item with the parameters.
MODEL_ITEMS = {place.item for place in ITEM_PLACES}
# Item with the optimizer state, by the name of the item with the parameters.
STATE_ITEMS = {place.item: place.state_item for place in ITEM_PLACES if place.state_item}
# Names of the item with the parameters next to an item with other state. redco has `params`.
PARAMS_ITEMS = ("params", *STATE_ITEMS)
# Metadata document of an array of zarr v2.
ZARRAY = ".zarray"
ZARR_TYPESTRS = {
    "bool": "|b1", "int8": "|i1", "uint8": "|u1",
    "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4", "int64": "<i8", "uint64": "<u8",
    "int4": "int4",
    "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    "float8_e8m0fnu": "float8_e8m0fnu", "float8_e4m3fnuz": "float8_e4m3fnuz", "float8_e5m2fnuz": "float8_e5m2fnuz",
}  # fmt: skip
"""dtype -> zarr v2 type string. Names without a NumPy type code are an extension of TensorStore."""

# Name of a step's folder. Levanter writes `step-1000`.
_STEP_NAME = re.compile(r"(?:step-)?([0-9]+)")

# A str is the key of a dict, an int the index of a list or tuple.
TreePath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ArrayMeta:
    """An array of the tree. `is_scalar` marks a Python number, stored as a 0-d array."""

    path: TreePath
    shape: tuple[int, ...]
    dtype: str  # a key of TYPESTR
    # One extent >= 1 per axis. It need not divide the shape: the last chunk is then partly unused.
    chunk_shape: tuple[int, ...]
    is_scalar: bool = False

    @property
    def name(self) -> str:
        """Return the name of the array on disk."""
        return dotted_name(self.path)

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the number of chunks along each axis, () for a 0-d array (one chunk)."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape))

    @property
    def chunk_nbytes(self) -> int:
        """Return the size of any chunk in bytes, padding included."""
        return math.prod(self.chunk_shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class OrbaxNonArray:
    """A leaf of the tree other than an array: a string, an empty container or None."""

    path: TreePath
    # Orbax's name: "string", "Dict", "List", "Tuple", "NamedTuple", "None".
    value_type: str
    text: str = ""  # content of a string


def dotted_name(path: TreePath) -> str:
    """Return a path joined by dots. Ambiguous if a part contains a dot."""
    return ".".join(map(str, path))


def chunk_key(index: tuple[int, ...]) -> str:
    """Return the key of a chunk without its prefix `NAME/`."""
    return ".".join(map(str, index)) or "0"


def zarr3_chunk_key(index: tuple[int, ...]) -> str:
    """Return the key of a chunk of zarr 3 without its prefix `NAME/`.

    >>> zarr3_chunk_key((0, 3)), zarr3_chunk_key(())
    ('c/0/3', 'c')
    """
    return "/".join(("c", *map(str, index)))


def chunk_file_path(name: str, index: tuple[int, ...], *, uses_zarr3: bool) -> str:
    """Return the path of a chunk in an item without OCDBT, e.g. `params.embed/0.3` or `params.embed/c/0/3`."""
    if uses_zarr3:
        return f"{name}/{zarr3_chunk_key(index)}"
    return f"{name}/{chunk_key(index)}"


def unravel_chunk_index(grid: tuple[int, ...], chunk_number: int) -> tuple[int, ...]:
    """Return the index of a chunk from its number in C order, like `np.unravel_index`."""
    index = []
    for extent in reversed(grid):
        # E.g. chunk 5 of a [2, 3] grid: divmod(5, 3) = 1, 2 -> (1, 2).
        chunk_number, i = divmod(chunk_number, extent)
        index.append(i)
    return tuple(reversed(index))


def find_name_clash(paths: Iterable[TreePath]) -> tuple[str, str] | None:
    """Return the names of two leaves with conflicting paths. None if there are none."""
    names = sorted((dotted_name(path), tuple(map(str, path))) for path in paths)
    # Two kinds of clash: ("a.b",) and ("a", "b") have the same name on disk, and a leaf "a"
    # cannot be a folder with "b" in it. After sorting, each clash is between neighbours.
    for (a, _), (b, _) in itertools.pairwise(names):
        if a == b:
            return a, b
    for a, b in itertools.pairwise(sorted(path for _, path in names)):
        if b[: len(a)] == a:
            return dotted_name(a), dotted_name(b)
    return None


def item_metadata_file(folder: Path) -> str | None:
    """Return the name of the file with the metadata of an item, or None if the folder is no item.

    A checkpoint of Levanter is an item too: a tree of zarr arrays, without Orbax's description of the tree.
    """
    if (folder / METADATA_FILE).is_file():
        return METADATA_FILE
    if is_levanter_checkpoint(folder):
        return LEVANTER_METADATA_FILE
    return None


def find_item(path: Path) -> Path | None:
    """Return the item that `path` is or holds: the item of a step folder, or of a run folder's last step."""
    if (item := _find_item_of_step(path)) is not None:
        return item
    steps: list[tuple[int, Path]] = []
    for child in _list_subfolders(path):
        if match := _STEP_NAME.fullmatch(child.name):
            steps.append((int(match[1]), child))
    # A killed writer may have left the last step without an item.
    for _, step in sorted(steps, reverse=True):
        item = _find_item_of_step(step)
        if item is not None:
            return item
    return None


def _find_item_of_step(step: Path) -> Path | None:
    """Return the item of a step folder.

    The names that Orbax uses come first, then the only item, then one of `PARAMS_ITEMS` next to an optimizer state. A
    folder with an item and checkpoints of other formats holds several models, and no item is chosen.
    """
    # `default` is Orbax's name for the only item of a CheckpointManager, `state` the name of prep, `items`
    # the name of MaxText.
    for candidate in (step, step / "default", step / "state", step / "items"):
        if item_metadata_file(candidate) is not None:
            return candidate
    items: list[Path] = []
    for child in _list_subfolders(step):
        if (child / METADATA_FILE).is_file() and not child.name.isdigit():
            items.append(child)
    if len(items) == 1:
        if len(list_checkpoint_folders(step)) <= 1:
            return items[0]
        return None
    for item in items:
        if item.name in PARAMS_ITEMS:
            return item
    return None


def list_checkpoint_folders(path: Path) -> list[Path]:
    """Return the subfolders with weights of any format or with files of prep. Steps are omitted."""
    children = [child for child in _list_subfolders(path) if not child.name.isdigit()]
    return [child for child in children if not child.name.startswith(".") and _is_checkpoint(child)]


def _is_checkpoint(folder: Path) -> bool:
    if folder.name.endswith(".partial"):
        return False
    try:
        names = os.listdir(folder)
    except OSError:  # a folder of someone else
        return False
    return any(name in CHECKPOINT_FILES or Path(name).suffix in READABLE_SUFFIXES for name in names)


def _list_subfolders(path: Path) -> list[Path]:
    if path.is_dir():
        return [path / name for name in list_folder(path) if (path / name).is_dir()]
    return []
