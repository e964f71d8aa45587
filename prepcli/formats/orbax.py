"""An Orbax item - the folder that holds one tree of arrays - as the reader and the writer both see it.

Arrays are zarr v2 in one OCDBT database: for each a document `NAME/.zarray` and a value `NAME/i.j.k` for each chunk of
its grid, where NAME is the path in the tree joined by dots. Chunks are raw: C order, little endian, the last one of
an axis padded to full size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prepcli.formats.untrusted import list_folder
from prepcli.planning.tensors import itemsize

METADATA_FILE = "_METADATA"
STRINGS_FILE = "_strings.json"
ZARR_TYPESTRS = {
    "bool": "|b1", "int8": "|i1", "uint8": "|u1",
    "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4", "int64": "<i8", "uint64": "<u8",
    "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "bfloat16": "bfloat16", "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    "float8_e8m0fnu": "float8_e8m0fnu", "float8_e4m3fnuz": "float8_e4m3fnuz", "float8_e5m2fnuz": "float8_e5m2fnuz",
}  # fmt: skip
"""dtypes as TensorStore's zarr v2 spells them; those without a NumPy code are its own extension."""

TreePath = tuple[str | int, ...]  # a str is a key of a dict, an int an index of a list or tuple


@dataclass(frozen=True, slots=True)
class ArrayMeta:
    """An array of the tree. `scalar`: a number of Python, stored as a 0-d array."""

    path: TreePath
    shape: tuple[int, ...]
    dtype: str  # a key of TYPESTR
    chunk_shape: tuple[int, ...]  # one extent >= 1 per axis; need not divide the shape
    is_scalar: bool = False

    @property
    def name(self) -> str:
        """What the array is called on disk."""
        return dotted_name(self.path)

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each axis; () for a 0-d array, which has one chunk."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape))

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of any chunk; the last ones are padded."""
        return math.prod(self.chunk_shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class OrbaxNonArray:
    """A leaf of the tree that is no array: a string, or an empty container or None by the name of its type."""

    path: TreePath
    value_type: str  # as Orbax says it: "string", "Dict", "List", "Tuple", "NamedTuple", "None"
    text: str = ""  # of a string


def dotted_name(path: TreePath) -> str:
    """A path as one name; ambiguous where a part contains a dot."""
    return ".".join(map(str, path))


def chunk_key(index: tuple[int, ...]) -> str:
    """What follows `NAME/` in the key of a chunk."""
    return ".".join(map(str, index)) or "0"


def unravel_chunk_index(grid: tuple[int, ...], chunk_number: int) -> tuple[int, ...]:
    """The index of chunk number `at` of a grid in C order."""
    index = []
    for n in reversed(grid):
        chunk_number, i = divmod(chunk_number, n)
        index.append(i)
    return tuple(reversed(index))


def find_name_clash(paths: Iterable[TreePath]) -> tuple[str, str] | None:
    """The names of two leaves that one tree, or one index, cannot both hold."""
    names = sorted((dotted_name(path), tuple(map(str, path))) for path in paths)
    for (a, _), (b, _) in itertools.pairwise(names):
        if a == b:
            return a, b
    for a, b in itertools.pairwise(sorted(path for _, path in names)):
        if b[: len(a)] == a:
            return dotted_name(a), dotted_name(b)
    return None


def find_item(path: Path) -> Path | None:
    """The item that `path` means: itself, the item of a step folder, or that of the last step of a run folder."""
    if (item := _item_of_step(path)) is not None:
        return item
    steps = [child for child in _folders(path) if child.name.isascii() and child.name.isdigit()]
    items = (_item_of_step(step) for step in sorted(steps, key=lambda step: int(step.name), reverse=True))
    return next((item for item in items if item is not None), None)


def _item_of_step(step: Path) -> Path | None:
    """Orbax's own names for the tree first; a training job may have named its only item otherwise, and parameters may
    have an optimizer's state beside them, as redco has it."""
    named = [step, step / "default", step / "state", step / "items"]
    if found := next((item for item in named if (item / METADATA_FILE).is_file()), None):
        return found
    items = [child for child in _folders(step) if (child / METADATA_FILE).is_file() and not child.name.isdigit()]
    return items[0] if len(items) == 1 else next((item for item in items if item.name == "params"), None)


def _folders(path: Path) -> list[Path]:
    return [path / name for name in list_folder(path) if (path / name).is_dir()] if path.is_dir() else []
