"""Read the index of a sharded model (`*.index.json`) and select the tensors that it names, for any tensor format."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.formatting import join_names
from prepcli.core.json_values import parse_json, quote_name
from prepcli.stores.paths import AnyPath, StorePath
from prepcli.stores.reading import (
    CutShortError,
    is_there,
    read_small_file,
    resolve_named_path,
    stat_file,
)

MAX_INDEX_NBYTES = 100_000_000
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


def shard_name(stem: str, number: int, count: int, suffix: str) -> str:
    """Return the Hugging Face name of shard `number` (from 1) of `count`."""
    return f"{stem}-{number:05d}-of-{count:05d}.{suffix}"


def read_weight_map(path: AnyPath, suffix: str) -> dict[str, str]:
    """Read the file name of each tensor from an index file.

    Args:
        path: Path of the index.
        suffix: Suffix of the weight files, without the dot.

    Raises:
        PrepError: The file is not a valid index, or a file name has another suffix or a folder.
    """
    stat = stat_file(path)
    try:
        if stat.st_size > MAX_INDEX_NBYTES:
            raise ValueError(f"it has {stat.st_size:,} bytes, the limit is {MAX_INDEX_NBYTES:,}")
        weight_map = _parse_weight_map(
            _parse_index(read_small_file(path, MAX_INDEX_NBYTES)), suffix
        )
    except ValueError as error:
        raise DamagedError(
            f"{path} is not a usable index", str(error), damage_hint(path, error)
        ) from error
    for name in {*weight_map.values()}:
        resolve_named_path(path.parent, name, path)
    return weight_map


def list_indexed_files(folder: AnyPath, weight_map: Mapping[str, str]) -> list[str]:
    """Return the sorted file names of an index. Raise PrepError if a file is missing."""
    tensor_counts = Counter(weight_map.values())
    missing: list[str] = []
    for name, count in sorted(tensor_counts.items()):
        if is_there(folder / name, follow_links=True):
            continue
        noun = "tensor" if count == 1 else "tensors"
        missing.append(f"{name} ({count} {noun})")
    if missing:
        why = f"the index names {join_names(missing, max_names=_MAX_LISTED)}"
        raise _missing_files_error(folder, len(missing), len(tensor_counts), why)
    return sorted(tensor_counts)


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


def find_unindexed(
    folder: AnyPath, tensors: Iterable[tuple[str, str]], weight_map: Mapping[str, str] | None
) -> frozenset[tuple[str, str]]:
    """Return the (tensor, file) pairs that the index of a folder does not name.

    The index decides which file a tensor is read from, as in transformers. Files may have further tensors, e.g. earlier
    versions of tensors in an overlay.

    Args:
        folder: Folder of the files.
        tensors: Each stored tensor with its file.
        weight_map: The file of each tensor, or None without an index.

    Raises:
        PrepError: A tensor is not in the file that the index names. Without an index: two files hold a tensor.
    """
    pairs = list(tensors)
    if weight_map is None:
        _check_one_file_each(folder, pairs)
        return frozenset()
    indexed = {name for name, file in pairs if weight_map.get(name) == file}
    missing = weight_map.keys() - indexed
    if missing:
        raise _missing_tensors_error(folder, weight_map, sorted(missing), dict(pairs))
    return frozenset((name, file) for name, file in pairs if weight_map.get(name) != file)


def _check_one_file_each(folder: AnyPath, tensors: Iterable[tuple[str, str]]) -> None:
    """Raise PrepError if two files hold a tensor."""
    file_by_tensor: dict[str, str] = {}
    for name, file in tensors:
        if file_by_tensor.setdefault(name, file) != file:
            what = f"tensor {quote_name(name)} is in two files of {folder}"
            raise PrepError(
                what,
                f"{file_by_tensor[name]} and {file}",
                "remove the file that does not belong to this model",
            )


def _missing_tensors_error(
    folder: AnyPath,
    weight_map: Mapping[str, str],
    missing: Sequence[str],
    file_by_tensor: Mapping[str, str],
) -> PrepError:
    """Return the error for tensors that are not in the file that the index names."""
    only_in_index = [quote_name(name) for name in missing if name not in file_by_tensor]
    in_another_file = [quote_name(name) for name in missing if name in file_by_tensor]
    reasons: list[str] = []
    for names, difference in (
        (only_in_index, "only in the index"),
        (in_another_file, "not in the file that the index names"),
    ):
        if names:
            listed = join_names(names, max_names=_MAX_LISTED)
            reasons.append(f"{len(names)} {difference}: {listed}")
    files = join_names(sorted({weight_map[name] for name in missing}), max_names=_MAX_LISTED)
    return DamagedError(
        f"files of {folder} lack tensors that the index names",
        "; ".join(reasons),
        _download_hint(folder, what=f"get {files} again, in the version of the index"),
    )


def damage_hint(path: AnyPath, error: BaseException | None) -> str:
    """Return the hint for a file with invalid content: the command that downloads it again if bytes are missing."""
    while error is not None:
        if isinstance(error, CutShortError):
            return download_again_hint(path)
        error = error.__cause__
    return GET_AGAIN_HINT


def download_again_hint(path: AnyPath) -> str:
    """Return the hint for a file without all of its bytes: the command that downloads it again."""
    arguments = (path.name, "--force-download")
    return _download_hint(path.parent, *arguments, what="download it again")


def _parse_index(content: bytes) -> object:
    """Parse an index. Raise CutShortError if it ends before its last brace."""
    try:
        return parse_json(content)
    except ValueError as error:
        if content.rstrip().endswith(b"}"):
            raise
        raise CutShortError(str(error)) from error


def _parse_weight_map(index: object, suffix: str) -> dict[str, str]:
    if isinstance(index, dict):
        weight_map = index.get("weight_map")
    else:
        weight_map = None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("it has no weight_map from tensors to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(f".{suffix}"):
            raise ValueError(
                f"it puts {quote_name(name)} in something other than a *.{suffix} file"
            )
        if not file.isprintable() or any(mark in file for mark in "/\\:"):
            raise ValueError(
                f"it puts {quote_name(name)} in {quote_name(file)}, which is not the bare name of a file"
            )
    return weight_map


def _missing_files_error(
    folder: AnyPath, missing_count: int, file_count: int, why: str
) -> PrepError:
    if missing_count == 1:
        verb = "is"
    else:
        verb = "are"
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
