"""The format of a checkpoint, by the names of its files, and whether its weights are quantised.

Settings of a quantisation tool may be left over from the model before it was decoded. They count only if a tensor may
be quantised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from typing import Any, Protocol

from prepcli.core.errors import (
    BROKEN_CONFIG_HINT,
    Command,
    DamagedError,
    Option,
    PrepError,
    Text,
    text,
    usage_error,
)
from prepcli.core.formatting import join_names
from prepcli.core.json_values import HFConfig, load_json, parse_json
from prepcli.formats import torch_files
from prepcli.formats.manifest import is_begun_run, no_step_error
from prepcli.formats.meta_llama_config import is_dense_mistral
from prepcli.formats.msgpack import sniff_msgpack_kind
from prepcli.formats.orbax import ITEM_MARKERS
from prepcli.formats.registry import FORMATS, SUFFIXES, Kind, Select, iter_hf_tensors
from prepcli.formats.safetensors import ADAPTER_CONFIG, ADAPTER_HINT, select_safetensors_files
from prepcli.formats.torch_dcp import METADATA_FILE as DCP_METADATA_FILE
from prepcli.formats.torch_files import META_PARAMS_FILE, MISTRAL_FILE, TRAINING_FILE_PATTERNS
from prepcli.planning.tensors import FLOAT_DTYPES
from prepcli.quantized.formats import (
    QUANTIZATION_FILES,
    QUANTIZATION_KEYS,
    SCALE_SUFFIXES,
    quantization_config_of_file,
    quantization_settings,
)
from prepcli.sources.references import CONFIG
from prepcli.sources.source import read_json_object
from prepcli.stores.files import MAX_CONFIG_NBYTES, list_folder, read_bytes
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
    return bool(quantization_file(_config_in(folder), folder))


def quantization_file(config: HFConfig, folder: AnyPath) -> str:
    """Return the name of the file with the quantisation config of a model, or an empty string.

    Earlier tools wrote the settings to a file next to config.json.
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
    remark = unused_quantization_note(_config_in(folder), folder)
    if remark:
        why = f"{why} ({remark})"
    return usage_error(text("{} has no effect", option), why, text("remove {}", option))


def _config_in(folder: AnyPath) -> HFConfig:
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


MAX_LISTED = 6
# Folders above the metadata file of an Orbax item: its step and the item itself.
MAX_ITEM_DEPTH = 2


class Folder(Protocol):
    """Files of a checkpoint: a folder on a disk or in a bucket, or a repository on the hub."""

    @property
    def display_name(self) -> str:
        """Name of the checkpoint in messages."""
        ...

    def names(self) -> Sequence[str]:
        """List the files at the top, and the metadata file of each Orbax item with its path."""
        ...

    def checkpoint_folders(self) -> Sequence[AnyPath]:
        """List the subfolders with checkpoints of their own."""
        ...

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a small listed file, or fewer if the file is shorter."""
        ...

    def open_headers(self) -> AnyPath | None:
        """Return a folder with all weight files whose headers can be read, or None if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Error for a known format without support.

    Attributes:
        what: First part of the error, after the checkpoint's name.
        why: Reason, with `{names}` for the names of the files.
        hint: How to convert it, with `{folder}` for the checkpoint's name.
        is_quantized: Whether the weights can be decoded. The hint names the option.
    """

    what: str
    why: str
    hint: str | Text = ""
    is_quantized: bool = False

    def error(self, names: Sequence[str], display_name: str) -> PrepError:
        """Return the error for a checkpoint with these files."""
        why = self.why.replace("{names}", join_names(names, max_names=MAX_LISTED))
        hint = self.hint
        # `replace` returns a plain text. A text with references names no folder.
        if not isinstance(hint, Text):
            hint = hint.replace("{folder}", display_name)
        if self.is_quantized:
            option = Option("quantized", "dequantize")
            hint = text("{} decodes its weights", Command("save-init", display_name, option))
        return PrepError(f"{display_name} {self.what}", why, hint)


def _quantised_refusal(why: str) -> Refusal:
    return Refusal(
        "is quantised",
        f"{why}; its weights are not the model's own values",
        is_quantized=True,
    )


ADAPTER = Refusal(
    "is an adapter, not a model",
    "it has {names}: adapters hold only changes to a base model",
    ADAPTER_HINT,
)
GPTQ, AWQ, MODELOPT = (
    _quantised_refusal(f"found {{names}}, which {tool} writes")
    for tool in ("GPTQ", "AWQ", "ModelOpt")
)
GGUF = Refusal(
    "is in GGUF format",
    "found {names}; GGUF is an inference format: its weights are quantised or reordered",
    text(
        "{} decodes them, or use the model that it was converted from",
        Command("save-init", "FILE.gguf", Option("quantized", "dequantize")),
    ),
)
DISTRIBUTED = Refusal(
    "is an incomplete torch distributed checkpoint",
    f"found {{names}}, but no {DCP_METADATA_FILE}, which is written last",
    "name a complete checkpoint",
)
TRAINING_FILES = Refusal(
    "holds no model",
    "found {names}; these files belong to a PyTorch training run, but are not the model",
    "name the folder that the model itself was saved to",
)


@dataclass(frozen=True, slots=True)
class Detected:
    """Format of a checkpoint, and facts about its files that were read to detect it.

    Attributes:
        kind: The format.
        item: Path of an Orbax item within the checkpoint, if there is one.
        may_be_quantized: Whether settings of a quantisation tool may be among the files.
        config: Content of the config.json of a folder with weights, if it is a JSON object.
    """

    kind: Kind
    item: str | None = None
    may_be_quantized: bool = True
    config: HFConfig | None = None


def _names_matching(patterns: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    """Return the names that match a pattern in lower case."""
    matching: list[str] = []
    for name in names:
        if any(fnmatchcase(name.lower(), pattern) for pattern in patterns):
            matching.append(name)
    return matching


def _adapter_config(names: Sequence[str]) -> Sequence[str]:
    if ADAPTER_CONFIG in names and CONFIG not in names:
        return [ADAPTER_CONFIG]
    return []


def _training_files(names: Sequence[str]) -> Sequence[str]:
    """Return the PyTorch files of a training run without the files of the model."""
    matching = _names_matching(TRAINING_FILE_PATTERNS, names)
    return [name for name in matching if name.lower().endswith(torch_files.SUFFIXES)]


# The first rule that selects a name decides, so the order matters:
#   1. Files that look like a model but are not one: adapters and quantised weights are safetensors
#      files too, and their tensors do not have the values of the model.
#   2. Weights under the names of their libraries.
#   3. Formats that are not supported. A repository may have GGUF files next to its safetensors, so
#      that these rules come after the weights.
#   4. Weights of any other name, and last the files that only a training run has: an
#      `optimizer.bin` next to a model must not hide it.
RULES: tuple[tuple[Select, Kind | Refusal], ...] = (
    (_adapter_config, ADAPTER),
    (partial(_names_matching, ("quantize_config.json",)), GPTQ),
    (partial(_names_matching, ("quant_config.json",)), AWQ),
    (partial(_names_matching, ("hf_quant_config.json",)), MODELOPT),
    *((row.select, kind) for kind, row in FORMATS.items()),
    (partial(_names_matching, ("*.gguf",)), GGUF),
    (partial(_names_matching, ("*.distcp",)), DISTRIBUTED),
    *((row.select_other, kind) for kind, row in FORMATS.items()),
    (_training_files, TRAINING_FILES),
)


def detect(
    folder: Folder, *, allow_adapters: bool = False, allow_quantized: bool = False
) -> Detected:
    """Detect the format of a checkpoint. Of its contents, only the config is read.

    The headers of weights are read too if there are settings of a quantisation tool, unless `allow_quantized`.

    An Orbax checkpoint may be an item, a step folder or a run folder with steps.

    Raises:
        PrepError: The format is not supported, the model is quantised or an adapter, or there is no checkpoint.
    """
    names = folder.names()
    # Not one of RULES, which see only names at the top: the metadata of a run's item is two folders
    # below it.
    item = _find_item(names)
    if item is not None:
        return Detected("orbax", item)
    top_names = sorted(name for name in names if "/" not in name)
    verdict, selected_names = apply_rules(top_names, allow_quantized=allow_quantized)
    is_settings_file = isinstance(verdict, Refusal) and verdict.is_quantized
    if is_settings_file and _has_only_dense_tensors(folder):
        allow_quantized = True
        verdict, selected_names = apply_rules(top_names, allow_quantized=True)
    if verdict is None:
        raise _subfolders_error(folder, top_names) or no_checkpoint_error(
            top_names, folder.display_name
        )
    if verdict is ADAPTER and allow_adapters:
        return Detected("adapter")
    if isinstance(verdict, Refusal):
        raise verdict.error(selected_names, folder.display_name)
    may_be_quantized = any(name in QUANTIZATION_FILES for name in top_names)
    config: HFConfig | None = None
    if CONFIG in top_names:
        content = folder.read(CONFIG, 0, MAX_CONFIG_NBYTES + 1)
        try:
            if len(content) > MAX_CONFIG_NBYTES:
                raise ValueError(f"it has more than {MAX_CONFIG_NBYTES:,} bytes")
            document: Any = load_json(content)
        except ValueError as error:
            raise DamagedError(
                f"{folder.display_name} has a broken {CONFIG}", str(error), BROKEN_CONFIG_HINT
            ) from error
        config = document if isinstance(document, dict) else None
        settings = config or {}
        # Multimodal models have the key under text_config.
        text_config = settings.get("text_config")
        sections = [settings, text_config if isinstance(text_config, Mapping) else {}]
        quantisation = ""
        for section, key in product(sections, QUANTIZATION_KEYS):
            if value := section.get(key):
                method = value.get("quant_method") if isinstance(value, Mapping) else None
                quantisation = f"{key}: {method or 'no quant_method'}"
                break
        may_be_quantized = may_be_quantized or bool(quantisation)
        if quantisation and not allow_quantized and not _has_only_dense_tensors(folder):
            why = f"{CONFIG} has a {quantisation}"
            raise _quantised_refusal(why).error((), folder.display_name)
    has_params = META_PARAMS_FILE in top_names
    if verdict == "safetensors" and has_params and _is_native_mistral(folder, top_names, config):
        verdict = "meta"
    return Detected(verdict, may_be_quantized=may_be_quantized, config=config)


def _is_native_mistral(folder: Folder, top_names: Sequence[str], config: HFConfig | None) -> bool:
    """Return whether the only weights next to `params.json` belong to a dense Mistral with the names of its own code.

    Its other models, e.g. with experts or images, keep the names of their files.
    """
    if select_safetensors_files(top_names) != [MISTRAL_FILE]:
        return False
    if CONFIG in top_names and (config or {}).get("model_type") != "mistral":
        return False
    try:
        return is_dense_mistral(parse_json(folder.read(META_PARAMS_FILE, 0, MAX_CONFIG_NBYTES)))
    except ValueError:
        return False


def _find_item(names: Sequence[str]) -> str | None:
    """Return the path of an Orbax item, or of a checkpoint of Levanter, with files among these."""
    listed = set(names)
    for name in names:
        folder, slash, file = name.rpartition("/")
        markers = ITEM_MARKERS.get(file)
        if markers is None or (slash and folder.count("/") >= MAX_ITEM_DEPTH):
            continue
        if all(f"{folder}{slash}{marker}" in listed for marker in markers):
            return folder
    return None


def detect_file(path: AnyPath, display_name: str, *, allow_gguf: bool = False) -> Kind:
    """Detect the format of a single local file: Flax or EasyLM, by its first bytes, or GGUF, by its name."""
    # The open refuses a pointer, whatever its name. No byte is read.
    read_bytes(path, nbytes=0)
    if (kind := sniff_msgpack_kind(path)) is not None:
        return kind
    verdict, selected_names = apply_rules([path.name])
    if verdict is GGUF:
        return detect_gguf(path.name, display_name, is_allowed=allow_gguf)
    if verdict is DISTRIBUTED:
        raise DISTRIBUTED.error(selected_names, display_name)
    raise PrepError(
        f"{display_name} is a file",
        "only Flax, EasyLM and GGUF checkpoints are single files",
        f"name its folder: `{path.parent}`",
    )


def detect_gguf(name: str, display_name: str, *, is_allowed: bool) -> Kind:
    """Return the kind of a GGUF file. Raise PrepError if the command does not read them."""
    if not is_allowed:
        raise GGUF.error([name], display_name)
    return "gguf"


def apply_rules(
    names: Sequence[str], *, allow_quantized: bool = False
) -> tuple[Kind | Refusal | None, Sequence[str]]:
    """Return the verdict of the first rule that selects any of the names, with the selected names."""
    for select, verdict in RULES:
        if allow_quantized and isinstance(verdict, Refusal) and verdict.is_quantized:
            continue
        if selected_names := select(names):
            return verdict, selected_names
    return None, ()


def _has_only_dense_tensors(folder: Folder) -> bool:
    """Return whether no tensor is quantised. Settings of a quantisation tool are then left over."""
    headers = folder.open_headers()
    return headers is not None and not has_quantized_tensors(headers)


def _subfolders_error(folder: Folder, names: Sequence[str]) -> PrepError | None:
    """Return the error for a folder with checkpoints in subfolders, or None. `names` are those in the folder."""
    if is_begun_run(names):
        return None
    name = folder.display_name.rstrip("/")
    paths = [f"`{name}/{subfolder.name}`" for subfolder in folder.checkpoint_folders()]
    if not paths:
        return None
    if len(paths) == 1:
        return PrepError(f"`{name}` holds no checkpoint", "its subfolder does", f"name {paths[0]}")
    listed = join_names(paths, max_names=MAX_LISTED)
    return PrepError(
        f"`{name}` holds {len(paths)} checkpoints", "a command reads one", f"name one: {listed}"
    )


def no_checkpoint_error(names: Sequence[str], display_name: str) -> PrepError:
    """Return the error for a folder with no file of a known format."""
    if is_begun_run(names):
        return no_step_error(display_name)
    listed = join_names(names, max_names=MAX_LISTED) if names else "nothing"
    looked_for = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
    return PrepError(
        f"`{display_name}` holds no checkpoint",
        f"looked for {looked_for}, Orbax `_METADATA`, EasyLM stream; found {listed}",
        "name the folder with the weights",
    )
