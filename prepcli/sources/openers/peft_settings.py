"""The settings of an adapter of PEFT: a typed adapter_config.json, compared with the adapter's tensors.

pydantic takes a tenth of a second to import, so that modules of all commands import this one where they need it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from prepcli.errors import PrepError
from prepcli.formats.file_records import check_files
from prepcli.formats.manifest import NO_MANIFEST, read_manifest
from prepcli.formats.safetensors import ADAPTER_CONFIG
from prepcli.planning.tensors import FileTensor
from prepcli.sources.openers.peft_folder import is_adapter, read_checked_header
from prepcli.sources.source import read_config
from trainer.models.json_types import HFConfig
from trainer.models.lora import (
    PEFT_PREFIX,
    LoraConfig,
    lora_family,
    projections,
    split_wrappers,
)
from trainer.models.parameters import Family
from trainer.models.text_part import with_prefixes

MATRIX_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
RANK_DIMS = {"A": 0, "B": 1}  # A is [rank, in] and B is [out, rank]
# Far above any tensor. Python refuses to divide by integers of hundreds of digits.
MAX_RANK = 2**31 - 1
MAX_SHOWN = 3  # faults of one file in a message
# Keys of adapter_config.json, and the values that prep supports: with them an adapter is plain LoRA.
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
    "use_bdlora": (False, None),
    "alora_invocation_tokens": ([], None),
    "arrow_config": ({}, None),
    "kasa_config": ({}, None),
    "monteclora_config": ({}, None),
    # Other initialisations change the base model.
    "init_lora_weights": (
        True,
        False,
        None,
        "gaussian",
        "eva",
        "orthogonal",
    ),
}


def _false_if_null(value: object) -> object:
    if value is None:
        return False
    return value


Flag = Annotated[bool, BeforeValidator(_false_if_null)]
# A regular expression, or ends of module names.
ModuleNames = str | list[str] | None


class PeftSettings(BaseModel):
    """The content of an adapter_config.json. Keys that do not change a merged model are not read."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    r: int = Field(ge=1, le=MAX_RANK)
    lora_alpha: float = Field(gt=0)
    use_rslora: Flag = False
    fan_in_fan_out: Flag = False
    base_model_name_or_path: str | None = None
    target_modules: ModuleNames = None
    exclude_modules: ModuleNames = None

    def lora_config(self, targets: tuple[str, ...] = ()) -> LoraConfig:
        """Return the rank and scale of the adapter, with the logical names of its targets."""
        return LoraConfig(self.r, self.lora_alpha, targets=targets, use_rslora=self.use_rslora)


def read_settings(folder: Path) -> PeftSettings:
    """Read the settings of an adapter.

    Raises:
        PrepError: They are missing or invalid, or need an unsupported feature.
    """
    path = folder / ADAPTER_CONFIG
    if not is_adapter(folder):
        raise PrepError(
            f"{folder} is not an adapter",
            f"it has no {ADAPTER_CONFIG}",
            "name a folder that PEFT or prep saved",
        )
    check_files(folder, read_manifest(folder) or NO_MANIFEST)
    content = read_config(path)
    for key, plain_values in PLAIN_VALUES.items():
        value = content.get(key, plain_values[0])
        # 0 == False in Python, but an integer is not a boolean setting.
        if not any(type(value) is type(plain) and value == plain for plain in plain_values):
            why = "only plain LoRA adapters are supported"
            hint = "PEFT's `merge_and_unload()` merges other adapters"
            raise PrepError(f"{folder}: {key} = {_value_text(value)} is not supported", why, hint)
    try:
        settings = PeftSettings.model_validate(content)
    except ValidationError as error:
        raise _invalid_error(path, _describe_faults(error)) from None
    _check_scale(path, settings)
    return settings


def read_adapter_family(path: Path, family: Family, config: HFConfig) -> tuple[Family, LoraConfig]:
    """Read the LoRA settings of an adapter, with logical names of its targets.

    Args:
        path: Folder of the adapter.
        family: Family of the model. Of a multimodal model, the family of its text part.
        config: The model's config.json.

    Returns:
        The family of the adapter's tensors, with the prefix of the class that was trained, and the settings.

    Raises:
        PrepError: The adapter is invalid, or belongs to another model.
    """
    settings = read_settings(path)
    header, _ = read_checked_header(path)
    check_settings(path, settings, header.tensors)
    # Name of a tensor without the modules around the text model -> these modules.
    wrappers: dict[str, str] = {}
    for tensor in header.tensors:
        prefix, name = split_wrappers(tensor.name.removeprefix(PEFT_PREFIX), family)
        wrappers[name] = prefix
    # A dict drops repeated names and keeps their order.
    found: dict[str, str] = {}  # logical name -> prefix
    for projection in projections(family, config):
        module = projection.module.replace(f"{{{projection.stack}}}", "0")
        prefix = wrappers.get(f"{module}.lora_A.weight")
        if prefix is not None:
            found.setdefault(projection.name, prefix)
    if not found:
        why = f"none of its tensors is an adapter of a projection of {family.name}"
        raise PrepError(
            f"{path} does not fit the model",
            why,
            "name the model that the adapter was trained with",
        )
    lora = settings.lora_config(tuple(found))
    prefix = next(iter(found.values()))
    return lora_family(with_prefixes(family, prefix, family.head_prefix), config, lora), lora


def check_settings(folder: Path, settings: PeftSettings, tensors: Iterable[FileTensor]) -> None:
    """Compare the settings of an adapter with its tensors, as PEFT does when it loads them.

    Args:
        folder: Folder of the adapter.
        settings: Its settings.
        tensors: Its tensors, with the names in the file.

    Raises:
        PrepError: The rank differs, or the settings do not select a module with tensors.
    """
    path = folder / ADAPTER_CONFIG
    for tensor in tensors:
        match = MATRIX_NAME.fullmatch(tensor.name)
        if match is None or len(tensor.shape) != 2:
            continue
        rank = tensor.shape[RANK_DIMS[match["matrix"]]]
        if rank != settings.r:
            shape = list(tensor.shape)
            r_text = _value_text(settings.r)
            why = f"r is {r_text}, but {tensor.name} is {shape}, which has the rank {rank}"
            raise PrepError(
                f"{path} does not belong to the tensors next to it",
                why,
                "get or export the adapter again",
            )
        module = match["module"].removeprefix(PEFT_PREFIX)
        if not _selects_module(settings.target_modules, module, if_unset=True):
            raise _not_selected_error(path, module, "target_modules does not list it")
        if _selects_module(settings.exclude_modules, module, if_unset=False):
            raise _not_selected_error(path, module, "exclude_modules lists it")


def _selects_module(names: ModuleNames, module: str, *, if_unset: bool) -> bool:
    """Return whether a list of ends of module names selects a module.

    A regular expression from a file is not evaluated, because matching it may take any time.
    """
    if not isinstance(names, list):
        return if_unset
    return any(module == name or module.endswith(f".{name}") for name in names)


def _not_selected_error(path: Path, module: str, why: str) -> PrepError:
    what = f"{path} does not belong to the tensors next to it"
    return PrepError(
        what, f"they have an adapter of {module}, but {why}", "get or export the adapter again"
    )


def _check_scale(path: Path, settings: PeftSettings) -> None:
    """Raise PrepError if the LoRA scale, e.g. `lora_alpha / r`, is infinite or 0 in float32."""
    scale = settings.lora_config().scaling
    with np.errstate(all="ignore"):
        rounded = np.float32(scale)
    if not np.isfinite(rounded) or rounded == 0:
        if settings.use_rslora:
            divisor = "sqrt(r)"
        else:
            divisor = "r"
        raise _invalid_error(
            path, f"lora_alpha / {divisor} is {scale:g}, which float32 cannot hold"
        )


def _describe_faults(error: ValidationError) -> str:
    """Describe the first invalid keys."""
    faults: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        key = str(item["loc"][0])
        faults.setdefault(key, f"{key} {_describe_fault(item)}")
    return "; ".join(list(faults.values())[:MAX_SHOWN])


def _describe_fault(item: ErrorDetails) -> str:
    if item["type"] == "missing":
        return "is missing"
    message = item["msg"].removeprefix("Input ")
    return f"is {_value_text(item['input'])}, it {message}"


def _value_text(value: object) -> str:
    """Return a short text of a value. Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**30:
        if value > 0:
            return "an integer above 10^30"
        return "an integer below -10^30"
    try:
        return f"{value!r:.60}"
    except ValueError:
        return f"a {type(value).__name__}"


def _invalid_error(path: Path, why: str) -> PrepError:
    return PrepError(f"{path} is invalid", why, "correct it, or get the adapter again")
