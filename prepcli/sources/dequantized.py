"""A source of quantised weights as a source of floats: each weight and its scales become one tensor.

The decoded weights are one blob, one weight after another. A read decodes the rows that it covers, in blocks, so that
memory does not depend on the sizes of tensors.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.engine.blobs import FilesAndBlobs, open_blobs
from prepcli.engine.chunk_cache import ChunkCache
from prepcli.engine.files import Files
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.planning.arrays import Array, Location, whole_array
from prepcli.planning.manifest_fields import Manifest, QuantizedRecord
from prepcli.planning.quantization_leaves import QUANTIZATION
from prepcli.planning.state_names import qualify
from prepcli.planning.tensors import itemsize
from prepcli.quantized.decoder import Decoder, StoredMatrix
from prepcli.quantized.find_weights import (
    QUANTIZATION_FILES,
    QuantizedWeights,
    find_weights,
    quantization_config_of_file,
    quantization_settings,
    without_quantization,
)
from prepcli.sources.dropped_tensors import without_recorded_drops
from prepcli.sources.model_family import as_verbatim
from prepcli.sources.multimodal import split_towers
from prepcli.sources.source import CONFIG, HF_FOLDER, Source, SourceTensor, read_json_object
from prepcli.sources.tensor_rows import TensorBytes
from prepcli.sources.unused_quantization import (
    find_quantization_file,
    has_quantized_tensors,
    unused_quantization_note,
)
from prepcli.stores.buffers import Blob, ByteArray
from prepcli.stores.paths import AnyPath

DECODED_DTYPE = "bfloat16"
# Memory per decoded value: codes, scales and zero points in float32, and the value itself.
DECODING_NBYTES = 24
MAX_PANEL_NBYTES = 4 << 20


# Without slots: a cached property needs the dict of the instance.
@dataclass(frozen=True)
class DequantizedBlob:
    """The decoded weights of a source, one after another.

    Attributes:
        name: Name in messages.
        decoders: Decoders of the weights.
        stored: Files and blobs of the stored tensors.
        dtype: Dtype of the values, or empty for the one of each decoder.
    """

    name: str
    decoders: tuple[Decoder, ...]
    stored: tuple[AnyPath | Blob, ...]
    dtype: str = ""

    def dtype_of(self, decoder: Decoder) -> str:
        """Return the dtype of the values of a weight."""
        return self.dtype or decoder.dtype

    @cached_property
    def weight_offsets(self) -> list[int]:
        """Offset of each weight, then the size of the blob."""
        sizes = [math.prod(each.shape) * itemsize(self.dtype_of(each)) for each in self.decoders]
        return [*itertools.accumulate(sizes, initial=0)]

    def open(self) -> DequantizedReader:
        """Open the weights for reading, with a small separate cache."""
        return self.open_with_cache(ChunkCache())

    def open_with_cache(self, cache: ChunkCache) -> DequantizedReader:
        """Open the weights for reading. A block takes no more memory than the cache may."""
        return DequantizedReader(self, cache.most_nbytes)


@dataclass(frozen=True, slots=True)
class _Panel:
    """A block of a stored matrix in memory: a range of rows and a range of columns."""

    rows: Range
    columns: Range
    values: np.ndarray

    def contains(self, rows: Range, columns: Range) -> bool:
        """Return whether the panel has these rows, and at least these columns."""
        first, stop = self.columns
        return self.rows == rows and first <= columns[0] and columns[1] <= stop


class DequantizedReader:
    """Reader of decoded weights, for one thread."""

    def __init__(self, blob: DequantizedBlob, max_nbytes: int) -> None:
        self._blob = blob
        self._decoders = blob.decoders
        self._weight_offsets = blob.weight_offsets
        self._max_values = max_nbytes // (2 * DECODING_NBYTES)
        self._panel_nbytes = min(max_nbytes // 8, MAX_PANEL_NBYTES)
        self._files = open_blobs(blob.stored)
        # The last block: slabs rarely end with a block, and runs may be shorter than a row.
        self._block_key = (-1, -1)
        self._block: ByteArray = np.empty(0, np.uint8)
        # Of the weight of the last block, by stored tensor. A decoded row of a format that packs columns needs a few
        # bytes of each stored row: such runs are read for many decoded rows at once.
        self._panels: dict[str, _Panel] = {}

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes of decoded values from `offset` on.

        Raises:
            PrepError: A stored tensor cannot be read, or its values are invalid.
        """
        done = 0
        number = bisect.bisect_right(self._weight_offsets, offset) - 1
        while done < into.size:
            start = offset + done - self._weight_offsets[number]
            weight_nbytes = self._weight_offsets[number + 1] - self._weight_offsets[number]
            count = min(into.size - done, weight_nbytes - start)
            self._read_weight(number, start, into[done : done + count])
            done += count
            number += 1

    def _read_weight(self, number: int, start: int, into: ByteArray) -> None:
        """Fill `into` with bytes of one weight."""
        decoder = self._decoders[number]
        dtype = self._blob.dtype_of(decoder)
        row_nbytes = decoder.columns * itemsize(dtype)
        block_rows = self._block_rows(decoder)
        block_nbytes = block_rows * row_nbytes
        done = 0
        while done < into.size:
            block_number, block_start = divmod(start + done, block_nbytes)
            if self._block_key != (number, block_number):
                if self._block_key[0] != number:
                    self._panels.clear()
                first = block_number * block_rows
                rows = (first, min(first + block_rows, decoder.rows))
                values = decoder.decode(rows, self._read_matrix).reshape(-1)
                if dtype != decoder.dtype:
                    # As in a cast: values with another rounding of a decoder are rounded once more.
                    values = round_to_dtype(values.astype(np.float32), numpy_dtype(dtype))
                self._block = values.view(np.uint8)
                self._block_key = (number, block_number)
            part = self._block[block_start : block_start + into.size - done]
            into[done : done + part.size] = part
            done += part.size

    def _block_rows(self, decoder: Decoder) -> int:
        """Return the number of rows to decode at a time."""
        rows = min(decoder.block_values, self._max_values) // decoder.columns
        multiple = decoder.row_multiple
        if rows < multiple and multiple * decoder.columns <= self._max_values:
            return multiple
        if rows > multiple:
            rows -= rows % multiple
        return max(rows, 1)

    def _read_matrix(
        self, matrix: StoredMatrix, rows: Range, columns: Range | None = None
    ) -> np.ndarray:
        """Return rows of a stored matrix, or only some of their columns."""
        tensor = matrix.tensor
        if columns is None or columns == (0, matrix.columns):
            row_nbytes = matrix.columns * itemsize(tensor.dtype)
            data = np.empty((rows[1] - rows[0]) * row_nbytes, np.uint8)
            self._files.read_at(tensor.file, tensor.offset + rows[0] * row_nbytes, data)
            return data.view(numpy_dtype(tensor.dtype)).reshape(-1, matrix.columns)
        panel = self._panels.get(tensor.name)
        if panel is None or not panel.contains(rows, columns):
            panel = self._read_panel(matrix, rows, columns)
            self._panels[tensor.name] = panel
        first = columns[0] - panel.columns[0]
        part = panel.values[:, first : first + columns[1] - columns[0]]
        return np.ascontiguousarray(part)

    def _read_panel(self, matrix: StoredMatrix, rows: Range, columns: Range) -> _Panel:
        """Read the given columns of a matrix, and further columns after them up to the size of a panel."""
        tensor = matrix.tensor
        item_nbytes = itemsize(tensor.dtype)
        count = rows[1] - rows[0]
        width = max(columns[1] - columns[0], self._panel_nbytes // (count * item_nbytes))
        stop = min(columns[0] + width, matrix.columns)
        octets = np.empty((count, (stop - columns[0]) * item_nbytes), np.uint8)
        for number in range(count):
            first = (rows[0] + number) * matrix.columns + columns[0]
            offset = tensor.offset + first * item_nbytes
            self._files.read_at(tensor.file, offset, octets[number])
        return _Panel(rows, (columns[0], stop), octets.view(numpy_dtype(tensor.dtype)))

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def is_quantized(folder: AnyPath) -> bool:
    """Return whether a model has quantised weights, by its settings and the dtypes of its tensors."""
    config: HFConfig = {}
    if (folder / CONFIG).is_file():
        config = read_json_object(folder / CONFIG)
    return bool(model_quantization(config, folder))


def model_quantization(config: HFConfig, folder: AnyPath) -> Mapping[str, Any]:
    """Return the quantisation config of a model, or an empty mapping.

    Args:
        config: Content of its config.json.
        folder: Its folder. Earlier tools wrote the settings to a file next to config.json.
    """
    name = quantization_file(config, folder)
    if not name:
        return {}
    if name == CONFIG:
        return quantization_settings(config)
    return quantization_config_of_file(name, read_json_object(folder / name))


def quantization_file(config: HFConfig, folder: AnyPath) -> str:
    """Return the name of the file with the quantisation config of a model, or an empty string.

    Settings count only if a tensor may be quantised.
    """
    if quantization_settings(config):
        name = CONFIG
    else:
        name = find_quantization_file(folder)
    if name and has_quantized_tensors(folder):
        return name
    return ""


def dequantize_source(source: Source) -> Source:
    """Return a source with one float tensor for each quantised weight and its scales.

    Args:
        source: The opened source.

    Raises:
        UsageError: The weights are not quantised.
        PrepError: The format is not supported.
        DamagedError: A tensor is missing, does not fit, or contradicts the config.
    """
    settings = _quantization_settings(source)
    weights, stored = find_source_weights(source)
    blob = DequantizedBlob(source.display_name, weights.decoders, stored)
    decoded = _decoded_source(source, weights, blob)
    method = str(settings.get("quant_method"))
    decoded = replace(
        decoded,
        config=without_quantization(source.config),
        small_files=tuple(
            file for file in source.small_files if file.name not in QUANTIZATION_FILES
        ),
        blobs=(*source.byte_sources, blob),
        # The config of the output is another one than the file.
        config_path=None,
        quantization=settings,
        quantized={each.name: quantized_record(each, method) for each in weights.decoders},
    )
    if decoded.family.is_verbatim:
        return as_verbatim(decoded)
    return decoded


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
    files = tuple(file for file in source.small_files if file.name not in QUANTIZATION_FILES)
    has_settings = bool(quantization_settings(source.config)) or files != source.small_files
    if not has_settings or has_quantized_tensors(source.root):
        return source
    config = without_quantization(source.config)
    config_path = source.config_path if config == source.config else None
    return replace(source, config=config, config_path=config_path, small_files=files)


def decode_alike(source: Source, other: Source) -> tuple[Source, Source]:
    """Return two sources with comparable weights: if only one has codes, they are decoded to the dtype of the other."""
    return _decode_to_dtype_of(source, other), _decode_to_dtype_of(other, source)


def _decode_to_dtype_of(source: Source, decoded: Source) -> Source:
    """Return a quantised source with its weights decoded to the dtype of `decoded`, or `source` unchanged."""
    if _has_codes(source) and not _has_codes(decoded):
        source = dequantize_source(source)
        if decoded.wrapper is not None:
            # A text part is not found beside scales, nor beside tensors that the output dropped.
            manifest = decoded.manifest or NO_MANIFEST
            source = without_recorded_drops(split_towers(source), manifest)
    if not source.quantization:
        return source
    return cast_decoded(source, _parameter_dtype(source, decoded))


def _has_codes(source: Source) -> bool:
    """Return whether the quantised weights of a source are read as they are stored."""
    return not (source.quantized or source.quantization) and has_quantized_weights(source)


def _parameter_dtype(source: Source, other: Source) -> str:
    """Return the dtype of a decoded tensor in another source."""
    dtypes = {other.names.stored_name(tensor.name): tensor.dtype for tensor in other.tensors}
    for tensor in source.tensors:
        name = source.names.stored_name(tensor.name)
        if tensor.default_dtype and name in dtypes:
            return dtypes[name]
    return DECODED_DTYPE


def decoder_of_tensor(source: Source, tensor: SourceTensor) -> Decoder:
    """Return the decoder of a decoded tensor. A decoder may have several tensors, e.g. one for each expert."""
    blob = _decoded_blob(source)
    offset = tensor.placement[0].array.offset
    return blob.decoders[bisect.bisect_right(blob.weight_offsets, offset) - 1]


def _decoded_blob(source: Source) -> DequantizedBlob:
    """Return the decoded weights of a source. They are its last byte source."""
    blob = source.blobs[-1]
    assert isinstance(blob, DequantizedBlob)
    return blob


def cast_decoded(source: Source, dtype: str) -> Source:
    """Return a source with decoded tensors in a dtype."""
    blob = _decoded_blob(source)
    cast_blob = replace(blob, dtype=dtype)

    def cast(tensors: Iterable[SourceTensor]) -> tuple[SourceTensor, ...]:
        return tuple(_cast_tensor(tensor, dtype, blob, cast_blob) for tensor in tensors)

    return replace(
        source,
        tensors=cast(source.tensors),
        tower_tensors=cast(source.tower_tensors),
        blobs=(*source.blobs[:-1], cast_blob),
    )


def _cast_tensor(
    tensor: SourceTensor, dtype: str, blob: DequantizedBlob, cast_blob: DequantizedBlob
) -> SourceTensor:
    """Return a decoded tensor in the dtype of another blob. Other tensors stay."""
    if not tensor.default_dtype:
        return tensor
    placement = tuple(
        _cast_location(location, tensor.dtype, blob, cast_blob) for location in tensor.placement
    )
    return replace(tensor, dtype=dtype, placement=placement, default_dtype="")


def _cast_location(
    location: Location,
    dtype: str,
    blob: DequantizedBlob,
    cast_blob: DequantizedBlob,
) -> Location:
    """Translate the location of values in one blob to a blob that decodes them to another dtype."""
    starts = blob.weight_offsets
    old_offset = location.array.offset
    number = bisect.bisect_right(starts, old_offset) - 1
    values = (old_offset - starts[number]) // itemsize(dtype)
    offset = cast_blob.weight_offsets[number] + values * itemsize(cast_blob.dtype)
    array = location.array
    # A decoder writes its output as one chunk in C order.
    position = (array.file, offset)
    return location.with_array(whole_array(array.name, cast_blob.dtype, array.shape, position))


def find_source_weights(source: Source) -> tuple[QuantizedWeights, tuple[AnyPath | Blob, ...]]:
    """Return the decoders of the quantised weights of a source, and the files and blobs of their tensors.

    See `dequantize_source`.
    """
    settings = _quantization_settings(source)
    tensors, blobs = _file_tensors(source)
    weights = find_stored_weights(
        settings,
        tensors,
        blobs,
        settings_file=_settings_file(source),
    )
    return weights, blobs


def _quantization_settings(source: Source) -> Mapping[str, Any]:
    """Return the quantisation config of a model. Raise UsageError if it has none."""
    if not has_quantized_weights(source):
        raise not_quantized_error(source.display_name, source.root)
    return model_quantization(source.config, _settings_folder(source))


def has_quantized_weights(source: Source) -> bool:
    """Return whether the tensors of an opened model, or of an init that keeps codes, are quantised."""
    return bool(_settings_file(source))


def _settings_file(source: Source) -> str:
    """Return the name of the file with the quantisation config of a source, or an empty string."""
    return quantization_file(source.config, _settings_folder(source))


def _settings_folder(source: Source) -> AnyPath:
    """Return the folder of a source with its config.json and the settings of tools."""
    return source.root / HF_FOLDER if source.tree_manifest else source.root


def not_quantized_error(display_name: str, folder: AnyPath) -> PrepError:
    """Return the error for a request to decode a model without quantised weights."""
    option = Option("quantized", "dequantize")
    why = f"{display_name} is not quantised"
    remark = unused_quantization_note(folder)
    if remark:
        why = f"{why} ({remark})"
    return usage_error(text("{} has no effect", option), why, text("remove {}", option))


def find_stored_weights(
    settings: Mapping[str, Any],
    tensors: Sequence[Array],
    blobs: Sequence[AnyPath | Blob],
    *,
    settings_file: str,
) -> QuantizedWeights:
    """Return the decoders of quantised weights in files. See `find_weights`.

    Args:
        settings: The quantisation config.
        tensors: All tensors of the files.
        blobs: Files and blobs, by the file numbers of the tensors.
        settings_file: Name of the file with the quantisation config, for messages.
    """
    with open_blobs(blobs) as files:
        return find_weights(
            settings,
            tensors,
            lambda tensor: _read_tensor(files, tensor),
            settings_file=settings_file,
        )


def _file_tensors(source: Source) -> tuple[list[Array], tuple[AnyPath | Blob, ...]]:
    """Return the tensors of a source by their names in the files, and the files and blobs with their bytes.

    The tensors of an init are stored in chunks. They are read as a further blob.
    """
    chunked: list[SourceTensor] = []
    for tensor in source.tensors:
        if not tensor.placement[0].is_contiguous:
            chunked.append(tensor)
    joined = TensorBytes(source.display_name, tuple(chunked), source.byte_sources)
    joined_number = len(source.byte_sources)
    joined_offsets = iter(joined.offsets)
    tensors: list[Array] = []
    for tensor in source.tensors:
        file, offset = tensor.placement[0].position
        if not tensor.placement[0].is_contiguous:
            file = joined_number
            offset = next(joined_offsets)
        tensors.append(
            whole_array(
                source.names.stored_name(tensor.name), tensor.dtype, tensor.shape, (file, offset)
            )
        )
    return tensors, (*source.byte_sources, joined) if chunked else source.byte_sources


def _read_tensor(files: Files | FilesAndBlobs, tensor: Array) -> bytes:
    """Return the bytes of a small tensor."""
    data = np.empty(tensor.nbytes, np.uint8)
    files.read_at(tensor.file, tensor.offset, data)
    return data.tobytes()


def _decoded_source(source: Source, weights: QuantizedWeights, blob: DequantizedBlob) -> Source:
    """Return the source with a decoded tensor in place of the codes of each weight, and with scales as its state."""
    blob_number = len(source.byte_sources)
    decoded: dict[str, SourceTensor] = {}
    made_from = _stored_parts(source, weights)
    for decoder, start in zip(weights.decoders, blob.weight_offsets):
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
        if stored_name in decoded:
            tensors.append(decoded[stored_name])
            file_names.append(file_name)
        elif stored_name in scale_names:
            scales.append(replace(tensor, name=qualify(QUANTIZATION, stored_name)))
        else:
            tensors.append(tensor)
            file_names.append(file_name)
    return replace(
        source,
        tensors=tuple(tensors),
        tensor_file_names=tuple(name for name in file_names if name),
        state_tensors=(*source.state_tensors, *scales),
    )


def _stored_parts(source: Source, weights: QuantizedWeights) -> dict[str, list[SourceTensor]]:
    """Return the stored tensors of each weight, by the name of its decoder."""
    tensors = {source.names.stored_name(tensor.name): tensor for tensor in source.tensors}
    parts: dict[str, list[SourceTensor]] = {}
    decoders_of_module: dict[str, list[str]] = {}
    other_names = set(weights.stored_names)
    for decoder in weights.decoders:
        names = [stored.name for stored in decoder.stored]
        parts[decoder.name] = [tensors[name] for name in names]
        other_names.difference_update(names)
        module, _, _ = decoder.name.rpartition(".")
        decoders_of_module.setdefault(module, []).append(decoder.name)
    # Settings such as NF4's `h.0.q.weight.quant_state`, which are read before any code, belong to a module: `h.0.q`.
    for name in sorted(other_names):
        module = name
        while module and module not in decoders_of_module:
            module, _, _ = module.rpartition(".")
        for decoder_name in decoders_of_module.get(module, ()):
            parts[decoder_name].append(tensors[name])
    return parts


def quantized_record(decoder: Decoder, method: str) -> QuantizedRecord:
    """Return the record of a weight, without the digest of its values.

    Args:
        decoder: Decoder of the weight.
        method: `quant_method` of the quantisation config.
    """
    codes = decoder.stored[0]
    return {
        "format": method,
        "codes": codes.name,
        "dtype": codes.dtype,
        "shape": [*codes.shape],
        "digest": "",
    }
