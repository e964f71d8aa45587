"""Flax msgpack and EasyLM streams: trees of other libraries, whose layout is found by what leaves they have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prepcli.engine.blobs import Blob, ConcatenatedBlob, FileRange
from prepcli.errors import PrepError
from prepcli.formats import safetensors
from prepcli.formats.flax_folder import check_index, find_weight_files
from prepcli.formats.manifest import read_manifest
from prepcli.formats.msgpack import MsgpackArray, MsgpackHeader, MsgpackKind, read_msgpack_header
from prepcli.formats.shard_index import shard_name
from prepcli.planning.chunk_placement import LeafPiece
from prepcli.planning.grids import StridedPlacement
from prepcli.planning.plan import DroppedTensor, SourceFile
from prepcli.planning.state_names import PARAMS, TRAINING_STATE_RULE
from prepcli.planning.strided_copies import Region
from prepcli.sources.source import Source, SourceTensor, read_config, recorded_digests, small_files
from prepcli.sources.source_hints import FLAX_PARAMS, TRAIN_STATE_PARTS, SourceHints, split_part
from prepcli.sources.tree_tensors import ForeignTree, StoredLeaf, match_foreign_tree
from trainer.models.registry import family_of

SETTINGS_SUFFIXES = {
    ".json",
    ".txt",
    ".model",
    ".jinja",
    ".md",
}  # what belongs to a model where weights may have any name


def open_flax(path: Path, display_name: str, hints: SourceHints) -> Source:
    """Headers and settings of a folder with Flax msgpack files, or of one such file. PrepError names what is broken or
    not understood."""
    return _open(path, display_name, hints, "flax")


def open_easylm(path: Path, display_name: str, hints: SourceHints) -> Source:
    """The same of an EasyLM stream, or of a folder with one."""
    return _open(path, display_name, hints, "easylm")


def _open(path: Path, name: str, given: SourceHints, kind: MsgpackKind) -> Source:
    _check_kind(kind, given, name)
    home = path if path.is_dir() else path.parent
    config_path = given.resolve_config_path(home, name)
    config = read_config(config_path)
    held = read_flax_files(path, kind)
    found = match_foreign_tree(held.stored_leaves(name), family_of(config), config, name)
    _check_part(found, given, name)
    manifest = read_manifest(path) if path.is_dir() else None
    said = (manifest or {}).get("tensors", {})
    tensors = (replace(t, digests=recorded_digests(said, found.names.full_name(t.name))) for t in found.tensors)
    small = tuple(p for p in small_files(config_path.parent) if p.suffix in SETTINGS_SUFFIXES)
    ordered = tuple(sorted(tensors, key=_position))
    return Source(
        name,
        home if path.is_dir() else path,
        found.names.family,
        config,
        found.names,
        ordered,
        held.files,
        tuple(SourceFile(d.path.name, d.size, d.mtime_ns, d.digest) for d in held.documents),
        small,
        manifest,
        tuple(held.safetensors_file_name(_position(tensor)[0]) for tensor in ordered),
        blobs=held.blobs if len(held.blobs) > len(held.files) else (),
        extra_entries=()
        if given.part == "trainstate_params"
        else (*found.extra_entries, *_numbers_beside(held, found)),
    )


def _numbers_beside(held: FlaxFiles, found: ForeignTree) -> Iterator[DroppedTensor]:
    """What a training state has that is no array, as the number of its step."""
    named = {dropped.name for dropped in found.extra_entries}
    for first in dict.fromkeys(
        aside.path[0] for document in held.documents for aside in document.non_arrays if aside.path
    ):
        if found.format.root and first not in named and first != PARAMS:
            yield DroppedTensor(first, 0, TRAINING_STATE_RULE)


@dataclass(frozen=True, slots=True)
class FlaxFiles:
    """The files of a checkpoint as they were read. An array in pieces lies in a blob that joins those of its file, so
    `blobs` are the files and then those; `owners` are the numbers of their files."""

    documents: tuple[MsgpackHeader, ...]
    blobs: tuple[Path | Blob, ...]
    blob_documents: tuple[int, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(document.path for document in self.documents)

    def array_locations(self) -> list[tuple[MsgpackArray, int, int]]:
        """Every array with the number of its blob and where it begins there."""
        found: list[tuple[MsgpackArray, int, int]] = []
        joined = dict(zip(self.blob_documents[len(self.documents) :], range(len(self.documents), len(self.blobs))))
        for number, document in enumerate(self.documents):
            at = 0
            for array in document.arrays:
                if len(array.runs) == 1:
                    found.append((array, number, array.runs[0][0]))
                    continue
                found.append((array, joined[number], at))
                at += sum(nbytes for _, nbytes in array.runs)
        return found

    def stored_leaves(self, display_name: str) -> dict[str, StoredLeaf]:
        """The arrays by dotted name; PrepError for a name that is twice there."""
        found: dict[str, StoredLeaf] = {}
        for array, blob, offset in self.array_locations():
            name = ".".join(array.path)
            if name in found:
                raise PrepError(f"{display_name} has a leaf twice", f"two are called {name}")
            zeros = (0,) * len(array.shape)
            place = partial(_only, StridedPlacement(blob, offset, zeros, zeros))
            found[name] = StoredLeaf(array.shape, array.dtype, tuple(max(1, n) for n in array.shape), place)
        return found

    def safetensors_file_name(self, blob: int) -> str:
        """What a Hugging Face folder with a file for each of these calls that of a blob."""
        count = len(self.documents)
        return (
            safetensors.SINGLE_FILE
            if count == 1
            else shard_name("model", self.blob_documents[blob] + 1, count, safetensors.SUFFIX)
        )


def read_flax_files(path: Path, kind: MsgpackKind) -> FlaxFiles:
    """The headers of all files of a checkpoint."""
    documents = [read_msgpack_header(file, kind) for file in find_weight_files(path, kind)]
    check_index(path, documents)
    joined = {number: blob for number, document in enumerate(documents) if (blob := _joined(document)).ranges}
    blobs = (*(document.path for document in documents), *joined.values())
    return FlaxFiles(tuple(documents), blobs, (*range(len(documents)), *joined))


def _joined(document: MsgpackHeader) -> ConcatenatedBlob:
    runs = (run for array in document.arrays if len(array.runs) > 1 for run in array.runs)
    return ConcatenatedBlob(document.path.name, tuple(FileRange(document.path, *run) for run in runs))


def _only(place: StridedPlacement, want: LeafPiece) -> StridedPlacement:
    """A leaf in one piece is one chunk, whatever is wanted of it."""
    return place


def _position(tensor: SourceTensor) -> tuple[int, int]:
    part = tensor.placement[0]
    return (
        (part.placement.file, part.placement.offset)
        if isinstance(part, Region) and isinstance(part.placement, StridedPlacement)
        else (0, 0)
    )


def _check_part(found: ForeignTree, given: SourceHints, name: str) -> None:
    """PrepError unless the file is what the word before its path says."""
    path = split_part(name)[1]
    if given.part in TRAIN_STATE_PARTS and not found.extra_entries:
        raise PrepError(f"{name} is no training state", "it holds parameters alone", f"`params::{path}`")
    if given.part and given.part not in TRAIN_STATE_PARTS and found.extra_entries:
        why = f"besides parameters it has {', '.join(dropped.name for dropped in found.extra_entries[:4])}"
        raise PrepError(f"{name} is a training state", why, f"`trainstate_params::{path}`")


def _check_kind(kind: MsgpackKind, given: SourceHints, name: str) -> None:
    """PrepError where the word before a path is that of the other format."""
    path = split_part(name)[1]
    if kind == "flax" and given.part not in ("", FLAX_PARAMS):
        raise PrepError(f"{name} is no EasyLM stream", "it is one Flax msgpack map", f"`{FLAX_PARAMS}::{path}`")
    if kind == "easylm" and given.part == FLAX_PARAMS:
        raise PrepError(f"{name} is no Flax msgpack file", "it is an EasyLM stream", f"`params::{path}`")
