"""Settings files of quantisation tools, which may be left over from the model before it was decoded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prepcli.errors import PrepError
from prepcli.formats.safetensors import read_safetensors_folder, select_safetensors_files
from prepcli.formats.torch_files import detect_torch_kind, read_torch_folder
from prepcli.formats.untrusted import list_folder
from prepcli.quantized.find_weights import QUANTIZATION_FILES
from prepcli.quantized.stored_weights import is_quantized_weight


def find_settings_file(folder: Path) -> str:
    """Return the name of the settings file in a folder, or an empty string."""
    for name in QUANTIZATION_FILES:
        if (folder / name).is_file():
            return name
    return ""


def has_quantized_tensors(folder: Path) -> bool:
    """Return whether a weight in the files of a model has quantised values, by its name and dtype.

    True for formats without dtypes in a header, and for broken headers: their error is raised by the opener.
    """
    try:
        return any(is_quantized_weight(name, dtype) for name, dtype in _stored_dtypes(folder))
    except (LookupError, PrepError):
        return True


def left_over_remark(folder: Path) -> str:
    """Return a note about a settings file beside weights without quantised values, or an empty string."""
    name = find_settings_file(folder)
    if not name or has_quantized_tensors(folder):
        return ""
    return f"{name} is ignored: no tensor is quantised"


def _stored_dtypes(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and dtype of each tensor. Raise LookupError for other formats than safetensors and PyTorch."""
    names = list_folder(folder)
    if select_safetensors_files(names):
        tensors = read_safetensors_folder(folder).tensors
    elif detect_torch_kind(names) == "torch":
        tensors = read_torch_folder(folder).tensors
    else:
        raise LookupError(folder)
    for tensor in tensors:
        yield tensor.name, tensor.dtype
