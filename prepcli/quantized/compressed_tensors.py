"""compressed-tensors: packed integers, and the schemes of groups of modules that tell which codes a weight has.

`pack-quantized` has integers of 1 to 8 bits in int32 words. weight_packed: int32 [R, ceil(C * bits / 32)], dense bit
fields along the columns. weight_scale: [R, G], [R, 1] or [1]. weight_zero_point: int32 [ceil(R * bits / 32), G], bit
fields along the rows. weight_g_idx: group g of each column, else g = c // (C / G). Packed codes u are signed codes plus
2^(bits - 1):

    value[r, c] = ((u[r, c] - 2^(bits - 1)) - z[r, g]) * scale[r, g]

The product is rounded to the dtype of the scales. Source: `unpack_from_int32` and `dequantize` of compressed-tensors
0.20 (compressors/pack_quantized/helpers.py and quantization/lifecycle/forward.py). Weights in fp8 and int8 are decoded
by `prepcli.quantized.scaled`, NVFP4 by `prepcli.quantized.float4`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_values import quote_name
from prepcli.planning.arrays import Array
from prepcli.quantized.decoder import (
    USE_ORIGINAL_HINT,
    VALUE_DTYPES,
    Decoder,
    FloatArray,
    MatrixReader,
    StoredWeights,
    bit_field_words,
    check_dims,
    checked_matrix,
    consecutive_groups,
    read_group_numbers,
    scale_groups,
    setting,
    shape_error,
    unpack_bits,
    word_count,
)
from prepcli.quantized.float4 import Nvfp4Decoder
from prepcli.quantized.scaled import (
    CODE_DTYPES,
    ScaledDecoder,
    block_of_grid,
    parse_block,
    scale_shapes,
)

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
# Strategies with a scale for `group_size` columns of a row.
GROUP_STRATEGIES = ("group", "tensor_group")
MAX_BITS = 8
# Settings of the weights in a group of modules.
Scheme = Mapping[str, Any]


class PackedIntDecoder(Decoder):
    """Packed integers with scales of groups of columns, of rows, or of the tensor."""

    def __init__(
        self,
        name: str,
        packed: Array,
        scale: Array,
        *,
        bits: int,
        columns: int,
        zero_point: Array | None = None,
        column_groups: Array | None = None,
    ) -> None:
        int32 = ("int32",)
        rows = packed.shape[0] if packed.shape else 0
        self._packed = checked_matrix(packed, name, int32, [(rows, word_count(columns, bits))])
        groups = scale.shape[1] if len(scale.shape) == 2 else 1
        num_groups = groups if groups > 0 and columns % groups == 0 else 1
        shapes = [(rows, num_groups), (rows,), (1,), ()]
        self._scale = checked_matrix(scale, name, VALUE_DTYPES, shapes, groups)
        self._zero_point = None
        if zero_point is not None:
            shape = (word_count(rows, bits), groups)
            self._zero_point = checked_matrix(zero_point, name, int32, [shape])
        self._column_groups = None
        if column_groups is not None:
            self._column_groups = checked_matrix(column_groups, name, int32, [(columns,)])
        stored = (packed, scale, zero_point, column_groups)
        super().__init__(name, (rows, columns), scale.dtype, stored)
        self._bits = bits

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        words = read(self._packed, rows)
        values = unpack_bits(words, self._bits, self.columns).astype(np.float32)
        scale_rows = rows if self._scale.rows > 1 else (0, 1)
        scales = read(self._scale, scale_rows).astype(np.float32)
        offsets = np.full_like(scales, 1 << (self._bits - 1))
        if self._zero_point is not None:
            # Codes and zero points are both offset by 2^(bits - 1), so the offsets cancel in their difference.
            zero_words, first = bit_field_words(rows, self._bits)
            columns = np.ascontiguousarray(read(self._zero_point, zero_words).T)
            codes = unpack_bits(columns, self._bits, first + rows[1] - rows[0])[:, first:]
            offsets = np.ascontiguousarray(codes.T).astype(np.float32)
        num_groups = scales.shape[1]
        group_numbers = None
        if self._column_groups is not None:
            group_numbers = read_group_numbers(self._column_groups, num_groups, read)
        if group_numbers is None:
            group_numbers = consecutive_groups(self.columns, self.columns // num_groups)
        scale_groups(values, offsets, scales, group_numbers)
        return values


def find_compressed(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    """Yield the decoders of a model of compressed-tensors."""
    setting(settings, "format", FORMATS, "dense")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise PrepError(
            "sparse tensors are not supported",
            "config.json has a sparsity_config",
            USE_ORIGINAL_HINT,
        )
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping):
        raise PrepError(
            "config.json is not supported",
            "its quantisation has no config_groups",
            USE_ORIGINAL_HINT,
        )
    schemes: list[Scheme] = []
    for group in groups.values():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            schemes.append(group["weights"])
    for name, prefix in [*stored.names_ending("weight_packed")]:
        yield _packed_weight(schemes, stored, name, prefix)
    for weight in [*stored.tensors_of(CODE_DTYPES)]:
        if not weight.name.endswith("weight"):
            continue
        check_dims(weight, 2)
        stored.take(weight.name, weight.name)
        scale = stored.take(f"{weight.name}_scale", weight.name)
        yield ScaledDecoder(
            weight,
            scale,
            block=_block_of_scale(schemes, weight, scale),
            zero_point=stored.take_optional(f"{weight.name}_zero_point"),
            # compressed-tensors decodes exponents to bfloat16.
            dtype=scale.dtype if scale.dtype in VALUE_DTYPES else "bfloat16",
        )


def _packed_weight(
    schemes: Sequence[Scheme], stored: StoredWeights, name: str, prefix: str
) -> Decoder:
    """Return the decoder of packed codes."""
    weight_name = f"{prefix}weight"
    packed = stored.take(name, weight_name)
    scale = stored.take(f"{weight_name}_scale", weight_name)
    if packed.dtype == "uint8":
        tensor_scale = stored.take(f"{weight_name}_global_scale", weight_name)
        return Nvfp4Decoder(weight_name, packed, scale, tensor_scale, is_divisor=True)
    shape = stored.take(f"{weight_name}_shape", weight_name)
    if shape.dtype not in ("int32", "int64") or shape.shape != (2,) or len(packed.shape) != 2:
        raise DamagedError(
            f"{quote_name(shape.name)} is not the shape of a matrix",
            f"it is {shape.dtype} {[*shape.shape]}, of words {[*packed.shape]}",
            GET_AGAIN_HINT,
        )
    rows, columns = np.frombuffer(stored.payload(shape), f"<i{shape.nbytes // 2}").tolist()
    packing: list[Scheme] = []
    for scheme in schemes:
        num_bits = scheme.get("num_bits")
        if type(num_bits) is not int or not 1 <= num_bits <= MAX_BITS:
            continue
        if packed.shape == (rows, word_count(columns, num_bits)):
            packing.append(scheme)
    if not packing or min(rows, columns) < 1:
        why = f"`{shape.name}` is {[rows, columns]}, which does not fit num_bits of config.json"
        raise shape_error(packed, why)
    bits = {scheme["num_bits"] for scheme in _fitting_schemes(packing, (rows, columns), scale)}
    if len(bits) > 1:
        raise _several_schemes_error(weight_name, bits, "{} bits")
    return PackedIntDecoder(
        weight_name,
        packed,
        scale,
        bits=bits.pop(),
        columns=columns,
        zero_point=stored.take_optional(f"{weight_name}_zero_point"),
        column_groups=stored.take_optional(f"{weight_name}_g_idx"),
    )


def _block_of_scale(schemes: Sequence[Scheme], weight: Array, scale: Array) -> tuple[int, int]:
    """Return how many rows and columns share a scale, for dense codes."""
    rows, columns = weight.shape[-2:]
    blocks: set[tuple[int, int]] = set()
    for scheme in _fitting_schemes(schemes, weight.shape, scale):
        block = _scheme_block(scheme, rows, columns)
        if block is not None:
            # Larger blocks than the weight are the same as the weight.
            blocks.add((min(block[0], rows), min(block[1], columns)))
    if len(blocks) > 1:
        sizes = ([*block] for block in blocks)
        raise _several_schemes_error(weight.name, sizes, "blocks of {}")
    if blocks:
        return blocks.pop()
    # One scale per row may come without the dim of size 1.
    if scale.shape == weight.shape[:1]:
        return 1, columns
    return block_of_grid(weight, scale)


def _scheme_block(scheme: Scheme, rows: int, columns: int) -> tuple[int, int] | None:
    """Return the rows and columns of a block with one scale, or None if the scheme does not name them."""
    strategy = scheme.get("strategy")
    if strategy == "block":
        return parse_block(scheme.get("block_structure"))
    if strategy == "channel":
        return 1, columns
    if strategy == "tensor":
        return rows, columns
    group_size = scheme.get("group_size")
    if strategy in GROUP_STRATEGIES and type(group_size) is int and group_size > 0:
        return 1, group_size
    return None


def _fitting_schemes(
    schemes: Sequence[Scheme], shape: tuple[int, ...], scale: Array
) -> list[Scheme]:
    """Return the schemes that give a weight of this shape such scales.

    A scheme names its modules by `targets`, names or classes. Classes are unknown here, so the shape of the scales
    decides.

    Raises:
        DamagedError: No scheme fits.
    """
    fitting: list[Scheme] = []
    for scheme in schemes:
        block = _scheme_block(scheme, *shape[-2:])
        if block is not None:
            # compressed-tensors refuses a last group with fewer columns.
            if scheme.get("strategy") in GROUP_STRATEGIES and shape[-1] % block[1]:
                continue
            if scale.shape not in scale_shapes(shape, block):
                continue
        fitting.append(scheme)
    if not fitting:
        why = f"no group of modules in config.json has such scales for a weight {[*shape]}"
        raise shape_error(scale, f"{why} (group_size must divide the columns)")
    return fitting


def _several_schemes_error(
    weight_name: str, alternatives: Iterable[object], meaning: str
) -> PrepError:
    meanings = meaning.format(" or ".join(sorted(map(str, alternatives))))
    return PrepError(
        f"the scheme of {quote_name(weight_name)} is unknown",
        f"its codes and scales fit {meanings} of the config_groups of config.json",
        USE_ORIGINAL_HINT,
    )
