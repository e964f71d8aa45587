"""The fields of an adapter_config.json that prep does not read: those without effect, and those it supports partly.

`PeftSettings` has the fields that prep reads. Every other one has an entry here, and a test compares both with the
fields of the installed PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prepcli.core.errors import PrepError
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
