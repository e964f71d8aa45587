"""Settings of quantisation tools, which may be left over from the model before it was decoded."""

from __future__ import annotations

from collections.abc import Iterator

from prepcli.core.errors import PrepError
from prepcli.formats.safetensors import iter_folder_tensors, select_safetensors_files
from prepcli.formats.torch_files import detect_torch_kind, read_torch_folder
from prepcli.planning.tensors import FLOAT_DTYPES
from prepcli.quantized.find_weights import QUANTIZATION_FILES, quantization_settings
from prepcli.quantized.stored_weights import SCALE_SUFFIXES
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


def find_quantization_file(folder: AnyPath) -> str:
    """Return the name of a file with quantisation settings, e.g. `quantize_config.json`, or an empty string."""
    for name in QUANTIZATION_FILES:
        if (folder / name).is_file():
            return name
    return ""


def has_quantized_tensors(folder: AnyPath) -> bool:
    """Return whether a tensor of a model may be quantised, by its name and dtype.

    True for formats without dtypes in a header, and for broken headers: their error is raised by the opener.
    """
    try:
        return any(may_be_quantized(name, dtype) for name, dtype in _stored_dtypes(folder))
    except (LookupError, PrepError):
        return True


def may_be_quantized(name: str, dtype: str) -> bool:
    """Return whether a stored tensor may have codes or scales of a quantised weight."""
    if dtype in FLOAT_DTYPES:
        return name.endswith(SCALE_SUFFIXES)
    return dtype != "bool" and not name.endswith(BUFFER_SUFFIXES)


def unused_quantization_note(folder: AnyPath) -> str:
    """Return a note about quantisation settings of tensors without quantised weights, or an empty string."""
    names: list[str] = []
    if (folder / CONFIG).is_file() and quantization_settings(read_json_object(folder / CONFIG)):
        names.append(CONFIG)
    name = find_quantization_file(folder)
    if name:
        names.append(name)
    if not names or has_quantized_tensors(folder):
        return ""
    return f"the quantisation in {' and '.join(names)} is ignored: no tensor is quantised"


def _stored_dtypes(folder: AnyPath) -> Iterator[tuple[str, str]]:
    """Yield name and dtype of each tensor. Raise LookupError for other formats than safetensors and PyTorch."""
    names = list_folder(folder)
    if select_safetensors_files(names):
        # Header by header: the first one of a quantised model is usually enough.
        for tensor in iter_folder_tensors(folder):
            yield tensor.name, tensor.dtype
    elif detect_torch_kind(names) == "torch":
        for tensor in read_torch_folder(folder).tensors:
            yield tensor.name, tensor.dtype
    else:
        raise LookupError(folder)
