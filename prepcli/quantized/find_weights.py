"""Find the quantised weights of a model from its config and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_values import HFConfig, JsonObject, parse_json, quote_name
from prepcli.planning.arrays import Array
from prepcli.quantized import gptq
from prepcli.quantized.awq import AwqDecoder
from prepcli.quantized.bitsandbytes import QUANT_TYPES, Bits4Decoder, parse_quant_state
from prepcli.quantized.decoder import VALUE_DTYPES, Decoder, check_dims
from prepcli.quantized.gptq import GptqDecoder
from prepcli.quantized.gptq_schemes import find_gptq_scheme, gptq_schemes
from prepcli.quantized.mxfp4 import Mxfp4Decoder
from prepcli.quantized.nvfp4 import GROUP_VALUES, Nvfp4Decoder
from prepcli.quantized.packed_ints import MAX_BITS, PackedIntDecoder, word_count
from prepcli.quantized.scaled import (
    CODE_DTYPES,
    FP8_DTYPES,
    Int8Decoder,
    ScaledDecoder,
    block_of_grid,
    scale_shapes,
)
from prepcli.quantized.stored_weights import (
    USE_ORIGINAL_HINT,
    PayloadReader,
    StoredWeights,
    check_group_size,
    setting,
)

# Settings of earlier versions of AutoGPTQ, AutoAWQ and ModelOpt, which config.json does not have.
GPTQ_FILE = "quantize_config.json"
AWQ_FILE = "quant_config.json"
MODELOPT_FILE = "hf_quant_config.json"
QUANTIZATION_FILES = (GPTQ_FILE, AWQ_FILE, MODELOPT_FILE)
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
# Strategies of compressed-tensors with a scale for `group_size` columns of a row.
GROUP_STRATEGIES = ("group", "tensor_group")
# Settings of the weights in a group of modules of compressed-tensors.
Scheme = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """The quantised weights of a model.

    Attributes:
        decoders: One decoder per weight.
        stored_names: Names of the stored tensors of all weights.
        activation_scales: Names of the stored scales without effect on weights.
    """

    decoders: tuple[Decoder, ...]
    stored_names: frozenset[str]
    activation_scales: frozenset[str]


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantisation config of a config.json, or an empty mapping."""
    sections = [config]
    text_config = config.get("text_config")
    # Multimodal models have the key in this section.
    if isinstance(text_config, Mapping):
        sections.append(text_config)
    for section in sections:
        for key in QUANTIZATION_KEYS:
            value = section.get(key)
            if value and isinstance(value, Mapping):
                return value
    return {}


def quantization_config_of_file(name: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantisation config of one of QUANTIZATION_FILES, with the keys of config.json."""
    if name == GPTQ_FILE:
        return {"quant_method": "gptq", **document}
    if name == MODELOPT_FILE:
        section = document.get("quantization")
        return {"quant_method": "modelopt", **(section if isinstance(section, Mapping) else {})}
    return {
        "quant_method": "awq",
        "bits": document.get("w_bit"),
        "group_size": document.get("q_group_size"),
        **document,
    }


def without_quantization(config: HFConfig) -> JsonObject:
    """Return a config.json without its quantisation config."""
    kept = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    text_config = kept.get("text_config")
    if isinstance(text_config, Mapping):
        kept["text_config"] = without_quantization(text_config)
    return kept


def find_weights(
    settings: Mapping[str, Any],
    tensors: Iterable[Array],
    read_payload: PayloadReader,
    *,
    settings_file: str = "config.json",
) -> QuantizedWeights:
    """Return the decoders of a model's quantised weights.

    Args:
        settings: The quantisation config.
        tensors: All stored tensors.
        read_payload: Reads small tensors that describe others.
        settings_file: Name of the file with the quantisation config, for messages.

    Raises:
        PrepError: The method or one of its settings is not supported.
        DamagedError: A tensor is missing, does not fit, or contradicts the config.
    """
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in FINDERS:
        raise PrepError(
            f"the quantisation `{method!s:.40}` is not supported",
            f"supported are {', '.join(FINDERS)}",
            USE_ORIGINAL_HINT,
        )
    stored = StoredWeights(tensors, read_payload, settings_file)
    decoders = tuple(FINDERS[method](settings, stored))
    stored.check_all_decoded(method)
    return QuantizedWeights(decoders, stored.used_tensor_names, stored.activation_scales())


def _find_fp8(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    block_setting = _parse_block(settings.get("weight_block_size"))
    for weight in [*stored.tensors_of(FP8_DTYPES)]:
        check_dims(weight, 2)
        stored.take(weight.name, weight.name)
        scale = stored.take(f"{weight.name}_scale_inv", weight.name)
        block = block_setting or block_of_grid(weight, scale)
        yield ScaledDecoder(weight, scale, block=block)


def _parse_block(value: object) -> tuple[int, int] | None:
    """Return the rows and columns of a block in a config, or None if it is not a pair of numbers."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    rows, columns = value
    for size in value:
        if type(size) is not int or not 1 <= size < 1 << 32:
            return None
    return rows, columns


def _find_mxfp4(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    for name, weight_name in [*stored.names_ending("_blocks")]:
        blocks = stored.take(name, weight_name)
        scales = stored.take(f"{weight_name}_scales", weight_name)
        yield Mxfp4Decoder(weight_name, blocks, scales)


def _find_compressed(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    setting(settings, "format", COMPRESSED_FORMATS, "dense")
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise PrepError(
            "sparse tensors are not supported",
            "config.json has a sparsity_config",
            USE_ORIGINAL_HINT,
        )
    schemes = [*_weight_schemes(settings)]
    for name, prefix in [*stored.names_ending("weight_packed")]:
        yield _packed_weight(schemes, stored, name, prefix)
    for weight in [*stored.tensors_of(CODE_DTYPES)]:
        if not weight.name.endswith("weight"):
            continue
        check_dims(weight, 2)
        stored.take(weight.name, weight.name)
        scale = stored.take(f"{weight.name}_scale", weight.name)
        dtype = scale.dtype
        # compressed-tensors decodes exponents to bfloat16.
        if dtype not in VALUE_DTYPES:
            dtype = "bfloat16"
        yield ScaledDecoder(
            weight,
            scale,
            block=_shape_of_scaled_block(schemes, weight, scale),
            zero_point=stored.take_optional(f"{weight.name}_zero_point"),
            dtype=dtype,
        )


def _weight_schemes(settings: Mapping[str, Any]) -> Iterator[Scheme]:
    """Yield the settings of weights in each group of modules."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping):
        raise PrepError(
            "config.json is not supported",
            "its quantisation has no config_groups",
            USE_ORIGINAL_HINT,
        )
    for group in groups.values():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            yield group["weights"]


def _packed_weight(
    schemes: Sequence[Scheme], stored: StoredWeights, name: str, prefix: str
) -> Decoder:
    """Return the decoder of packed codes of compressed-tensors."""
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
        raise DamagedError(
            f"{quote_name(packed.name)} has shape {[*packed.shape]}",
            f"`{shape.name}` is {[rows, columns]}, which does not fit num_bits of config.json",
            GET_AGAIN_HINT,
        )
    bits = {scheme["num_bits"] for scheme in _fitting_schemes(packing, (rows, columns), scale)}
    if len(bits) > 1:
        raise _several_schemes_error(weight_name, f"{_join_alternatives(bits)} bits")
    return PackedIntDecoder(
        weight_name,
        packed,
        scale,
        bits=bits.pop(),
        columns=columns,
        zero_point=stored.take_optional(f"{weight_name}_zero_point"),
        column_groups=stored.take_optional(f"{weight_name}_g_idx"),
    )


def _shape_of_scaled_block(
    schemes: Sequence[Scheme], weight: Array, scale: Array
) -> tuple[int, int]:
    """Return how many rows and columns share a scale, for dense codes of compressed-tensors."""
    rows, columns = weight.shape[-2:]
    blocks: set[tuple[int, int]] = set()
    for scheme in _fitting_schemes(schemes, weight.shape, scale):
        block = _scheme_block(scheme, rows, columns)
        if block is not None:
            # Larger blocks than the weight are the same as the weight.
            blocks.add((min(block[0], rows), min(block[1], columns)))
    if len(blocks) > 1:
        sizes = _join_alternatives([*block] for block in blocks)
        raise _several_schemes_error(weight.name, f"blocks of {sizes}")
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
        return _parse_block(scheme.get("block_structure"))
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
    """Return the schemes that give scales of this shape.

    A scheme names its modules by `targets`, names or classes. Classes are unknown here, so the shape of the scales
    decides.

    Args:
        schemes: Schemes of all groups of modules.
        shape: Shape of the weight.
        scale: Its scales.

    Raises:
        DamagedError: No scheme fits.
    """
    fitting = [scheme for scheme in schemes if _fits(scheme, shape, scale)]
    if not fitting:
        raise DamagedError(
            f"{quote_name(scale.name)} has shape {[*scale.shape]}",
            f"no group of modules in config.json has such scales for a weight {[*shape]}"
            " (group_size must divide the columns)",
            GET_AGAIN_HINT,
        )
    return fitting


def _fits(scheme: Scheme, shape: tuple[int, ...], scale: Array) -> bool:
    """Return whether a weight of a shape can have a scheme and these scales."""
    block = _scheme_block(scheme, *shape[-2:])
    if block is None:
        return True
    # compressed-tensors refuses a last group with fewer columns.
    if scheme.get("strategy") in GROUP_STRATEGIES and shape[-1] % block[1]:
        return False
    return scale.shape in scale_shapes(shape, block)


def _join_alternatives(values: Iterable[object]) -> str:
    return " or ".join(sorted(str(value) for value in values))


def _several_schemes_error(weight_name: str, meanings: str) -> PrepError:
    return PrepError(
        f"the scheme of {quote_name(weight_name)} is unknown",
        f"its codes and scales fit {meanings} of the config_groups of config.json",
        USE_ORIGINAL_HINT,
    )


def _find_gptq(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    file_format = setting(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    setting(settings, "pack_dtype", ("int32",), "int32")
    schemes = gptq_schemes(settings, stored.settings_file)
    for name, prefix in [*stored.names_ending("qweight")]:
        weight_name = f"{prefix}weight"
        weight = stored.take(name, weight_name)
        scales = stored.take(f"{prefix}scales", weight_name)
        zeros = stored.take(f"{prefix}qzeros", weight_name)
        input_groups = stored.take_optional(f"{prefix}g_idx")
        check_dims(weight, 2)
        scheme = find_gptq_scheme(
            schemes, weight_name, weight, zeros, has_input_groups=input_groups is not None
        )
        inputs = weight.shape[0] * gptq.WORD_BITS // scheme.bits
        _check_input_groups(scheme.group_size, scales, inputs, weight_name)
        yield GptqDecoder(
            weight_name,
            weight,
            zeros,
            scales,
            bits=scheme.bits,
            is_zero_stored_minus_1=file_format == "gptq",
            input_groups=input_groups,
            group_size=scheme.group_size,
            settings_file=stored.settings_file,
        )


def _check_input_groups(group_size: object, scales: Array, inputs: int, weight_name: str) -> None:
    """Raise DamagedError if scales [groups, outputs] contradict the group size of the settings."""
    check_group_size(
        scales,
        size=inputs,
        groups=scales.shape[0] if scales.shape else 0,
        group_size=group_size,
        owner=weight_name,
    )


def _find_awq(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    setting(settings, "bits", (4,), 4)
    setting(settings, "version", ("gemm", "GEMM"), "gemm")
    setting(settings, "zero_point", (True,), True)
    for name, prefix in [*stored.names_ending("qweight")]:
        weight_name = f"{prefix}weight"
        weight = stored.take(name, weight_name)
        scales = stored.take(f"{prefix}scales", weight_name)
        check_dims(weight, 2)
        _check_input_groups(settings.get("group_size"), scales, weight.shape[0], weight_name)
        yield AwqDecoder(weight_name, weight, stored.take(f"{prefix}qzeros", weight_name), scales)


def _find_modelopt(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    setting(settings, "quant_algo", ("NVFP4",), "NVFP4")
    setting(settings, "group_size", (GROUP_VALUES,), GROUP_VALUES)
    for name, weight_name in [*stored.names_ending("_scale_2")]:
        tensor_scale = stored.take(name, weight_name)
        weight = stored.take(weight_name, weight_name)
        scales = stored.take(f"{weight_name}_scale", weight_name)
        yield Nvfp4Decoder(weight_name, weight, scales, tensor_scale, is_divisor=False)


def _find_bitsandbytes(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    for name, prefix in [*stored.names_ending("SCB")]:
        weight_name = f"{prefix}weight"
        row_maxima = stored.take(name, weight_name)
        weight_format = stored.take_optional(f"{prefix}weight_format")
        # 0 stands for rows. Other layouts are those of kernels of earlier versions.
        if weight_format is not None and any(stored.payload(weight_format)):
            raise PrepError(
                f"the layout of {quote_name(weight_name)} is not supported",
                f"{quote_name(weight_format.name)} is not 0, which stands for rows",
                USE_ORIGINAL_HINT,
            )
        weight = stored.take(weight_name, weight_name)
        check_dims(weight, 2)
        yield Int8Decoder(weight, row_maxima)
    for quant_type in QUANT_TYPES:
        suffix = f".quant_state.bitsandbytes__{quant_type}"
        for name, weight_name in [*stored.names_ending(suffix)]:
            yield _bits4_weight(stored, stored.take(name, weight_name), weight_name)


def _bits4_weight(stored: StoredWeights, quant_state: Array, weight_name: str) -> Decoder:
    """Return the decoder of a 4-bit weight of bitsandbytes."""
    try:
        document = parse_json(stored.payload(quant_state))
        state = parse_quant_state(document)
    except ValueError as error:
        raise DamagedError(
            f"{quote_name(quant_state.name)} is invalid", str(error), GET_AGAIN_HINT
        ) from error
    return Bits4Decoder(
        weight_name,
        stored.take(weight_name, weight_name),
        stored.take(f"{weight_name}.absmax", weight_name),
        stored.take(f"{weight_name}.quant_map", weight_name),
        state=state,
        nested_absmax=stored.take_optional(f"{weight_name}.nested_absmax"),
        nested_quant_map=stored.take_optional(f"{weight_name}.nested_quant_map"),
    )


Finder = Callable[[Mapping[str, Any], StoredWeights], Iterator[Decoder]]
FINDERS: Mapping[str, Finder] = {
    "fp8": _find_fp8,
    "mxfp4": _find_mxfp4,
    "compressed-tensors": _find_compressed,
    "gptq": _find_gptq,
    "awq": _find_awq,
    "modelopt": _find_modelopt,
    "bitsandbytes": _find_bitsandbytes,
}
