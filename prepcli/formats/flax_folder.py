"""Find the files of a Flax checkpoint or an EasyLM stream in a folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from prepcli.core.errors import PrepError
from prepcli.formats.msgpack import SUFFIX, MsgpackHeader, MsgpackKind
from prepcli.formats.shard_index import (
    UnindexedTensor,
    find_unindexed,
    list_indexed_files,
    read_weight_map,
)
from prepcli.planning.arrays import Array
from prepcli.stores.files import list_folder
from prepcli.stores.paths import AnyPath

STEM = "flax_model"
SINGLE_FILE = f"{STEM}.{SUFFIX}"
INDEX_FILE = f"{SINGLE_FILE}.index.json"
# In order of precedence: the names of transformers come before names that training scripts choose.
FLAX_FILES = (
    SINGLE_FILE,
    INDEX_FILE,
    "params.msgpack",
    "train_state.msgpack",
)
STREAM_FILE = "streaming_params"
STREAM_FILES = (STREAM_FILE, "streaming_train_state")
_NUMBERED_STREAM = re.compile(rf"({'|'.join(STREAM_FILES)})_\d+")


def select_other_flax_files(names: Collection[str]) -> list[str]:
    """Return the msgpack files of a folder without a file of a known name."""
    return [name for name in names if name.endswith(f".{SUFFIX}") and not name.startswith(".")]


def detect_msgpack_kind(names: Collection[str]) -> MsgpackKind | None:
    """Return `flax` or `easylm` by the file names of a folder, or None for neither."""
    if any(name in names for name in FLAX_FILES):
        return "flax"
    if any(name in STREAM_FILES or _NUMBERED_STREAM.fullmatch(name) for name in names):
        return "easylm"
    return None


def select_flax_files(names: Sequence[str]) -> list[str]:
    """Return the file names of a Flax model in a repository. With an index, these are all files that it may name."""
    if SINGLE_FILE in names:
        return [SINGLE_FILE]
    files = select_other_flax_files(names)
    if INDEX_FILE in names:
        return [INDEX_FILE, *files]
    known = [name for name in FLAX_FILES if name in names]
    return known[:1] or files


def find_weight_files(path: AnyPath, kind: MsgpackKind) -> tuple[AnyPath, ...]:
    """Return the files of a checkpoint.

    Args:
        path: File, or folder that holds the files.
        kind: Kind of the checkpoint.

    Raises:
        PrepError: A file of the index is missing, or the folder holds several EasyLM streams.
    """
    if not path.is_dir():
        return (path,)
    names = list_folder(path)
    if kind == "easylm":
        return (path / _find_stream_file(path, names),)
    first = next((name for name in FLAX_FILES if name in names), None)
    if first is None:
        return (path / _only_file(path, select_other_flax_files(names)),)
    if first != INDEX_FILE:
        return (path / first,)
    weight_map = read_weight_map(path / INDEX_FILE, SUFFIX)
    return tuple(path / name for name in list_indexed_files(path, weight_map))


def select_indexed(
    folder: AnyPath, headers: Sequence[MsgpackHeader]
) -> tuple[list[MsgpackHeader], list[UnindexedTensor]]:
    """Return the headers with only the arrays that the folder's index names, and the records of the other arrays.

    Headers of files that were not selected by an index are returned as they are.

    Raises:
        PrepError: An array of the index is missing.
    """
    names = {header.path.name for header in headers}
    has_index = folder.is_dir() and INDEX_FILE in list_folder(folder)
    if not has_index or names <= {*FLAX_FILES} or detect_msgpack_kind([*names]) == "easylm":
        return [*headers], []
    pairs: list[tuple[str, str]] = []
    for header in headers:
        for array in header.arrays:
            pairs.append((_index_name(array), header.path.name))
    weight_map = read_weight_map(folder / INDEX_FILE, SUFFIX)
    ignored = find_unindexed(folder, pairs, weight_map)
    indexed: list[MsgpackHeader] = []
    unindexed: list[UnindexedTensor] = []
    for header in headers:
        kept: list[Array] = []
        for array in header.arrays:
            if (_index_name(array), header.path.name) in ignored:
                name = _index_name(array)
                unindexed.append(UnindexedTensor(name, header.path.name, array.nbytes))
            else:
                kept.append(array)
        indexed.append(replace(header, arrays=tuple(kept)))
    return indexed, unindexed


def _index_name(array: Array) -> str:
    """Return the name of an array in an index."""
    return "/".join(map(str, array.path))


def _only_file(folder: AnyPath, names: Sequence[str]) -> str:
    """Return the only msgpack file of a folder. Raise PrepError if there are several."""
    if len(names) == 1:
        return names[0]
    what = f"{folder} holds {len(names)} msgpack files"
    raise PrepError(what, ", ".join(names[:4]), f"name one of them: `{folder / names[0]}`")


def _find_stream_file(folder: AnyPath, names: list[str]) -> str:
    for name in STREAM_FILES:
        if name in names:
            return name
    # EasyLM appends the step to the names of milestones, e.g. `streaming_params_1000`.
    numbered = list(filter(_NUMBERED_STREAM.fullmatch, names))
    if len(numbered) == 1:
        return numbered[0]
    hint = f"one of them: `params::{folder / numbered[-1]}`"
    raise PrepError(f"{folder} holds {len(numbered)} EasyLM streams", ", ".join(numbered), hint)
