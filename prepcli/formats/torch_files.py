"""PyTorch checkpoints, read: what a file says of its tensors, and which files of a folder are a model's.

A file is a pickle that refers to storages. The pickle is interpreted without running anything (`torch_pickle`), and
the storages stay where they are: payload bytes are the engine's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Literal

from prepcli.engine.digest import digest
from prepcli.errors import PrepError
from prepcli.formats import torch_zip
from prepcli.formats.shard_index import (
    check_index_matches_files,
    check_numbered_files,
    download_again_hint,
    list_indexed_files,
    map_tensors_to_files,
    read_weight_map,
)
from prepcli.formats.torch_legacy import read_legacy_file
from prepcli.formats.torch_pickle import MAX_NBYTES, BoundedReader, UnexpectedNameError, interpret_pickle
from prepcli.formats.torch_state import ALLOWED_NAMES, UNSUPPORTED_NAMES, StorageView, TorchState, read_torch_state
from prepcli.formats.untrusted import list_folder, quote_name, stat_file, unreadable_error
from prepcli.planning.tensors import array_bits

INDEX_FILE = "pytorch_model.bin.index.json"
META_PARAMS_FILE = "params.json"  # of Meta's
SINGLE_FILE = "pytorch_model.bin"
ADAPTER_FILE = "adapter_model.bin"
SUFFIXES = (".bin", ".pth", ".pt")
TRAINING_FILE_PATTERNS = (  # lower case: what a training run keeps beside a model
    "training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*", "random_states*", "*optim_states.pt",
)  # fmt: skip
MAX_NON_TENSORS = 12

CONSOLIDATED_FILE = re.compile(r"consolidated\.(\d{2})\.pth")

_HUGGING_FACE = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin")
_NUMBERED = re.compile(r".+-\d{5}-of-\d{5}\.[^.]+")
_PICKLE = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_FOREIGN = (
    (b"version https://git-lfs", "a Git LFS pointer", "it only names the file that should be here", "`git lfs pull`"),
    ((b"<!", b"<h", b"<H", b"<?"), "a web page", "an error page was saved under this name", ""),
    ((b"lmgg", b"tjgg", b"fmgg", b"algg", b"GGUF"), "a GGML file", "its weights are quantised or reordered",
     "take the model that it was made from"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor of file number `file`: from `offset` on in C order, or with `steps` bytes along each dim."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    byte_strides: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        return array_bits(self.dtype, self.shape) // 8

    @property
    def byte_range(self) -> tuple[int, int]:
        """The bytes of the file between its first and its last, both included."""
        if self.byte_strides is None:
            return self.offset, self.offset + self.nbytes
        reach = sum((extent - 1) * step for extent, step in zip(self.shape, self.byte_strides))
        return self.offset, self.offset + reach + array_bits(self.dtype, ()) // 8


@dataclass(frozen=True, slots=True)
class TorchHeader:
    """A file without its payload: tensors in the order of their bytes, and what it holds besides, in a few words."""

    file_name: str
    size: int
    mtime_ns: int
    digest: str  # XXH3-128 of what says where tensors are
    tensors: tuple[TorchTensor, ...]
    non_tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TorchFolder:
    """The PyTorch files of one model; tensors in (file, offset) order, `file` being an index into `checkpoints`."""

    path: Path
    headers: tuple[TorchHeader, ...]

    @property
    def tensors(self) -> tuple[TorchTensor, ...]:
        return tuple(tensor for checkpoint in self.headers for tensor in checkpoint.tensors)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self.path / checkpoint.file_name for checkpoint in self.headers)


def read_torch_header(path: Path, file_number: int) -> TorchHeader:
    """The tensors of a file, marked as being in file `number`. Raises PrepError, and nothing else, for any bytes."""
    found = stat_file(path)
    try:
        with path.open("rb") as file:
            start = file.read(512)
            if start.startswith(torch_zip.ZIP_MAGIC):
                told, state, places = _read_zip(file)
            elif start.startswith(_PICKLE):
                told, state, places = _read_legacy(file)
            else:
                raise _foreign(path, start)
        tensors = sorted((_placed(view, places, file_number) for view in state.views), key=lambda t: (t.offset, t.name))
    except OSError as error:
        raise unreadable_error(path, error) from error
    except UnexpectedNameError as error:
        raise _unexpected(path, error.name) from error
    except ValueError as error:
        raise PrepError(f"{path.name} is not a usable PyTorch file", str(error), download_again_hint(path)) from error
    return TorchHeader(path.name, found.st_size, found.st_mtime_ns, told, tuple(tensors), _some(state.non_tensors))


def select_model_files(names: Iterable[str]) -> list[str]:
    """Of the names in a folder those that hold the model's tensors in PyTorch's format, without a look into them."""
    names = list(names)
    if INDEX_FILE in names or SINGLE_FILE in names:
        return [name for name in names if name == (INDEX_FILE if INDEX_FILE in names else SINGLE_FILE)]
    found = [name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")]
    found = [name for name in found if not CONSOLIDATED_FILE.fullmatch(name)]
    return sorted(
        name for name in found if not any(fnmatchcase(name.lower(), pattern) for pattern in TRAINING_FILE_PATTERNS)
    )


def detect_torch_kind(names: Iterable[str]) -> Literal["torch", "meta"] | None:
    """What the names in a folder say by themselves: a model as transformers saved it, or as Meta did."""
    names = list(names)
    if INDEX_FILE in names or any(_HUGGING_FACE.fullmatch(name) for name in names):
        return "torch"
    return "meta" if any(CONSOLIDATED_FILE.fullmatch(name) for name in names) else None


def select_torch_files(names: Iterable[str]) -> list[str]:
    """Of the names in a repository without safetensors those that a model needs, its index and Meta's settings among
    them; none where nothing says that there is a model."""
    names = list(names)
    kind = detect_torch_kind(names)
    if kind == "meta":
        return [name for name in names if name == META_PARAMS_FILE or CONSOLIDATED_FILE.fullmatch(name)]
    if INDEX_FILE in names:
        return [name for name in names if name == INDEX_FILE or _HUGGING_FACE.fullmatch(name)]
    return select_model_files(names) if kind == "torch" else []


def read_torch_folder(folder: Path) -> TorchFolder:
    """The tensors of a model's files: those that the index names, else pytorch_model.bin, else the one that there is.

    Raises PrepError for a folder that cannot be read, lacks a file or contradicts itself.
    """
    found = select_model_files(list_folder(folder))
    weight_map = read_weight_map(folder / INDEX_FILE, "bin") if found == [INDEX_FILE] else None
    names = list_indexed_files(folder, weight_map) if weight_map is not None else found
    if weight_map is None:
        _check_model(folder, names)
    checkpoints = tuple(read_torch_header(folder / name, number) for number, name in enumerate(names))
    told = TorchFolder(folder, checkpoints)
    holders = map_tensors_to_files(folder, ((tensor.name, names[tensor.file]) for tensor in told.tensors))
    if weight_map is not None:
        check_index_matches_files(folder, weight_map, holders)
    return told


# One file


_Places = Mapping[str, int]  # first byte of each storage in the file
_Found = tuple[str, TorchState, _Places]  # with the digest


def _read_zip(file: BinaryIO) -> _Found:
    archive = torch_zip.read_archive(file)
    if "byteorder" in archive.records and torch_zip.read_record(file, archive, "byteorder", 16) != b"little":
        raise ValueError("it was written on a machine whose numbers begin with their highest byte")
    if any(name.startswith("code/") for name in archive.records):
        raise ValueError("it is a TorchScript archive, a program; save the model's state_dict() instead")
    pickled = torch_zip.read_record(file, archive, "data.pkl", MAX_NBYTES)
    state = read_torch_state(interpret_pickle(BoundedReader.from_bytes(pickled), ALLOWED_NAMES))
    promised: dict[str, int] = {}
    for view in state.views:
        promised[view.storage.key] = max(view.storage.nbytes, promised.get(view.storage.key, 0))
    return digest(pickled + archive.directory), state, _zip_places(file, archive, promised)


def _zip_places(file: BinaryIO, archive: torch_zip.ZipArchive, promised: Mapping[str, int]) -> _Places:
    """The first byte of each storage; none lies in another, and each has at least the bytes that are promised."""
    places: dict[str, int] = {}
    spans = []
    for key, nbytes in promised.items():
        name = f"data/{key}"
        places[key], stored = torch_zip.locate_record(file, archive, name)
        if nbytes > stored:
            raise ValueError(f"storage {quote_name(key)} has {stored:,} bytes, its tensors say {nbytes:,}")
        spans.append((archive.records[name].header_offset, places[key] + stored))
    spans.sort()
    for (_, end), (start, _) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"two storages in it have byte {start:,}")
    return places


def _read_legacy(file: BinaryIO) -> _Found:
    legacy = read_legacy_file(file)
    state = read_torch_state(legacy.unpickled)
    file.seek(0)
    return digest(file.read(legacy.data_start)), state, legacy.storage_offsets


def _placed(view: StorageView, places: _Places, number: int) -> TorchTensor:
    return TorchTensor(
        view.name, view.dtype, view.shape, number, places[view.storage.key] + view.offset, view.byte_strides
    )


def _some(asides: Sequence[str]) -> tuple[str, ...]:
    more = (f"and {len(asides) - MAX_NON_TENSORS:,} more",) if len(asides) > MAX_NON_TENSORS else ()
    return (*asides[:MAX_NON_TENSORS], *more)


def _unexpected(path: Path, name: str) -> PrepError:
    """The error for a file that names what is not let in."""
    if name in UNSUPPORTED_NAMES:
        return PrepError(f"{path.name} cannot be read", f"{UNSUPPORTED_NAMES[name]} (`{name}`)", _SAVE_AGAIN)
    why = "prep runs nothing of a file: tensors, and what plain settings are made of, is all that it lets in"
    return PrepError(f"{path.name} asks for {quote_name(name)}", why, f"if you trust it, {_SAVE_AGAIN}")


_SAVE_AGAIN = "with PyTorch: load it, and torch.save() the model's state_dict() alone"


def _foreign(path: Path, start: bytes) -> PrepError:
    """The error for a file that is neither of the two formats."""
    for magic, kind, meaning, hint in _FOREIGN:
        if start.lstrip().startswith(magic):
            return PrepError(f"{path.name} is {kind}, not a PyTorch file", meaning, hint or download_again_hint(path))
    if start[257:262] == b"ustar":
        why = "PyTorch wrote so before 0.1.10"
        return PrepError(f"{path.name} is a tar archive", why, _SAVE_AGAIN)
    if start[8:9] == b"{":
        hint = f"if it is one, name it {path.with_suffix('.safetensors').name}"
        return PrepError(f"{path.name} is not a PyTorch file", "it begins like a safetensors file", hint)
    why = f"it begins with {start[:8].hex(' ')}" if start else "it is empty"
    return PrepError(f"{path.name} is not a PyTorch file", why, download_again_hint(path))


# A folder


def _check_model(folder: Path, names: Sequence[str]) -> None:
    """All that can be known without an index: it is one model, and no file is missing of those that are numbered."""
    if ADAPTER_FILE in names:
        why = f"{ADAPTER_FILE} holds only what is added to a base model"
        raise PrepError(f"{folder} is an adapter, not a model", why, "merge it first: PEFT's `merge_and_unload()`")
    check_numbered_files(folder, names)
    if len(names) != 1 and not all(_NUMBERED.fullmatch(name) for name in names):
        why = f"{len(names)} PyTorch files could be it: {', '.join(names[:4])}"
        raise PrepError(
            f"{folder} does not say which file the model is", why, f"name the one that counts {SINGLE_FILE}"
        )
