"""What a folder holds, by its content: a checkpoint that prep reads, or one that it knows and refuses by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from prepcli.console.lists import some
from prepcli.errors import PrepError
from prepcli.formats.flax_folder import kind_of_names
from prepcli.formats.msgpack import sniff
from prepcli.formats.orbax import find_item
from prepcli.formats.safetensors import has_safetensors
from prepcli.formats.torch_files import OF_TRAINING, SUFFIXES, model_files, torch_kind
from prepcli.formats.untrusted import MOST_CONFIG_NBYTES, list_folder, parse_json, read_small

Kind = Literal["safetensors", "orbax", "torch", "meta", "flax", "easylm"]

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
MAX_SHOWN = 6
OF_QUANTISING = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}  # by tools whose config.json says nothing
_KEYS_OF_QUANTISING = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Foreign:
    """A format that is known and not read: the names that give it away, and the way out of it for `{folder}`."""

    patterns: tuple[str, ...]  # lower case
    what: str
    why: str
    hint: str


FOREIGN = (
    Foreign(
        ("*.gguf",),
        "is in GGUF format",
        "GGUF is made for inference: its weights are quantised or reordered",
        "take the model that it was made from: a folder with config.json and *.safetensors",
    ),
    Foreign(
        ("*.distcp",),
        "is a torch distributed checkpoint",
        "each rank wrote its part in PyTorch's own format",
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} model.pth, then load it into the"
        " model and call its save_pretrained(OUT)",
    ),
)

OF_A_RUN = Foreign(
    OF_TRAINING,
    "holds no model",
    "this is what a training run of PyTorch keeps beside one",
    "the folder that the model itself was saved to",
)


def detect(path: Path, shown: str = "") -> Kind:
    """The kind of checkpoint in the folder `path`, which is `shown` so in messages.

    An Orbax checkpoint may also be a step folder or a run folder with steps. Raises PrepError for formats that are
    not read, for quantised models and adapters, and for folders that hold none; names what was found.
    """
    shown = shown or str(path)
    if path.is_file():
        if (kind := sniff(path)) is not None:
            return kind
        raise format_refusal([path.name], shown) or _is_a_file(path, shown)
    if find_item(path) is not None:
        return "orbax"
    names = list_folder(path)
    if ADAPTER_CONFIG in names and CONFIG not in names:
        raise adapter_refusal(shown)
    if CONFIG in names:
        check_config(path / CONFIG, shown)
    if (refusal := quantised_refusal(names, shown)) is not None:
        raise refusal
    if has_safetensors(path):
        return "safetensors"
    if (torch := torch_kind(names)) is not None:
        return torch
    if (flax := kind_of_names(names)) is not None:
        return flax
    if (refusal := format_refusal(names, shown)) is not None:
        raise refusal
    if model_files(names):
        return "torch"
    of_torch = [name for name in names if name.lower().endswith(SUFFIXES)]
    raise _refusal((OF_A_RUN,), of_torch, shown) or _nothing(names, shown)


def format_refusal(names: Iterable[str], shown: str) -> PrepError | None:
    """The error for a folder or repository of these file names, none of them safetensors; None if nothing is known."""
    return _refusal(FOREIGN, list(names), shown)


def _refusal(foreigns: Iterable[Foreign], names: list[str], shown: str) -> PrepError | None:
    for foreign in foreigns:
        found = [name for name in names if any(fnmatchcase(name.lower(), pattern) for pattern in foreign.patterns)]
        if found:
            why = f"found {some(found, most=MAX_SHOWN)}; {foreign.why}"
            return PrepError(f"{shown} {foreign.what}", why, foreign.hint.format(folder=shown))
    return None


def adapter_refusal(shown: str) -> PrepError:
    """The error for a LoRA or other PEFT adapter."""
    return PrepError(
        f"{shown} is an adapter, not a model",
        f"{ADAPTER_CONFIG} is there: it holds only what is added to a base model",
        "merge it first: PEFT's merge_and_unload(), then save_pretrained(OUT)",
    )


def check_config(config: Path, shown: str) -> None:
    """Raise PrepError where config.json cannot be read, or says that the weights are quantised."""
    try:
        document = parse_json(read_small(config, MOST_CONFIG_NBYTES))
    except ValueError as error:
        raise PrepError(f"{shown} has a broken {CONFIG}", str(error)) from error
    if method := _quantisation(document):
        raise _quantised(shown, f"{CONFIG} has a quantization_config: {method}")


def quantised_refusal(names: Iterable[str], shown: str) -> PrepError | None:
    """The error for a folder or repository with a file that a tool for quantising leaves in its output; None: there is
    no such file."""
    found = next((name for name in names if name in OF_QUANTISING), None)
    return _quantised(shown, f"found {found}, which {OF_QUANTISING[found]} leaves beside them") if found else None


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
        f"found {some(names, most=MAX_SHOWN) if names else 'nothing'}",
    )
