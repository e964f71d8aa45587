"""A source of decoded weights with the bytes of the quantised model that it was made from. It undoes `dequantized`.

Codes and scales are those of the model. Its codes are decoded once more, and the values are compared with the digests
that the manifest recorded when the weights were decoded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.json_values import quote_name
from prepcli.models.text_part import with_text_config
from prepcli.planning.arrays import whole_array
from prepcli.planning.manifest_fields import QuantizedRecord
from prepcli.planning.state_rows import DECODED, QUANTIZATION
from prepcli.planning.tensor_match import DEFAULT_MATCH_OPTIONS, Vocabulary, with_vocabulary
from prepcli.planning.tensors import qualify, split_name
from prepcli.quantized.decoder import Decoder
from prepcli.sources.appended_files import append_files, shift_file_numbers
from prepcli.sources.dequantized import DequantizedBlob, find_source_weights
from prepcli.sources.model_family import as_verbatim
from prepcli.sources.source import (
    Source,
    SourceTensor,
    match_source_tensors,
    stored_axis_maps,
)
from prepcli.sources.vocabulary_tensors import vocabulary_names


def with_quantized_bytes(
    source: Source, original: Source, *, true_vocab: int | None = None
) -> Source:
    """Return a source with the quantised tensors of its original model in place of the decoded weights.

    Its `state_tensors` are the decoded weights of the original, to be read and compared with their digests.

    Args:
        source: An init with the records of decoded weights.
        original: Its quantised model, with the names of the file.
        true_vocab: Unpadded size of the vocabulary. By default, the size in the config.

    Raises:
        PrepError: A weight was changed, or the original is another model.
    """
    source = _without_padding(source, true_vocab)
    weights = {tensor.name: tensor for tensor in source.tensors if tensor.name in source.quantized}
    original_weights, original_blobs = find_source_weights(original)
    decoders = {decoder.name: decoder for decoder in original_weights.decoders}
    stored = {tensor.name: tensor for tensor in original.tensors}
    first_file = len(source.byte_sources)

    def take(name: str, dtype: str, shape: Sequence[int]) -> SourceTensor:
        """Return a stored tensor of the original, which must have this type."""
        tensor = stored.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, tuple(shape)):
            raise _other_model_error(source, original, f"{quote_name(name)} of {dtype} {[*shape]}")
        return replace(shift_file_numbers(tensor, first_file), default_dtype="")

    codes: dict[str, SourceTensor] = {}
    ordered_decoders: list[Decoder] = []
    for name, record in source.quantized.items():
        weight = _unchanged_weight(source, weights.get(name), name, record)
        decoder = decoders.get(name)
        if decoder is None or decoder.shape != weight.shape:
            what = f"{quote_name(name)} of shape {[*weight.shape]}"
            raise _other_model_error(source, original, what)
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
    blob = DequantizedBlob(original.display_name, tuple(ordered_decoders), original_blobs, dtype)
    combined = append_files(source, original)
    blob_number = len(combined.byte_sources)
    checked: list[SourceTensor] = []
    for name, start in zip(codes, blob.weight_offsets):
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


def _other_model_error(source: Source, original: Source, missing: str) -> PrepError:
    return PrepError(
        f"{original.display_name} is not the source of {source.display_name}",
        f"it has no {missing}",
        text("{}: the quantised model", Option("quantized_source", "SOURCE")),
    )


def _without_padding(source: Source, true_vocab: int | None) -> Source:
    """Return a source without the padding of the vocabulary, and with the names of the file."""
    vocabulary = source.vocabulary(true_vocab)
    true_size = vocabulary.true_size
    padded: Collection[str] = ()
    config = source.config
    if true_size != vocabulary.stored_size:
        match = match_source_tensors(source, stored_axis_maps(source), DEFAULT_MATCH_OPTIONS)
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

    return _whole_model(
        replace(
            source,
            tensors=tuple(map(true_rows, source.tensors)),
            tower_tensors=tuple(map(true_rows, source.tower_tensors)),
            config=config,
        )
    )


def _whole_model(source: Source) -> Source:
    """Return a source with the names of the file, and with the towers of a multimodal model among its tensors."""
    model = as_verbatim(source)
    if source.wrapper is None:
        return model
    config = with_text_config(source.wrapper.config, source.wrapper.text_config, source.config)
    return replace(model, config=config)
