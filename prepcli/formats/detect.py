"""What a folder holds, by its content: a checkpoint that prep reads, or one that it knows and refuses by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from prepcli.console.lists import join_names
from prepcli.errors import PrepError
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
QUANTISATION_FILES = {
    "quantize_config.json": "GPTQ",
    "quant_config.json": "AWQ",
}  # by tools whose config.json says nothing
_KEYS_OF_QUANTISING = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class UnsupportedFormat:
    """A format that is known and not read: the names that give it away, and the way out of it for `{folder}`."""

    patterns: tuple[str, ...]  # lower case
    what: str
    why: str
    hint: str


UNSUPPORTED_FORMATS = (
    UnsupportedFormat(
        ("*.gguf",),
        "is in GGUF format",
        "GGUF is made for inference: its weights are quantised or reordered",
        "take the model that it was made from: a folder with config.json and *.safetensors",
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
    "this is what a training run of PyTorch keeps beside one",
    "the folder that the model itself was saved to",
)


def detect(path: Path, display_name: str = "") -> Kind:
    """The kind of checkpoint in the folder `path`, which is `shown` so in messages.

    An Orbax checkpoint may also be a step folder or a run folder with steps. Raises PrepError for formats that are
    not read, for quantised models and adapters, and for folders that hold none; names what was found.
    """
    display_name = display_name or str(path)
    if path.is_file():
        if (kind := sniff_msgpack_kind(path)) is not None:
            return kind
        raise unsupported_format_error([path.name], display_name) or _is_a_file(path, display_name)
    if find_item(path) is not None:
        return "orbax"
    names = list_folder(path)
    if ADAPTER_CONFIG in names and CONFIG not in names:
        raise adapter_error(display_name)
    if CONFIG in names:
        check_config(path / CONFIG, display_name)
    if (refusal := quantised_files_error(names, display_name)) is not None:
        raise refusal
    if has_safetensors(path):
        return "safetensors"
    if (torch := detect_torch_kind(names)) is not None:
        return torch
    if (flax := detect_msgpack_kind(names)) is not None:
        return flax
    if (refusal := unsupported_format_error(names, display_name)) is not None:
        raise refusal
    if select_model_files(names):
        return "torch"
    of_torch = [name for name in names if name.lower().endswith(SUFFIXES)]
    raise _refusal((TRAINING_FILES_ONLY,), of_torch, display_name) or _nothing(names, display_name)


def unsupported_format_error(names: Iterable[str], display_name: str) -> PrepError | None:
    """The error for a folder or repository of these file names, none of them safetensors; None if nothing is known."""
    return _refusal(UNSUPPORTED_FORMATS, list(names), display_name)


def _refusal(foreigns: Iterable[UnsupportedFormat], names: list[str], shown: str) -> PrepError | None:
    for foreign in foreigns:
        found = [name for name in names if any(fnmatchcase(name.lower(), pattern) for pattern in foreign.patterns)]
        if found:
            why = f"found {join_names(found, max_names=MAX_LISTED)}; {foreign.why}"
            return PrepError(f"{shown} {foreign.what}", why, foreign.hint.format(folder=shown))
    return None


def adapter_error(display_name: str) -> PrepError:
    """The error for a LoRA or other PEFT adapter."""
    return PrepError(
        f"{display_name} is an adapter, not a model",
        f"{ADAPTER_CONFIG} is there: it holds only what is added to a base model",
        "merge it first: PEFT's merge_and_unload(), then save_pretrained(OUT)",
    )


def check_config(config: Path, display_name: str) -> None:
    """Raise PrepError where config.json cannot be read, or says that the weights are quantised."""
    try:
        document = parse_json(read_small_file(config, MAX_CONFIG_NBYTES))
    except ValueError as error:
        raise PrepError(f"{display_name} has a broken {CONFIG}", str(error)) from error
    if method := _quantisation(document):
        raise _quantised(display_name, f"{CONFIG} has a quantization_config: {method}")


def quantised_files_error(names: Iterable[str], display_name: str) -> PrepError | None:
    """The error for a folder or repository with a file that a tool for quantising leaves in its output; None: there is
    no such file."""
    found = next((name for name in names if name in QUANTISATION_FILES), None)
    return (
        _quantised(display_name, f"found {found}, which {QUANTISATION_FILES[found]} leaves beside them")
        if found
        else None
    )


def _quantised(shown: str, why: str) -> PrepError:
    return PrepError(
        f"{shown} is quantised",
        f"{why}; its weights are not the model's own values",
        "take the model that it was made from, or dequantise it with its own tool and save it in bfloat16",
    )


def _quantisation(document: Any) -> str:
    """`gptq`, `fp8`, … or nothing; multimodal models keep it under text_config."""
    if not isinstance(document, Mapping):
        return ""
    inner = document.get("text_config")
    places = [document, inner] if isinstance(inner, Mapping) else [document]
    config = next((found for place in places for key in _KEYS_OF_QUANTISING if (found := place.get(key))), None)
    if not config:
        return ""
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    return str(method or "of an unnamed method")


def _is_a_file(path: Path, shown: str) -> PrepError:
    return PrepError(f"{shown} is a file", "a checkpoint is a folder", f"the folder that it is in: `{path.parent}`")


def _nothing(names: list[str], shown: str) -> PrepError:
    return PrepError(
        f"`{shown}` holds no checkpoint",
        "looked for *.safetensors, *.bin, *.msgpack, Orbax `_METADATA`, EasyLM stream; "
        f"found {join_names(names, max_names=MAX_LISTED) if names else 'nothing'}",
    )
