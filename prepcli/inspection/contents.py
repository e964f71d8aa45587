"""Contents of a checkpoint as stored: names, shapes, dtypes and locations, without weights or a known family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from prepcli.algebra.chunks import FilePosition, StoredRange
from prepcli.core.errors import Command, PrepError, text
from prepcli.core.json_values import HFConfig
from prepcli.formats import msgpack
from prepcli.formats.codecs import CODECS
from prepcli.formats.manifest import NO_MANIFEST, find_manifest_folder, read_manifest
from prepcli.formats.orbax import OrbaxNonArray, find_item, read_item
from prepcli.formats.orbax_chunks import dotted_name
from prepcli.formats.safetensors import read_safetensors_folder
from prepcli.formats.torch_dcp import read_dcp_folder
from prepcli.formats.torch_files import read_torch_folder
from prepcli.inspection.checkpoint_contents import (
    AdapterSummary,
    CheckpointContents,
)
from prepcli.planning.arrays import whole_array
from prepcli.planning.map_file import TensorMap
from prepcli.quantized.find_weights import QuantizedWeights, without_quantization
from prepcli.quantized.gguf_blocks import FLOAT_TYPES, GgufDecoder
from prepcli.sources.decoded_arrays import DecodedArray
from prepcli.sources.dequantized import (
    DECODED_DTYPE,
    DequantizedBlob,
    cast_decoded,
    decoder_of_tensor,
    find_stored_weights,
    model_quantization,
    not_quantized_error,
    quantization_file,
)
from prepcli.sources.folders import Kind
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.multimodal import (
    MULTIMODAL_KINDS,
    find_text_part,
    multimodal_wrapper_prefix,
)
from prepcli.sources.openers.flax_tree import read_flax_files
from prepcli.sources.openers.gguf_file import open_gguf
from prepcli.sources.openers.meta_folder import open_meta
from prepcli.sources.openers.orbax_item import find_config, stored_leaves
from prepcli.sources.openers.peft_folder import read_header
from prepcli.sources.opening import check_recorded_files, open_source
from prepcli.sources.source import (
    CONFIG,
    Source,
    SourceTensor,
    check_headers,
    file_stamps,
    read_config,
    stored_tensor,
)
from prepcli.sources.source_hints import NO_HINTS, SourceHints
from prepcli.sources.unused_quantization import unused_quantization_note
from prepcli.stores.paths import AnyPath


def read_contents(
    located: LocatedCheckpoint, config_path: Path | None = None, *, dequantize: bool = False
) -> CheckpointContents:
    """Read the headers or the index of a located checkpoint.

    Args:
        located: Result of `locate`.
        config_path: The user's config.json, or a folder with one, if any.
        dequantize: Return quantised weights decoded, without their scales.

    Raises:
        UsageError: `dequantize` is set, and no weight is quantised.
        PrepError: The checkpoint is broken or not supported.
    """
    check_recorded_files(located.files, located.manifest)
    contents = READERS[located.kind](located.files.path, located.display_name)
    if config_path is not None:
        hints = SourceHints(config_path)
        config = read_config(hints.resolve_config_path(contents.folder, located.display_name))
        contents = replace(contents, config=config)
    if dequantize:
        return _with_text_part(_decoded(contents))
    return _with_text_part(_with_decoders(contents))


def _with_text_part(contents: CheckpointContents) -> CheckpointContents:
    """Return the contents with the text part of a multimodal model, if it has a supported one."""
    if contents.manifest.is_tree:
        wrapper_type = (contents.manifest.towers or {}).get("model_type", "")
        # A model with multi-token prediction is no other type than its parameters.
        if wrapper_type == contents.manifest.config.get("model_type"):
            return contents
        return replace(contents, wrapper_type=str(wrapper_type))
    if contents.kind not in MULTIMODAL_KINDS or contents.family or contents.is_verbatim:
        return contents
    full_names = [entry.name for entry in contents.entries]
    prefix = multimodal_wrapper_prefix(contents.config, full_names)
    part = find_text_part(contents.config, (name.removeprefix(prefix) for name in full_names))
    if part is None:
        return contents
    wrapper_type = str(contents.config.get("model_type"))
    return replace(
        contents,
        config=part.config,
        text_part=part,
        wrapper_type=wrapper_type,
        wrapper_prefix=prefix,
    )


def _with_decoders(contents: CheckpointContents) -> CheckpointContents:
    """Return the contents with the decoders of quantised weights. A fault becomes one of `non_arrays`."""
    settings = model_quantization(contents.config, contents.folder)
    if not settings and contents.kind in ("safetensors", "torch"):
        remark = unused_quantization_note(contents.folder)
        if remark:
            return replace(contents, non_arrays=(*contents.non_arrays, remark))
    if not settings or contents.kind != "safetensors":
        return contents
    try:
        weights = _find_weights(contents)
    except PrepError as error:
        remark = f"{error.what}: {error.why}"
        return replace(contents, non_arrays=(*contents.non_arrays, remark))
    return replace(contents, decoders=weights.decoders)


def _find_weights(contents: CheckpointContents) -> QuantizedWeights:
    """Return the quantised weights of safetensors files."""
    # A tensor of safetensors files is one array.
    tensors = [entry.placement[0].array for entry in contents.entries]
    return find_stored_weights(
        model_quantization(contents.config, contents.folder),
        tensors,
        contents.byte_sources,
        settings_file=quantization_file(contents.config, contents.folder),
    )


def _decoded(contents: CheckpointContents) -> CheckpointContents:
    """Return the contents with decoded weights in place of their codes, and without scales."""
    if not model_quantization(contents.config, contents.folder):
        raise not_quantized_error(contents.display_name, contents.folder)
    if contents.kind != "safetensors":
        hint = text("save the model as safetensors")
        if contents.kind == "orbax":
            hint = text("{} writes them", Command("export", contents.display_name))
        why = "inspect decodes quantised weights in safetensors files only"
        raise PrepError(f"{contents.display_name} cannot be decoded", why, hint)
    weights = _find_weights(contents)
    files = contents.byte_sources
    blob = DequantizedBlob(contents.display_name, weights.decoders, files, DECODED_DTYPE)
    number = len(files)
    decoded: dict[str, SourceTensor] = {}
    places: dict[str, FilePosition | None] = {}
    for decoder, start in zip(weights.decoders, blob.weight_offsets):
        values = whole_array(decoder.name, DECODED_DTYPE, decoder.shape, (number, start))
        codes = decoder.stored[0]
        decoded[codes.name] = stored_tensor(values)
        places[decoder.name] = codes.position
    stored_names = weights.stored_names | weights.activation_scales
    entries: list[SourceTensor] = []
    for entry in contents.entries:
        if entry.name in decoded:
            entries.append(decoded[entry.name])
        elif entry.name not in stored_names:
            entries.append(entry)
    return replace(
        contents,
        entries=tuple(entries),
        config=without_quantization(contents.config),
        blobs=(*files, blob),
        encoded_places=places,
    )


def _read_safetensors(path: AnyPath, display_name: str) -> CheckpointContents:
    folder = read_safetensors_folder(path)
    manifest = read_manifest(path) or NO_MANIFEST
    check_headers(path, manifest, file_stamps(folder.headers))
    return CheckpointContents(
        display_name=display_name,
        kind="safetensors",
        folder=path,
        entries=tuple(map(stored_tensor, folder.tensors)),
        files=tuple(path / header.file_name for header in folder.headers),
        config=_read_config_if_present(path),
        manifest=manifest,
        non_arrays=tuple(map(str, folder.unindexed)),
    )


def _read_adapter(path: AnyPath, display_name: str) -> CheckpointContents:
    """Read an adapter of PEFT. Adapters with unsupported settings can be shown, but not merged."""
    from prepcli.sources.openers.peft_settings import read_settings

    header = read_header(path)
    manifest = read_manifest(path) or NO_MANIFEST
    check_headers(path, manifest, file_stamps([header]))
    adapter: AdapterSummary | None = None
    remarks: list[str] = []
    try:
        settings = read_settings(path)
        lora = settings.lora_config()
        adapter = {
            "rank": lora.rank,
            "alpha": lora.alpha,
            "use_rslora": lora.use_rslora,
            "scaling": lora.scaling,
            "base": settings.base_model_name_or_path,
        }
    except PrepError as error:
        remarks.append(f"{error.what}: {error.why}")
    return CheckpointContents(
        display_name=display_name,
        kind="adapter",
        folder=path,
        entries=tuple(map(stored_tensor, header.tensors)),
        files=(path / header.file_name,),
        config={},
        manifest=manifest,
        non_arrays=tuple(remarks),
        adapter=adapter,
    )


def _read_config_if_present(folder: AnyPath) -> HFConfig:
    if (folder / CONFIG).exists():
        return read_config(folder / CONFIG)
    return {}


def _read_torch(path: AnyPath, display_name: str) -> CheckpointContents:
    """Read the contents of PyTorch weight files."""
    folder = read_torch_folder(path)
    non_arrays = [str(tensor) for tensor in folder.unindexed]
    for header in folder.headers:
        non_arrays += [f"{header.file_name}: {text}" for text in header.non_tensors]
    return CheckpointContents(
        display_name=display_name,
        kind="torch",
        folder=path,
        entries=tuple(map(stored_tensor, folder.tensors)),
        files=folder.files,
        config=_read_config_if_present(path),
        manifest=NO_MANIFEST,
        non_arrays=tuple(non_arrays),
    )


def _read_dcp(path: AnyPath, display_name: str) -> CheckpointContents:
    """Read the contents of a PyTorch distributed checkpoint."""
    folder = read_dcp_folder(path)
    return CheckpointContents(
        display_name=display_name,
        kind="dcp",
        folder=path,
        entries=tuple(map(stored_tensor, folder.tensors)),
        files=folder.files,
        config=_read_config_if_present(path),
        manifest=NO_MANIFEST,
        non_arrays=tuple(f"{name} is not a tensor" for name in folder.non_tensors),
    )


def _read_meta_llama(path: AnyPath, display_name: str) -> CheckpointContents:
    """Read a LLaMA checkpoint in Meta's own format: `params.json` and one file per shard.

    The entries are the Hugging Face tensors, each assembled from the shards.
    """
    source = open_meta(path, display_name, NO_HINTS)
    return CheckpointContents(
        display_name=display_name,
        kind="meta",
        folder=path,
        entries=_renamed(source, _display_names(source)),
        files=source.files,
        config=source.config,
        manifest=NO_MANIFEST,
        blobs=source.blobs,
    )


def _renamed(source: Source, names: Iterable[str]) -> tuple[SourceTensor, ...]:
    """Return the parameters of a source under other names."""
    tensors: list[SourceTensor] = []
    for tensor, name in zip(source.tensors, names, strict=True):
        tensors.append(replace(tensor, name=name, digests=()))
    return tuple(tensors)


def _display_names(source: Source) -> Iterator[str]:
    return (source.names.display_name(tensor.name) for tensor in source.tensors)


def _read_flax(kind: msgpack.MsgpackKind, path: AnyPath, display_name: str) -> CheckpointContents:
    flax_files = read_flax_files(path, kind)
    non_arrays = [str(tensor) for tensor in flax_files.unindexed]
    for document in flax_files.documents:
        non_arrays += map(str, document.non_arrays)
    folder = path if path.is_dir() else path.parent
    manifest = (read_manifest(path) or NO_MANIFEST) if path.is_dir() else NO_MANIFEST
    check_headers(folder, manifest, flax_files.stamps)
    return CheckpointContents(
        display_name=display_name,
        kind=kind,
        folder=path,
        entries=tuple(map(stored_tensor, flax_files.arrays)),
        files=flax_files.files,
        config=_read_config_if_present(folder),
        manifest=manifest,
        non_arrays=tuple(non_arrays),
    )


def _read_orbax(path: AnyPath, display_name: str) -> CheckpointContents:
    """Read the contents of an Orbax checkpoint."""
    item = read_item(find_item(path) or path)
    manifest = read_manifest(find_manifest_folder(item.folder)) or NO_MANIFEST
    config_path = find_config(item.folder, path)
    near_config = read_config(config_path) if config_path else {}
    blobs, leaves = stored_leaves(item)
    places: dict[str, FilePosition | None] = {}
    for blob in blobs:
        if isinstance(blob, DecodedArray):
            _, first = next(blob.meta.stored_chunks(), (None, b""))
            is_in_file = isinstance(first, StoredRange)
            places[blob.meta.name] = (first.file, first.offset) if is_in_file else None
    names = dict.fromkeys(chain.from_iterable(array.codecs for array in item.arrays))
    # A checksum compresses nothing.
    codecs = [name for name in names if not CODECS[name].is_checksum]
    unlisted = (f"{name} is in the index, but not in the tree" for name in item.unlisted_names)
    return CheckpointContents(
        display_name=display_name,
        kind="orbax",
        folder=item.folder,
        entries=tuple(map(stored_tensor, leaves.values())),
        files=item.files,
        config=manifest.config or near_config,
        manifest=manifest,
        non_arrays=(*map(_describe_non_array, item.non_arrays), *unlisted),
        blobs=blobs,
        encoded_places=places,
        codecs=tuple(codecs),
    )


def _describe_non_array(entry: OrbaxNonArray) -> str:
    if entry.value_type == "string":
        value = f"the text {entry.text!r}"
    else:
        value = f"an empty {entry.value_type}"
    return f"{dotted_name(entry.path)} is {value}"


def read_mapped_contents(
    located: LocatedCheckpoint,
    config_path: Path | None,
    tensor_map: TensorMap | None,
    layout: str | None = None,
) -> CheckpointContents:
    """Return the contents of a checkpoint with the targets of a map or a layout as its tensors.

    Args:
        located: Result of `locate`.
        config_path: The user's config.json, or a folder with one, if any.
        tensor_map: The map, or None for a layout.
        layout: Name of the layout of another library.

    Raises:
        PrepError: The checkpoint is broken, or the map or layout does not fit it.
    """
    source = open_source(located, config_path, verbatim=None, tensor_map=tensor_map, layout=layout)
    return CheckpointContents(
        display_name=source.display_name,
        # The names and shapes are those of a Hugging Face folder, in whatever format they are stored.
        kind="safetensors",
        folder=source.root,
        entries=_renamed(source, map(source.file_name, source.tensors)),
        files=source.files,
        config=source.config,
        manifest=NO_MANIFEST,
        blobs=source.blobs,
    )


def read_gguf_contents(
    path: AnyPath, display_name: str, config_path: Path | None = None
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
    entries = _renamed(source, _display_names(source))
    decoders: dict[str, GgufDecoder] = {}
    places: dict[str, FilePosition | None] = {}
    for tensor, entry in zip(source.tensors, entries):
        decoder = decoder_of_tensor(source, tensor)
        assert isinstance(decoder, GgufDecoder)
        places[entry.name] = decoder.stored[0].position
        if decoder.type_name not in FLOAT_TYPES:
            decoders[decoder.name] = decoder
    return CheckpointContents(
        display_name=display_name,
        kind="gguf",
        folder=path,
        entries=entries,
        files=source.files,
        config={**source.config, "quantization_config": dict(source.quantization)},
        manifest=NO_MANIFEST,
        blobs=source.blobs,
        encoded_places=places,
        decoders=tuple(decoders.values()),
    )


READERS: Mapping[Kind, Callable[[AnyPath, str], CheckpointContents]] = {
    "safetensors": _read_safetensors,
    "flax": partial(_read_flax, "flax"),
    "easylm": partial(_read_flax, "easylm"),
    "torch": _read_torch,
    "meta": _read_meta_llama,
    "dcp": _read_dcp,
    "orbax": _read_orbax,
    "adapter": _read_adapter,
}
