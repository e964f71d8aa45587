"""Read the headers of PyTorch checkpoints, and find the files of a model in a folder.

A file is a pickle that refers to storages. The pickle is interpreted without running any code (`torch_pickle`). The
engine reads the storages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Literal

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.lists import join_names
from prepcli.engine.digest import digest
from prepcli.formats import torch_zip
from prepcli.formats.shard_index import (
    UnindexedTensor,
    check_numbered_files,
    damage_hint,
    download_again_hint,
    find_unindexed,
    list_indexed_files,
    read_weight_map,
)
from prepcli.formats.torch_legacy import read_legacy_file
from prepcli.formats.torch_pickle import (
    MAX_NBYTES,
    BoundedReader,
    UnexpectedNameError,
    interpret_pickle,
)
from prepcli.formats.torch_state import (
    ALLOWED_NAMES,
    UNSUPPORTED_NAMES,
    StateDictError,
    StorageView,
    TorchState,
    read_torch_state,
    read_torch_tensor,
)
from prepcli.formats.untrusted import list_folder, quote_name, stat_file, unreadable_error
from prepcli.planning.tensors import array_bits
from prepcli.stores.reading import open_regular_file

INDEX_FILE = "pytorch_model.bin.index.json"
INDEXED_SUFFIX = "bin"
META_PARAMS_FILE = "params.json"  # config of Meta's LLaMA
SINGLE_FILE = "pytorch_model.bin"
ADAPTER_FILE = "adapter_model.bin"
SUFFIXES = (".bin", ".pth", ".pt")
# Lower case: files of a training run next to a model.
TRAINING_FILE_PATTERNS = (
    "training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*", "random_states*", "*optim_states.pt",
)  # fmt: skip
MAX_NON_TENSORS = 12
# A remark names at most this many keys beside a state dict.
MAX_KEYS = 4

# The whole model, in Mistral's repositories. Its tensors have Meta's names.
MISTRAL_FILE = "consolidated.safetensors"
CONSOLIDATED_FILE = re.compile(r"consolidated\.(\d{2})\.pth")

_HF_FILE = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin")
_NUMBERED_FILE = re.compile(r".+-\d{5}-of-\d{5}\.[^.]+")
_PICKLE_MAGICS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_OTHER_FORMATS = (
    ((b"<!", b"<h", b"<H", b"<?"), "a web page", "an error page was saved under this name", ""),
    ((b"lmgg", b"tjgg", b"fmgg", b"algg", b"GGUF"), "a GGML file", "its weights are quantised or reordered",
     "use the model that it was converted from"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor in file number `file` at `offset`, in C order or with `byte_strides` along each dim."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    byte_strides: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor's elements in bytes."""
        return array_bits(self.dtype, self.shape) // 8

    @property
    def byte_range(self) -> tuple[int, int]:
        """Return start and stop offset of the tensor's bytes in its file."""
        if self.byte_strides is None:
            return self.offset, self.offset + self.nbytes
        # E.g. the transpose [3, 2] of a float32 [2, 3] has the strides (4, 12): its last element is at
        # 2 * 4 + 1 * 12 = 20, and its bytes end at 24.
        last_offset = 0
        for extent, step in zip(self.shape, self.byte_strides):
            last_offset += (extent - 1) * step
        return self.offset, self.offset + last_offset + array_bits(self.dtype, ()) // 8


@dataclass(frozen=True, slots=True)
class TorchHeader:
    """Contents of a file without its payload: tensors by offset, and descriptions of all other values."""

    file_name: str
    size: int
    mtime_ns: int
    digest: str  # XXH3-128 of the metadata
    tensors: tuple[TorchTensor, ...]
    non_tensors: tuple[str, ...]
    # Key of the state dict, and the other keys beside it. Empty if the file has nothing else.
    key: str = ""
    other_keys: tuple[str, ...] = ()

    @property
    def remark(self) -> str:
        """Which part of the file is read. Empty for a file with only a state dict."""
        if not self.key:
            return ""
        others = join_names([quote_name(key) for key in self.other_keys], max_names=MAX_KEYS)
        remark = f"the tensors under {quote_name(self.key)} of {self.file_name} are read"
        return f"{remark}, not {others}" if others else remark


@dataclass(frozen=True, slots=True)
class TorchFolder:
    """PyTorch files of one model. Tensors in (file, offset) order, `file` is an index into `headers`.

    `unindexed` has the records of further tensors in the files, which the index does not name.
    """

    path: Path
    headers: tuple[TorchHeader, ...]
    unindexed: tuple[UnindexedTensor, ...] = ()

    @property
    def tensors(self) -> tuple[TorchTensor, ...]:
        """Return the tensors of all files."""
        return tuple(itertools.chain.from_iterable(header.tensors for header in self.headers))

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the paths of all files."""
        return tuple(self.path / checkpoint.file_name for checkpoint in self.headers)


def read_torch_header(path: Path, file_number: int) -> TorchHeader:
    """Read the header of a PyTorch file.

    Args:
        path: Path of the file.
        file_number: Number of the file in its model, stored in the tensors.

    Raises:
        PrepError: The file is unreadable or invalid. No other exception is raised, whatever the file holds.
    """
    file_stat = stat_file(path)
    try:
        with open_regular_file(path) as file:
            first_bytes = file.read(512)
            if first_bytes.startswith(torch_zip.ZIP_MAGIC):
                metadata_digest, state, offsets = _read_zip(file)
            elif first_bytes.startswith(_PICKLE_MAGICS):
                metadata_digest, state, offsets = _read_legacy(file)
            else:
                raise _wrong_format_error(path, first_bytes)
        tensors = sorted(
            (_to_torch_tensor(view, offsets, file_number) for view in state.views),
            key=lambda t: (t.offset, t.name),
        )
    except OSError as error:
        raise unreadable_error(path, error) from error
    except UnexpectedNameError as error:
        raise unexpected_name_error(path, error.name) from error
    except StateDictError as error:
        what = f"{path.name} is not a usable PyTorch file"
        raise PrepError(what, str(error), _SAVE_AGAIN_HINT) from error
    except ValueError as error:
        raise DamagedError(
            f"{path.name} is not a usable PyTorch file", str(error), damage_hint(path, error)
        ) from error
    return TorchHeader(
        path.name,
        file_stat.st_size,
        file_stat.st_mtime_ns,
        metadata_digest,
        tuple(tensors),
        _limit_non_tensors(state.non_tensors),
        state.key,
        state.other_keys,
    )


def select_model_files(names: Iterable[str]) -> list[str]:
    """Return the file names that hold a model's tensors in PyTorch's format, by their names alone."""
    names = list(names)
    for preferred in (INDEX_FILE, SINGLE_FILE):
        if preferred in names:
            return [preferred]
    return sorted(filter(_is_candidate, names))


def _is_candidate(name: str) -> bool:
    """Return whether a file may hold the model of a folder that has no file of a standard name."""
    if name.startswith(".") or not name.lower().endswith(SUFFIXES):
        return False
    # Parts of Meta's models are split inside tensors, so that no one of them is a model.
    return not CONSOLIDATED_FILE.fullmatch(name) and not is_training_file(name)


def is_training_file(name: str) -> bool:
    """Return whether a file belongs to a training run next to a model, e.g. optimizer.pt."""
    return any(fnmatchcase(name.lower(), pattern) for pattern in TRAINING_FILE_PATTERNS)


def detect_torch_kind(names: Iterable[str]) -> Literal["torch", "meta"] | None:
    """Return the kind of a folder by its file names: saved by transformers, or by Meta. None if neither."""
    names = list(names)
    if INDEX_FILE in names or any(_HF_FILE.fullmatch(name) for name in names):
        return "torch"
    if any(CONSOLIDATED_FILE.fullmatch(name) for name in names):
        return "meta"
    return None


def select_torch_files(names: Iterable[str]) -> list[str]:
    """Return the file names of a PyTorch model in a repository without safetensors, with its index or params.json.

    With an index, these are all files that it may name.

    The list is empty if the names do not identify a model.
    """
    names = list(names)
    kind = detect_torch_kind(names)
    if kind == "meta":
        return [n for n in names if n == META_PARAMS_FILE or CONSOLIDATED_FILE.fullmatch(n)]
    if INDEX_FILE in names:
        indexed = [name for name in names if name.endswith(f".{INDEXED_SUFFIX}")]
        return [INDEX_FILE, *indexed]
    if kind == "torch":
        return select_model_files(names)
    return []


def read_torch_folder(folder: Path) -> TorchFolder:
    """Read the headers of a model's files: the ones in the index, else pytorch_model.bin, else the only file.

    Headers have only the tensors that the index assigns to their file.

    Raises:
        PrepError: The folder is unreadable, or a file or tensor of the index is missing.
    """
    candidates = select_model_files(list_folder(folder))
    weight_map: dict[str, str] | None = None
    names = candidates
    if candidates == [INDEX_FILE]:
        weight_map = read_weight_map(folder / INDEX_FILE, INDEXED_SUFFIX)
        names = list_indexed_files(folder, weight_map)
    else:
        _check_model(folder, names)
    headers: list[TorchHeader] = []
    pairs: list[tuple[str, str]] = []
    for file_number, name in enumerate(names):
        header = read_torch_header(folder / name, file_number)
        headers.append(header)
        for tensor in header.tensors:
            pairs.append((tensor.name, name))
    ignored = find_unindexed(folder, pairs, weight_map)
    indexed: list[TorchHeader] = []
    unindexed: list[UnindexedTensor] = []
    for header in headers:
        kept: list[TorchTensor] = []
        for tensor in header.tensors:
            if (tensor.name, header.file_name) in ignored:
                unindexed.append(UnindexedTensor(tensor.name, header.file_name, tensor.nbytes))
            else:
                kept.append(tensor)
        indexed.append(replace(header, tensors=tuple(kept)))
    return TorchFolder(folder, tuple(indexed), tuple(unindexed))


# One file


_StorageOffsets = Mapping[str, int]  # offset of each storage in the file
_ReadResult = tuple[str, TorchState, _StorageOffsets]  # metadata digest, state, offsets


def read_archived_tensor(file: BinaryIO) -> tuple[StorageView, int]:
    """Read the archive of one tensor, as `torch.save(tensor)` writes it.

    Returns:
        The tensor as a view of its storage, and the offset of its first element in the file.

    Raises:
        ValueError: The archive is invalid.
    """
    archive = open_torch_archive(file)
    pickled = torch_zip.read_record(file, archive, "data.pkl", MAX_NBYTES)
    view = read_torch_tensor(interpret_pickle(BoundedReader.from_bytes(pickled), ALLOWED_NAMES))
    offsets = storage_offsets(file, archive, {view.storage.key: view.storage.nbytes})
    return view, offsets[view.storage.key] + view.offset


def open_torch_archive(file: BinaryIO) -> torch_zip.ZipArchive:
    """Read the directory of an archive of tensors."""
    # Older versions of torch.save do not record the byte order. Their files count as little endian.
    archive = torch_zip.read_archive(file)
    if (
        "byteorder" in archive.records
        and torch_zip.read_record(file, archive, "byteorder", 16) != b"little"
    ):
        raise ValueError("it was written on a big-endian machine")
    if any(name.startswith("code/") for name in archive.records):
        raise ValueError("it is a TorchScript archive; save the model's state_dict() instead")
    return archive


def _read_zip(file: BinaryIO) -> _ReadResult:
    archive = open_torch_archive(file)
    pickled = torch_zip.read_record(file, archive, "data.pkl", MAX_NBYTES)
    state = read_torch_state(interpret_pickle(BoundedReader.from_bytes(pickled), ALLOWED_NAMES))
    required_nbytes: dict[str, int] = {}
    for view in state.views:
        required_nbytes[view.storage.key] = max(
            view.storage.nbytes, required_nbytes.get(view.storage.key, 0)
        )
    return (
        digest(pickled + archive.directory),
        state,
        storage_offsets(file, archive, required_nbytes),
    )


def storage_offsets(
    file: BinaryIO, archive: torch_zip.ZipArchive, required_nbytes: Mapping[str, int]
) -> _StorageOffsets:
    """Return the offset of each storage. Raise ValueError if one is too small or overlaps another."""
    # Overlapping storages would let a small file claim more elements than it has bytes.
    offsets: dict[str, int] = {}
    spans = []
    for key, nbytes in required_nbytes.items():
        name = f"data/{key}"
        offsets[key], stored_nbytes = torch_zip.locate_record(file, archive, name)
        if nbytes > stored_nbytes:
            raise ValueError(
                f"storage {quote_name(key)} has {stored_nbytes:,} bytes, its tensors need {nbytes:,}"
            )
        spans.append((archive.records[name].header_offset, offsets[key] + stored_nbytes))
    spans.sort()
    for (_, end), (start, _) in itertools.pairwise(spans):
        if start < end:
            raise ValueError(f"two of its storages overlap at byte {start:,}")
    return offsets


def _read_legacy(file: BinaryIO) -> _ReadResult:
    legacy = read_legacy_file(file)
    state = read_torch_state(legacy.unpickled)
    file.seek(0)
    return digest(file.read(legacy.data_start)), state, legacy.storage_offsets


def _to_torch_tensor(view: StorageView, offsets: _StorageOffsets, file_number: int) -> TorchTensor:
    return TorchTensor(
        view.name,
        view.dtype,
        view.shape,
        file_number,
        offsets[view.storage.key] + view.offset,
        view.byte_strides,
    )


def _limit_non_tensors(non_tensors: Sequence[str]) -> tuple[str, ...]:
    if len(non_tensors) > MAX_NON_TENSORS:
        more = (f"and {len(non_tensors) - MAX_NON_TENSORS:,} more",)
    else:
        more = ()
    return (*non_tensors[:MAX_NON_TENSORS], *more)


def unexpected_name_error(path: Path, name: str) -> PrepError:
    """Return the error for a pickle with a name outside of the allowed ones."""
    if name in UNSUPPORTED_NAMES:
        return PrepError(
            f"{path.name} cannot be read", f"{UNSUPPORTED_NAMES[name]} (`{name}`)", _SAVE_AGAIN_HINT
        )
    why = "prep runs no code of a file: it reads only tensors and plain settings"
    return PrepError(
        f"{path.name} refers to {quote_name(name)}", why, f"if you trust it, {_SAVE_AGAIN_HINT}"
    )


_SAVE_AGAIN_HINT = "load it with PyTorch and torch.save() only the model's state_dict()"


def _wrong_format_error(path: Path, first_bytes: bytes) -> PrepError:
    """Return the error for a file in neither of the two formats."""
    for magic, format_name, explanation, hint in _OTHER_FORMATS:
        if first_bytes.lstrip().startswith(magic):
            return PrepError(
                f"{path.name} is {format_name}, not a PyTorch file",
                explanation,
                hint or download_again_hint(path),
            )
    # The magic of a POSIX tar header is at byte 257.
    if first_bytes[257:262] == b"ustar":
        why = "PyTorch wrote this format before 0.1.10"
        return PrepError(f"{path.name} is a tar archive", why, _SAVE_AGAIN_HINT)
    # A safetensors file has 8 bytes of length before its JSON header.
    if first_bytes[8:9] == b"{":
        hint = f"if it is a safetensors file, rename it to {path.with_suffix('.safetensors').name}"
        return PrepError(
            f"{path.name} is not a PyTorch file", "it starts like a safetensors file", hint
        )
    if first_bytes:
        why = f"it starts with {first_bytes[:8].hex(' ')}"
        return DamagedError(f"{path.name} is not a PyTorch file", why, GET_AGAIN_HINT)
    return DamagedError(
        f"{path.name} is not a PyTorch file", "it is empty", download_again_hint(path)
    )


# A folder


def _check_model(folder: Path, names: Sequence[str]) -> None:
    """Raise PrepError if files without an index are not one model, or a numbered file is missing."""
    if ADAPTER_FILE in names:
        why = f"{ADAPTER_FILE} has only the weights that are added to a base model"
        raise PrepError(
            f"{folder} is an adapter, not a model",
            why,
            "merge it first: PEFT's `merge_and_unload()`",
        )
    check_numbered_files(folder, names)
    if len(names) != 1 and not all(_NUMBERED_FILE.fullmatch(name) for name in names):
        why = f"it has {len(names)} PyTorch files: {', '.join(names[:4])}"
        raise PrepError(
            f"{folder} does not say which file the model is",
            why,
            f"rename the file of the model to {SINGLE_FILE}",
        )
