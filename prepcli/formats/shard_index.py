"""The index of a model in several files (`*.index.json`), held against the files; whatever their format."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prepcli.console.lists import join_names
from prepcli.errors import PrepError
from prepcli.formats.untrusted import parse_json, quote_name, stat_file, unreadable_error

MAX_INDEX_NBYTES = 100_000_000
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.([^.]+)", re.ASCII)
_SHOWN = 3


def shard_name(stem: str, number: int, count: int, suffix: str) -> str:
    """The name of file `number` (from 1) of `count`, as the Hugging Face libraries spell it."""
    return f"{stem}-{number:05d}-of-{count:05d}.{suffix}"


def read_weight_map(path: Path, suffix: str) -> dict[str, str]:
    """The file of each tensor by an index file, all names of files bare and ending in `.suffix`.

    Raises PrepError for a file that is no such index.
    """
    found = stat_file(path)
    try:
        if found.st_size > MAX_INDEX_NBYTES:
            raise ValueError(f"it has {found.st_size:,} bytes, allowed are {MAX_INDEX_NBYTES:,}")
        return _weight_map(parse_json(path.read_bytes()), suffix)
    except OSError as error:
        raise unreadable_error(path, error) from error
    except ValueError as error:
        raise PrepError(f"{path} is not a usable index", str(error), download_again_hint(path)) from error


def list_indexed_files(folder: Path, weight_map: Mapping[str, str]) -> list[str]:
    """The names of the files that an index names, sorted; a PrepError if one is not there."""
    ntensors = Counter(weight_map.values())
    if missing := [name for name in sorted(ntensors) if not os.path.exists(folder / name)]:
        listed = [f"{name} ({ntensors[name]} tensor{'s' * (ntensors[name] != 1)})" for name in missing]
        raise _missing(folder, len(missing), len(ntensors), f"the index names {join_names(listed, max_names=_SHOWN)}")
    return sorted(ntensors)


def check_numbered_files(folder: Path, names: Sequence[str]) -> None:
    """Raises PrepError if a file is missing of those that are numbered `-00001-of-00003`."""
    found = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    there = {match[0] for match in found if 1 <= int(match[2]) <= int(match[3])}
    sets = sorted({(match[1], int(match[3]), match[4]) for match in found})
    wanted = (shard_name(stem, i, count, suffix) for stem, count, suffix in sets for i in range(1, count + 1))
    total = sum(count for _, count, _ in sets)
    if missing := [*itertools.islice((name for name in wanted if name not in there), _SHOWN)]:  # of maybe millions
        why = f"the names of the others promise {join_names(missing, total - len(there), max_names=_SHOWN)}"
        raise _missing(folder, total - len(there), total, why)


def map_tensors_to_files(folder: Path, tensors: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The file that really holds each tensor, from (tensor, file) pairs; a PrepError if two do."""
    holders: dict[str, str] = {}
    for name, file in tensors:
        if holders.setdefault(name, file) != file:
            what = f"tensor {quote_name(name)} is in two files of {folder}"
            raise PrepError(what, f"{holders[name]} and {file}", "remove the file that is not of this model")
    return holders


def check_index_matches_files(folder: Path, weight_map: Mapping[str, str], file_by_tensor: Mapping[str, str]) -> None:
    """Raises PrepError unless the index and the files tell the same of every tensor."""
    if weight_map == file_by_tensor:
        return
    kinds = {
        "only in the index": [name for name in weight_map if name not in file_by_tensor],
        "only in the files": [name for name in file_by_tensor if name not in weight_map],
        "not in the file that the index names": [
            n for n in file_by_tensor if weight_map.get(n, file_by_tensor[n]) != file_by_tensor[n]
        ],
    }
    why = "; ".join(
        f"{len(names)} {kind}: {join_names([*map(quote_name, names)], max_names=_SHOWN)}"
        for kind, names in kinds.items()
        if names
    )
    raise PrepError(f"the index of {folder} and its files name different tensors", why, f"`{_download(folder)}`")


def download_again_hint(path: Path) -> str:
    """The hint for a file that is not as its authors made it."""
    return f"download it again: `{_download(path.parent, path.name, '--force-download')}`"


def _weight_map(index: object, suffix: str) -> dict[str, str]:
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("it has no weight_map, which gives the file of each tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(f".{suffix}"):
            raise ValueError(f"it puts {quote_name(name)} in something other than a *.{suffix} file")
        if not file.isprintable() or any(mark in file for mark in "/\\:"):
            raise ValueError(f"it puts {quote_name(name)} in {quote_name(file)}, which is not the bare name of a file")
    return weight_map


def _missing(folder: Path, nmissing: int, nfiles: int, why: str) -> PrepError:
    verb = "is" if nmissing == 1 else "are"
    return PrepError(f"{nmissing} of {nfiles} files of {folder} {verb} missing", why, f"`{_download(folder)}`")


def _download(folder: Path, *arguments: str) -> str:
    """The command that fetches a folder, or a file of it; the path of a hub cache tells whose it is."""
    owner = next((part for part in reversed(folder.absolute().parts) if part.startswith("models--")), None)
    if owner is None:
        return shlex.join(["hf", "download", "OWNER/NAME", *arguments, "--local-dir", str(folder)])
    return shlex.join(["hf", "download", owner.removeprefix("models--").replace("--", "/"), *arguments])
