"""Which files of a folder hold a Flax checkpoint, or an EasyLM stream."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from prepcli.errors import PrepError
from prepcli.formats.msgpack import SUFFIX, Document, Kind
from prepcli.formats.shard_index import check_agreement, files_of, holders_of, read_weight_map
from prepcli.formats.untrusted import list_folder

STEM = "flax_model"
SINGLE = f"{STEM}.{SUFFIX}"
INDEX = f"{SINGLE}.index.json"
FLAX_NAMES = (SINGLE, INDEX, "params.msgpack", "train_state.msgpack")  # in the order in which they count
STREAM = "streaming_params"
STREAM_NAMES = (STREAM, "streaming_train_state")
_SHARD = re.compile(rf"{STEM}-\d{{5}}-of-\d{{5}}\.{SUFFIX}")
_NUMBERED = re.compile(rf"({'|'.join(STREAM_NAMES)})_\d+")


def kind_of_names(names: list[str]) -> Kind | None:
    """Which of the two a folder of these files holds."""
    if any(name in names for name in FLAX_NAMES):
        return "flax"
    return "easylm" if any(name in STREAM_NAMES or _NUMBERED.fullmatch(name) for name in names) else None


def flax_weights(names: Sequence[str]) -> list[str]:
    """Of the files of a repository those of a Flax model, its index among them."""
    if SINGLE in names or INDEX not in names:
        return [SINGLE] if SINGLE in names else []
    return [INDEX, *(name for name in names if _SHARD.fullmatch(name))]


def weight_files(path: Path, kind: Kind) -> tuple[Path, ...]:
    """The files of a checkpoint that is a file, or in a folder. PrepError where one is missing, or several could be
    meant."""
    if not path.is_dir():
        return (path,)
    names = list_folder(path)
    if kind == "easylm":
        return (path / _stream(path, names),)
    first = next(name for name in FLAX_NAMES if name in names)
    if first != INDEX:
        return (path / first,)
    return tuple(path / name for name in files_of(path, read_weight_map(path / INDEX, SUFFIX)))


def check_index(folder: Path, documents: list[Document]) -> None:
    """PrepError unless the index of a folder, where its files were taken from that, and they tell the same."""
    names = {document.path.name for document in documents}
    if not folder.is_dir() or names <= {*FLAX_NAMES} or kind_of_names([*names]) == "easylm":
        return
    pairs = [("/".join(array.path), document.path.name) for document in documents for array in document.arrays]
    check_agreement(folder, read_weight_map(folder / INDEX, SUFFIX), holders_of(folder, pairs))


def _stream(folder: Path, names: list[str]) -> str:
    if found := [name for name in STREAM_NAMES if name in names]:
        return found[0]
    numbered = [name for name in names if _NUMBERED.fullmatch(name)]
    if len(numbered) == 1:
        return numbered[0]
    hint = f"one of them: `params::{folder / numbered[-1]}`"
    raise PrepError(f"{folder} holds {len(numbered)} EasyLM streams", ", ".join(numbered), hint)
