"""Changes of a model's rotary embedding for other context lengths, made in its Hugging Face config. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from prepcli.core.errors import INVALID_CONFIG, Command, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import HFConfig, JsonObject, JsonValue
from prepcli.models.architecture import ArchConfig
from prepcli.models.registry import family_of
from prepcli.models.rope_config import MAX_FLOAT32, ROPE_TYPES, Rope

SCALING_KEY = "model.rope_scaling"
THETA_KEY = "model.rope_theta"
POSITIONS_KEY = "model.max_position_embeddings"
ORIGINAL = "original_max_position_embeddings"
COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Keys of the config that another scaling does not replace.
KEPT_KEYS = ("rope_theta", "partial_rotary_factor")
# Keys of each type that transformers requires.
REQUIRED_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
OPTIONAL_KEYS: Mapping[str, tuple[str, ...]] = {
    "llama3": (ORIGINAL,),
    "yarn": (
        ORIGINAL,
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": (ORIGINAL, "factor", "attention_factor"),
}
# Pairs of keys: the value of the first one must be the smaller one.
ORDERED_KEYS = (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast"))
THETA_FIELDS = ("rope_theta", "rotary_emb_base")
# transformers 4 reads theta outside of the scaling, transformers 5 inside of `rope_parameters`.
VERSION_4_THETA = ("rope_theta", "rope_scaling")
POSITION_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx")
# NTK-aware scaling stretches the lowest frequency theta^(-(d - 2)/d) by the factor and keeps the
# highest one, which theta * factor^(d / (d - 2)) does.
OTHER_VALUE_HINT = "set another value, or remove the key from the recipe"
NTK_HINT = "`model.rope_theta` = theta * factor ** (d / (d - 2)), for heads with d rotated elements"

ReadArch = Callable[[HFConfig], ArchConfig]


@dataclass(frozen=True, slots=True)
class RopeOverrides:
    """Values of a recipe that replace those of a config.json. None keeps the value of the config."""

    # `model.rope_scaling`, as in `rope_scaling` or `rope_parameters` of a config.json
    scaling: HFConfig | None = None
    theta: float | None = None  # `model.rope_theta`
    max_positions: int | None = None  # `model.max_position_embeddings`

    @property
    def keys(self) -> tuple[str, ...]:
        """The recipe keys that are set."""
        values = {
            SCALING_KEY: self.scaling,
            THETA_KEY: self.theta,
            POSITIONS_KEY: self.max_positions,
        }
        return tuple(key for key, value in values.items() if value is not None)


def check_rope_scaling(scaling: HFConfig) -> None:
    """Check a rope scaling without a model.

    Args:
        scaling: Content of `model.rope_scaling`.

    Raises:
        UsageError: The type is not supported, a key is unknown or missing, or a value is invalid.
    """
    rope_type = _read_scaling_type(scaling)
    required = REQUIRED_KEYS[rope_type]
    known = (*COMMON_KEYS, *required, *OPTIONAL_KEYS.get(rope_type, ()))
    for key in scaling:
        if key not in known:
            why = f"the keys of type {rope_type} are {', '.join(known)}"
            hint = did_you_mean(key, known)
            raise usage_error(f"`{SCALING_KEY}` has the unknown key `{key:.60}`", why, hint)
    for key in required:
        if key not in scaling:
            why = f"type {rope_type} needs {', '.join(required)}"
            raise usage_error(f"`{SCALING_KEY}` has no `{key}`", why, f"add `{key}`")
    for what, why in _invalid_values(scaling):
        raise usage_error(f"`{SCALING_KEY}` has {what}", why, OTHER_VALUE_HINT)


def _read_scaling_type(scaling: HFConfig) -> str:
    """Return the `rope_type` of a recipe. Raise UsageError if prep does not support it."""
    rope_type = scaling.get("rope_type", scaling.get("type"))
    if isinstance(rope_type, str) and rope_type in ROPE_TYPES:
        return rope_type
    if rope_type:
        what = f"rope type `{rope_type!s:.60}` is not supported"
    else:
        what = f"`{SCALING_KEY}` has no `rope_type`"
    hint = NTK_HINT if rope_type == "ntk" else did_you_mean(str(rope_type or ""), ROPE_TYPES)
    raise usage_error(what, f"supported: {', '.join(ROPE_TYPES)}", hint)


def _invalid_values(scaling: HFConfig) -> Iterator[tuple[str, str]]:
    """Yield each invalid value of a rope scaling, and what it must be."""
    for key, value in scaling.items():
        requirement = _value_requirement(key, value)
        if requirement:
            yield f"{key} = {value!r:.60}", f"it must be {requirement}"
    for smaller, larger in ORDERED_KEYS:
        low = scaling.get(smaller)
        high = scaling.get(larger)
        if _is_positive_number(low) and _is_positive_number(high) and low >= high:
            yield f"{smaller} {low:g} and {larger} {high:g}", f"{larger} must be the larger one"


def _value_requirement(key: str, value: JsonValue) -> str:
    """Return what the value of a key must be, or "" if it is valid."""
    is_valid = _is_positive_number(value)
    requirement = "a number above 0"
    if key in ("rope_type", "type"):
        is_valid = isinstance(value, str)
        requirement = "text"
    elif key == "truncate":
        is_valid = isinstance(value, bool)
        requirement = "true or false"
    elif key in ("short_factor", "long_factor"):
        is_valid = isinstance(value, list) and all(map(_is_positive_number, value))
        requirement = "a list of numbers above 0, one per rotated pair of elements"
    elif key == ORIGINAL:
        is_valid = isinstance(value, int) and _is_positive_number(value)
        requirement = "a positive integer"
    return "" if is_valid else requirement


def _is_positive_number(value: JsonValue) -> TypeGuard[int | float]:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_FLOAT32
    )


def override_rope(config: HFConfig, overrides: RopeOverrides) -> HFConfig:
    """Return a config with another rotary embedding. Transformers reads the same one from it.

    The original positions of a scaling are written out. If the overrides do not name them, they are
    those that the unchanged config has for this scaling, usually its `max_position_embeddings`.

    Args:
        config: Content of a config.json.
        overrides: Values to replace.

    Raises:
        UsageError: The family has no rotary embedding or several, or does not support the values.
    """
    if not overrides.keys:
        return config
    family = family_of(config)
    before = family.arch_config(config)
    _check_one_rope(before, family.name, overrides.keys[0])
    try:
        changed = _write_original_positions(_write_rope(config, overrides), family.arch_config)
        if overrides.max_positions is not None:
            # Old configs may have several of these fields. All get the same value, so that it does not
            # matter which one a reader takes.
            fields = [name for name in POSITION_FIELDS if name in changed] or POSITION_FIELDS[:1]
            changed |= dict.fromkeys(fields, overrides.max_positions)
        after = family.arch_config(changed)
    except PrepError as error:
        what = f"`{'`, `'.join(overrides.keys)}` cannot be applied to this {family.name} model"
        why = error.what
        if error.what == INVALID_CONFIG:
            why = error.why
        raise usage_error(what, why, OTHER_VALUE_HINT) from error
    is_dynamic = _required_rope(after).rope_type == "dynamic"
    if is_dynamic and after.max_positions > before.max_positions:
        why = f"dynamic scaling begins after these positions: {before.max_positions:,} in the checkpoint"
        what = f"`{POSITIONS_KEY}` is {after.max_positions}"
        raise usage_error(what, why, f"remove `{POSITIONS_KEY}`")
    return changed


def _check_one_rope(arch_config: ArchConfig, family_name: str, key: str) -> None:
    """Raise UsageError if the model has no rotary embedding, or more than one."""
    if arch_config.rope is None:
        if arch_config.mixer is not None:
            kind = "recurrent mixers"
        elif arch_config.has_learned_positions:
            kind = "learned positions"
        elif arch_config.has_sinusoidal_positions:
            kind = "sinusoidal positions"
        else:
            kind = "a relative position bias"
        why = f"it has {kind} instead of a rotary embedding"
        raise usage_error(f"`{key}` cannot be applied to {family_name}", why, f"remove `{key}`")
    if arch_config.local_rope is not None:
        why = "it has one rotary embedding for layers with a sliding window and another for the other layers"
        hint = text("edit `config.json` of the model before {}", Command("save-init"))
        raise usage_error(f"`{key}` is not supported for {family_name}", why, hint)


def _write_rope(config: HFConfig, overrides: RopeOverrides) -> JsonObject:
    """Return the config with the scaling and theta, in the form of transformers 4 or 5 that it has."""
    if overrides.scaling is None and overrides.theta is None:
        return dict(config)
    field = _rope_field(config)
    parameters = _rope_parameters(config) or {"rope_type": "default"}
    outer: JsonObject = {}
    if overrides.scaling is not None:
        kept = {key: parameters[key] for key in KEPT_KEYS if key in parameters}
        scaling = {key: value for key, value in overrides.scaling.items() if key != "type"}
        parameters = {**kept, "rope_type": overrides.scaling.get("type"), **scaling}
        # `read_rope` prefers the field outside of the scaling, so an old value there would win.
        outer = {ORIGINAL: scaling[ORIGINAL]} if ORIGINAL in scaling else {}
    theta = overrides.theta or (overrides.scaling or {}).get("rope_theta")
    if theta is not None:
        parameters["rope_theta"] = theta
        outer |= {
            name: theta
            for name in THETA_FIELDS
            if name in config or (name, field) == VERSION_4_THETA
        }
    return {**config, field: parameters, **outer}


def _rope_field(config: HFConfig) -> str:
    """Return the name of the field with the rope scaling."""
    # transformers 4 writes `rope_scaling`, version 5 `rope_parameters`. It reads the first if a config has both.
    if config.get("rope_scaling") or not config.get("rope_parameters"):
        return "rope_scaling"
    return "rope_parameters"


def _rope_parameters(config: HFConfig) -> JsonObject:
    """Return the object of the rope scaling, or an empty one. The config is valid."""
    parameters = config.get(_rope_field(config)) or {}
    assert isinstance(parameters, dict), "checked by `read_rope`"
    return dict(parameters)


def _write_original_positions(config: JsonObject, read_arch: ReadArch) -> JsonObject:
    """Return the config with the original positions of its scaling, at both places where transformers reads them."""
    rope = _required_rope(read_arch(config))
    if rope.rope_type not in OPTIONAL_KEYS:
        return config
    field = _rope_field(config)
    original = {ORIGINAL: rope.original_max_positions}
    return {**config, **original, field: {**_rope_parameters(config), **original}}


def _required_rope(arch_config: ArchConfig) -> Rope:
    assert arch_config.rope is not None, "checked by _check_one_rope"
    return arch_config.rope
