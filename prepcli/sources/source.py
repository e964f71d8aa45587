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
from prepcli.formats.manifest import KEYS_BY_KIND, MANIFEST_FILE
from prepcli.formats.untrusted import MAX_CONFIG_NBYTES, read_small_file
from prepcli.planning.accounting import Accounting, MatchOptions, TensorInfo, TensorNames, match_tensors
from prepcli.planning.plan import DroppedTensor, Locations, SourceFile
from prepcli.planning.state_names import qualify, split_name
from prepcli.planning.tensors import ITEM_BITS, cast_dtype
from prepcli.planning.vocabulary import Vocabulary, read_vocabulary
from trainer.models.axis_map import Row
from trainer.models.parameters import Family, HFConfig, parameter_rows

CONFIG = "config.json"
HF_FOLDER = "hf"  # in an init checkpoint: config, tokenizer and what else belongs to the model
INDEX_FILES = (safetensors.INDEX_FILE, "pytorch_model.bin.index.json")
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".msgpack", ".h5", ".gguf", ".onnx", ".ot", ".npz"}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor by its name in rows, where its bytes are, and the digests of its rows that a manifest records."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: Locations
    digests: tuple[tuple[int, int, str], ...] = ()  # (first row, one past the last, digest)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8

    def cast(self, dtype: str | None) -> SourceTensor:
        """The tensor as it is written where another dtype is asked for."""
        return replace(self, dtype=cast_dtype(self.dtype, dtype))


@dataclass(frozen=True, slots=True)
class Source:
    """An opened checkpoint: tensors in the order in which they lie, data files by number, and what belongs to it.

    `state`: what a training checkpoint holds besides parameters, named as `slots` has it. `files` are those that
    `facts` tell of; `blobs` what sides number, where that is not the files as they stand.
    """

    display_name: str  # as messages call it
    root: Path
    family: Family
    config: HFConfig
    names: TensorNames
    tensors: tuple[SourceTensor, ...]
    files: tuple[Path, ...]
    file_stamps: tuple[SourceFile, ...]
    small_files: tuple[Path, ...]
    manifest: Mapping[str, Any] | None
    tensor_file_names: tuple[str, ...] = ()  # of each tensor's file, for a Hugging Face folder
    state_tensors: tuple[SourceTensor, ...] = ()
    blobs: tuple[Path | Blob, ...] = ()
    extra_entries: tuple[DroppedTensor, ...] = ()  # what else the files hold, which no conversion takes

    @property
    def byte_sources(self) -> tuple[Path | Blob, ...]:
        """What sides number."""
        return self.blobs or self.files

    @property
    def all_tensors(self) -> tuple[SourceTensor, ...]:
        """Parameters, and what else a training checkpoint holds."""
        return *self.tensors, *self.state_tensors

    @property
    def tree_manifest(self) -> Mapping[str, Any]:
        """The manifest of an Orbax checkpoint that prep wrote; of anything else nothing."""
        return self.manifest if self.manifest and self.manifest["kind"] in KEYS_BY_KIND else {}

    def display_names(self) -> dict[str, str]:
        """How each tensor is called outside of prep."""
        shown = {t.name: self.names.full_name(t.name) for t in self.tensors}
        for slot, name in (split_name(t.name) for t in self.state_tensors):
            shown[qualify(slot, name)] = qualify(slot, self.names.full_name(name)) if slot else name
        return shown

    def vocabulary(self, true_size: int | None = None) -> Vocabulary:
        """True and stored vocabulary; `true` is what the user says."""
        return read_vocabulary(self.config, self.family.sizes(self.config)["vocab"], true_size)

    def tensor_specs(self) -> dict[str, TensorInfo]:
        """Name -> shape of every tensor."""
        return {t.name: TensorInfo(t.dtype, t.shape, t.nbytes) for t in self.tensors}


def match_source_tensors(source: Source, table: Mapping[str, Row], options: MatchOptions) -> Accounting:
    """Which row has which tensor of the source."""
    sizes = source.family.sizes(source.config)
    return match_tensors(source.names, source.config, sizes, table, source.tensor_specs(), options, source.display_name)


def stored_rows(source: Source) -> dict[str, Row]:
    """The rows of the source's family as it has its layers, stacked where it has none of its own."""
    return source_rows(source, source.tree_manifest.get("scan", True), source.tree_manifest.get("scan_axis", 0))


def source_rows(source: Source, scan: bool = True, scan_axis: int = 0) -> dict[str, Row]:
    """The rows of the source's family for its config."""
    return parameter_rows(source.family, source.config, scan, scan_axis, {t.name for t in source.tensors})


def read_config(path: Path) -> dict[str, Any]:
    """A config.json; PrepError where it is missing or no JSON object."""
    if not os.path.exists(path):
        raise PrepError(f"{path.parent} has no {path.name}", "it says what model the weights are of")
    try:
        found = json.loads(read_small_file(path, MAX_CONFIG_NBYTES))
    except (ValueError, RecursionError) as error:
        raise PrepError(f"{path} is broken", str(error)) from error
    if not isinstance(found, dict):
        raise PrepError(f"{path} is broken", "it holds no JSON object")
    return found


def small_files(folder: Path) -> tuple[Path, ...]:
    """What belongs to a model besides its weights: tokenizer, generation config, licence …; never code."""
    if not folder.is_dir():
        return ()
    skipped = {CONFIG, MANIFEST_FILE, *INDEX_FILES}
    return tuple(
        p
        for p in sorted(folder.iterdir())
        if p.is_file()
        and p.name not in skipped
        and p.suffix not in {*WEIGHT_SUFFIXES, ".py"}
        and not p.name.startswith(".")
    )


def recorded_digests(records: Mapping[str, Any], name: str) -> tuple[tuple[int, int, str], ...]:
    """The digests that a manifest's records have of a tensor."""
    return tuple((low, high, text) for low, high, text in records.get(name, {}).get("digests", ()))
