"""The settings of an adapter of PEFT: a typed adapter_config.json, compared with the adapter's tensors.

pydantic takes a tenth of a second to import, so that modules of all commands import this one where they need it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from prepcli.core.errors import Command, PrepError, text
from prepcli.core.json_values import HFConfig
from prepcli.formats.manifest import NO_MANIFEST, check_files, read_manifest
from prepcli.formats.safetensors import ADAPTER_CONFIG
from prepcli.models.declaration import split_row
from prepcli.models.lora import (
    BASE_LAYER,
    HEAD,
    PEFT_PREFIX,
    expert_projections,
    layer_names,
    lora_family,
    projections,
    saved_modules,
    with_named_patterns,
)
from prepcli.models.lora_config import LoraConfig, find_pattern
from prepcli.models.parameters import Family
from prepcli.models.peft_names import split_wrappers
from prepcli.models.text_part import with_prefixes
from prepcli.planning.arrays import Array
from prepcli.sources.openers.tensor_files import is_adapter, read_checked_header
from prepcli.sources.source import read_config
from prepcli.stores.paths import AnyPath

MERGE_HINT = "PEFT's `merge_and_unload()` merges other adapters"


# Fields that prep does not read, with their supported values and the reason why others are not supported. With these
# values an adapter is plain LoRA: alpha / r times B A is added to a weight.
SUPPORTED_VALUES: Mapping[str, tuple[tuple[object, ...], str]] = {
    "peft_type": (("LORA",), "only LoRA adapters are supported"),
    "bias": (("none", None), "trained biases are not supported"),
    "lora_bias": ((False, None), "a bias of B is not supported"),
    "use_dora": ((False, None), "DoRA also trains the norm of each weight"),
    "use_qalora": ((False, None), "QALoRA averages groups of inputs"),
    "use_bdlora": ((None, False), "BD-LoRA has matrices of diagonal blocks"),
    "velora_config": ((None, {}), "VeLoRA trains A with compressed inputs"),
    "kasa_config": ((None, {}), "KaSA changes the weights of the base model"),
    "monteclora_config": ((None, {}), "MonteCLoRA adds random samples to A"),
    "arrow_config": ((None, {}), "Arrow routes tokens between several adapters"),
    "alora_invocation_tokens": ((None, []), "aLoRA adapts only tokens after its invocation"),
    "trainable_token_indices": ((None, [], {}), "trained rows of an embedding are not supported"),
    "layers_to_transform": ((None, []), "adapters of some layers are not supported"),
    "layer_replication": ((None, []), "repeated layers are not supported"),
    "megatron_config": ((None, {}), "modules of Megatron are not supported"),
    "enable_lora": ((None, []), "parts of a fused weight are not supported"),
    "init_lora_weights": (
        (True, False, None, "gaussian", "eva", "orthogonal"),
        "this initialisation changes the weights of the base model, or freezes a matrix",
    ),
}
# Fields without an effect on the values: names and versions, modes of PEFT, and settings of the fields above or of the
# initialisation.
IGNORED_FIELDS = {
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config", "merge_weights",
    "megatron_core", "layers_pattern", "qalora_group_size", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config",
}  # fmt: skip


def value_text(value: object) -> str:
    """Return a short text of a value. Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "an integer above 10^30" if value > 0 else "an integer below -10^30"
    try:
        return f"{value!r:.60}"
    except ValueError:
        return f"a {type(value).__name__}"


MATRIX_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
RANK_DIMS = {"A": 0, "B": 1}  # A is [rank, in] and B is [out, rank]
# Far above any tensor. Python refuses to divide by integers of hundreds of digits.
MAX_RANK = 2**31 - 1
MAX_SHOWN = 3  # faults of one file in a message


Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
_EMPTY_IF_NULL = BeforeValidator(lambda value: {} if value is None else value)
Rank = Annotated[int, Field(ge=1, le=MAX_RANK)]
Alpha = Annotated[float, Field(gt=0)]
# A regular expression, or ends of module names.
ModuleNames = str | list[str] | None


class PeftSettings(BaseModel):
    """The content of an adapter_config.json. `SUPPORTED_VALUES` and `IGNORED_FIELDS` have its other fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    r: Rank
    lora_alpha: Alpha
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    use_rslora: Flag = False
    fan_in_fan_out: Flag = False
    base_model_name_or_path: str | None = None
    target_modules: ModuleNames = None
    exclude_modules: ModuleNames = None
    rank_pattern: Annotated[dict[str, Rank], _EMPTY_IF_NULL] = Field(default_factory=dict[str, int])
    alpha_pattern: Annotated[dict[str, Alpha], _EMPTY_IF_NULL] = Field(
        default_factory=dict[str, float]
    )
    modules_to_save: list[str] | None = None
    ensure_weight_tying: Flag = False
    target_parameters: list[str] | None = None

    def lora_config(self, targets: tuple[str, ...] = ()) -> LoraConfig:
        """Return the rank and scale of the adapter, with the logical names of its targets."""
        return LoraConfig(
            self.r,
            self.lora_alpha,
            targets=targets,
            use_rslora=self.use_rslora,
            dropout=self.lora_dropout,
            rank_pattern=self.rank_pattern,
            alpha_pattern=self.alpha_pattern,
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, by its name in the class that was trained."""
        return self.rank_pattern.get(find_pattern(self.rank_pattern, [module]) or "", self.r)

    def scaling_of(self, module: str) -> float:
        """Return the factor of the product of a module's matrices."""
        alpha_key = find_pattern(self.alpha_pattern, [module])
        alpha = self.alpha_pattern.get(alpha_key or "", self.lora_alpha)
        return self.lora_config().scaling_of(self.rank_of(module), alpha)

    def has_parameters_of(self, module: str) -> bool:
        """Return whether a module with matrices is one around parameters of experts."""
        name = module.replace(f".{BASE_LAYER}", ".").removesuffix(f".{BASE_LAYER}"[:-1])
        targets = [target.rpartition(".")[0] for target in self.target_parameters or ()]
        return any(name == target or name.endswith(f".{target}") for target in targets)

    def targets_parameter(self, name: str) -> bool:
        """Return whether a parameter of experts has an adapter, by its name without the modules around the model."""
        return any(f".{name}".endswith(f".{target}") for target in self.target_parameters or ())

    def saves_module(self, module: str) -> bool:
        """Return whether the adapter has a whole copy of a module."""
        return any(module.endswith(name) for name in self.modules_to_save or ())


def read_settings(folder: AnyPath) -> PeftSettings:
    """Read the settings of an adapter."""
    path = folder / ADAPTER_CONFIG
    if not is_adapter(folder):
        raise PrepError(
            f"{folder} is not an adapter",
            f"it has no {ADAPTER_CONFIG}",
            "name a folder that PEFT or prep saved",
        )
    check_files(folder, read_manifest(folder) or NO_MANIFEST)
    content = read_config(path)
    for name, (values, reason) in SUPPORTED_VALUES.items():
        # 0 == False in Python, but an integer is not a boolean setting.
        value = content.get(name)
        is_supported = any(type(value) is type(each) and value == each for each in values)
        if name in content and not is_supported:
            what = f"{folder}: {name} = {value_text(value)} is not supported"
            raise PrepError(what, reason, MERGE_HINT)
    known = IGNORED_FIELDS | SUPPORTED_VALUES.keys() | PeftSettings.model_fields.keys()
    for name, value in content.items():
        # An empty value is the default of every field that turns something on.
        if name not in known and value:
            what = f"{folder}: {name[:60]!r} = {value_text(value)} is unknown"
            why = "a setting of adapters may change the model or its training"
            hint = "remove it from adapter_config.json if it changes neither"
            raise PrepError(what, why, hint)
    try:
        settings = PeftSettings.model_validate(content)
    except ValidationError as error:
        faults: dict[str, str] = {}
        for item in error.errors(include_url=False, include_context=False):
            fault = "is missing"
            if item["type"] != "missing":
                fault = f"is {value_text(item['input'])}, it {item['msg'].removeprefix('Input ')}"
            key = str(item["loc"][0])
            faults.setdefault(key, f"{key} {fault}")
        raise _invalid_error(path, "; ".join(list(faults.values())[:MAX_SHOWN])) from None
    _check_scale(path, settings, settings.lora_config().scaling)
    if settings.target_parameters and settings.lora_dropout:
        why = f"lora_dropout is {settings.lora_dropout:g}, and PEFT has no dropout for target_parameters"
        raise _invalid_error(path, why)
    return settings


def read_adapter_family(
    path: AnyPath, family: Family, config: HFConfig
) -> tuple[Family, LoraConfig]:
    """Read the LoRA settings of an adapter, with logical names of its targets.

    Returns:
        The family of the adapter's tensors, with the prefix of the class that was trained, and the settings.
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
    experts: dict[str, str] = {}
    for projection in (*projections(family, config), *expert_projections(family, config)):
        prefixes: dict[str, str] = {}
        missing: list[str] = []
        for layer in layer_names(projection.module, projection.stack, family, config):
            names = [f"{layer}.{nesting}lora_A.weight" for nesting in ("", BASE_LAYER)]
            prefix = next((wrappers[name] for name in names if name in wrappers), None)
            if prefix is None:
                missing.append(layer)
            else:
                prefixes[layer] = prefix
        adapters = found
        if projection.has_experts:
            adapters = experts
            if not settings.targets_parameter(projection.tensor):
                continue
        if not prefixes:
            continue
        layer, prefix = next(iter(prefixes.items()))
        if missing:
            what = f"{path}: adapters of some layers are not supported"
            why = f"{layer} has one, and {missing[0]} has none"
            raise PrepError(what, why, text("{} adds them to their base", Command("merge")))
        adapters.setdefault(projection.name, prefix)
    if not found and not experts:
        why = f"none of its tensors is an adapter of a projection of {family.name}"
        raise PrepError(
            f"{path} does not fit the model",
            why,
            "name the model that the adapter was trained with",
        )
    prefix = next(iter((found | experts).values()))
    head_prefix = family.head_prefix
    for tensor in header.tensors:
        name = tensor.name.removeprefix(PEFT_PREFIX)
        name_prefix, rest = split_wrappers(name, family)
        if rest in family.unprefixed:
            head_prefix = name_prefix
            break
    class_family = with_prefixes(family, prefix, head_prefix)
    lora = replace(
        settings.lora_config(tuple(found)),
        target_parameters=tuple(experts),
        modules_to_save=_saved_modules(path, settings, header.tensors, class_family, config),
    )
    lora = with_named_patterns(class_family, config, lora)
    return lora_family(class_family, config, lora), lora


def _saved_modules(
    path: AnyPath,
    settings: PeftSettings,
    tensors: Iterable[Array],
    family: Family,
    config: HFConfig,
) -> tuple[str, ...]:
    """Return the names of the modules that the adapter has whole copies of."""
    names = {tensor.name.removeprefix(PEFT_PREFIX) for tensor in tensors}
    saved: list[str] = []
    known: set[str] = set()
    for module, paths in saved_modules(family, config).items():
        bare = [split_row(family.parameters[item].row)[1] for item in paths]
        full = {
            (family.head_prefix if name in family.unprefixed else family.prefix) + name
            for name in bare
        }
        if full & names:
            saved.append(module)
            known |= full
    others = sorted(name for name in names - known if ".lora_" not in name)
    if others:
        why = "only lora_A and lora_B of projections, and whole embeddings and heads, are supported"
        raise PrepError(f"{path}: {others[0]:.200} is not supported", why, MERGE_HINT)
    if saved and family.is_tied(config):
        check_tying(path, settings, has_head=HEAD in saved)
        saved = [module for module in saved if module != HEAD]
    return tuple(saved)


def check_tying(path: AnyPath, settings: PeftSettings, *, has_head: bool) -> None:
    """Raise PrepError if an adapter of a model with a tied head has a trained embedding that is not tied.

    Args:
        path: Folder of the adapter.
        settings: Its settings.
        has_head: Whether it has a tensor of the head. PEFT writes one if it has tied it. With `ensure_weight_tying`, it
            ties embeddings named `embed_tokens`, and no others, e.g. `wte`.
    """
    if not settings.ensure_weight_tying or not has_head:
        what = f"{path}: modules_to_save without ensure_weight_tying is not supported"
        if settings.ensure_weight_tying:
            what = f"{path}: a trained embedding without its head is not supported"
        why = "the head of the model is its token embedding, and PEFT trained one of them alone"
        raise PrepError(what, why, "PEFT's `merge_and_unload()` writes a model with both")


def check_settings(folder: AnyPath, settings: PeftSettings, tensors: Iterable[Array]) -> None:
    """Compare the settings of an adapter with its tensors, as PEFT does when it loads them."""
    path = folder / ADAPTER_CONFIG
    tensors = list(tensors)
    modules = [tensor.name.rpartition(".")[0] for tensor in tensors]
    for name in settings.modules_to_save or ():
        if not any(module.endswith(name) for module in modules):
            why = f"modules_to_save has {name!r:.80}, and no tensor is of such a module"
            raise _mismatch_error(path, why)
    for tensor in tensors:
        match = MATRIX_NAME.fullmatch(tensor.name)
        if match is None or len(tensor.shape) != 2:
            continue
        module = match["module"].removeprefix(PEFT_PREFIX)
        if settings.has_parameters_of(module):
            continue
        rank = tensor.shape[RANK_DIMS[match["matrix"]]]
        expected = settings.rank_of(module)
        if rank != expected:
            shape = list(tensor.shape)
            r_text = value_text(expected)
            key = "r" if find_pattern(settings.rank_pattern, [module]) is None else "rank_pattern"
            why = f"{key} is {r_text}, but {tensor.name} is {shape}, which has the rank {rank}"
            raise _mismatch_error(path, why)
        _check_scale(path, settings, settings.scaling_of(module))
        what = f"they have an adapter of {module}"
        if not _selects_module(settings.target_modules, module, if_unset=True):
            raise _mismatch_error(path, f"{what}, but target_modules does not list it")
        if _selects_module(settings.exclude_modules, module, if_unset=False):
            raise _mismatch_error(path, f"{what}, but exclude_modules lists it")


def _selects_module(names: ModuleNames, module: str, *, if_unset: bool) -> bool:
    """Return whether a list of ends of module names selects a module.

    A regular expression from a file is not evaluated, because matching it may take any time.
    """
    if not isinstance(names, list):
        return if_unset
    return any(module == name or module.endswith(f".{name}") for name in names)


def _mismatch_error(path: AnyPath, why: str) -> PrepError:
    what = f"{path} does not belong to the tensors next to it"
    return PrepError(what, why, "get or export the adapter again")


def _check_scale(path: AnyPath, settings: PeftSettings, scale: float) -> None:
    """Raise PrepError if a LoRA scale, e.g. `lora_alpha / r`, is infinite or 0 in float32."""
    with np.errstate(all="ignore"):
        rounded = np.float32(scale)
    if not np.isfinite(rounded) or rounded == 0:
        divisor = "sqrt(r)" if settings.use_rslora else "r"
        raise _invalid_error(
            path, f"lora_alpha / {divisor} is {scale:g}, which float32 cannot hold"
        )


def _invalid_error(path: AnyPath, why: str) -> PrepError:
    return PrepError(f"{path} is invalid", why, "correct it, or get the adapter again")
