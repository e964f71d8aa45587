"""The quantisation of a model's files: its settings, in config.json or a file of a tool, and whether they are used.

Settings may be left over from the model before it was decoded. They count only if a tensor may be quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.formats.registry import iter_hf_tensors
from prepcli.planning.tensors import FLOAT_DTYPES
from prepcli.quantized.formats import (
    QUANTIZATION_FILES,
    SCALE_SUFFIXES,
    quantization_config_of_file,
    quantization_settings,
)
from prepcli.sources.references import CONFIG
from prepcli.sources.source import read_json_object
from prepcli.stores.files import list_folder
from prepcli.stores.paths import AnyPath

# Integer tensors of models without quantised weights: masks of GPT-2, positions, and counters of batch norm.
BUFFER_SUFFIXES = (
    ".bias",
    "position_ids",
    "token_type_ids",
    "position_index",
    "num_batches_tracked",
)


def is_quantized(folder: AnyPath) -> bool:
    """Return whether a model has quantised weights, by its settings and the dtypes of its tensors."""
    return bool(quantization_file(_read_config(folder), folder))


def quantization_file(config: HFConfig, folder: AnyPath) -> str:
    """Return the name of the file with the quantisation config of a model, or an empty string.

    Args:
        config: Content of its config.json.
        folder: Its folder. Earlier tools wrote the settings to a file next to config.json.
    """
    names = _settings_files(config, folder)
    return names[0] if names and has_quantized_tensors(folder) else ""


def model_quantization(config: HFConfig, folder: AnyPath) -> Mapping[str, Any]:
    """Return the quantisation config of a model, or an empty mapping. See `quantization_file`."""
    name = quantization_file(config, folder)
    if name in ("", CONFIG):
        return quantization_settings(config) if name else {}
    return quantization_config_of_file(name, read_json_object(folder / name))


def unused_quantization_note(config: HFConfig, folder: AnyPath) -> str:
    """Return a note about quantisation settings of tensors without quantised weights, or an empty string.

    The arguments are as for `quantization_file`.
    """
    names = _settings_files(config, folder)
    if not names or has_quantized_tensors(folder):
        return ""
    return f"the quantisation in {' and '.join(names)} is ignored: no tensor is quantised"


def not_quantized_error(display_name: str, folder: AnyPath) -> PrepError:
    """Return the error for a request to decode a model without quantised weights."""
    option = Option("quantized", "dequantize")
    why = f"{display_name} is not quantised"
    remark = unused_quantization_note(_read_config(folder), folder)
    if remark:
        why = f"{why} ({remark})"
    return usage_error(text("{} has no effect", option), why, text("remove {}", option))


def _read_config(folder: AnyPath) -> HFConfig:
    return read_json_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def _settings_files(config: HFConfig, folder: AnyPath) -> list[str]:
    """Return the names of the files with quantisation settings: config.json, and the first file of a tool."""
    names = [CONFIG] if quantization_settings(config) else []
    of_tools = (name for name in QUANTIZATION_FILES if (folder / name).is_file())
    return [*names, *list(of_tools)[:1]]


def has_quantized_tensors(folder: AnyPath) -> bool:
    """Return whether a tensor of a model may be quantised, by its name and dtype.

    True for formats without dtypes in a header, and for broken headers: their error is raised by the opener.
    """
    try:
        # Header by header: the first one of a quantised model is usually enough.
        tensors = iter_hf_tensors(folder, list_folder(folder))
        return any(may_be_quantized(tensor.name, tensor.dtype) for tensor in tensors)
    except (LookupError, PrepError):
        return True


def may_be_quantized(name: str, dtype: str) -> bool:
    """Return whether a stored tensor may have codes or scales of a quantised weight."""
    if dtype in FLOAT_DTYPES:
        return name.endswith(SCALE_SUFFIXES)
    return dtype != "bool" and not name.endswith(BUFFER_SUFFIXES)
