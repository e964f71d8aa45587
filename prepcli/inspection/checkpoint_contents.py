"""The contents of a checkpoint: its tensors as they are stored, its config and its manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from prepcli.algebra.chunks import FilePosition
from prepcli.core.json_values import HFConfig
from prepcli.models.parameters import VERBATIM, Family
from prepcli.models.registry import FAMILIES
from prepcli.models.text_part import TextPart
from prepcli.planning.arrays import location_copies
from prepcli.planning.manifest_fields import Manifest
from prepcli.quantized.decoder import Decoder
from prepcli.sources.folders import Kind
from prepcli.sources.source import SourceTensor
from prepcli.stores.buffers import Blob
from prepcli.stores.paths import AnyPath, path_in_folder

MAX_PATH_PARTS = 32  # a hostile name may have millions of dots


def name_path(tensor: SourceTensor) -> tuple[str, ...]:
    """Return the parts of the name of a stored tensor or leaf, at most MAX_PATH_PARTS."""
    path = tuple(map(str, tensor.placement[0].array.path[: MAX_PATH_PARTS - 1]))
    if not path:
        return tuple(tensor.name.split(".", MAX_PATH_PARTS - 1))
    rest = tensor.placement[0].array.path[MAX_PATH_PARTS - 1 :]
    return (*path, ".".join(map(str, rest))) if rest else path


def first_element(tensor: SourceTensor) -> FilePosition:
    """Return the file number and the offset of the first element of a tensor."""
    first = tensor.placement[0]
    if first.is_contiguous or not tensor.nbytes:
        return first.position
    copy = next(location_copies(tensor.placement, ((0, 1),) * len(tensor.shape)))
    return copy.file, copy.file_offset


def num_chunks(tensor: SourceTensor) -> int:
    """Return the number of stored chunks of a tensor."""
    return sum(math.prod(location.array.grid.chunk_counts) for location in tensor.placement)


class AdapterSummary(TypedDict):
    """Settings of an adapter, and the name of its base."""

    rank: int
    alpha: float
    use_rslora: bool
    scaling: float
    base: str | None


@dataclass(frozen=True, slots=True)
class CheckpointContents:
    """The stored tensors of a checkpoint and its metadata.

    Attributes:
        display_name: Name of the checkpoint in messages.
        kind: Format.
        folder: Folder or file.
        entries: Tensors as they are stored, in the order of the files.
        files: Data files.
        config: The model's config.json, empty if there is none. Of a multimodal model, the config of its text part.
        manifest: The manifest that prep wrote, empty if there is none.
        non_arrays: Descriptions of entries other than arrays.
        blobs: Byte sources of the tensors, if these are not `files`.
        encoded_places: File in `files` and offset of the first chunk of each encoded tensor, by name. None for a chunk
            inline in an index, or not stored.
        codecs: Names of the compression codecs.
        adapter: Settings of an adapter, None for a model.
        decoders: Decoders of quantised weights.
        text_part: The text part of a multimodal model in a Hugging Face folder.
        wrapper_type: `model_type` of a multimodal model, else empty.
        wrapper_prefix: Prefix that a wrapper gave to all names of a multimodal model, e.g. `_orig_mod.`. The names in
            `entries` have it, those in `text_part` do not.
    """

    display_name: str
    kind: Kind
    folder: AnyPath
    entries: tuple[SourceTensor, ...]
    files: tuple[AnyPath, ...]
    config: HFConfig
    manifest: Manifest
    non_arrays: tuple[str, ...] = ()
    blobs: tuple[AnyPath | Blob, ...] = ()
    encoded_places: Mapping[str, FilePosition | None] = field(default_factory=dict)
    codecs: tuple[str, ...] = ()
    adapter: AdapterSummary | None = None
    decoders: tuple[Decoder, ...] = ()
    text_part: TextPart | None = None
    wrapper_type: str = ""
    wrapper_prefix: str = ""

    @property
    def byte_sources(self) -> tuple[AnyPath | Blob, ...]:
        """Files and blobs, in the order of the file numbers of the chunks."""
        return self.blobs or self.files

    @property
    def is_verbatim(self) -> bool:
        """Whether prep wrote the checkpoint with the names of its source."""
        return self.manifest.family == VERBATIM

    @property
    def family(self) -> Family | None:
        """The model family. None if it is unknown, or if the names are kept as in the source."""
        if self.is_verbatim:
            return None
        if self.text_part is not None:
            return self.text_part.family
        return FAMILIES.get(str(self.config.get("model_type")))

    @property
    def num_chunks(self) -> int:
        """Number of stored chunks of all tensors."""
        return sum(map(num_chunks, self.entries))

    def first_place(self, tensor: SourceTensor) -> tuple[str, int] | None:
        """Return file name and offset of a tensor's first chunk as stored, or None if it is inline or not stored."""
        if tensor.name in self.encoded_places:
            position = self.encoded_places[tensor.name]
            if position is None:
                return None
            file: AnyPath | Blob = self.files[position[0]]
        else:
            position = first_element(tensor)
            file = self.byte_sources[position[0]]
        if isinstance(file, AnyPath) and self.folder.is_dir():
            return str(path_in_folder(file, self.folder) or file.name), position[1]
        return file.name, position[1]
