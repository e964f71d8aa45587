"""A model without its weights: its config with the overrides of a recipe, and the shapes of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from prepcli.core.errors import INVALID_CONFIG, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import HFConfig, JsonObject, JsonValue
from prepcli.models.architecture import ArchConfig
from prepcli.models.layer_config import DROPOUT_SITES
from prepcli.models.mesh import Mesh
from prepcli.models.param_tree import ParamLeaf, param_leaves
from prepcli.models.parameters import Family, true_vocab_size
from prepcli.models.partition import vocab_multiple
from prepcli.models.registry import family_of, fields_read
from prepcli.models.rope_config import Rope
from prepcli.models.rules import Rules
from trainer.planning.step_inputs import ModelShapes
from trainer.recipe import Recipe
from trainer.recipe.model_table import SCALING_KEY, THETA_KEY, Model, override_rope

OVERRIDES_KEY = "model.overrides"
# Fields with a token id, or a list of them.
END_TOKEN_FIELD = "eos_token_id"
TOKEN_ID_FIELDS = ("bos_token_id", END_TOKEN_FIELD, "pad_token_id", "decoder_start_token_id")
ROTARY_BASES = dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), 10000.0)
TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
}


def override_fields(config: HFConfig, overrides: HFConfig | None) -> JsonObject:
    """Return a config with other values of some fields.

    Args:
        config: Content of a config.json.
        overrides: Field -> value, of the type that the field has in the config or in published
            configs of its family.

    Raises:
        UsageError: Neither the config nor its family has such a field, or the value has another
            type or is invalid.
        PrepError: The family is not supported, or the config is invalid without the overrides.
    """
    changed = {**config, **(overrides or {})}
    if overrides:
        for field, value in overrides.items():
            _check_field(config, field, value)
        _check_values(config, overrides)
    return changed


def _check_values(config: HFConfig, overrides: HFConfig) -> None:
    """Raise UsageError if a config is invalid because of its overrides."""
    # Raise PrepError if it is invalid without them as well.
    read_architecture = family_of(config).arch_config
    try:
        read_architecture({**config, **overrides})
    except PrepError as error:
        # An error here belongs to the config, not to the overrides, and replaces the one above.
        read_architecture(config)
        why = text("{}: {}", error.what, error.why)
        hint = error.hint
        if error.what == INVALID_CONFIG:
            why = error.why
            hint = "set another value, or remove the key from the recipe"
        raise usage_error(f"`{OVERRIDES_KEY}` is invalid", why, hint) from error


def _check_field(config: HFConfig, field: str, value: JsonValue) -> None:
    """Raise PrepError if the config has no such field, or its values have another type."""
    family = family_of(config)
    known = {*config, *fields_read(family), *_dropout_fields(family), *TOKEN_ID_FIELDS}.union(
        *_presets_of(family)
    )
    if field not in known:
        why = f"neither the config.json nor the family {config.get('model_type')} has this field"
        raise usage_error(
            f"`{OVERRIDES_KEY}` has the unknown field `{field:.60}`",
            why,
            did_you_mean(field, known),
        )
    if field == "model_type" and value != config.get(field):
        why = f"the config is of {config.get(field)}"
        raise usage_error(f"`{OVERRIDES_KEY}` changes `model_type`", why, "use another config")
    example = _example_value(config, field)
    values = value if field == END_TOKEN_FIELD and isinstance(value, list) else [value]
    if example is not None and not all(_has_type_of(item, example) for item in values):
        what = f"`{OVERRIDES_KEY}` sets `{field}` to {value!r:.60}"
        why = f"it must be {TYPE_NAMES[type(example)]}"
        raise usage_error(what, why, f"for example {example!r:.60}")


def _example_value(config: HFConfig, field: str) -> JsonValue:
    """Return a value of a field: of the config, else of a published config of its family, or None."""
    family = family_of(config)
    # Configs may have integers.
    numbers = dict.fromkeys(_dropout_fields(family), 0.1) | ROTARY_BASES
    configs: list[HFConfig] = [{**numbers, END_TOKEN_FIELD: 0}, config, *_presets_of(family)]
    configs.append(dict.fromkeys(TOKEN_ID_FIELDS, 0))
    return next((fields[field] for fields in configs if fields.get(field) is not None), None)


def _presets_of(family: Family) -> list[HFConfig]:
    # Most runs override no field of their model, and need no presets.
    from prepcli.models.presets import PRESETS

    return [preset for preset in PRESETS.values() if preset["model_type"] == family.name]


def _dropout_fields(family: Family) -> set[str]:
    rates = (getattr(family.dropout_fields, site) for site in DROPOUT_SITES)
    return {rate[0] for rate in rates if rate is not None}


def _has_type_of(value: JsonValue, example: JsonValue) -> bool:
    """Return whether a value has the type of an example. An integer is also a number."""
    if isinstance(example, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    # Not `isinstance`: it would accept true for an integer.
    return type(value) is type(example)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model to plan for."""

    config: HFConfig  # Content of its config.json
    is_tied: bool  # Whether the LM head is the token embedding
    scan: bool = True  # Whether each parameter of the layers is one leaf
    scan_axis: int = 0  # The axis over which layers are stacked
    # Whether it is a checkpoint of prep, with a vocabulary that already has its padding
    is_converted: bool = False

    @property
    def family(self) -> Family:
        """The family of the config."""
        return family_of(self.config)

    @property
    def arch_config(self) -> ArchConfig:
        """The choices of its layers. Raise PrepError if the config is invalid."""
        return self.family.arch_config(self.config)

    @property
    def true_vocab_size(self) -> int:
        """Vocabulary size without padding. Raise PrepError if the config is invalid."""
        return true_vocab_size(self.family, self.config)

    def shapes(self, mesh: Mesh, rules: Rules) -> ModelShapes:
        """Return the architecture and the parameters, with the vocabulary of `--pad-vocab auto` before conversion.

        Raises:
            PrepError: The config is invalid or needs an unsupported feature.
        """
        config = self._padded_config(mesh, rules)
        return ModelShapes(family_of(config).arch_config(config), self._leaves_of_config(config))

    def manifest(self, mesh: Mesh, rules: Rules) -> dict[str, Any]:
        """Return the entries of a checkpoint's manifest that describe the model, except its rules."""
        config = self._padded_config(mesh, rules)
        return {
            "config": config,
            "tied": self.is_tied,
            "scan": self.scan,
            "scan_axis": self.scan_axis,
        }

    def _padded_config(self, mesh: Mesh, rules: Rules) -> HFConfig:
        """Return the config with the vocabulary that the checkpoint has after its conversion."""
        # Rows are padded during the conversion. Another mesh adds none to the files of a checkpoint.
        if self.is_converted:
            return self.config
        vocab = family_of(self.config).sizes(self.config)["vocab"]
        dims = {path: leaf.dims for path, leaf in self._leaves_of_config(self.config).items()}
        multiple = vocab_multiple(dims, mesh, rules)
        # Round up, e.g. 50257 rows for a multiple of 64 -> 50304.
        padded = -(-vocab // multiple) * multiple
        if padded == vocab:
            return self.config
        return {**self.config, "vocab_size": padded, "true_vocab_size": vocab}

    def _leaves_of_config(self, config: HFConfig) -> dict[str, ParamLeaf]:
        """Return the parameters of a config with the layout of this model."""
        return param_leaves(
            family_of(config), config, self.is_tied, scan=self.scan, scan_axis=self.scan_axis
        )

    def of_recipe(self, table: Model) -> PlannedModel:
        """Return the model with the changes of a recipe. See `recipe_config`."""
        return replace(self, config=recipe_config(self.config, table))


def recipe_config(config: HFConfig, table: Model) -> HFConfig:
    """Return a config.json with the overrides and the rotary embedding of a recipe.

    Args:
        config: Content of the config.json.
        table: The recipe's `[model]`.

    Raises:
        PrepError: The model does not support the rotary embedding, or a field or its value is
            invalid.
    """
    return override_rope(override_fields(config, table.overrides), table)


def model_of_config(config: HFConfig, *, has_stored_head: bool = False) -> PlannedModel:
    """Return the model of a config.json before its conversion.

    Args:
        config: Content of the config.json.
        has_stored_head: Whether the checkpoint stores the head's tensor.

    Raises:
        PrepError: The model's family is not supported.
    """
    family = family_of(config)
    tensors = (family.tying.head_tensor,) if has_stored_head else ()
    return PlannedModel(config, family.is_tied(config, tensors))


def model_of_manifest(manifest: Mapping[str, Any]) -> PlannedModel:
    """Return the model of a checkpoint of prep."""
    return PlannedModel(
        manifest["config"],
        manifest["tied"],
        manifest["scan"],
        manifest["scan_axis"],
        is_converted=True,
    )


def override_config(manifest: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the manifest of a start checkpoint, with the recipe's changes of its config.

    The manifest of a step to resume from has them already.

    Raises:
        PrepError: The model does not support the recipe's rotary embedding, or a field or its value is invalid.
    """
    table = recipe.model
    if table.is_random:
        # The config has the recipe's other overrides already, and its vocabulary may have been padded since.
        config = override_rope(manifest["config"], table)
    else:
        config = recipe_config(manifest["config"], table)
    _check_mrope(manifest, config, table)
    return {**manifest, "config": config}


def _check_mrope(manifest: Mapping[str, Any], config: HFConfig, table: Model) -> None:
    """Raise UsageError for another rope type of a multimodal model with M-RoPE."""
    # M-RoPE has positions for time, height and width. Text has three equal positions per token, so training does not
    # test the other cases.
    towers = manifest.get("towers") or {}
    if not towers.get("mrope"):
        return
    before = _read_rope(manifest["config"])
    rope = _read_rope(config)
    if before is None or rope is None or rope.rope_type == "default":
        return
    # A checkpoint may have another type itself, and keeps it with a new theta.
    if table.rope_scaling is None and replace(rope, theta=before.theta) == before:
        return
    key = "model.overrides" if table.rope_scaling is None else SCALING_KEY
    what = f"`{key}` of type {rope.rope_type} is not supported for {towers.get('model_type')}"
    why = "its rotary embedding has three positions per token (M-RoPE)"
    raise usage_error(what, why, f"set `{THETA_KEY}`, or remove `{key}`")


def _read_rope(config: HFConfig) -> Rope | None:
    """Return the rotary embedding of a config.json."""
    return family_of(config).arch_config(config).rope
