"""Typed changes of a Hugging Face config by a recipe. No I/O, no jax."""

from __future__ import annotations

from prepcli.core.errors import INVALID_CONFIG, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import HFConfig, JsonObject, JsonValue
from prepcli.models.dropout_config import DROPOUT_SITES
from prepcli.models.parameters import Family
from prepcli.models.registry import family_of, fields_read

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
    """Raise UsageError if a config is invalid because of its overrides.

    Raise PrepError if it is invalid without them as well.
    """
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
    known = _known_fields(config)
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


def _known_fields(config: HFConfig) -> set[str]:
    """Return the names of fields in the config, in published configs, and of those that the family reads."""
    family = family_of(config)
    return {*config, *fields_read(family), *_dropout_fields(family), *TOKEN_ID_FIELDS}.union(
        *_presets_of(family)
    )


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
