"""Contents of a GGUF model as `save-init` reads them: names of Hugging Face and decoded values."""

from __future__ import annotations

from pathlib import Path

from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.orbax_chunks import StoredRange
from prepcli.inspection.checkpoint_contents import MAX_PATH_PARTS, CheckpointContents, TensorEntry
from prepcli.planning.item_storage import ChunkIndex
from prepcli.planning.plan import Contiguous, Locations
from prepcli.quantized.gguf_blocks import FLOAT_TYPES, GgufDecoder
from prepcli.sources.dequantized import DECODED_DTYPE, cast_decoded, decoder_of_tensor
from prepcli.sources.openers.gguf_file import open_gguf
from prepcli.sources.source import SourceTensor
from prepcli.sources.source_hints import SourceHints


def read_gguf_contents(
    path: Path, display_name: str, config_path: Path | None = None
) -> CheckpointContents:
    """Return the contents of a GGUF model.

    Args:
        path: The file, or one of the files of a model in parts.
        display_name: Name of the checkpoint in messages.
        config_path: The user's config.json, or a folder with one, if any.

    Raises:
        PrepError: The file is broken, or its architecture or one of its types is not supported.
    """
    source = cast_decoded(open_gguf(path, display_name, SourceHints(config_path)), DECODED_DTYPE)
    entries: list[TensorEntry] = []
    decoders: dict[str, GgufDecoder] = {}
    for tensor in source.tensors:
        decoder = decoder_of_tensor(source, tensor)
        assert isinstance(decoder, GgufDecoder)
        name = source.names.display_name(tensor.name)
        entries.append(_tensor_entry(name, tensor, decoder))
        if decoder.type_name not in FLOAT_TYPES:
            decoders[decoder.name] = decoder
    return CheckpointContents(
        display_name=display_name,
        kind="gguf",
        folder=path,
        entries=tuple(entries),
        files=source.files,
        config={**source.config, "quantization_config": dict(source.quantization)},
        manifest=NO_MANIFEST,
        blobs=source.blobs,
        decoders=tuple(decoders.values()),
    )


def _tensor_entry(name: str, tensor: SourceTensor, decoder: GgufDecoder) -> TensorEntry:
    chunks: dict[ChunkIndex, StoredRange] = {}
    placement: Locations = tensor.placement
    location = placement[0]
    if isinstance(location, Contiguous):
        decoded = StoredRange(location.file, location.offset, tensor.nbytes)
        chunks[(0,) * len(tensor.shape)] = decoded
        placement = ()
    blocks = decoder.stored[0]
    return TensorEntry(
        name,
        tuple(name.split(".", MAX_PATH_PARTS - 1)),
        tensor.dtype,
        tensor.shape,
        tensor.shape,
        chunks,
        StoredRange(blocks.file, blocks.offset, blocks.nbytes),
        placement,
    )
