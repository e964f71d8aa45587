"""A checkpoint seen as tensors, whatever holds them: what every conversion reads from."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prepcli.engine.blobs import Blob
from prepcli.errors import PrepError
from prepcli.formats import safetensors
from prepcli.formats.manifest import MANIFEST, OF_A_TREE
from prepcli.formats.untrusted import MOST_CONFIG_NBYTES, read_small
from prepcli.planning.accounting import Account, Names, Shaped, Wishes, account
from prepcli.planning.plan import Dropped, Side, SourceFile
from prepcli.planning.slots import joined, parted
from prepcli.planning.tensors import ITEM_BITS, cast_dtype
from prepcli.planning.vocabulary import Vocabulary, read_vocabulary
from trainer.models.axis_map import Row
from trainer.models.parameters import Config, Family, rows

CONFIG = "config.json"
HF_FOLDER = "hf"  # in an init checkpoint: config, tokenizer and what else belongs to the model
INDEX_FILES = (safetensors.INDEX, "pytorch_model.bin.index.json")
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".h5", ".gguf", ".onnx", ".ot", ".npz"}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor by its name in rows, where its bytes are, and the digests of its rows that a manifest records."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    side: Side
    digests: tuple[tuple[int, int, str], ...] = ()  # (first row, one past the last, digest)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8

    def cast(self, wanted: str | None) -> SourceTensor:
        """The tensor as it is written where another dtype is asked for."""
        return replace(self, dtype=cast_dtype(self.dtype, wanted))


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint: tensors in the order in which they lie, data files by number, and what belongs to it.

    `state`: what a training checkpoint holds besides parameters, named as `slots` has it. `files` are those that
    `facts` tell of; `blobs` what sides number, where that is not the files as they stand.
    """

    name: str  # as messages call it
    root: Path
    family: Family
    config: Config
    names: Names
    tensors: tuple[SourceTensor, ...]
    files: tuple[Path, ...]
    facts: tuple[SourceFile, ...]
    small_files: tuple[Path, ...]
    manifest: Mapping[str, Any] | None
    file_names: tuple[str, ...] = ()  # of each tensor's file, for a Hugging Face folder
    state: tuple[SourceTensor, ...] = ()
    blobs: tuple[Path | Blob, ...] = ()
    beside: tuple[Dropped, ...] = ()  # what else the files hold, which no conversion takes

    @property
    def reads(self) -> tuple[Path | Blob, ...]:
        """What sides number."""
        return self.blobs or self.files

    @property
    def everything(self) -> tuple[SourceTensor, ...]:
        """Parameters, and what else a training checkpoint holds."""
        return *self.tensors, *self.state

    @property
    def laid_out(self) -> Mapping[str, Any]:
        """The manifest of an Orbax checkpoint that prep wrote; of anything else nothing."""
        return self.manifest if self.manifest and self.manifest["kind"] in OF_A_TREE else {}

    def shown_names(self) -> dict[str, str]:
        """How each tensor is called outside of prep."""
        shown = {t.name: self.names.full(t.name) for t in self.tensors}
        for slot, name in (parted(t.name) for t in self.state):
            shown[joined(slot, name)] = joined(slot, self.names.full(name)) if slot else name
        return shown

    def vocabulary(self, true: int | None = None) -> Vocabulary:
        """True and stored vocabulary; `true` is what the user says."""
        return read_vocabulary(self.config, self.family.sizes(self.config)["vocab"], true)

    def shaped(self) -> dict[str, Shaped]:
        """Name -> shape of every tensor."""
        return {t.name: Shaped(t.dtype, t.shape, t.nbytes) for t in self.tensors}


def counted(source: Source, table: Mapping[str, Row], wishes: Wishes) -> Account:
    """Which row has which tensor of the source."""
    sizes = source.family.sizes(source.config)
    return account(source.names, source.config, sizes, table, source.shaped(), wishes, source.name)


def stored_table(source: Source) -> dict[str, Row]:
    """The rows of the source's family as it has its layers, stacked where it has none of its own."""
    return table_of(source, source.laid_out.get("scan", True), source.laid_out.get("scan_axis", 0))


def table_of(source: Source, scan: bool = True, scan_axis: int = 0) -> dict[str, Row]:
    """The rows of the source's family for its config."""
    return rows(source.family, source.config, scan, scan_axis, {t.name for t in source.tensors})


def read_config(path: Path) -> dict[str, Any]:
    """A config.json; PrepError where it is missing or no JSON object."""
    if not os.path.exists(path):
        raise PrepError(f"{path.parent} has no {path.name}", "it says what model the weights are of")
    try:
        found = json.loads(read_small(path, MOST_CONFIG_NBYTES))
    except (ValueError, RecursionError) as error:
        raise PrepError(f"{path} is broken", str(error)) from error
    if not isinstance(found, dict):
        raise PrepError(f"{path} is broken", "it holds no JSON object")
    return found


def small_files(folder: Path) -> tuple[Path, ...]:
    """What belongs to a model besides its weights: tokenizer, generation config, licence …; never code."""
    if not folder.is_dir():
        return ()
    skipped = {CONFIG, MANIFEST, *INDEX_FILES}
    return tuple(
        p
        for p in sorted(folder.iterdir())
        if p.is_file() and p.name not in skipped and p.suffix not in {*WEIGHTS, ".py"} and not p.name.startswith(".")
    )


def recorded(tensors: Mapping[str, Any], name: str) -> tuple[tuple[int, int, str], ...]:
    """The digests that a manifest's records have of a tensor."""
    return tuple((low, high, text) for low, high, text in tensors.get(name, {}).get("digests", ()))
