"""Read an object of `torch.save`, such as the state dict of an optimizer, without torch and without its code.

Tensors become `ArchivedTensor`, with the place of their bytes in the file. No payload is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from prepcli.core.errors import DamagedError, PrepError
from prepcli.engine.digest import digest
from prepcli.formats import torch_zip
from prepcli.formats.shard_index import damage_hint, download_again_hint
from prepcli.formats.torch_files import open_torch_archive, storage_offsets, unexpected_name_error
from prepcli.formats.torch_pickle import (
    MAX_NBYTES,
    BoundedReader,
    PickledMapping,
    UnexpectedNameError,
    UnpickledObject,
    interpret_pickle,
)
from prepcli.formats.torch_state import ALLOWED_NAMES, collect_storages, is_tensor, parse_view
from prepcli.formats.untrusted import stat_file, unreadable_error
from prepcli.planning.tensors import array_bits

MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor in a file.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        offset: Offset of its first element in the file.
        byte_strides: Strides in bytes. None for C order.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    byte_strides: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return array_bits(self.dtype, self.shape) // 8


@dataclass(frozen=True, slots=True)
class ArchivedObject:
    """An object in an archive.

    Attributes:
        root: The object, of dicts, lists, tuples, plain values and `ArchivedTensor`. Other objects are None.
        digest: XXH3-128 of the metadata.
    """

    root: object
    digest: str


@dataclass(frozen=True, slots=True)
class TorchObject:
    """An object in a file, with the size of the file and the time of its last change. See `ArchivedObject`."""

    root: object
    digest: str
    size: int
    mtime_ns: int


def read_torch_object(path: Path, file: BinaryIO) -> TorchObject:
    """Read the object of a file.

    Args:
        path: The file, or its placeholder with its size.
        file: The opened file.

    Raises:
        PrepError: The file is unreadable, damaged, or of a format before PyTorch 1.6.
    """
    stat = stat_file(path)
    if stat.st_size == 0:
        raise DamagedError(f"{path.name} is damaged", "it is empty", download_again_hint(path))
    try:
        if not file.read(4).startswith(torch_zip.ZIP_MAGIC):
            why = "it is no zip archive, as PyTorch writes since version 1.6"
            raise PrepError(
                f"{path.name} is not supported",
                why,
                "load it with PyTorch, and `torch.save` it again",
            )
        archived = read_archived_object(file)
    except OSError as error:
        raise unreadable_error(path, error) from error
    except UnexpectedNameError as error:
        raise unexpected_name_error(path, error.name) from error
    except ValueError as error:
        what = f"{path.name} is not a usable PyTorch file"
        raise DamagedError(what, str(error), damage_hint(path, error)) from error
    return TorchObject(archived.root, archived.digest, stat.st_size, stat.st_mtime_ns)


def read_archived_object(file: BinaryIO) -> ArchivedObject:
    """Read the object of an archive.

    Raises:
        UnexpectedNameError: It refers to a class or function outside of the allowed ones.
        ValueError: The archive is invalid.
    """
    archive = open_torch_archive(file)
    pickled = torch_zip.read_record(file, archive, "data.pkl", MAX_NBYTES)
    unpickled = interpret_pickle(BoundedReader.from_bytes(pickled), ALLOWED_NAMES)
    offsets = storage_offsets(file, archive, _storage_sizes(unpickled))
    root = _convert(unpickled.root, offsets, depth=0)
    return ArchivedObject(root, digest(pickled + archive.directory))


def _storage_sizes(unpickled: UnpickledObject) -> dict[str, int]:
    """Return the bytes of each storage of the object, by key."""
    return {key: storage.nbytes for key, storage in collect_storages(unpickled).items()}


def _convert(value: object, offsets: Mapping[str, int], *, depth: int) -> object:
    """Return a value with tensors and containers of Python."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it nests more than {MAX_DEPTH} containers")
    if is_tensor(value):
        view = parse_view(value)
        offset = offsets[view.storage.key] + view.offset
        return ArchivedTensor(view.dtype, view.shape, offset, view.byte_strides)
    if isinstance(value, PickledMapping):
        items: dict[object, object] = {}
        for key, item in value.items:
            if not isinstance(key, str | int):
                raise ValueError("a key in it is neither a text nor a number")
            items[key] = _convert(item, offsets, depth=depth + 1)
        return items
    if isinstance(value, list | tuple):
        converted = [_convert(item, offsets, depth=depth + 1) for item in value]
        return converted if isinstance(value, list) else tuple(converted)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return None
