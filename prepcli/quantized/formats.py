"""The quantised formats by the method that a config names, and the weights of a model in one of them.

A new format is a module with a decoder and a function that finds the weights, and a row in `FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_values import HFConfig, JsonObject, quote_name
from prepcli.planning.arrays import Array
from prepcli.planning.tensors import FLOAT_DTYPES
from prepcli.quantized.decoder import USE_ORIGINAL_HINT, Decoder, StoredWeights

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# Scales of activations and of the KV cache, which quantised kernels multiply with.
ACTIVATION_SUFFIXES = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """A format, or a library with several formats.

    Attributes:
        find: Name of the function that yields the decoders of the weights, from a quantisation config and the stored
            tensors. Its module is imported for weights of the format only.
        codes: Ending of the names of codes. Codes may also have the name of the weight.
        scales: Endings of the names of scales. Whether float weights beside them are already multiplied with them is
            unknown.
        file: File with the settings of earlier versions of the tool, which config.json does not have.
        file_settings: Name of the function that returns the settings in the file with the keys of config.json. Empty if
            they have these keys.
    """

    find: str
    codes: str = ".weight"
    scales: tuple[str, ...] = ()
    file: str = ""
    file_settings: str = ""

    def find_decoders(
        self, settings: Mapping[str, Any], stored: StoredWeights
    ) -> Iterator[Decoder]:
        """Yield the decoders of the weights."""
        return _import_function(self.find)(settings, stored)

    def settings_of_file(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings in the file of the tool with the keys of config.json."""
        return _import_function(self.file_settings)(document) if self.file_settings else document


def _import_function(name: str) -> Callable[..., Any]:
    """Return a function of this package, e.g. `gptq.find_awq`."""
    module, _, function = name.partition(".")
    return getattr(import_module(f"prepcli.quantized.{module}"), function)


FORMATS: Mapping[str, QuantizedFormat] = {
    "fp8": QuantizedFormat("scaled.find_fp8", scales=("_scale_inv",)),
    "mxfp4": QuantizedFormat("float4.find_mxfp4", "_blocks", ("_scales",)),
    "compressed-tensors": QuantizedFormat(
        "compressed_tensors.find_compressed",
        ".weight_packed",
        ("weight_scale", "weight_global_scale", "weight_zero_point", "_proj_scale"),
    ),
    "gptq": QuantizedFormat("gptq.find_gptq", ".qweight", (".scales",), "quantize_config.json"),
    "awq": QuantizedFormat(
        "gptq.find_awq", ".qweight", (".scales",), "quant_config.json", "gptq.awq_file_settings"
    ),
    "modelopt": QuantizedFormat(
        "float4.find_modelopt",
        scales=("weight_scale_2",),
        file="hf_quant_config.json",
        file_settings="float4.modelopt_file_settings",
    ),
    "bitsandbytes": QuantizedFormat(
        "bitsandbytes.find_bitsandbytes", scales=(".SCB", ".absmax", ".nested_absmax", ".quant_map")
    ),
}
FORMATS_BY_FILE = {row.file: (method, row) for method, row in FORMATS.items() if row.file}
QUANTIZATION_FILES = tuple(FORMATS_BY_FILE)
CODE_SUFFIXES = tuple(row.codes for row in FORMATS.values())
SCALE_SUFFIXES = (*(end for row in FORMATS.values() for end in row.scales), *ACTIVATION_SUFFIXES)


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
    # Multimodal models have the key in this section.
    for section in (config, config.get("text_config")):
        for key in QUANTIZATION_KEYS:
            value = section.get(key) if isinstance(section, Mapping) else None
            if value and isinstance(value, Mapping):
                return value
    return {}


def quantization_config_of_file(name: str, document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantisation config of one of QUANTIZATION_FILES, with the keys of config.json."""
    method, row = FORMATS_BY_FILE[name]
    return {"quant_method": method, **row.settings_of_file(document)}


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
    read_payload: Callable[[Array], bytes],
    *,
    settings_file: str = "config.json",
) -> QuantizedWeights:
    """Return the decoders of a model's quantised weights.

    Args:
        settings: The quantisation config.
        tensors: All stored tensors.
        read_payload: Reads small tensors that describe other tensors.
        settings_file: Name of the file with the quantisation config, for messages.

    Raises:
        PrepError: The method or one of its settings is not supported.
        DamagedError: A tensor is missing, does not fit, or contradicts the config.
    """
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise PrepError(
            f"the quantisation `{method!s:.40}` is not supported",
            f"supported are {', '.join(FORMATS)}",
            USE_ORIGINAL_HINT,
        )
    stored = StoredWeights(tensors, read_payload, settings_file)
    decoders = tuple(FORMATS[method].find_decoders(settings, stored))
    _check_all_decoded(stored, method)
    others = stored.tensors.keys() - stored.used_names
    activation_scales = frozenset(name for name in others if name.endswith(ACTIVATION_SUFFIXES))
    return QuantizedWeights(decoders, frozenset(stored.used_names), activation_scales)


def _check_all_decoded(stored: StoredWeights, method: str) -> None:
    """Raise DamagedError if no weight is quantised, or a stored weight has a quantised dtype but no decoder."""
    codes: list[Array] = []
    for tensor in stored.tensors.values():
        if tensor.name.endswith(CODE_SUFFIXES) and tensor.dtype not in FLOAT_DTYPES:
            codes.append(tensor)
    named = f"names the quantisation {method}"
    if not stored.used_names:
        why = f"it {named}, and no tensor is quantised in this way"
        hint = GET_AGAIN_HINT
        scale = next((name for name in stored.tensors if name.endswith(SCALE_SUFFIXES)), "")
        if scale and not codes:
            why = f"it {named}, {quote_name(scale)} is a scale, and no weight has codes"
            hint = "if the weights are decoded, remove the scales and the settings; else get the model again"
        raise DamagedError(f"{stored.settings_file} and the tensors disagree", why, hint)
    for tensor in codes:
        if tensor.name not in stored.used_names:
            raise DamagedError(
                f"{quote_name(tensor.name)} is {tensor.dtype}",
                f"{stored.settings_file} {named}, and no tensor has its scales",
                GET_AGAIN_HINT,
            )
