"""Read PyTorch files: the state dict of a model, any other object, and the files of a model in a folder.

No code of a file is run, and no payload is read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import BinaryIO

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.formatting import join_names
from prepcli.core.json_values import quote_name
from prepcli.formats.model_files import (
    FileHeader,
    ModelFiles,
    check_numbered_files,
    damage_hint,
    download_again_hint,
    list_weight_files,
    other_format_error,
    read_model_files,
)
from prepcli.formats.torch_archive import (
    INT64_LIMIT,
    UNSUPPORTED_NAMES,
    ZIP_MAGIC,
    TorchArchive,
    is_tensor,
)
from prepcli.formats.torch_pickle import (
    PersistentRef,
    PickledCall,
    PickledMapping,
    PickledName,
    UnexpectedNameError,
)
from prepcli.planning.arrays import Array
from prepcli.stores.files import list_folder, open_regular_file, stat_file, unreadable_error
from prepcli.stores.paths import AnyPath

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
# Keys of a state dict in a file with several values. They come before other keys.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
MAX_NON_TENSORS = 12
MAX_SHOWN_CHARS = 40
# Nested containers of an object.
MAX_DEPTH = 16
# A remark names at most this many keys beside a state dict.
MAX_KEYS = 4

# The whole model, in Mistral's repositories. Its tensors have Meta's names.
MISTRAL_FILE = "consolidated.safetensors"
CONSOLIDATED_FILE = re.compile(r"consolidated\.(\d{2})\.pth")

_HF_FILE = re.compile(r"pytorch_model(-\d{5}-of-\d{5})?\.bin")
_NUMBERED_FILE = re.compile(r".+-\d{5}-of-\d{5}\.[^.]+")
_PICKLE_MAGICS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_SAVE_AGAIN_HINT = "load it with PyTorch and torch.save() only the model's state_dict()"


@dataclass(frozen=True, slots=True)
class TorchObject:
    """An object in a file, see `to_python`.

    Attributes:
        root: The object.
        digest: XXH3-128 of the metadata.
        size: Size of the file.
        mtime_ns: Time of its last change.
    """

    root: object
    digest: str
    size: int
    mtime_ns: int


def read_torch_header(path: AnyPath, file_number: int) -> FileHeader:
    """Read the header of a PyTorch file.

    Raises:
        PrepError: The file is unreadable or invalid. No other exception is raised, whatever the file holds.
    """
    stat = stat_file(path)
    with _file_errors(path), open_regular_file(path) as file:
        archive = _open_archive(path, file)
        state_key, state_dict = _find_state_dict(archive)
        tensors: dict[str, Array] = {}
        values: list[_Item] = []
        for key, value in state_dict.items:
            if not is_tensor(value):
                values.append((key, value))
                continue
            if not isinstance(key, str):
                what = _describe_value(key)
                raise ValueError(f"the name of a tensor in it is not text, but {what}")
            if key in tensors:
                raise ValueError(f"it has {quote_name(key)} twice")
            try:
                tensors[key] = archive.find_tensor(value, key, file_number)
            except ValueError as error:
                raise ValueError(f"{quote_name(key)}: {error}") from error
    # Of a file with a state dict among other values, e.g. `epoch`.
    beside: list[_Item] = []
    if isinstance(archive.root, PickledMapping) and archive.root is not state_dict:
        beside = [item for item in archive.root.items if item[1] is not state_dict]
    values = [*beside, *values]
    others: list[str] = []
    for key, value in values[:MAX_NON_TENSORS]:
        name = quote_name(key) if isinstance(key, str) else _describe_value(key)
        others.append(f"{path.name}: {name} is {_describe_value(value)}")
    if len(values) > MAX_NON_TENSORS:
        others.append(f"{path.name}: and {len(values) - MAX_NON_TENSORS:,} more")
    remark = ""
    if state_key:
        remark = f"the tensors under {quote_name(state_key)} of {path.name} are read"
    if state_key and beside:
        unread: list[str] = []
        for key, _ in beside:
            name = str(key) if isinstance(key, str | int) else "a key of another type"
            unread.append(quote_name(name))
        remark += f", not {join_names(unread, max_names=MAX_KEYS)}"
    ordered = tuple(sorted(tensors.values(), key=attrgetter("offset", "name")))
    digest = archive.digest
    return FileHeader(path, stat.st_size, stat.st_mtime_ns, digest, ordered, tuple(others), remark)


def read_torch_object(path: AnyPath) -> TorchObject:
    """Read the object of a file, such as the state dict of an optimizer."""
    stat = stat_file(path)
    with _file_errors(path), open_regular_file(path) as file:
        archive = _open_archive(path, file)
        root = to_python(archive)
    return TorchObject(root, archive.digest, stat.st_size, stat.st_mtime_ns)


def to_python(archive: TorchArchive) -> object:
    """Return the object of an archive, of dicts, lists, tuples, plain values and `Array`. Others are None."""
    # A pickle may repeat one large container again and again. It is converted once.
    converted: dict[int, object] = {}

    def convert(value: object, depth: int) -> object:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if depth > MAX_DEPTH:
            raise ValueError(f"it nests more than {MAX_DEPTH} containers")
        if id(value) not in converted:
            converted[id(value)] = convert_container(value, depth + 1)
        return converted[id(value)]

    def convert_container(value: object, depth: int) -> object:
        if is_tensor(value):
            return archive.find_tensor(value)
        if isinstance(value, PickledMapping):
            items: dict[object, object] = {}
            for key, item in value.items:
                if not isinstance(key, str | int):
                    raise ValueError("a key in it is neither a text nor a number")
                items[key] = convert(item, depth)
            return items
        if isinstance(value, list | tuple):
            parts = [convert(item, depth) for item in value]
            return parts if isinstance(value, list) else tuple(parts)
        return None

    return convert(archive.root, 0)


def select_model_files(names: Iterable[str]) -> list[str]:
    """Return the file names that hold a model's tensors in PyTorch's format, by their names alone."""
    names = list(names)
    for preferred in (INDEX_FILE, SINGLE_FILE):
        if preferred in names:
            return [preferred]
    selected: list[str] = []
    for name in names:
        has_suffix = name.lower().endswith(SUFFIXES) and not name.startswith(".")
        # Parts of Meta's models are split inside tensors, so that no one of them is a model.
        is_other = CONSOLIDATED_FILE.fullmatch(name) or is_training_file(name)
        if has_suffix and not is_other:
            selected.append(name)
    return sorted(selected)


def is_training_file(name: str) -> bool:
    """Return whether a file belongs to a training run next to a model, e.g. optimizer.pt."""
    return any(fnmatchcase(name.lower(), pattern) for pattern in TRAINING_FILE_PATTERNS)


def select_transformers_files(names: Iterable[str]) -> list[str]:
    """Return the index and the weight files with the names of transformers."""
    return [name for name in names if name == INDEX_FILE or _HF_FILE.fullmatch(name)]


def select_meta_files(names: Iterable[str]) -> list[str]:
    """Return the files of a model in Meta's layout."""
    return [name for name in names if CONSOLIDATED_FILE.fullmatch(name)]


def select_torch_downloads(names: Sequence[str]) -> list[str]:
    """Return the files of a model in a repository. With an index, these are all files that it may name.

    The list is empty if the names do not identify a model.
    """
    if INDEX_FILE in names:
        return [INDEX_FILE, *(name for name in names if name.endswith(f".{INDEXED_SUFFIX}"))]
    return select_model_files(names) if select_transformers_files(names) else []


def read_torch_folder(folder: AnyPath) -> ModelFiles:
    """Read the headers of a model's files: the ones in the index, else pytorch_model.bin, else the only file."""
    names, weight_map = list_weight_files(folder, select_model_files(list_folder(folder)))
    if weight_map is None:
        if ADAPTER_FILE in names:
            why = f"{ADAPTER_FILE} has only the weights that are added to a base model"
            hint = "merge it first: PEFT's `merge_and_unload()`"
            raise PrepError(f"{folder} is an adapter, not a model", why, hint)
        check_numbered_files(folder, names)
        if len(names) != 1 and not all(_NUMBERED_FILE.fullmatch(name) for name in names):
            why = f"it has {len(names)} PyTorch files: {', '.join(names[:4])}"
            hint = f"rename the file of the model to {SINGLE_FILE}"
            raise PrepError(f"{folder} does not say which file the model is", why, hint)
    files = [folder / name for name in names]
    return read_model_files(folder, files, read_torch_header, weight_map)


# One file


def _open_archive(path: AnyPath, file: BinaryIO) -> TorchArchive:
    """Read the directory and the pickle of a file. Raise PrepError if it has another format."""
    first_bytes = file.read(512)
    if not first_bytes.startswith(ZIP_MAGIC):
        what = f"{path.name} is not a PyTorch file"
        # Before 1.6, PyTorch wrote pickles in a row, or a tar archive, whose magic is at byte 257.
        if first_bytes.startswith(_PICKLE_MAGICS) or first_bytes[257:262] == b"ustar":
            why = "it has the format of PyTorch before version 1.6"
            command = f"`torch.save(torch.load({path.name!r}), {path.name!r})`"
            hint = f"save it again with torch 1.6 or newer: {command}"
            raise PrepError(f"{path.name} is not supported", why, hint)
        if error := other_format_error(path, first_bytes, "PyTorch"):
            raise error
        # A safetensors file has 8 bytes of length before its JSON header.
        if first_bytes[8:9] == b"{":
            hint = f"if it is a safetensors file, rename it to {path.name.removesuffix(path.suffix)}.safetensors"
            raise PrepError(what, "it starts like a safetensors file", hint)
        if first_bytes:
            raise DamagedError(what, f"it starts with {first_bytes[:8].hex(' ')}", GET_AGAIN_HINT)
        raise DamagedError(f"{path.name} is damaged", "it is empty", download_again_hint(path))
    return TorchArchive(file)


@contextmanager
def _file_errors(path: AnyPath) -> Iterator[None]:
    """Raise PrepError for the errors of reading a file."""
    what = f"{path.name} is not a usable PyTorch file"
    try:
        yield
    except OSError as error:
        raise unreadable_error(path, error) from error
    except UnexpectedNameError as error:
        if error.name in UNSUPPORTED_NAMES:
            why = f"{UNSUPPORTED_NAMES[error.name]} (`{error.name}`)"
            raise PrepError(f"{path.name} cannot be read", why, _SAVE_AGAIN_HINT) from error
        message = f"{path.name} refers to {quote_name(error.name)}"
        why = "prep runs no code of a file: it reads only tensors and plain settings"
        raise PrepError(message, why, f"if you trust it, {_SAVE_AGAIN_HINT}") from error
    except StateDictError as error:
        raise PrepError(what, str(error), _SAVE_AGAIN_HINT) from error
    except ValueError as error:
        raise DamagedError(what, str(error), damage_hint(path, error)) from error


# The state dict


class StateDictError(ValueError):
    """A complete PyTorch file that holds no state dict, or several ones."""


# Key and value.
_Item = tuple[object, object]


def _find_state_dict(archive: TorchArchive) -> tuple[str, PickledMapping]:
    """Return the only state dict: the root with an empty key, or one of its values with its key.

    E.g. nanoGPT saves `{"model": {...}, "optimizer": {...}, "iter_num": 5, "best_val_loss": tensor}`.
    """
    root = archive.root
    if not isinstance(root, PickledMapping):
        raise StateDictError(f"it holds {_describe_value(root)}, not tensors by name")
    # A pickle may repeat one large mapping without tensors. It is searched once.
    has_tensors = functools.cache(_has_tensors)
    nested: dict[str, PickledMapping] = {}
    # A pickle may set a key twice, and PyTorch then keeps the last value. Which one is meant is not guessed.
    keys: set[str] = set()
    for key, value in root.items:
        if not isinstance(key, str):
            continue
        if isinstance(value, PickledMapping) and has_tensors(value):
            nested.setdefault(key, value)
        elif key not in WRAPPERS:
            continue
        if key in keys:
            raise StateDictError(f"it has {quote_name(key)} twice")
        keys.add(key)
    candidates = [(key, value) for key, value in nested.items() if key in WRAPPERS]
    if not candidates:
        # Of other names, only the ones of a model's state dict count, e.g. no `{"cpu": tensor}` of random states.
        has_parameters = functools.cache(functools.partial(_has_parameters, archive))
        candidates = [(key, value) for key, value in nested.items() if has_parameters(value)]
    # Beside a state dict, tensors such as a loss or the state of a random generator are no parameters.
    if _has_parameters(archive, root) or (_has_tensors(root) and not candidates):
        candidates = [("", root), *candidates]
    if not candidates:
        raise StateDictError("it holds no tensors by name")
    # A name in WRAPPERS comes before others, e.g. `model` beside an average under `ema`. Of two such names, or of two
    # other ones, which one is meant is not guessed.
    if len(candidates) > 1:
        locations = [quote_name(key) for key, _ in candidates[:4]]
        if not candidates[0][0]:
            locations[0] = "itself"
        raise StateDictError(
            f"it has tensors by name in {' and '.join(locations)}, which is ambiguous"
        )
    return candidates[0]


def _has_parameters(archive: TorchArchive, mapping: PickledMapping) -> bool:
    """Return whether a mapping has a tensor with the name of a parameter, e.g. `wte.weight`, or a matrix."""
    for key, value in mapping.items:
        if not is_tensor(value) or not isinstance(key, str):
            continue
        if "." in key or len(archive.find_tensor(value).shape) > 1:
            return True
    return False


def _has_tensors(mapping: PickledMapping) -> bool:
    return any(is_tensor(value) for _, value in mapping.items)


def _describe_value(value: object) -> str:
    """Describe any value in a few words."""
    match value:
        case None | bool() | float():
            return str(value)
        case int():
            return str(value) if abs(value) < INT64_LIMIT else "a large number"
        case str():
            return f"the text {quote_name(value[:MAX_SHOWN_CHARS])}"
        case PickledMapping():
            return f"a mapping of {len(value.items):,}"
        case list() | tuple():
            return f"a {type(value).__name__} of {len(value):,}"
        case PickledCall():
            return "a tensor" if is_tensor(value) else f"a {value.callee.qualified_name}"
        case PickledName():
            return "the name of a class"
        case PersistentRef():
            return "a storage"
        case _:
            return type(value).__name__
