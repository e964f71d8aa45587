"""The settings of an adapter of PEFT: a typed adapter_config.json, compared with the adapter's tensors.

pydantic takes a tenth of a second to import, so that modules of all commands import this one where they need it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from prepcli.core.errors import PrepError
from prepcli.core.json_types import HFConfig
from prepcli.formats.manifest import NO_MANIFEST, check_files, read_manifest
from prepcli.formats.safetensors import ADAPTER_CONFIG
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
from prepcli.models.lora_config import LoraConfig
from prepcli.models.module_patterns import find_pattern
from prepcli.models.parameters import Family
from prepcli.models.peft_names import split_wrappers
from prepcli.models.rows import split_row
from prepcli.models.text_part import with_prefixes
from prepcli.planning.arrays import Array
from prepcli.sources.openers.peft_folder import is_adapter, read_checked_header
from prepcli.sources.source import read_config
from prepcli.stores.paths import AnyPath

MERGE_HINT = "PEFT's `merge_and_unload()` merges other adapters"


@dataclass(frozen=True, slots=True)
class UnreadField:
    """A field whose value prep does not use.

    Attributes:
        reason: Why no value has an effect, or why other values are not supported.
        values: The supported values, the first one for adapters without the field. None means all.
    """

    reason: str
    values: tuple[object, ...] | None = None


def _only(*values: object, reason: str) -> UnreadField:
    return UnreadField(reason, values)


# With the supported values an adapter is plain LoRA: alpha / r times B A is added to a weight.
UNREAD_FIELDS: Mapping[str, UnreadField] = {
    "peft_type": _only("LORA", reason="only LoRA adapters are supported"),
    "bias": _only("none", None, reason="trained biases are not supported"),
    "lora_bias": _only(False, None, reason="a bias of B is not supported"),
    "use_dora": _only(False, None, reason="DoRA also trains the norm of each weight"),
    "use_qalora": _only(False, None, reason="QALoRA averages groups of inputs"),
    "use_bdlora": _only(None, False, reason="BD-LoRA has matrices of diagonal blocks"),
    "velora_config": _only(None, {}, reason="VeLoRA trains A with compressed inputs"),
    "kasa_config": _only(None, {}, reason="KaSA changes the weights of the base model"),
    "monteclora_config": _only(None, {}, reason="MonteCLoRA adds random samples to A"),
    "arrow_config": _only(None, {}, reason="Arrow routes tokens between several adapters"),
    "alora_invocation_tokens": _only(
        None, [], reason="aLoRA adapts only tokens after its invocation"
    ),
    "trainable_token_indices": _only(
        None, [], {}, reason="trained rows of an embedding are not supported"
    ),
    "layers_to_transform": _only(None, [], reason="adapters of some layers are not supported"),
    "layer_replication": _only(None, [], reason="repeated layers are not supported"),
    "megatron_config": _only(None, {}, reason="modules of Megatron are not supported"),
    "enable_lora": _only(None, [], reason="parts of a fused weight are not supported"),
    "init_lora_weights": _only(
        *(True, False, None, "gaussian", "eva", "orthogonal"),
        reason="this initialisation changes the weights of the base model, or freezes a matrix",
    ),
    "task_type": UnreadField("the head of a task is in modules_to_save"),
    "auto_mapping": UnreadField("it names the Python class of the model"),
    "peft_version": UnreadField("each field is checked by itself"),
    "revision": UnreadField("the base model is the one that the command or the recipe names"),
    "inference_mode": UnreadField("PEFT sets it again when it loads an adapter"),
    "runtime_config": UnreadField("it chooses where PEFT computes"),
    "merge_weights": UnreadField("it is a mode of evaluation of the first versions of PEFT"),
    "megatron_core": UnreadField("only megatron_config uses it"),
    "layers_pattern": UnreadField("only layers_to_transform uses it"),
    "qalora_group_size": UnreadField("only use_qalora uses it"),
    "loftq_config": UnreadField("only the initialisation uses it"),
    "eva_config": UnreadField("only the initialisation uses it"),
    "corda_config": UnreadField("only the initialisation uses it"),
    "lora_ga_config": UnreadField("only the initialisation uses it"),
}


def check_unread_fields(
    folder: AnyPath, content: Mapping[str, object], read_fields: Mapping[str, object]
) -> None:
    """Check the fields of an adapter_config.json that prep does not read.

    Args:
        folder: Folder of the adapter.
        content: Content of its adapter_config.json.
        read_fields: Fields that prep reads.

    Raises:
        PrepError: A field has an unsupported value, or is unknown and set.
    """
    for name, field in UNREAD_FIELDS.items():
        if name in content and field.values is not None:
            _check_value(folder, name, content[name], field)
    for name, value in content.items():
        # An empty value is the default of every field that turns something on.
        if name not in UNREAD_FIELDS and name not in read_fields and value:
            what = f"{folder}: {name[:60]!r} = {value_text(value)} is unknown"
            why = "a setting of adapters may change the model or its training"
            hint = "remove it from adapter_config.json if it changes neither"
            raise PrepError(what, why, hint)


def _check_value(folder: AnyPath, name: str, value: object, field: UnreadField) -> None:
    """Raise PrepError for an unsupported value."""
    for supported in field.values or ():
        # 0 == False in Python, but an integer is not a boolean setting.
        if type(value) is type(supported) and value == supported:
            return
    what = f"{folder}: {name} = {value_text(value)} is not supported"
    raise PrepError(what, field.reason, MERGE_HINT)


def value_text(value: object) -> str:
    """Return a short text of a value. Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= 10**30:
        if value > 0:
            return "an integer above 10^30"
        return "an integer below -10^30"
    try:
        return f"{value!r:.60}"
    except ValueError:
        return f"a {type(value).__name__}"


MATRIX_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
RANK_DIMS = {"A": 0, "B": 1}  # A is [rank, in] and B is [out, rank]
# Far above any tensor. Python refuses to divide by integers of hundreds of digits.
MAX_RANK = 2**31 - 1
MAX_SHOWN = 3  # faults of one file in a message


def _false_if_null(value: object) -> object:
    if value is None:
        return False
    return value


def _empty_if_null(value: object) -> object:
    if value is None:
        return {}
    return value


Flag = Annotated[bool, BeforeValidator(_false_if_null)]
Rank = Annotated[int, Field(ge=1, le=MAX_RANK)]
Alpha = Annotated[float, Field(gt=0)]
# A regular expression, or ends of module names.
ModuleNames = str | list[str] | None


class PeftSettings(BaseModel):
    """The content of an adapter_config.json. `UNREAD_FIELDS` has its other fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    r: Rank
    lora_alpha: Alpha
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    use_rslora: Flag = False
    fan_in_fan_out: Flag = False
    base_model_name_or_path: str | None = None
    target_modules: ModuleNames = None
    exclude_modules: ModuleNames = None
    rank_pattern: Annotated[dict[str, Rank], BeforeValidator(_empty_if_null)] = Field(
        default_factory=dict[str, int]
    )
    alpha_pattern: Annotated[dict[str, Alpha], BeforeValidator(_empty_if_null)] = Field(
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
    check_unread_fields(folder, content, PeftSettings.model_fields)
    try:
        settings = PeftSettings.model_validate(content)
    except ValidationError as error:
        raise _invalid_error(path, _describe_faults(error)) from None
    _check_scale(path, settings, settings.lora_config().scaling)
    if settings.target_parameters and settings.lora_dropout:
        why = f"lora_dropout is {settings.lora_dropout:g}, and PEFT has no dropout for target_parameters"
        raise _invalid_error(path, why)
    return settings


def read_adapter_family(
    path: AnyPath, family: Family, config: HFConfig
) -> tuple[Family, LoraConfig]:
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
    experts: dict[str, str] = {}
    for projection in (*projections(family, config), *expert_projections(family, config)):
        layer = next(layer_names(projection.module, projection.stack, family, config))
        names = [f"{layer}.{nesting}lora_A.weight" for nesting in ("", BASE_LAYER)]
        prefix = next((wrappers[name] for name in names if name in wrappers), None)
        if projection.has_experts:
            if prefix is not None and settings.targets_parameter(projection.tensor):
                experts.setdefault(projection.name, prefix)
        elif prefix is not None:
            found.setdefault(projection.name, prefix)
    if not found and not experts:
        why = f"none of its tensors is an adapter of a projection of {family.name}"
        raise PrepError(
            f"{path} does not fit the model",
            why,
            "name the model that the adapter was trained with",
        )
    prefix = next(iter((found | experts).values()))
    head_prefix = _head_prefix(header.tensors, family)
    class_family = with_prefixes(family, prefix, head_prefix)
    lora = replace(
        settings.lora_config(tuple(found)),
        target_parameters=tuple(experts),
        modules_to_save=_saved_modules(path, settings, header.tensors, class_family, config),
    )
    lora = with_named_patterns(class_family, config, lora)
    return lora_family(class_family, config, lora), lora


def _head_prefix(tensors: Iterable[Array], family: Family) -> str:
    """Return the modules around the head in the class that was trained."""
    for tensor in tensors:
        name = tensor.name.removeprefix(PEFT_PREFIX)
        prefix, rest = split_wrappers(name, family)
        if rest in family.unprefixed:
            return prefix
    return family.head_prefix


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
        check_tying(path, settings)
        saved = [module for module in saved if module != HEAD]
    return tuple(saved)


def check_tying(path: AnyPath, settings: PeftSettings) -> None:
    """Raise PrepError if an adapter of a model with a tied head has a trained embedding that is not tied."""
    if not settings.ensure_weight_tying:
        what = f"{path}: modules_to_save without ensure_weight_tying is not supported"
        why = "the head of the model is its token embedding, and PEFT trained one of them alone"
        raise PrepError(what, why, "PEFT's `merge_and_unload()` writes a model with both")


def check_settings(folder: AnyPath, settings: PeftSettings, tensors: Iterable[Array]) -> None:
    """Compare the settings of an adapter with its tensors, as PEFT does when it loads them.

    Args:
        folder: Folder of the adapter.
        settings: Its settings.
        tensors: Its tensors, with the names in the file.

    Raises:
        PrepError: The rank differs, or the settings do not select a module with tensors.
    """
    path = folder / ADAPTER_CONFIG
    tensors = list(tensors)
    modules = [tensor.name.rpartition(".")[0] for tensor in tensors]
    for name in settings.modules_to_save or ():
        if not any(module.endswith(name) for module in modules):
            what = f"{path} does not belong to the tensors next to it"
            why = f"modules_to_save has {name!r:.80}, and no tensor is of such a module"
            raise PrepError(what, why, "get or export the adapter again")
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
            raise PrepError(
                f"{path} does not belong to the tensors next to it",
                why,
                "get or export the adapter again",
            )
        _check_scale(path, settings, settings.scaling_of(module))
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


def _not_selected_error(path: AnyPath, module: str, why: str) -> PrepError:
    what = f"{path} does not belong to the tensors next to it"
    return PrepError(
        what, f"they have an adapter of {module}, but {why}", "get or export the adapter again"
    )


def _check_scale(path: AnyPath, settings: PeftSettings, scale: float) -> None:
    """Raise PrepError if a LoRA scale, e.g. `lora_alpha / r`, is infinite or 0 in float32."""
    with np.errstate(all="ignore"):
        rounded = np.float32(scale)
    if not np.isfinite(rounded) or rounded == 0:
        divisor = "sqrt(r)" if settings.use_rslora else "r"
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
    return f"is {value_text(item['input'])}, it {message}"


def _invalid_error(path: AnyPath, why: str) -> PrepError:
    return PrepError(f"{path} is invalid", why, "correct it, or get the adapter again")
