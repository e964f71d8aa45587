"""Detection of a checkpoint's format from file names, with errors for known but unsupported formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from prepcli.console.lists import join_names
from prepcli.errors import DamagedError, PrepError
from prepcli.formats.flax_folder import detect_msgpack_kind
from prepcli.formats.msgpack import sniff_msgpack_kind
from prepcli.formats.orbax import find_item
from prepcli.formats.safetensors import has_safetensors
from prepcli.formats.torch_files import SUFFIXES, TRAINING_FILE_PATTERNS, detect_torch_kind, select_model_files
from prepcli.formats.untrusted import MAX_CONFIG_NBYTES, list_folder, parse_json, read_small_file

Kind = Literal["safetensors", "orbax", "torch", "meta", "flax", "easylm"]

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
MAX_LISTED = 6
QUANTISATION_FILES = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}  # written by older tools
_QUANTISATION_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class UnsupportedFormat:
    """A known but unsupported format.

    Attributes:
        patterns: Lower-case patterns of its file names.
        what: First part of the error, after the checkpoint's name.
        why: Reason.
        hint: How to convert it, with `{folder}` for the checkpoint's name.
    """

    patterns: tuple[str, ...]
    what: str
    why: str
    hint: str


UNSUPPORTED_FORMATS = (
    UnsupportedFormat(
        ("*.gguf",),
        "is in GGUF format",
        "GGUF is an inference format: its weights are quantised or reordered",
        "use the model that it was converted from: a folder with config.json and *.safetensors",
    ),
    UnsupportedFormat(
        ("*.distcp",),
        "is a torch distributed checkpoint",
        "each rank wrote its part in PyTorch's own format",
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} model.pth, then load it into the"
        " model and call its save_pretrained(OUT)",
    ),
)

TRAINING_FILES_ONLY = UnsupportedFormat(
    TRAINING_FILE_PATTERNS,
    "holds no model",
    "these files belong to a PyTorch training run, but are not the model",
    "name the folder that the model itself was saved to",
)


def detect(path: Path, display_name: str = "") -> Kind:
    """Detect the format of a checkpoint.

    Args:
        path: Folder or file. An Orbax checkpoint may be an item, a step folder or a run folder with steps.
        display_name: Name of the checkpoint in messages.

    Raises:
        PrepError: The format is not supported, the model is quantised or an adapter, or there is no checkpoint.
    """
    display_name = display_name or str(path)
    if path.is_file():
        if (kind := sniff_msgpack_kind(path)) is not None:
            return kind
        raise unsupported_format_error([path.name], display_name) or _single_file_error(path, display_name)
    if find_item(path) is not None:
        return "orbax"
    names = list_folder(path)
    if ADAPTER_CONFIG in names and CONFIG not in names:
        raise adapter_error(display_name)
    if CONFIG in names:
        check_config(path / CONFIG, display_name)
    if (error := quantised_files_error(names, display_name)) is not None:
        raise error
    if has_safetensors(path):
        return "safetensors"
    if (torch_kind := detect_torch_kind(names)) is not None:
        return torch_kind
    if (flax_kind := detect_msgpack_kind(names)) is not None:
        return flax_kind
    if (error := unsupported_format_error(names, display_name)) is not None:
        raise error
    if select_model_files(names):
        return "torch"
    torch_files = [name for name in names if name.lower().endswith(SUFFIXES)]
    error = _matching_format_error((TRAINING_FILES_ONLY,), torch_files, display_name)
    raise error or _no_checkpoint_error(names, display_name)


def unsupported_format_error(names: Iterable[str], display_name: str) -> PrepError | None:
    """Return the error for a folder or repository without safetensors; None if no file is of a known format."""
    return _matching_format_error(UNSUPPORTED_FORMATS, list(names), display_name)


def _matching_format_error(
    formats: Iterable[UnsupportedFormat], names: list[str], display_name: str
) -> PrepError | None:
    for unsupported in formats:
        matches = [name for name in names if any(fnmatchcase(name.lower(), p) for p in unsupported.patterns)]
        if matches:
            why = f"found {join_names(matches, max_names=MAX_LISTED)}; {unsupported.why}"
            hint = unsupported.hint.format(folder=display_name)
            return PrepError(f"{display_name} {unsupported.what}", why, hint)
    return None


def adapter_error(display_name: str) -> PrepError:
    """Return the error for a LoRA or other PEFT adapter."""
    return PrepError(
        f"{display_name} is an adapter, not a model",
        f"it has {ADAPTER_CONFIG}: adapters hold only changes to a base model",
        "merge it first: PEFT's merge_and_unload(), then save_pretrained(OUT)",
    )


def check_config(config_path: Path, display_name: str) -> None:
    """Raise PrepError if config.json cannot be parsed or describes quantised weights."""
    try:
        config = parse_json(read_small_file(config_path, MAX_CONFIG_NBYTES))
    except ValueError as error:
        raise DamagedError(f"{display_name} has a broken {CONFIG}", str(error)) from error
    if method := _quantisation_method(config):
        raise _quantised_error(display_name, f"{CONFIG} has a quantization_config: {method}")


def quantised_files_error(names: Iterable[str], display_name: str) -> PrepError | None:
    """Return the error for a folder or repository with a file of a quantisation tool; None if there is none."""
    name = next((name for name in names if name in QUANTISATION_FILES), None)
    if name is None:
        return None
    return _quantised_error(display_name, f"found {name}, which {QUANTISATION_FILES[name]} writes")


def _quantised_error(display_name: str, why: str) -> PrepError:
    return PrepError(
        f"{display_name} is quantised",
        f"{why}; its weights are not the model's own values",
        "use the model that it was quantised from, or dequantise it with its own tool and save it in bfloat16",
    )


def _quantisation_method(config: Any) -> str:
    """Return `gptq`, `fp8`, ...; empty if not quantised. Multimodal models have the keys under text_config."""
    if not isinstance(config, Mapping):
        return ""
    text_config = config.get("text_config")
    sections = [config, text_config] if isinstance(text_config, Mapping) else [config]
    values = (section.get(key) for section in sections for key in _QUANTISATION_KEYS)
    quantisation = next((value for value in values if value), None)
    if not quantisation:
        return ""
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
    return str(method or "of an unnamed method")


def _single_file_error(path: Path, display_name: str) -> PrepError:
    return PrepError(f"{display_name} is a file", "a checkpoint is a folder", f"name its folder: `{path.parent}`")


def _no_checkpoint_error(names: list[str], display_name: str) -> PrepError:
    return PrepError(
        f"`{display_name}` holds no checkpoint",
        "looked for *.safetensors, *.bin, *.msgpack, Orbax `_METADATA`, EasyLM stream; "
        f"found {join_names(names, max_names=MAX_LISTED) if names else 'nothing'}",
    )
