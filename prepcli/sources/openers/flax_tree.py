"""Flax msgpack and EasyLM streams: trees of other libraries, whose layout is found by what leaves they have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prepcli.engine.blobs import Blob, Joined, Part
from prepcli.errors import PrepError
from prepcli.formats import safetensors
from prepcli.formats.flax_folder import check_index, weight_files
from prepcli.formats.manifest import read_manifest
from prepcli.formats.msgpack import Array, Document, Kind, read_document
from prepcli.formats.shard_index import shard_name
from prepcli.planning.grids import Lattice
from prepcli.planning.moves import Region
from prepcli.planning.placing import Want
from prepcli.planning.plan import Dropped, SourceFile
from prepcli.planning.slots import PARAMS, STATE_RULE
from prepcli.sources.hints import FLAX, OF_A_STATE, Given, parted_name
from prepcli.sources.source import Source, SourceTensor, read_config, recorded, small_files
from prepcli.sources.tree_tensors import Foreign, HeldLeaf, foreign_tensors
from trainer.models.registry import family_of

SETTINGS = {".json", ".txt", ".model", ".jinja", ".md"}  # what belongs to a model where weights may have any name


def open_flax(path: Path, name: str, given: Given) -> Source:
    """Headers and settings of a folder with Flax msgpack files, or of one such file. PrepError names what is broken or
    not understood."""
    return _open(path, name, given, "flax")


def open_stream(path: Path, name: str, given: Given) -> Source:
    """The same of an EasyLM stream, or of a folder with one."""
    return _open(path, name, given, "easylm")


def _open(path: Path, name: str, given: Given, kind: Kind) -> Source:
    _check_kind(kind, given, name)
    home = path if path.is_dir() else path.parent
    config_path = given.config_file(home, name)
    config = read_config(config_path)
    held = read_held(path, kind)
    found = foreign_tensors(held.leaves(name), family_of(config), config, name)
    _check_part(found, given, name)
    manifest = read_manifest(path) if path.is_dir() else None
    said = (manifest or {}).get("tensors", {})
    tensors = (replace(t, digests=recorded(said, found.names.full(t.name))) for t in found.tensors)
    small = tuple(p for p in small_files(config_path.parent) if p.suffix in SETTINGS)
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
        tuple(held.safetensors_name(_position(tensor)[0]) for tensor in ordered),
        blobs=held.blobs if len(held.blobs) > len(held.files) else (),
        beside=() if given.part == "trainstate_params" else (*found.beside, *_numbers_beside(held, found)),
    )


def _numbers_beside(held: HeldFiles, found: Foreign) -> Iterator[Dropped]:
    """What a training state has that is no array, as the number of its step."""
    named = {dropped.name for dropped in found.beside}
    for first in dict.fromkeys(aside.path[0] for document in held.documents for aside in document.asides if aside.path):
        if found.form.root and first not in named and first != PARAMS:
            yield Dropped(first, 0, STATE_RULE)


@dataclass(frozen=True, slots=True)
class HeldFiles:
    """The files of a checkpoint as they were read. An array in pieces lies in a blob that joins those of its file, so
    `blobs` are the files and then those; `owners` are the numbers of their files."""

    documents: tuple[Document, ...]
    blobs: tuple[Path | Blob, ...]
    owners: tuple[int, ...]

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(document.path for document in self.documents)

    def places(self) -> list[tuple[Array, int, int]]:
        """Every array with the number of its blob and where it begins there."""
        found: list[tuple[Array, int, int]] = []
        joined = dict(zip(self.owners[len(self.documents) :], range(len(self.documents), len(self.blobs))))
        for number, document in enumerate(self.documents):
            at = 0
            for array in document.arrays:
                if len(array.runs) == 1:
                    found.append((array, number, array.runs[0][0]))
                    continue
                found.append((array, joined[number], at))
                at += sum(nbytes for _, nbytes in array.runs)
        return found

    def leaves(self, where: str) -> dict[str, HeldLeaf]:
        """The arrays by dotted name; PrepError for a name that is twice there."""
        found: dict[str, HeldLeaf] = {}
        for array, blob, offset in self.places():
            name = ".".join(array.path)
            if name in found:
                raise PrepError(f"{where} has a leaf twice", f"two are called {name}")
            zeros = (0,) * len(array.shape)
            place = partial(_only, Lattice(blob, offset, zeros, zeros))
            found[name] = HeldLeaf(array.shape, array.dtype, tuple(max(1, n) for n in array.shape), place)
        return found

    def safetensors_name(self, blob: int) -> str:
        """What a Hugging Face folder with a file for each of these calls that of a blob."""
        count = len(self.documents)
        return (
            safetensors.SINGLE if count == 1 else shard_name("model", self.owners[blob] + 1, count, safetensors.SUFFIX)
        )


def read_held(path: Path, kind: Kind) -> HeldFiles:
    """The headers of all files of a checkpoint."""
    documents = [read_document(file, kind) for file in weight_files(path, kind)]
    check_index(path, documents)
    joined = {number: blob for number, document in enumerate(documents) if (blob := _joined(document)).parts}
    blobs = (*(document.path for document in documents), *joined.values())
    return HeldFiles(tuple(documents), blobs, (*range(len(documents)), *joined))


def _joined(document: Document) -> Joined:
    runs = (run for array in document.arrays if len(array.runs) > 1 for run in array.runs)
    return Joined(document.path.name, tuple(Part(document.path, *run) for run in runs))


def _only(place: Lattice, want: Want) -> Lattice:
    """A leaf in one piece is one chunk, whatever is wanted of it."""
    return place


def _position(tensor: SourceTensor) -> tuple[int, int]:
    part = tensor.side[0]
    return (
        (part.places.file, part.places.offset)
        if isinstance(part, Region) and isinstance(part.places, Lattice)
        else (0, 0)
    )


def _check_part(found: Foreign, given: Given, name: str) -> None:
    """PrepError unless the file is what the word before its path says."""
    path = parted_name(name)[1]
    if given.part in OF_A_STATE and not found.beside:
        raise PrepError(f"{name} is no training state", "it holds parameters alone", f"`params::{path}`")
    if given.part and given.part not in OF_A_STATE and found.beside:
        why = f"besides parameters it has {', '.join(dropped.name for dropped in found.beside[:4])}"
        raise PrepError(f"{name} is a training state", why, f"`trainstate_params::{path}`")


def _check_kind(kind: Kind, given: Given, name: str) -> None:
    """PrepError where the word before a path is that of the other format."""
    path = parted_name(name)[1]
    if kind == "flax" and given.part not in ("", FLAX):
        raise PrepError(f"{name} is no EasyLM stream", "it is one Flax msgpack map", f"`{FLAX}::{path}`")
    if kind == "easylm" and given.part == FLAX:
        raise PrepError(f"{name} is no Flax msgpack file", "it is an EasyLM stream", f"`params::{path}`")
