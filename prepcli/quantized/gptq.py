"""GPTQ and AWQ: integers packed into int32 words, with scales and zero points of groups of inputs.

scales: [G, out]. The decoded tensor is [out, in], with the group g of input i:

    value[o, i] = scales[g, o] * (w[i, o] - z[g, o])

The product is rounded to the dtype of the scales.

GPTQ has 2, 3, 4 or 8 bits. qweight: int32 [in * bits / 32, out], dense bit fields along the rows. qzeros: int32
[G, out * bits / 32], bit fields along the columns. g_idx: group g of each input, else g = i // group_size. Files of
version 1 store z - 1. The sum (z - 1) + 1 is taken modulo 2^bits, except with 3 bits. Source: `QuantLinear` of AutoGPTQ
0.7.1 (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py). Version 2 is `checkpoint_format: gptq_v2` of GPTQModel.

AWQ has 4 bits in GEMM order. qweight: int32 [in, out / 8]. qzeros: int32 [G, out / 8]. Output 8 j + t has nibble
ORDER[t] of word j, and g = i // (in / G). Source: `dequantize_gemm` of AutoAWQ 0.2.9 (awq/utils/packing_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import quote_name
from prepcli.planning.arrays import Array
from prepcli.quantized.decoder import (
    USE_ORIGINAL_HINT,
    VALUE_DTYPES,
    WORD_BITS,
    CodeArray,
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
    unpack_bits,
    word_count,
)

BITS = (2, 3, 4, 8)
SKIP_RULE = "-:"
# Settings of a rule with effect on the values that are stored, but not on how they are stored.
QUANTIZER_KEYS = frozenset(
    (
        "act_group_aware",
        "damp_auto_increment",
        "damp_percent",
        "desc_act",
        "mse",
        "static_groups",
        "sym",
        "true_sequential",
    )
)
AWQ_VALUES_PER_WORD = 8
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class GptqDecoder(Decoder):
    """Integers packed along the input dim.

    Without `input_groups` a group has consecutive inputs: `group_size`, or the same number in all groups.
    """

    # Zero points are packed along the rows of the decoded tensor: those of 32 rows are whole words.
    row_multiple = 32

    def __init__(
        self,
        name: str,
        weight: Array,
        zeros: Array,
        scales: Array,
        *,
        bits: int,
        is_zero_stored_minus_1: bool = True,
        input_groups: Array | None = None,
        group_size: int | None = None,
        settings_file: str = "config.json",
    ) -> None:
        words, outputs = (0, 0, *weight.shape)[-2:]
        inputs = words * WORD_BITS // bits
        groups = scales.shape[0] if scales.shape else 0
        int32 = ("int32",)
        self._weight = checked_matrix(weight, name, int32, [(word_count(inputs, bits), outputs)])
        self._scales = checked_matrix(scales, name, VALUE_DTYPES, [(max(groups, 1), outputs)])
        zeros_shape = (groups, word_count(outputs, bits))
        self._zeros = checked_matrix(zeros, name, int32, [zeros_shape])
        self._input_groups = None
        if input_groups is not None:
            self._input_groups = checked_matrix(input_groups, name, int32, [(inputs,)])
        stored = (weight, zeros, scales, input_groups)
        super().__init__(name, (outputs, inputs), scales.dtype, stored)
        self._bits = bits
        self._is_zero_stored_minus_1 = is_zero_stored_minus_1
        self._group_size = group_size
        self._settings_file = settings_file
        if group_size is None and inputs % groups == 0:
            self._group_size = inputs // groups
        if input_groups is None and self._group_size is None:
            raise self._group_size_error()

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        groups = (0, self._scales.rows)
        words = np.ascontiguousarray(read(self._weight, (0, self._weight.rows), rows).T)
        values = unpack_bits(words, self._bits, self.columns).astype(np.float32)
        zero_words, first = bit_field_words(rows, self._bits)
        zeros = unpack_bits(
            read(self._zeros, groups, zero_words), self._bits, first + rows[1] - rows[0]
        )
        zeros = zeros[:, first:]
        if self._is_zero_stored_minus_1:
            zeros = zeros + np.uint8(1)
            if self._bits in (2, 4):
                zeros &= (1 << self._bits) - 1
        scales = read(self._scales, groups, rows).T.astype(np.float32)
        scale_groups(values, zeros.T.astype(np.float32), scales, self._group_numbers(read))
        return values

    def _group_numbers(self, read: MatrixReader) -> np.ndarray:
        """Return the group of each input."""
        if self._input_groups is not None:
            numbers = read_group_numbers(self._input_groups, self._scales.rows, read)
            if numbers is not None:
                return numbers
        if self._group_size is None:
            raise self._group_size_error()
        return consecutive_groups(self.columns, self._group_size)

    def _group_size_error(self) -> PrepError:
        return PrepError(
            f"the groups of {quote_name(self.name)} are unknown",
            f"{self.columns:,} inputs have {self._scales.rows:,} groups of unequal sizes, and the quantisation"
            " config has no group_size",
            f"add group_size to the quantisation settings in {self._settings_file}",
        )


def find_gptq(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    """Yield the decoders of a model of GPTQ."""
    file_format = setting(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    setting(settings, "pack_dtype", ("int32",), "int32")
    schemes = _gptq_schemes(settings, stored.settings_file)
    for name, prefix in [*stored.names_ending("qweight")]:
        weight_name = f"{prefix}weight"
        weight = stored.take(name, weight_name)
        scales = stored.take(f"{prefix}scales", weight_name)
        zeros = stored.take(f"{prefix}qzeros", weight_name)
        input_groups = stored.take_optional(f"{prefix}g_idx")
        check_dims(weight, 2)
        has_input_groups = input_groups is not None
        scheme = _find_scheme(schemes, weight_name, weight, zeros, has_input_groups)
        inputs = weight.shape[0] * WORD_BITS // scheme.bits
        _check_groups(scheme.group_size, scales, inputs, weight_name)
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


def _check_groups(group_size: object, scales: Array, inputs: int, weight_name: str) -> None:
    """Raise DamagedError if scales [groups, outputs] contradict the group size of the settings, if it is positive."""
    groups = scales.shape[0] if scales.shape else 0
    if not isinstance(group_size, int) or group_size < 1 or groups == 0:
        return
    expected = -(-inputs // group_size)
    if groups != expected:
        raise DamagedError(
            f"{quote_name(scales.name)} has {count_text(groups, 'group')}",
            f"{quote_name(weight_name)} has {count_text(inputs, 'input')} in groups of {group_size:,} (group_size):"
            f" {count_text(expected, 'group')}",
            GET_AGAIN_HINT,
        )


# Modules of a GPTQ model may have different settings. GPTQModel's `dynamic` maps regular expressions of module names to
# settings. A rule `-:REGEX` leaves the modules as floats: they have no words. A rule `+:REGEX` or `REGEX` changes
# settings of the modules. No expression of a file is run here: the shapes of a module's tensors show which of the
# settings it has. Source: `dynamic_get` of GPTQModel 4 (gptqmodel/quantization/config.py).


@dataclass(frozen=True, slots=True)
class _GptqScheme:
    """Settings of modules. Without `group_size`, all groups have the same number of inputs."""

    bits: int
    group_size: int | None

    def fits(self, weight: Array, zeros: Array) -> bool:
        """Return whether words of codes [inputs, outputs] and of zero points [groups, outputs] have the settings."""
        if len(zeros.shape) != 2:
            return False
        groups, zero_words = zeros.shape
        words, outputs = weight.shape
        inputs = words * WORD_BITS // self.bits
        if word_count(inputs, self.bits) != words or word_count(outputs, self.bits) != zero_words:
            return False
        return self.group_size is None or groups == -(-inputs // self.group_size)

    def __str__(self) -> str:
        """Return the settings as text."""
        if self.group_size is None:
            return f"{self.bits} bits"
        return f"{self.bits} bits in groups of {self.group_size}"


def _gptq_schemes(settings: Mapping[str, Any], settings_file: str) -> list[_GptqScheme]:
    """Return the settings of a model, and then the settings that the rules of `dynamic` give to modules."""

    def rule_error(why: str) -> PrepError:
        what = "modules with other settings are not supported"
        return PrepError(what, f"{settings_file}: {why}", USE_ORIGINAL_HINT)

    schemes = [_scheme(settings)]
    rules = settings.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise rule_error("`dynamic` has no rules")
    for pattern, changes in rules.items():
        if pattern.startswith(SKIP_RULE):
            continue
        if not isinstance(changes, Mapping):
            raise rule_error(f"the rule {pattern!r:.60} has no settings")
        for key in changes.keys() - QUANTIZER_KEYS - {"bits", "group_size"}:
            raise rule_error(f"the rule {pattern!r:.60} changes {key!r:.60}")
        schemes.append(_scheme({**settings, **changes}))
    return [*dict.fromkeys(schemes)]


def _scheme(settings: Mapping[str, Any]) -> _GptqScheme:
    group_size = settings.get("group_size")
    # -1 stands for one group of all inputs.
    if type(group_size) is not int or group_size < 1:
        group_size = None
    return _GptqScheme(setting(settings, "bits", BITS, 4), group_size)


def _find_scheme(
    schemes: list[_GptqScheme],
    weight_name: str,
    weight: Array,
    zeros: Array,
    has_input_groups: bool,
) -> _GptqScheme:
    """Return the settings that the shapes of a weight fit, or the model's settings, the first ones, if none fit.

    If the group of each input is stored, the size of groups has no effect.

    Raises:
        PrepError: Several fit, and the weight would have other values with each.
    """
    fitting = [scheme for scheme in schemes if scheme.fits(weight, zeros)]
    if not fitting:
        return schemes[0]
    bits = {scheme.bits for scheme in fitting}
    group_sizes = {scheme.group_size for scheme in fitting}
    if len(bits) > 1 or (len(group_sizes) > 1 and not has_input_groups):
        raise PrepError(
            f"the settings of {quote_name(weight_name)} are unknown",
            f"its tensors fit {' or '.join(map(str, fitting))}",
            USE_ORIGINAL_HINT,
        )
    return fitting[0]


class AwqDecoder(Decoder):
    """Integers packed along the output dim."""

    # A word has 8 values along the rows of the decoded tensor, so that 32 rows are whole words.
    row_multiple = 32

    def __init__(self, name: str, weight: Array, zeros: Array, scales: Array) -> None:
        inputs, words = (0, 0, *weight.shape)[-2:]
        outputs = words * AWQ_VALUES_PER_WORD
        groups = scales.shape[0] if scales.shape else 0
        num_groups = groups if groups > 0 and inputs % groups == 0 else 1
        self._weight = checked_matrix(weight, name, ("int32",), [(inputs, words)])
        self._scales = checked_matrix(scales, name, VALUE_DTYPES, [(num_groups, outputs)])
        self._zeros = checked_matrix(zeros, name, ("int32",), [(groups, words)])
        super().__init__(name, (outputs, inputs), scales.dtype, (weight, zeros, scales))

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        groups = (0, self._scales.rows)
        words = (rows[0] // AWQ_VALUES_PER_WORD, -(-rows[1] // AWQ_VALUES_PER_WORD))
        first = rows[0] - words[0] * AWQ_VALUES_PER_WORD
        outputs = slice(first, first + rows[1] - rows[0])
        codes = _unpack_awq(read(self._weight, (0, self._weight.rows), words))[:, outputs]
        zeros = _unpack_awq(read(self._zeros, groups, words))[:, outputs].astype(np.float32)
        scales = read(self._scales, groups, rows).astype(np.float32)
        values = np.ascontiguousarray(codes.T).astype(np.float32)
        numbers = consecutive_groups(self.columns, self.columns // groups[1])
        scale_groups(values, zeros.T, scales.T, numbers)
        return values


def _unpack_awq(words: np.ndarray) -> CodeArray:
    """Return the codes of words in the order of outputs."""
    codes = unpack_bits(words, 4, words.shape[1] * AWQ_VALUES_PER_WORD)
    codes = codes.reshape(len(words), -1, AWQ_VALUES_PER_WORD)[..., AWQ_ORDER]
    return codes.reshape(len(words), -1)


def find_awq(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    """Yield the decoders of a model of AWQ."""
    setting(settings, "bits", (4,), 4)
    setting(settings, "version", ("gemm", "GEMM"), "gemm")
    setting(settings, "zero_point", (True,), True)
    for name, prefix in [*stored.names_ending("qweight")]:
        weight_name = f"{prefix}weight"
        weight = stored.take(name, weight_name)
        scales = stored.take(f"{prefix}scales", weight_name)
        check_dims(weight, 2)
        _check_groups(settings.get("group_size"), scales, weight.shape[0], weight_name)
        yield AwqDecoder(weight_name, weight, stored.take(f"{prefix}qzeros", weight_name), scales)


def awq_file_settings(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of AutoAWQ's `quant_config.json` with the keys of config.json."""
    bits, group_size = document.get("w_bit"), document.get("q_group_size")
    return {"bits": bits, "group_size": group_size, **document}
