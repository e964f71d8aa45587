"""Read the index of a sharded model (`*.index.json`) and compare it with the files, for any tensor format."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prepcli.console.lists import join_names
from prepcli.errors import DamagedError, PrepError
from prepcli.formats.untrusted import parse_json, quote_name, stat_file, unreadable_error
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
        weight_map = _parse_weight_map(parse_json(path.read_bytes()), suffix)
    except OSError as error:
        raise unreadable_error(path, error) from error
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
    if missing := [name for name in sorted(tensor_counts) if not os.path.exists(folder / name)]:
        listed = [
            f"{name} ({tensor_counts[name]} tensor{'s' * (tensor_counts[name] != 1)})"
            for name in missing
        ]
        raise _missing_files_error(
            folder,
            len(missing),
            len(tensor_counts),
            f"the index names {join_names(listed, max_names=_MAX_LISTED)}",
        )
    return sorted(tensor_counts)


def check_numbered_files(folder: Path, names: Sequence[str]) -> None:
    """Raise PrepError if a file of a set numbered `-00001-of-00003` is missing."""
    matches = [match for name in names if (match := _NUMBERED_FILE.fullmatch(name))]
    present = {match[0] for match in matches if 1 <= int(match[2]) <= int(match[3])}
    file_sets = sorted({(match[1], int(match[3]), match[4]) for match in matches})
    # A generator: the name of one file may promise 99,999 others.
    expected = (
        shard_name(stem, i, count, suffix)
        for stem, count, suffix in file_sets
        for i in range(1, count + 1)
    )
    total = sum(count for _, count, _ in file_sets)
    # Lazily: a set may have millions.
    if missing := [
        *itertools.islice((name for name in expected if name not in present), _MAX_LISTED)
    ]:
        why = f"the names of the others promise {join_names(missing, total - len(present), max_names=_MAX_LISTED)}"
        raise _missing_files_error(folder, total - len(present), total, why)


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
    differences = {
        "only in the index": [name for name in weight_map if name not in file_by_tensor],
        "only in the files": [name for name in file_by_tensor if name not in weight_map],
        "not in the file that the index names": [
            n for n in file_by_tensor if weight_map.get(n, file_by_tensor[n]) != file_by_tensor[n]
        ],
    }
    why = "; ".join(
        f"{len(names)} {difference}: {join_names([*map(quote_name, names)], max_names=_MAX_LISTED)}"
        for difference, names in differences.items()
        if names
    )
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
    cache_folder = next(
        (part for part in reversed(folder.absolute().parts) if part.startswith("models--")), None
    )
    if cache_folder is None:
        return shlex.join(["hf", "download", "OWNER/NAME", *arguments, "--local-dir", str(folder)])
    return shlex.join(
        ["hf", "download", cache_folder.removeprefix("models--").replace("--", "/"), *arguments]
    )
