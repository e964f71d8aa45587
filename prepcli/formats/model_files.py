"""The weight files of a model in a folder, for any tensor format: headers, index (`*.index.json`), missing files."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError, causes
from prepcli.core.formatting import count_text, join_names
from prepcli.core.json_values import parse_json, quote_name
from prepcli.planning.arrays import Array
from prepcli.stores.files import (
    CutShortError,
    is_there,
    read_small_file,
    resolve_named_path,
    stat_file,
)
from prepcli.stores.paths import AnyPath, StorePath, map_files

MAX_INDEX_NBYTES = 100_000_000
INDEX_SUFFIX = ".index.json"
# First bytes, format, explanation, hint (empty: download it again).
_OTHER_FORMATS = (
    ((b"<!", b"<h", b"<H", b"<?"), "a web page", "an error page was saved under this name", ""),
    (b"PK\x03\x04", "a zip archive", "PyTorch checkpoints have this format",
     "if it is a PyTorch checkpoint, rename it to *.bin"),
    ((b"\x80\x02", b"\x80\x03", b"\x80\x04"), "a pickle", "old PyTorch checkpoints have this format",
     "if it is a PyTorch checkpoint, rename it to *.bin"),
    (b"GGUF", "a GGUF file", "its weights are quantised", "use the model that it was converted from"),
    ((b"lmgg", b"tjgg", b"fmgg", b"algg"), "a GGML file", "its weights are quantised or reordered",
     "use the model that it was converted from"),
    (b"\x89HDF", "an HDF5 file", "Keras weights have this format", "use the model's safetensors files"),
    (b"{", "bare JSON", "the length of the header must come first", GET_AGAIN_HINT),
)  # fmt: skip
_NUMBERED_FILE = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.([^.]+)", re.ASCII)
_MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class UnindexedTensor:
    """A tensor in a file that the index assigns to another file, or does not name."""

    name: str
    file: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.file}: {self.name} is not in the index"


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A weight file without its payload.

    Attributes:
        path: The file.
        size: Size of the whole file in bytes.
        mtime_ns: Time of its last change.
        digest: XXH3-128 of its metadata. For safetensors and msgpack, these are all bytes outside of tensors.
        tensors: Tensors, in the order of their bytes.
        others: Values other than tensors. Their texts describe them.
        remark: Which part of the file is read. Empty for the whole file.
        metadata: Texts of the `__metadata__` of a safetensors file.
    """

    path: AnyPath
    size: int
    mtime_ns: int
    digest: str
    tensors: tuple[Array, ...]
    others: tuple[object, ...] = ()
    remark: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def file_name(self) -> str:
        """Name in the folder of the model."""
        return self.path.name


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The weight files of a model.

    Attributes:
        path: Folder or file of the model.
        headers: Header of each file, by file number.
        tensors: Tensors of the model, in the order of the files. They have the numbers of their files.
        unindexed: Records of further tensors in the files, which the index does not name.
    """

    path: AnyPath
    headers: tuple[FileHeader, ...]
    tensors: tuple[Array, ...]
    unindexed: tuple[UnindexedTensor, ...] = ()

    @property
    def files(self) -> tuple[AnyPath, ...]:
        """Path of each file."""
        return tuple(header.path for header in self.headers)

    @property
    def others(self) -> tuple[str, ...]:
        """Descriptions of the values other than tensors, and of the tensors that are not read."""
        others = [str(tensor) for tensor in self.unindexed]
        for header in self.headers:
            others += map(str, header.others)
        return tuple(others)


def read_model_files(
    path: AnyPath,
    files: Sequence[AnyPath],
    read_header: Callable[[AnyPath, int], FileHeader],
    weight_map: Mapping[str, str] | None = None,
) -> ModelFiles:
    """Read the headers of a model's files.

    The index decides which file a tensor is read from. Files may have further tensors, e.g. earlier versions of tensors
    in an overlay.

    Args:
        path: Folder or file of the model.
        files: The files. Those in a store are read several at a time.
        read_header: Reads the header of a file with a number.
        weight_map: The file of each tensor in the index, or None without an index.

    Raises:
        PrepError: A file is broken, or a tensor is not in the file that the index names. Without an index: two files
            hold a tensor.
    """
    headers = tuple(map_files(read_header, files, range(len(files))))
    tensors: list[Array] = []
    unindexed: list[UnindexedTensor] = []
    file_by_tensor: dict[str, str] = {}
    for header in headers:
        for tensor in header.tensors:
            # In an index, the path of a leaf has slashes.
            name = "/".join(map(str, tensor.path)) or tensor.name
            if weight_map is not None and weight_map.get(name) != header.file_name:
                unindexed.append(UnindexedTensor(name, header.file_name, tensor.nbytes))
                continue
            tensors.append(tensor)
            first_file = file_by_tensor.setdefault(name, header.file_name)
            if weight_map is None and first_file != header.file_name:
                raise PrepError(
                    f"tensor {quote_name(name)} is in two files of {path}",
                    f"{first_file} and {header.file_name}",
                    "remove the file that does not belong to this model",
                )
    if weight_map is not None and weight_map.keys() - file_by_tensor.keys():
        others = {tensor.name for tensor in unindexed}
        missing = sorted(weight_map.keys() - file_by_tensor.keys())
        only_in_index = [quote_name(name) for name in missing if name not in others]
        in_another_file = [quote_name(name) for name in missing if name in others]
        reasons: list[str] = []
        for names, difference in (
            (only_in_index, "only in the index"),
            (in_another_file, "not in the file that the index names"),
        ):
            if names:
                listed = join_names(names, max_names=_MAX_LISTED)
                reasons.append(f"{len(names)} {difference}: {listed}")
        file_names = join_names(
            sorted({weight_map[name] for name in missing}), max_names=_MAX_LISTED
        )
        raise DamagedError(
            f"files of {path} lack tensors that the index names",
            "; ".join(reasons),
            _download_hint(path, what=f"get {file_names} again, in the version of the index"),
        )
    return ModelFiles(path, headers, tuple(tensors), tuple(unindexed))


def index_suffix(index: str) -> str:
    """Return the suffix of the files in an index: `model.safetensors.index.json` -> `.safetensors`."""
    return PurePath(index.removesuffix(INDEX_SUFFIX)).suffix


def shard_name(stem: str, number: int, count: int, suffix: str) -> str:
    """Return the Hugging Face name of shard `number` (from 1) of `count`."""
    return f"{stem}-{number:05d}-of-{count:05d}.{suffix}"


def list_weight_files(
    folder: AnyPath, selected: Sequence[str]
) -> tuple[Sequence[str], Mapping[str, str] | None]:
    """Return the names of a model's files, and the file of each tensor if they are in an index.

    Args:
        folder: Folder of the model.
        selected: The files, or only the index of them. See `whole_file` for the file that is read instead.
    """
    if len(selected) != 1 or not selected[0].endswith(INDEX_SUFFIX):
        return selected, None
    weight_map = read_weight_map(folder / selected[0])
    whole = whole_file(selected[0], weight_map)
    if whole and is_there(folder / whole, follow_links=True):
        return [whole], None
    tensor_counts = Counter(weight_map.values())
    missing: list[str] = []
    for name, count in sorted(tensor_counts.items()):
        if not is_there(folder / name, follow_links=True):
            missing.append(f"{name} ({count_text(count, 'tensor')})")
    if missing:
        why = f"the index names {join_names(missing, max_names=_MAX_LISTED)}"
        raise _missing_files_error(folder, len(missing), len(tensor_counts), why)
    return sorted(tensor_counts), weight_map


def whole_file(index: str, weight_map: Mapping[str, str]) -> str:
    """Return the name of the file that holds a whole model, if it is read before an index. Empty otherwise.

    E.g. `model.safetensors` beside `model.safetensors.index.json`. transformers reads it and not the index:
    `save_pretrained` leaves the index of an earlier save. An index with this file among others is the model's own.
    """
    whole = index.removesuffix(INDEX_SUFFIX)
    return "" if whole in weight_map.values() else whole


def read_weight_map(path: AnyPath) -> dict[str, str]:
    """Read the file name of each tensor from an index file."""
    stat = stat_file(path)
    try:
        if stat.st_size > MAX_INDEX_NBYTES:
            raise ValueError(f"it has {stat.st_size:,} bytes, the limit is {MAX_INDEX_NBYTES:,}")
        content = read_small_file(path, MAX_INDEX_NBYTES)
        try:
            index = parse_json(content)
        except ValueError as error:
            if content.rstrip().endswith(b"}"):
                raise
            # The index ends before its last brace.
            raise CutShortError(str(error)) from error
        suffix = index_suffix(path.name)
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("it has no weight_map from tensors to files")
        for name, file in weight_map.items():
            if not isinstance(file, str) or not file.endswith(suffix):
                raise ValueError(
                    f"it puts {quote_name(name)} in something other than a *{suffix} file"
                )
            if not file.isprintable() or any(mark in file for mark in "/\\:"):
                raise ValueError(
                    f"it puts {quote_name(name)} in {quote_name(file)}, which is not the bare name of a file"
                )
    except ValueError as error:
        raise DamagedError(
            f"{path} is not a usable index", str(error), damage_hint(path, error)
        ) from error
    for name in {*weight_map.values()}:
        resolve_named_path(path.parent, name, path)
    return weight_map


def check_numbered_files(folder: AnyPath, names: Sequence[str]) -> None:
    """Raise PrepError if a file of a set numbered `-00001-of-00003` is missing."""
    present: set[str] = set()
    file_sets: set[tuple[str, int, str]] = set()
    for name in names:
        match = _NUMBERED_FILE.fullmatch(name)
        if match is None:
            continue
        stem, number, count, suffix = match.groups()
        file_sets.add((stem, int(count), suffix))
        if 1 <= int(number) <= int(count):
            present.add(name)
    total = sum(count for _, count, _ in file_sets)
    missing = list(itertools.islice(_missing_shards(sorted(file_sets), present), _MAX_LISTED))
    if missing:
        missing_count = total - len(present)
        why = f"the names of the other files imply {join_names(missing, missing_count, max_names=_MAX_LISTED)}"
        raise _missing_files_error(folder, missing_count, total, why)


def _missing_shards(
    file_sets: Iterable[tuple[str, int, str]], present: Collection[str]
) -> Iterator[str]:
    """Yield the names of missing shards of (stem, count, suffix) sets."""
    # A generator, because the name of one file may promise 99,998 others.
    for stem, count, suffix in file_sets:
        for number in range(1, count + 1):
            name = shard_name(stem, number, count, suffix)
            if name not in present:
                yield name


def damage_hint(path: AnyPath, error: BaseException | None) -> str:
    """Return the hint for a file with invalid content: the command that downloads it again if bytes are missing."""
    if any(isinstance(cause, CutShortError) for cause in causes(error)):
        return download_again_hint(path)
    return GET_AGAIN_HINT


def download_again_hint(path: AnyPath) -> str:
    """Return the hint for a file without all of its bytes: the command that downloads it again."""
    arguments = (path.name, "--force-download")
    return _download_hint(path.parent, *arguments, what="download it again")


def other_format_error(path: AnyPath, first_bytes: bytes, expected: str) -> PrepError | None:
    """Return the error for a file of another known format than the expected one, e.g. a web page. None for others."""
    for magic, format_name, why, hint in _OTHER_FORMATS:
        if first_bytes.lstrip().startswith(magic):
            what = f"{path.name} is {format_name}, not a {expected} file"
            return PrepError(what, why, hint or download_again_hint(path))
    return None


def _missing_files_error(
    folder: AnyPath, missing_count: int, file_count: int, why: str
) -> PrepError:
    verb = "is" if missing_count == 1 else "are"
    return DamagedError(
        f"{missing_count} of {file_count} files of {folder} {verb} missing",
        why,
        _download_hint(folder),
    )


def _download_hint(folder: AnyPath, *arguments: str, what: str = "") -> str:
    """Return a hint with the command that downloads a folder or a file of it. No command downloads to a store."""
    if isinstance(folder, StorePath):
        return GET_AGAIN_HINT
    command = ["hf", "download", "OWNER/NAME", *arguments, "--local-dir", str(folder)]
    # huggingface_hub caches OWNER/NAME as models--OWNER--NAME/snapshots/COMMIT. Names cannot contain `--`.
    for part in folder.absolute().parts:
        if part.startswith("models--"):
            repository = part.removeprefix("models--").replace("--", "/")
            command = ["hf", "download", repository, *arguments]
    return f"{what}: `{shlex.join(command)}`" if what else f"`{shlex.join(command)}`"
