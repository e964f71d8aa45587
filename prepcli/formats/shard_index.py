"""Read the index of a sharded model (`*.index.json`) and compare it with the files, for any tensor format."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from prepcli.console.lists import join_names
from prepcli.errors import DamagedError, PrepError
from prepcli.formats.untrusted import parse_json, quote_name, read_bytes, stat_file
from trainer.files.reading import resolve_named_path

MAX_INDEX_NBYTES = 100_000_000
_NUMBERED_FILE = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.([^.]+)", re.ASCII)
_MAX_LISTED = 3


def shard_name(stem: str, number: int, count: int, suffix: str) -> str:
    """Return the Hugging Face name of shard `number` (from 1) of `count`."""
    return f"{stem}-{number:05d}-of-{count:05d}.{suffix}"


def read_weight_map(path: Path, suffix: str) -> dict[str, str]:
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
        weight_map = _parse_weight_map(parse_json(read_bytes(path)), suffix)
    except ValueError as error:
        raise DamagedError(
            f"{path} is not a usable index", str(error), download_again_hint(path)
        ) from error
    for name in {*weight_map.values()}:
        resolve_named_path(path.parent, name, path)
    return weight_map


def list_indexed_files(folder: Path, weight_map: Mapping[str, str]) -> list[str]:
    """Return the sorted file names of an index. Raise PrepError if a file is missing."""
    tensor_counts = Counter(weight_map.values())
    missing: list[str] = []
    for name, count in sorted(tensor_counts.items()):
        if os.path.exists(folder / name):
            continue
        noun = "tensor" if count == 1 else "tensors"
        missing.append(f"{name} ({count} {noun})")
    if missing:
        why = f"the index names {join_names(missing, max_names=_MAX_LISTED)}"
        raise _missing_files_error(folder, len(missing), len(tensor_counts), why)
    return sorted(tensor_counts)


def check_numbered_files(folder: Path, names: Sequence[str]) -> None:
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


def map_tensors_to_files(folder: Path, tensors: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Map each tensor to its file, from (tensor, file) pairs. Raise PrepError if two files hold a tensor."""
    file_by_tensor: dict[str, str] = {}
    for name, file in tensors:
        if file_by_tensor.setdefault(name, file) != file:
            what = f"tensor {quote_name(name)} is in two files of {folder}"
            raise PrepError(
                what,
                f"{file_by_tensor[name]} and {file}",
                "remove the file that does not belong to this model",
            )
    return file_by_tensor


def check_index_matches_files(
    folder: Path, weight_map: Mapping[str, str], file_by_tensor: Mapping[str, str]
) -> None:
    """Raise PrepError unless the index and the files agree on the file of every tensor."""
    if weight_map == file_by_tensor:
        return
    only_in_files: list[str] = []
    in_another_file: list[str] = []
    for name, file in file_by_tensor.items():
        if name not in weight_map:
            only_in_files.append(quote_name(name))
        elif weight_map[name] != file:
            in_another_file.append(quote_name(name))
    only_in_index = [quote_name(name) for name in weight_map if name not in file_by_tensor]
    reasons: list[str] = []
    for names, difference in (
        (only_in_index, "only in the index"),
        (only_in_files, "only in the files"),
        (in_another_file, "not in the file that the index names"),
    ):
        if names:
            listed = join_names(names, max_names=_MAX_LISTED)
            reasons.append(f"{len(names)} {difference}: {listed}")
    why = "; ".join(reasons)
    raise DamagedError(
        f"the index of {folder} and its files name different tensors",
        why,
        f"`{_download_command(folder)}`",
    )


def download_again_hint(path: Path) -> str:
    """Return the hint for a damaged file: the command that downloads it again."""
    return f"download it again: `{_download_command(path.parent, path.name, '--force-download')}`"


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


def _missing_files_error(folder: Path, missing_count: int, file_count: int, why: str) -> PrepError:
    if missing_count == 1:
        verb = "is"
    else:
        verb = "are"
    return DamagedError(
        f"{missing_count} of {file_count} files of {folder} {verb} missing",
        why,
        f"`{_download_command(folder)}`",
    )


def _download_command(folder: Path, *arguments: str) -> str:
    """Return the command that downloads a folder or a file of it. A hub cache path contains the repository."""
    # huggingface_hub caches OWNER/NAME as models--OWNER--NAME/snapshots/COMMIT. Names cannot contain `--`.
    for part in reversed(folder.absolute().parts):
        if part.startswith("models--"):
            repository = part.removeprefix("models--").replace("--", "/")
            return shlex.join(["hf", "download", repository, *arguments])
    return shlex.join(["hf", "download", "OWNER/NAME", *arguments, "--local-dir", str(folder)])
