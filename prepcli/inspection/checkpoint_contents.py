"""The contents of a checkpoint: its tensors as they are stored, its config and its manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from prepcli.core.json_types import HFConfig
from prepcli.formats.orbax_chunks import StoredRange, StoredValue
from prepcli.models.parameters import VERBATIM, Family
from prepcli.models.registry import FAMILIES
from prepcli.models.text_part import TextPart
from prepcli.planning.item_storage import ChunkIndex
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Locations
from prepcli.planning.tensors import array_bits
from prepcli.quantized.decoder import Decoder
from prepcli.sources.folders import Kind
from prepcli.stores.buffers import Blob
from prepcli.stores.paths import AnyPath

MAX_PATH_PARTS = 32  # a hostile name may have millions of dots


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor or leaf.

    Attributes:
        name: Dotted name.
        path: Parts of the name, at most MAX_PATH_PARTS.
        dtype: Stored dtype.
        shape: Shape of the tensor.
        chunk_shape: Shape of a chunk. Chunks at the edge may extend beyond the tensor.
        chunks: Byte range of each chunk, in the checkpoint's byte sources.
        encoded_first_chunk: The first chunk as stored, if `chunks` refer to decoded or strided bytes.
        placement: Location of the tensor, if it is not stored in chunks.
    """

    name: str
    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    chunks: Mapping[ChunkIndex, StoredRange]
    encoded_first_chunk: StoredValue | None = None
    placement: Locations = ()

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return array_bits(self.dtype, self.shape) // 8

    @property
    def first_chunk(self) -> StoredRange | None:
        """Byte range of the first chunk, or None if the chunk is inline in an index, or not stored."""
        stored = self.encoded_first_chunk
        if stored is None:
            stored = next(iter(self.chunks.values()), None)
        if isinstance(stored, StoredRange):
            return stored
        return None


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
        entries: Tensors, in the order of the files.
        files: Data files.
        config: The model's config.json, empty if there is none. Of a multimodal model, the config of its text part.
        manifest: The manifest that prep wrote, empty if there is none.
        non_arrays: Descriptions of entries other than arrays.
        blobs: Byte sources of the chunks, if these are not `files`.
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
    entries: tuple[TensorEntry, ...]
    files: tuple[AnyPath, ...]
    config: HFConfig
    manifest: Manifest
    non_arrays: tuple[str, ...] = ()
    blobs: tuple[AnyPath | Blob, ...] = ()
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
        return sum(len(entry.chunks) for entry in self.entries)
