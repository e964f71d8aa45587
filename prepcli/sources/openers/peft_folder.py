"""Opener for an adapter in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.errors import PrepError
from prepcli.formats.file_records import check_files, check_header
from prepcli.formats.manifest import read_manifest
from prepcli.formats.safetensors import SafetensorsHeader, read_safetensors_header
from prepcli.planning.accounting import TensorNames
from prepcli.planning.plan import Contiguous, SourceFile
from prepcli.sources.source import Source, SourceTensor, read_config
from trainer.models.lora import PEFT_PREFIX, LoraConfig, projections
from trainer.models.parameters import Family, HFConfig

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
# Keys of adapter_config.json that change the model, and the values with which they do not
PLAIN_VALUES: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layers_to_transform": ([], None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": ([], None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base
}


def is_adapter(path: Path) -> bool:
    """Return whether a folder has an adapter of PEFT."""
    return (path / ADAPTER_CONFIG).is_file()


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of an adapter.

    Raises:
        PrepError: They are missing, or need a feature that is not supported.
    """
    if not is_adapter(path):
        raise PrepError(f"{path} is not an adapter", f"it has no {ADAPTER_CONFIG}", "a folder that PEFT saved")
    check_files(path, read_manifest(path) or {})
    settings = read_config(path / ADAPTER_CONFIG)
    for key, plain_values in PLAIN_VALUES.items():
        if (value := settings.get(key, plain_values[0])) not in plain_values:
            raise PrepError(f"{path}: {key} = {value!r:.60} is not supported", "only plain LoRA adapters are")
    for key in ("r", "lora_alpha"):
        value = settings.get(key)
        is_number = isinstance(value, int) or (key != "r" and isinstance(value, float))
        if not is_number or isinstance(value, bool) or not value or value <= 0:
            raise PrepError(f"{path / ADAPTER_CONFIG} is invalid", f"{key} is {value!r:.60}, not a positive number")
    return settings


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of an adapter's tensors.

    Raises:
        PrepError: The file is missing or broken.
    """
    if not (path / ADAPTER_FILE).is_file():
        hint = "PEFT's `save_pretrained` writes it; `adapter_model.bin` is not supported"
        raise PrepError(f"{path} has no {ADAPTER_FILE}", "the tensors of an adapter are read from it", hint)
    header = read_safetensors_header(path / ADAPTER_FILE, 0)
    check_header(path / ADAPTER_FILE, read_manifest(path) or {}, header.digest)
    return header


def read_lora_config(path: Path, family: Family, config: HFConfig) -> LoraConfig:
    """Return the settings of an adapter of a model, with logical names of its targets.

    Args:
        path: Folder of the adapter.
        family: Family of the model.
        config: The model's config.json.

    Raises:
        PrepError: The adapter is invalid, or belongs to another model.
    """
    settings = read_settings(path)
    names = {tensor.name for tensor in read_header(path).tensors}
    first_tensors: dict[str, str] = {}  # a tensor of the first layer -> logical name
    for projection in projections(family, config):
        module = projection.module.replace(f"{{{projection.stack}}}", "0")
        first_tensors.setdefault(f"{PEFT_PREFIX}{family.prefix}{module}.lora_A.weight", projection.name)
    targets = tuple(dict.fromkeys(name for tensor, name in first_tensors.items() if tensor in names))
    if not targets:
        why = f"none of its tensors is an adapter of a projection of {family.name}"
        raise PrepError(f"{path} does not fit the model", why, "the model that the adapter was trained with")
    return adapter_config(settings, targets)


def adapter_config(settings: Mapping[str, Any], targets: tuple[str, ...] = ()) -> LoraConfig:
    """Return the rank, scale and targets of an adapter with these settings."""
    use_rslora = bool(settings.get("use_rslora"))
    return LoraConfig(settings["r"], float(settings["lora_alpha"]), targets=targets, use_rslora=use_rslora)


def open_adapter(path: Path, family: Family, config: HFConfig) -> Source:
    """Read the header of an adapter.

    Args:
        path: Folder of the adapter.
        family: Family of its tensors: that of `lora_family`, or the model's with the prefix of PEFT.
        config: The model's config.json.

    Returns:
        A source with the tensors of the adapter. They are not compared with the family's parameters.

    Raises:
        PrepError: The file is missing or broken.
    """
    header = read_header(path)
    names = TensorNames(family)
    tensors = (
        SourceTensor(names.bare_name(t.name), t.dtype, t.shape, (Contiguous(t.file, t.offset),)) for t in header.tensors
    )
    return Source(
        display_name=str(path),
        root=path,
        family=family,
        config=config,
        names=names,
        tensors=tuple(tensors),
        files=(path / header.file_name,),
        file_stamps=(SourceFile(header.file_name, header.size, header.mtime_ns, header.digest),),
        small_files=(),
        manifest=None,
    )
