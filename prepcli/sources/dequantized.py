"""A source of quantised weights as a source of floats, and back to the quantised bytes.

Each weight and its scales become one tensor. The decoded weights are one blob, one weight after another. A read decodes
the rows that it covers, in blocks, so that memory does not depend on the sizes of tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.json_values import quote_name
from prepcli.engine.blobs import CastRows, DerivedArrays, Operation, open_blobs
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.models.text_part import with_text_config
from prepcli.planning.arrays import Array, Location, whole_array
from prepcli.planning.manifest_fields import Manifest, QuantizedRecord
from prepcli.planning.tensors import DECODED, QUANTIZATION, itemsize, qualify, split_name
from prepcli.quantized.decoder import Decoder
from prepcli.quantized.formats import (
    QUANTIZATION_FILES,
    QuantizedWeights,
    find_weights,
    quantization_settings,
    without_quantization,
)
from prepcli.sources.decoded_arrays import JoinChunks
from prepcli.sources.detect import (
    has_quantized_tensors,
    model_quantization,
    not_quantized_error,
    quantization_file,
)
from prepcli.sources.dropped_tensors import without_recorded_drops
from prepcli.sources.model_family import as_verbatim, split_towers
from prepcli.sources.source import (
    HF_FOLDER,
    Source,
    SourceTensor,
    append_files,
    match_source_tensors,
    shift_file_numbers,
    stored_rows,
)
from prepcli.sources.tensor_match import DEFAULT_MATCH_OPTIONS, Vocabulary, with_vocabulary
from prepcli.sources.vocabulary_tensors import vocabulary_names
from prepcli.stores.buffers import Blob
from prepcli.stores.paths import AnyPath

DECODED_DTYPE = "bfloat16"


def dequantize_source(source: Source) -> Source:
    """Return a source with one float tensor for each quantised weight and its scales.

    Raises:
        UsageError: The weights are not quantised.
        PrepError: The format is not supported.
        DamagedError: A tensor is missing, does not fit, or contradicts the config.
    """
    settings, weights, stored = _find_source_weights(source)
    blob = DerivedArrays(source.display_name, weights.decoders, stored)
    decoded = _decoded_source(source, weights, blob)
    side_files = [file for file in source.side_files if file.name not in QUANTIZATION_FILES]
    records: dict[str, QuantizedRecord] = {}
    for decoder in weights.decoders:
        codes = decoder.stored[0]
        records[decoder.name] = {
            "format": str(settings.get("quant_method")),
            "codes": codes.name,
            "dtype": codes.dtype,
            "shape": [*codes.shape],
            # Of the decoded values. It is known when they are written.
            "digest": "",
        }
    decoded = replace(
        decoded,
        config=without_quantization(source.config),
        side_files=tuple(side_files),
        blobs=(*source.byte_sources, blob),
        # The config of the output is another one than the file.
        config_path=None,
        quantization=settings,
        quantized=records,
    )
    return as_verbatim(decoded) if decoded.family.is_verbatim else decoded


def quantization_entries(source: Source) -> Manifest:
    """Return the manifest's entries of dequantised weights. A copy of an init keeps them."""
    entries = Manifest()
    settings = source.quantization or source.tree_manifest.quantization
    if settings:
        entries |= Manifest(quantization=settings)
    if source.quantized:
        entries |= Manifest(quantized=source.quantized)
    return entries


def without_unused_quantization(source: Source) -> Source:
    """Return a source without quantisation settings if no tensor of its files is quantised.

    The outputs must not have the settings either: with a `quantization_config`, transformers needs the library of the
    method and builds layers for codes and scales, whatever the tensors are.
    """
    files = tuple(file for file in source.side_files if file.name not in QUANTIZATION_FILES)
    has_settings = bool(quantization_settings(source.config)) or files != source.side_files
    if not has_settings or has_quantized_tensors(source.root):
        return source
    config = without_quantization(source.config)
    config_path = source.config_path if config == source.config else None
    return replace(source, config=config, config_path=config_path, side_files=files)


def has_quantized_weights(source: Source) -> bool:
    """Return whether the tensors of an opened model, or of an init that keeps codes, are quantised."""
    return bool(quantization_file(source.config, _settings_folder(source)))


def _settings_folder(source: Source) -> AnyPath:
    """Return the folder of a source with its config.json and the settings of tools."""
    return source.root / HF_FOLDER if source.tree_manifest else source.root


def decode_alike(source: Source, other: Source) -> tuple[Source, Source]:
    """Return two sources with comparable weights: if only one has codes, they are decoded to the dtype of the other."""
    return _decode_to_dtype_of(source, other), _decode_to_dtype_of(other, source)


def _decode_to_dtype_of(source: Source, decoded: Source) -> Source:
    """Return a quantised source with its weights decoded to the dtype of `decoded`, or `source` unchanged."""
    if has_codes(source) and not has_codes(decoded):
        source = dequantize_source(source)
        if decoded.wrapper is not None:
            # A text part is not found beside scales, nor beside tensors that the output dropped.
            manifest = decoded.manifest or NO_MANIFEST
            source = without_recorded_drops(split_towers(source), manifest)
    if not source.quantization:
        return source
    dtypes = {decoded.names.stored_name(tensor.name): tensor.dtype for tensor in decoded.tensors}
    for tensor in source.tensors:
        name = source.names.stored_name(tensor.name)
        if tensor.default_dtype and name in dtypes:
            return cast_decoded(source, dtypes[name])
    return cast_decoded(source, DECODED_DTYPE)


def has_codes(source: Source) -> bool:
    """Return whether the quantised weights of a source are read as they are stored."""
    return not (source.quantized or source.quantization) and has_quantized_weights(source)


def decoder_of_tensor(source: Source, tensor: SourceTensor) -> Decoder:
    """Return the decoder of a decoded tensor. A decoder may have several tensors, e.g. one for each expert."""
    blob = _decoded_blob(source)
    return _decoder_of(blob.operations[blob.number_at(tensor.placement[0].array.offset)])


def _decoder_of(operation: Operation) -> Decoder:
    if isinstance(operation, CastRows):
        operation = operation.operation
    assert isinstance(operation, Decoder)
    return operation


def _decoded_blob(source: Source) -> DerivedArrays:
    """Return the decoded weights of a source. They are its last byte source."""
    blob = source.blobs[-1]
    assert isinstance(blob, DerivedArrays)
    return blob


def cast_decoders(decoders: Sequence[Decoder], dtype: str) -> tuple[Decoder | CastRows, ...]:
    """Return the decoders with values in a dtype: as in a cast, values of another dtype are rounded once more."""
    operations: list[Decoder | CastRows] = []
    for decoder in decoders:
        operations.append(decoder if decoder.dtype == dtype else CastRows(decoder, dtype))
    return tuple(operations)


def cast_decoded(source: Source, dtype: str) -> Source:
    """Return a source with decoded tensors in a dtype."""
    blob = _decoded_blob(source)
    decoders = [_decoder_of(operation) for operation in blob.operations]
    cast_blob = replace(blob, operations=cast_decoders(decoders, dtype))

    def cast_location(location: Location) -> Location:
        array = location.array
        number = blob.number_at(array.offset)
        values = (array.offset - blob.offsets[number]) // itemsize(array.dtype)
        # A decoder writes its output as one chunk in C order.
        position = (array.file, cast_blob.offsets[number] + values * itemsize(dtype))
        return location.with_array(whole_array(array.name, dtype, array.shape, position))

    def cast_tensors(tensors: Sequence[SourceTensor]) -> tuple[SourceTensor, ...]:
        cast: list[SourceTensor] = []
        for tensor in tensors:
            if tensor.default_dtype:
                placement = tuple(map(cast_location, tensor.placement))
                tensor = replace(tensor, dtype=dtype, placement=placement, default_dtype="")
            cast.append(tensor)
        return tuple(cast)

    return replace(
        source,
        tensors=cast_tensors(source.tensors),
        tower_tensors=cast_tensors(source.tower_tensors),
        blobs=(*source.blobs[:-1], cast_blob),
    )


def _find_source_weights(
    source: Source,
) -> tuple[Mapping[str, Any], QuantizedWeights, tuple[AnyPath | Blob, ...]]:
    """Return the quantisation config of a source, the decoders, and the files and blobs of their tensors."""
    folder = _settings_folder(source)
    if not has_quantized_weights(source):
        raise not_quantized_error(source.display_name, source.root)
    settings = model_quantization(source.config, folder)
    tensors = {source.names.stored_name(tensor.name): tensor for tensor in source.tensors}
    settings_file = quantization_file(source.config, folder)
    weights, blobs = find_stored_weights(
        settings, tensors, source.byte_sources, settings_file, display_name=source.display_name
    )
    return settings, weights, blobs


def find_stored_weights(
    settings: Mapping[str, Any],
    tensors: Mapping[str, SourceTensor],
    blobs: tuple[AnyPath | Blob, ...],
    settings_file: str,
    *,
    display_name: str,
) -> tuple[QuantizedWeights, tuple[AnyPath | Blob, ...]]:
    """Return the decoders of quantised weights, and the files and blobs that their tensors are read from."""
    # Tensors in chunks, e.g. those of an init, are read as a further blob.
    chunked = [tensor for tensor in tensors.values() if not tensor.placement[0].is_contiguous]
    joined = DerivedArrays(display_name, tuple(map(JoinChunks, chunked)), blobs)
    joined_offsets = iter(joined.offsets)
    arrays: list[Array] = []
    for name, tensor in tensors.items():
        position = tensor.placement[0].position
        if not tensor.placement[0].is_contiguous:
            position = (len(blobs), next(joined_offsets))
        arrays.append(whole_array(name, tensor.dtype, tensor.shape, position))
    if chunked:
        blobs = (*blobs, joined)
    with open_blobs(blobs) as files:

        def read_payload(array: Array) -> bytes:
            data = np.empty(array.nbytes, np.uint8)
            files.read_at(array.file, array.offset, data)
            return data.tobytes()

        weights = find_weights(settings, arrays, read_payload, settings_file=settings_file)
    return weights, blobs


def _decoded_source(source: Source, weights: QuantizedWeights, blob: DerivedArrays) -> Source:
    """Return the source with a decoded tensor in place of the codes of each weight, and with scales as its state."""
    blob_number = len(source.byte_sources)
    decoded: dict[str, SourceTensor] = {}
    stored_tensors = {source.names.stored_name(tensor.name): tensor for tensor in source.tensors}
    made_from: dict[str, list[SourceTensor]] = {}
    decoders_of_module: dict[str, list[str]] = {}
    other_names = set(weights.stored_names)
    for decoder in weights.decoders:
        names = [stored.name for stored in decoder.stored]
        made_from[decoder.name] = [stored_tensors[name] for name in names]
        other_names.difference_update(names)
        module, _, _ = decoder.name.rpartition(".")
        decoders_of_module.setdefault(module, []).append(decoder.name)
    # Settings such as NF4's `h.0.q.weight.quant_state`, which are read before any code, belong to a module: `h.0.q`.
    for name in sorted(other_names):
        module = name
        while module and module not in decoders_of_module:
            module, _, _ = module.rpartition(".")
        for decoder_name in decoders_of_module.get(module, ()):
            made_from[decoder_name].append(stored_tensors[name])
    for decoder, start in zip(weights.decoders, blob.offsets):
        decoded[decoder.stored[0].name] = SourceTensor(
            source.names.bare_name(decoder.name),
            decoder.dtype,
            decoder.shape,
            (whole_array(decoder.name, decoder.dtype, decoder.shape, (blob_number, start)),),
            default_dtype=DECODED_DTYPE,
            made_from=tuple(made_from[decoder.name]),
        )
    tensors: list[SourceTensor] = []
    file_names: list[str] = []
    scales: list[SourceTensor] = []
    scale_names = weights.stored_names | weights.activation_scales
    # The tensors of an init have no file names.
    every_file_name = source.tensor_file_names or ("",) * len(source.tensors)
    for tensor, file_name in zip(source.tensors, every_file_name, strict=True):
        stored_name = source.names.stored_name(tensor.name)
        if stored_name in scale_names and stored_name not in decoded:
            scales.append(replace(tensor, name=qualify(QUANTIZATION, stored_name)))
        else:
            tensors.append(decoded.get(stored_name, tensor))
            file_names.append(file_name)
    return replace(
        source,
        tensors=tuple(tensors),
        tensor_file_names=tuple(name for name in file_names if name),
        state_tensors=(*source.state_tensors, *scales),
    )


# Back to the quantised bytes


def with_quantized_bytes(
    source: Source, original: Source, *, true_vocab: int | None = None
) -> Source:
    """Return a source with the quantised tensors of its original model in place of the decoded weights.

    Codes and scales are read from the model. Its codes are decoded once more: the `state_tensors` of the result are the
    decoded weights of the original, to be read and compared with the digests that the manifest recorded when the
    weights were decoded.

    Args:
        source: An init with the records of decoded weights.
        original: Its quantised model, with the names of the file.
        true_vocab: Unpadded size of the vocabulary. By default, the size in the config.

    Raises:
        PrepError: A weight was changed, or the original is another model.
    """
    source = _without_padding(source, true_vocab)
    weights = {tensor.name: tensor for tensor in source.tensors if tensor.name in source.quantized}
    _, original_weights, original_blobs = _find_source_weights(original)
    decoders = {decoder.name: decoder for decoder in original_weights.decoders}
    stored = {tensor.name: tensor for tensor in original.tensors}
    first_file = len(source.byte_sources)

    def other_model_error(missing: str) -> PrepError:
        return PrepError(
            f"{original.display_name} is not the source of {source.display_name}",
            f"it has no {missing}",
            text("{}: the quantised model", Option("quantized_source", "SOURCE")),
        )

    def take(name: str, dtype: str, shape: Sequence[int]) -> SourceTensor:
        """Return a stored tensor of the original, which must have this type."""
        tensor = stored.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, tuple(shape)):
            raise other_model_error(f"{quote_name(name)} of {dtype} {[*shape]}")
        return replace(shift_file_numbers(tensor, first_file), default_dtype="")

    codes: dict[str, SourceTensor] = {}
    ordered_decoders: list[Decoder] = []
    for name, record in source.quantized.items():
        weight = _unchanged_weight(source, weights.get(name), name, record)
        decoder = decoders.get(name)
        if decoder is None or decoder.shape != weight.shape:
            raise other_model_error(f"{quote_name(name)} of shape {[*weight.shape]}")
        codes[name] = take(record["codes"], record["dtype"], record["shape"])
        ordered_decoders.append(decoder)
    scales: list[SourceTensor] = []
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot == QUANTIZATION:
            taken = take(name, tensor.dtype, tensor.shape)
            scales.append(replace(taken, digests=tensor.digests))
    # The checked values have the dtype of the init, which is the same for all decoded weights.
    dtype = weights[ordered_decoders[0].name].dtype
    operations = cast_decoders(ordered_decoders, dtype)
    blob = DerivedArrays(original.display_name, operations, original_blobs)
    combined = append_files(source, original)
    blob_number = len(combined.byte_sources)
    checked: list[SourceTensor] = []
    for name, start in zip(codes, blob.offsets):
        weight = weights[name]
        array = whole_array(name, weight.dtype, weight.shape, (blob_number, start))
        checked.append(replace(weight, name=qualify(DECODED, name), placement=(array,)))
    view = replace(
        combined,
        tensors=(*(codes.get(tensor.name, tensor) for tensor in source.tensors), *scales),
        state_tensors=tuple(checked),
        blobs=(*combined.byte_sources, blob),
    )
    config = {**source.config, "quantization_config": source.tree_manifest.quantization}
    return replace(as_verbatim(view), config=config, config_path=None, quantized={})


def _unchanged_weight(
    source: Source, weight: SourceTensor | None, name: str, record: QuantizedRecord
) -> SourceTensor:
    """Return a decoded weight. Raise PrepError if its values were changed after they were decoded."""
    if weight is None:
        raise DamagedError(
            f"the manifest of {source.display_name} is invalid",
            f"it has no tensor for its record of the quantised weight {quote_name(name)}",
            GET_AGAIN_HINT,
        )
    if [entry[2] for entry in weight.digests] != [record["digest"]]:
        raise PrepError(
            f"{quote_name(name)} has no quantised bytes",
            "its values were changed after they were decoded",
            text("{} writes the values", Option("quantized", "dequantize")),
        )
    return weight


def _without_padding(source: Source, true_vocab: int | None) -> Source:
    """Return the whole model without the padding of the vocabulary, and with the names of the file."""
    vocabulary = source.vocabulary(true_vocab)
    true_size = vocabulary.true_size
    padded: Collection[str] = ()
    config = source.config
    if true_size != vocabulary.stored_size:
        match = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS)
        padded = vocabulary_names(source, match, vocabulary)
        config = with_vocabulary(config, Vocabulary(true_size, true_size))

    def true_rows(tensor: SourceTensor) -> SourceTensor:
        if tensor.name not in padded:
            return tensor
        shape = (true_size, *tensor.shape[1:])
        digests = tuple(entry for entry in tensor.digests if entry[1] <= true_size)
        if digests and digests[-1][1] < true_size:
            # The next digest is also of padding. The stored tensor is checked with all of its digests.
            digests = ()
        return replace(tensor, shape=shape, digests=digests, made_from=tensor.stored)

    model = as_verbatim(
        replace(
            source,
            tensors=tuple(map(true_rows, source.tensors)),
            tower_tensors=tuple(map(true_rows, source.tower_tensors)),
            config=config,
        )
    )
    if source.wrapper is None:
        return model
    whole_config = with_text_config(source.wrapper.config, source.wrapper.text_config, config)
    return replace(model, config=whole_config)
