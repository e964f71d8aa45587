"""Find the files of a Flax checkpoint or an EasyLM stream in a folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from prepcli.errors import PrepError
from prepcli.formats.msgpack import SUFFIX, MsgpackHeader, MsgpackKind
from prepcli.formats.shard_index import (
    check_index_matches_files,
    list_indexed_files,
    map_tensors_to_files,
    read_weight_map,
)
from prepcli.formats.untrusted import list_folder

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
_SHARD_FILE = re.compile(rf"{STEM}-\d{{5}}-of-\d{{5}}\.{SUFFIX}")
_NUMBERED_STREAM = re.compile(rf"({'|'.join(STREAM_FILES)})_\d+")


def detect_msgpack_kind(names: Collection[str]) -> MsgpackKind | None:
    """Return `flax` or `easylm` by the file names of a folder, or None for neither."""
    if any(name in names for name in FLAX_FILES):
        return "flax"
    if any(name in STREAM_FILES or _NUMBERED_STREAM.fullmatch(name) for name in names):
        return "easylm"
    return None


def select_flax_files(names: Sequence[str]) -> list[str]:
    """Return the file names of a Flax model in a repository, with its index if it has one."""
    if SINGLE_FILE in names or INDEX_FILE not in names:
        if SINGLE_FILE in names:
            return [SINGLE_FILE]
        return []
    return [INDEX_FILE, *filter(_SHARD_FILE.fullmatch, names)]


def find_weight_files(path: Path, kind: MsgpackKind) -> tuple[Path, ...]:
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
    first = next(name for name in FLAX_FILES if name in names)
    if first != INDEX_FILE:
        return (path / first,)
    weight_map = read_weight_map(path / INDEX_FILE, SUFFIX)
    return tuple(path / name for name in list_indexed_files(path, weight_map))


def check_index(folder: Path, headers: list[MsgpackHeader]) -> None:
    """Raise PrepError if the files were selected by the folder's index and disagree with it."""
    names = {header.path.name for header in headers}
    if not folder.is_dir() or names <= {*FLAX_FILES} or detect_msgpack_kind([*names]) == "easylm":
        return
    pairs: list[tuple[str, str]] = []
    for header in headers:
        for array in header.arrays:
            pairs.append(("/".join(array.path), header.path.name))
    check_index_matches_files(
        folder, read_weight_map(folder / INDEX_FILE, SUFFIX), map_tensors_to_files(folder, pairs)
    )


def _find_stream_file(folder: Path, names: list[str]) -> str:
    for name in STREAM_FILES:
        if name in names:
            return name
    # EasyLM appends the step to the names of milestones, e.g. `streaming_params_1000`.
    numbered = list(filter(_NUMBERED_STREAM.fullmatch, names))
    if len(numbered) == 1:
        return numbered[0]
    hint = f"one of them: `params::{folder / numbered[-1]}`"
    raise PrepError(f"{folder} holds {len(numbered)} EasyLM streams", ", ".join(numbered), hint)
