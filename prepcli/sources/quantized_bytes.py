"""A source of decoded weights as a source of the quantised ones. It undoes `dequantized`.

The codes of a weight are encoded from its values and its scales, or come from the original model. Both are checked
with the recorded digest of the decoded values: encoded codes decode to the values of the init, and these are
read once more for their digest. The codes of the original are decoded.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text
from prepcli.engine.blobs import Blob, open_blobs
from prepcli.engine.chunk_cache import ChunkCache
from prepcli.engine.files import ByteArray
from prepcli.engine.fills import numpy_dtype
from prepcli.formats.untrusted import quote_name
from prepcli.models.text_part import with_text_config
from prepcli.planning.manifest_fields import QuantizedRecord
from prepcli.planning.plan import Contiguous
from prepcli.planning.quantization_leaves import DECODED, QUANTIZATION
from prepcli.planning.state_names import qualify, split_name
from prepcli.planning.tensor_match import DEFAULT_MATCH_OPTIONS
from prepcli.planning.tensors import FileTensor, array_bits
from prepcli.planning.vocabulary import Vocabulary, with_vocabulary
from prepcli.quantized.decoder import Decoder, StoredMatrix
from prepcli.quantized.encoder import InvertibleDecoder, not_invertible_error
from prepcli.quantized.find_weights import find_weights
from prepcli.sources.appended_files import append_files, shift_file_numbers
from prepcli.sources.dequantized import DECODED_DTYPE, DequantizedBlob, find_source_weights
from prepcli.sources.model_family import as_verbatim
from prepcli.sources.source import (
    Source,
    SourceTensor,
    match_source_tensors,
    stored_axis_maps,
)
from prepcli.sources.tensor_rows import read_rows, read_tensor
from prepcli.sources.vocabulary_tensors import vocabulary_names

# Values to encode at a time, if the memory suffices.
BLOCK_VALUES = 1 << 19
# Memory per value of temporary arrays.
ENCODING_NBYTES = 24
# Of a bfloat16 value.
DECODED_NBYTES = 2
# Scales up to this size are kept in memory while a weight is encoded.
MAX_KEPT_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class EncodedWeight:
    """A weight to encode.

    Attributes:
        decoder: Decoder of the weight.
        values: The decoded tensor.
        scales: Other stored tensors of the weight.
    """

    decoder: InvertibleDecoder
    values: SourceTensor
    scales: tuple[SourceTensor, ...]


@dataclass(frozen=True, slots=True)
class RequantizedBlob:
    """The codes of the weights of a source, one after another.

    Attributes:
        name: Name in messages.
        weights: The weights.
        stored: Files and blobs of their values and scales.
    """

    name: str
    weights: tuple[EncodedWeight, ...]
    stored: tuple[Path | Blob, ...]

    @property
    def weight_offsets(self) -> list[int]:
        """Offset of each weight's codes in the blob, then the size of the blob."""
        sizes = [each.decoder.stored[0].nbytes for each in self.weights]
        return [*itertools.accumulate(sizes, initial=0)]

    def open(self) -> RequantizedReader:
        """Open the codes for reading, with a small separate cache."""
        return self.open_with_cache(ChunkCache())

    def open_with_cache(self, cache: ChunkCache) -> RequantizedReader:
        """Open the codes for reading. A block takes no more memory than the cache may."""
        return RequantizedReader(self, cache.most_nbytes)


class RequantizedReader:
    """Reader of the codes of weights, for one thread."""

    def __init__(self, blob: RequantizedBlob, max_nbytes: int) -> None:
        self._weights = blob.weights
        self._weight_offsets = blob.weight_offsets
        self._max_values = min(BLOCK_VALUES, max_nbytes // ENCODING_NBYTES)
        self._max_codes_nbytes = max_nbytes // 4
        # A read of decoded rows takes twice its size.
        self._max_read_nbytes = max_nbytes // 4
        self._files = open_blobs(blob.stored)
        self._weight_number = -1
        # Scales of the last weight.
        self._scales_by_name: dict[str, np.ndarray] = {}
        # The last block of codes, with its range in the blob.
        self._block_range = (0, 0)
        self._block: ByteArray = np.empty(0, np.uint8)

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes of codes from `offset` on.

        Raises:
            PrepError: A tensor cannot be read, or its values do not determine the codes.
        """
        done = 0
        while done < into.size:
            position = offset + done
            if not self._block_range[0] <= position < self._block_range[1]:
                self._encode_block(position)
            start = position - self._block_range[0]
            part = self._block[start : start + into.size - done]
            into[done : done + part.size] = part
            done += part.size

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _encode_block(self, position: int) -> None:
        """Encode the rows of codes from a position of the blob on."""
        number = bisect.bisect_right(self._weight_offsets, position) - 1
        if number != self._weight_number:
            self._scales_by_name.clear()
            self._weight_number = number
        decoder = self._weights[number].decoder
        row_nbytes = decoder.stored[0].nbytes // decoder.code_rows
        row = (position - self._weight_offsets[number]) // row_nbytes
        if decoder.are_codes_transposed:
            matrix_stop = (row // decoder.columns + 1) * decoder.columns
            count = max(1, self._max_codes_nbytes // row_nbytes)
            rows = (row, min(row + count, matrix_stop))
            codes = self._encode_transposed(number, rows, row_nbytes)
        else:
            count = max(1, self._max_values // decoder.columns)
            rows = (row, min(row + count, decoder.rows))
            codes = self._encode_rows(number, rows)
        first = self._weight_offsets[number] + row * row_nbytes
        self._block = codes.reshape(-1)
        self._block_range = (first, first + codes.size)

    def _encode_rows(self, number: int, rows: Range) -> np.ndarray:
        """Return the codes of decoded rows."""
        weight = self._weights[number]
        values = read_rows(self._files, weight.values, rows).view(np.uint16)
        return weight.decoder.encode(rows, values, self._read_matrix)

    def _encode_transposed(self, number: int, rows: Range, row_nbytes: int) -> np.ndarray:
        """Return rows of codes: columns of a decoded matrix."""
        weight = self._weights[number]
        decoder = weight.decoder
        height = decoder.shape[-2]
        matrix, first_column = divmod(rows[0], decoder.columns)
        columns = slice(first_column, first_column + rows[1] - rows[0])
        codes = np.empty((rows[1] - rows[0], row_nbytes), np.uint8)
        # In the leaves of an init, rows of these tensors are short runs. Many rows are read at once, to join the runs.
        read_rows_count = self._num_rows(decoder, self._max_read_nbytes // DECODED_NBYTES)
        step = self._num_rows(decoder, self._max_values)
        done = 0
        for read_first in range(0, height, read_rows_count):
            read_stop = min(read_first + read_rows_count, height)
            read_range = (matrix * height + read_first, matrix * height + read_stop)
            values = read_rows(self._files, weight.values, read_range).view(np.uint16)
            for first in range(read_range[0], read_range[1], step):
                stop = min(first + step, read_range[1])
                block = values[first - read_range[0] : stop - read_range[0]]
                part = decoder.encode((first, stop), block, self._read_matrix)[columns]
                codes[:, done : done + part.shape[1]] = part
                done += part.shape[1]
        return codes

    @staticmethod
    def _num_rows(decoder: InvertibleDecoder, max_values: int) -> int:
        """Return how many decoded rows fit into `max_values` values, in whole blocks."""
        multiple = decoder.row_multiple
        return max(1, max_values // decoder.columns // multiple) * multiple

    def _read_matrix(
        self, matrix: StoredMatrix, rows: Range, columns: Range | None = None
    ) -> np.ndarray:
        """Return rows of a stored matrix of scales. See `MatrixReader`."""
        values = self._scale_rows(matrix, rows)
        if columns is None:
            return values
        return np.ascontiguousarray(values[:, slice(*columns)])

    def _scale_rows(self, matrix: StoredMatrix, rows: Range) -> np.ndarray:
        name = matrix.tensor.name
        if name in self._scales_by_name:
            return self._scales_by_name[name][slice(*rows)]
        scales = self._weights[self._weight_number].scales
        tensor = next(scale for scale in scales if scale.name == name)
        dtype = numpy_dtype(tensor.dtype)
        if tensor.nbytes > MAX_KEPT_NBYTES and tensor.shape[-1] == matrix.columns:
            return read_rows(self._files, tensor, rows).view(dtype)
        values = read_tensor(self._files, tensor).view(dtype)
        self._scales_by_name[name] = values.reshape(matrix.rows, matrix.columns)
        return self._scales_by_name[name][slice(*rows)]


@dataclass(frozen=True, slots=True)
class _Weight:
    """A decoded weight of an init: its record, its tensor, and the decoder of its codes."""

    record: QuantizedRecord
    tensor: SourceTensor
    decoder: Decoder


def requantize_source(
    source: Source, original: Source | None = None, *, true_vocab: int | None = None
) -> Source:
    """Return a source with the quantised tensors of an init.

    Its `state_tensors` are decoded weights, to be read and compared with their digests.

    Args:
        source: An init with the records of decoded weights.
        original: Its quantised model, with the names of the file. By default, the codes are
            encoded.
        true_vocab: Unpadded size of the vocabulary. By default, the size in the config.

    Raises:
        PrepError: A weight was changed, its codes do not follow from its values, or the original is another model.
    """
    source = _without_padding(source, true_vocab)
    scales: dict[str, SourceTensor] = {}
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot == QUANTIZATION:
            scales[name] = replace(tensor, name=name)
    weights = _find_weights(source, scales)
    if original is None:
        view = _encoded_view(source, weights, scales)
    else:
        view = _original_view(source, weights, scales, original)
    config = {**source.config, "quantization_config": source.tree_manifest.quantization}
    return replace(as_verbatim(view), config=config, config_path=None, quantized={})


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


def _find_weights(source: Source, scales: Mapping[str, SourceTensor]) -> list[_Weight]:
    """Return the decoded weights of an init.

    Raises:
        PrepError: A weight was changed.
        DamagedError: The records contradict the tensors.
    """
    records = source.quantized
    stored: list[FileTensor] = []
    for record in records.values():
        shape = tuple(record["shape"])
        nbytes = array_bits(record["dtype"], shape) // 8
        stored.append(FileTensor(record["codes"], record["dtype"], shape, -1, 0, nbytes))
    for tensor in scales.values():
        stored.append(FileTensor(tensor.name, tensor.dtype, tensor.shape, -1, 0, tensor.nbytes))
    with open_blobs(source.byte_sources) as files:
        found = find_weights(
            source.tree_manifest.quantization,
            stored,
            lambda tensor: read_tensor(files, scales[tensor.name]).tobytes(),
        )
    tensors = {tensor.name: tensor for tensor in source.tensors}
    weights: list[_Weight] = []
    for decoder in found.decoders:
        record = records.get(decoder.name)
        tensor = tensors.get(decoder.name)
        if record is None or tensor is None or tensor.shape != decoder.shape:
            raise DamagedError(
                f"the manifest of {source.display_name} is invalid",
                f"its records of quantised weights do not fit {quote_name(decoder.name)}",
                GET_AGAIN_HINT,
            )
        if [entry[2] for entry in tensor.digests] != [record["digest"]]:
            raise PrepError(
                f"{quote_name(decoder.name)} has no quantised bytes",
                "its values were changed after they were decoded",
                text("{} writes bfloat16", Option("quantized", "dequantize")),
            )
        weights.append(_Weight(record, tensor, decoder))
    return weights


def _encoded_view(
    source: Source, weights: Sequence[_Weight], scales: Mapping[str, SourceTensor]
) -> Source:
    """Return a source with encoded codes. See `requantize_source`."""
    encoded: list[EncodedWeight] = []
    for weight in weights:
        decoder = weight.decoder
        if not isinstance(decoder, InvertibleDecoder):
            why = f"the codes of {weight.record['format']} cannot be computed from bfloat16 values"
            raise not_invertible_error(decoder.name, why, is_written=False)
        if weight.tensor.dtype != DECODED_DTYPE:
            why = f"its values are {weight.tensor.dtype}, and codes are computed from bfloat16 values only"
            raise not_invertible_error(decoder.name, why, is_written=False)
        names = [tensor.name for tensor in decoder.stored[1:]]
        parts = tuple(scales[name] for name in names)
        encoded.append(EncodedWeight(decoder, weight.tensor, parts))
    blob = RequantizedBlob(source.display_name, tuple(encoded), source.byte_sources)
    codes: dict[str, SourceTensor] = {}
    for weight, start in zip(weights, blob.weight_offsets):
        stored = weight.decoder.stored[0]
        location = Contiguous(len(source.byte_sources), start)
        codes[weight.tensor.name] = SourceTensor(
            stored.name, stored.dtype, stored.shape, (location,)
        )
    checked = [_renamed_tensor(weight.tensor, DECODED) for weight in weights]
    return _with_codes(source, codes, scales.values(), checked, blob)


def _renamed_tensor(tensor: SourceTensor, slot: str) -> SourceTensor:
    return replace(tensor, name=qualify(slot, tensor.name))


def _original_view(
    source: Source,
    weights: Sequence[_Weight],
    scales: Mapping[str, SourceTensor],
    original: Source,
) -> Source:
    """Return a source with the codes and scales of the original. See `requantize_source`."""
    first = len(source.byte_sources)
    stored = {tensor.name: tensor for tensor in original.tensors}

    def find_tensor(name: str, dtype: str, shape: Sequence[int]) -> SourceTensor:
        tensor = stored.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, tuple(shape)):
            raise PrepError(
                f"{original.display_name} is not the source of {source.display_name}",
                f"it has no {quote_name(name)} of {dtype} {[*shape]}",
                text("{}: the quantised model", Option("quantized_source", "SOURCE")),
            )
        return replace(shift_file_numbers(tensor, first), default_dtype="")

    original_weights, original_blobs = find_source_weights(original)
    decoders = {each.name: each for each in original_weights.decoders}
    codes: dict[str, SourceTensor] = {}
    taken_scales: list[SourceTensor] = []
    for weight in weights:
        record = weight.record
        codes[weight.tensor.name] = find_tensor(record["codes"], record["dtype"], record["shape"])
    for tensor in scales.values():
        taken = find_tensor(tensor.name, tensor.dtype, tensor.shape)
        taken_scales.append(replace(taken, digests=tensor.digests))
    dtype = weights[0].tensor.dtype
    ordered = tuple(decoders[weight.tensor.name] for weight in weights)
    blob = DequantizedBlob(original.display_name, ordered, original_blobs, dtype)
    checked: list[SourceTensor] = []
    combined = append_files(source, original)
    blob_number = len(combined.byte_sources)
    for weight, start in zip(weights, blob.weight_offsets):
        placement = (Contiguous(blob_number, start),)
        checked.append(_renamed_tensor(replace(weight.tensor, placement=placement), DECODED))
    return _with_codes(combined, codes, taken_scales, checked, blob)


def _with_codes(
    source: Source,
    codes: Mapping[str, SourceTensor],
    scales: Iterable[SourceTensor],
    checked: Sequence[SourceTensor],
    blob: Blob,
) -> Source:
    """Return a source with codes in place of decoded weights.

    Args:
        source: The init.
        codes: Codes by the name of the decoded weight.
        scales: Other stored tensors.
        checked: Decoded weights to read for a check.
        blob: The encoded codes, or the decoded weights of the original. It follows the files of the source.
    """
    tensors = [codes.get(tensor.name, tensor) for tensor in source.tensors]
    return replace(
        source,
        tensors=(*tensors, *scales),
        state_tensors=tuple(checked),
        blobs=(*source.byte_sources, blob),
    )
