"""Rotary embeddings as a Hugging Face config describes them, in the forms of transformers 4 and 5. No I/O, no jax.

A function that reads a config raises PrepError for a value that is invalid, or that the family does not support.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.json_values import HFConfig, JsonObject, JsonValue

# Slightly below the largest float32, 3.40282e38: frequencies are computed in float32.
MAX_FLOAT32 = 3.4e38
DEFAULT_ROPE: JsonObject = {"rope_type": "default"}
ROPE_TYPES = {name: name for name in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")}


class QueryScale(NamedTuple):
    """The factor of queries at position p: 1 + beta * log(1 + floor(p / n)) (Llama 4, https://arxiv.org/abs/2501.19399)."""

    beta: float  # Growth of the factor.
    step_length: int  # The number n of positions between two steps of the factor.
    offset: int = 0  # Number added to the position p.


@dataclass(frozen=True, slots=True)
class Rope:
    """The parameters of a rotary embedding, as in `modeling_rope_utils.py` of transformers.

    Pair i of the d rotated elements turns by the angle p * theta^(-2i/d) at position p (RoFormer,
    https://arxiv.org/abs/2104.09864, equation 15). The types change the frequencies
    f = theta^(-2i/d), with s = `factor`:

        linear    f / s for all pairs (https://arxiv.org/abs/2306.15595)
        dynamic   theta grows with the length beyond `original_max_positions` (NTK-aware)
        llama3    f / s for wavelengths above original / low_freq_factor, f below
                  original / high_freq_factor, an interpolation of both between them
        yarn      a ramp from f to f / s over the pairs that turn between `beta_fast` and `beta_slow`
                  times in the original length (https://arxiv.org/abs/2309.00071, section 3.2)
        longrope  f / factor_i with one factor per pair (https://arxiv.org/abs/2402.13753)
        proportional  f / s for the first pairs of a head, 0 for the others (p-RoPE, https://arxiv.org/abs/2410.06205)


    Raises:
        PrepError: A value is out of range.
    """

    # Number of rotated elements of a head. They are the first ones. 0 for layers with a factor of queries only.
    rotary_dim: int
    theta: float  # Base of the frequencies.
    original_max_positions: int  # Sequence length of pretraining.
    rope_type: str = "default"  # One of ROPE_TYPES.
    # Factor by which positions are stretched (all types but default and longrope).
    factor: float = 1.0
    low_freq_factor: float = 1.0  # low_freq_factor of llama3, beta_slow of yarn.
    high_freq_factor: float = 4.0  # high_freq_factor of llama3, beta_fast of yarn.
    attention_factor: float = 1.0  # Factor of cosine and sine (yarn, longrope).
    truncate: bool = True  # Whether the bounds of yarn's ramp are rounded to integers.
    # longrope: factor of each frequency in sequences of up to `original_max_positions` tokens.
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()  # longrope: factor of each frequency in longer sequences.
    query_scale: QueryScale | None = None  # Factor of queries. None means 1.
    is_reversed: bool = False  # Whether pairs turn by the negative angle (nanochat).
    num_turning_pairs: int = 0  # Number of the pairs that turn in the type proportional.

    def __post_init__(self) -> None:
        if self.rotary_dim == 0 and self.query_scale is not None:
            return
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            why = f"rotary embeddings rotate pairs, but {self.rotary_dim} elements of a head are to be rotated"
            raise invalid_config_error(why)
        # The new theta has the exponent d / (d - 2), which 2 rotated elements divide by zero.
        if self.rope_type == "dynamic" and self.rotary_dim == 2:
            raise invalid_config_error("dynamic rotary embeddings need heads of 4 or more elements")
        # With theta 1 all pairs turn at the same rate, below it the later pairs turn faster.
        if self.theta <= 1:
            raise invalid_config_error(f"rope_theta is {self.theta:g}, it must be above 1")
        positive = {
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_positions,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
        }
        for key, value in positive.items():
            if value <= 0:
                raise invalid_config_error(
                    f"{key} of the rope scaling is {value:g}, it must be above 0"
                )


def has_llama3_scaling(config: HFConfig) -> bool:
    """Return whether the rotary frequencies are scaled as in LLaMA 3.1 and later."""
    scaling = read_scaling(config)
    return _read_rope_type(scaling, ROPE_TYPES) == "llama3"


def read_rope(
    config: HFConfig,
    head_dim: int,
    *,
    max_positions: int,
    default_theta: float = 10_000.0,
    allow_partial: bool = False,
    rope_types: Mapping[str, str] = ROPE_TYPES,
) -> Rope:
    """Read the rotary embedding that all layers of a model share.

    `default_theta` is used if the config has no `rope_theta`. `rope_types` maps names in the config to the supported
    types.
    """
    scaling = read_scaling(config)
    rope_type = _read_rope_type(scaling, rope_types)
    rotary_dim = _read_rotary_dim(config, scaling, head_dim, allow_partial=allow_partial)
    theta = _read_number(scaling, "rope_theta", _read_number(config, "rope_theta", default_theta))
    if rope_type == "default":
        return Rope(rotary_dim, theta, max_positions)
    factor = _read_number(scaling, "factor", 1.0 if rope_type == "longrope" else None)
    if rope_type in ("linear", "dynamic"):
        return Rope(rotary_dim, theta, max_positions, rope_type=rope_type, factor=factor)
    original = _read_position_count(
        config,
        "original_max_position_embeddings",
        _read_number(scaling, "original_max_position_embeddings", max_positions),
    )
    if rope_type == "llama3":
        return Rope(
            rotary_dim,
            theta,
            original,
            rope_type=rope_type,
            factor=factor,
            low_freq_factor=_read_number(scaling, "low_freq_factor"),
            high_freq_factor=_read_number(scaling, "high_freq_factor"),
        )
    if rope_type == "longrope":
        return Rope(
            rotary_dim,
            theta,
            original,
            rope_type=rope_type,
            attention_factor=_longrope_attention_factor(
                scaling, max_positions / original, original
            ),
            short_factors=_read_factors(scaling, "short_factor", rotary_dim // 2),
            long_factors=_read_factors(scaling, "long_factor", rotary_dim // 2),
        )
    return Rope(
        rotary_dim,
        theta,
        original,
        rope_type=rope_type,
        factor=factor,
        # transformers writes `get(key) or default`, so a 0 in the config is the default too.
        low_freq_factor=_read_number(scaling, "beta_slow", 1.0) or 1.0,
        high_freq_factor=_read_number(scaling, "beta_fast", 32.0) or 32.0,
        attention_factor=_yarn_attention_factor(scaling, factor),
        truncate=bool(scaling.get("truncate", True)),
    )


def read_scaling(config: HFConfig) -> HFConfig:
    """Return the object of the rope scaling, or an empty one."""
    # If a config has both, transformers reads the field of version 4.
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise invalid_config_error(f"its rope scaling is {scaling!r:.60}, it must be an object")
    return scaling


def _read_rotary_dim(
    config: HFConfig, scaling: HFConfig, head_dim: int, *, allow_partial: bool
) -> int:
    """Read the number of rotated elements of a head."""
    # transformers 5 writes the share into `rope_parameters`, older versions into the config.
    rotary_share = 1.0
    # A family supports the fields that it reads. The outer one has no effect beside the inner one.
    if allow_partial or "partial_rotary_factor" not in scaling:
        rotary_share = _read_number(config, "partial_rotary_factor", 1.0)
    rotary_share = _read_number(scaling, "partial_rotary_factor", rotary_share)
    if rotary_share != 1 and not allow_partial:
        why = f"config.json has {rotary_share:g}; this family rotates whole heads"
        what = "`partial_rotary_factor` is not supported for this family"
        raise unsupported_config_error(what, why)
    return check_rotary_dim(
        int(head_dim * rotary_share), head_dim, f"partial_rotary_factor {rotary_share:g}"
    )


def _read_rope_type(scaling: HFConfig, rope_types: Mapping[str, str]) -> str:
    """Return the type of the rotary embedding. Raise PrepError if the family lacks it."""
    # transformers 5 writes `rope_type`, older versions `type`.
    type_name = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(type_name, str) or type_name not in rope_types:
        what = f"rope type `{type_name!s:.60}` is not supported for this family"
        raise unsupported_config_error(what, f"supported: {', '.join(rope_types)}")
    for key, value in scaling.items():
        if isinstance(value, Mapping):
            why = f"config.json has a rotary embedding for `{key:.60}`"
            what = "rotary embeddings per layer type are not supported for this family"
            raise unsupported_config_error(what, why)
    return rope_types[type_name]


def read_layer_rope(
    config: HFConfig,
    layer_type: str,
    *,
    layer_types: Sequence[str],
    theta: JsonValue,
    head_dim: int,
    max_positions: int,
) -> Rope:
    """Read the rotary embedding of one layer type, for a family with one per layer type.

    In transformers 5 `rope_parameters` has an object per layer type. In transformers 4 `rope_scaling` belongs to the
    first layer type, and each layer type has its own field for theta. `theta` is the `rope_theta` of this layer type
    if `rope_parameters` has none.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    why = f"rope_parameters is {parameters!r:.60}, it must have an object for each of {' and '.join(layer_types)}"
    error = invalid_config_error(f"{why}; rope_scaling is {scaling!r:.60}, it must be an object")
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        raise error
    if not {*parameters} <= {*layer_types, "truncate"}:
        raise error
    layer_parameters = parameters.get(layer_type)
    if layer_parameters is None:
        # It has a type, so that a scaling with the old key `type` does not change it.
        layer_parameters = DEFAULT_ROPE
    if not isinstance(layer_parameters, dict):
        raise error
    merged = layer_parameters
    if layer_type == layer_types[0]:
        merged = {**layer_parameters, **scaling}
    # Transformers reads it from the outer object only.
    truncate = {"truncate": parameters.get("truncate", True)}
    return read_rope(
        {"rope_theta": theta, "rope_parameters": merged | truncate},
        head_dim,
        max_positions=max_positions,
    )


def read_proportional_rope(scaling: HFConfig, head_dim: int, *, max_positions: int) -> Rope:
    """Read a rotary embedding of the type proportional, which turns the first pairs of whole heads."""
    share = _read_number(scaling, "partial_rotary_factor", 1.0)
    if not 0 <= share <= 1:
        raise invalid_config_error(
            f"partial_rotary_factor of the rope scaling is {share:g}, it must be from 0 to 1"
        )
    return Rope(
        head_dim,
        _read_number(scaling, "rope_theta"),
        max_positions,
        rope_type="proportional",
        factor=_read_number(scaling, "factor", 1.0),
        num_turning_pairs=int(share * head_dim // 2),
    )


def check_rotary_dim(rotary_dim: int, head_dim: int, source: str) -> int:
    """Return the number of rotated elements of a head. Raise PrepError if a head has fewer.

    `source` is the config field, for the error.
    """
    if rotary_dim > head_dim:
        why = f"{source} rotates {rotary_dim} elements of a head, which has {head_dim}"
        raise invalid_config_error(why)
    return rotary_dim


def _read_position_count(config: HFConfig, key: str, default: float) -> int:
    value = _read_number(config, key, default)
    if value < 1:
        raise invalid_config_error(f"{key} is {value:g}, it must be a positive integer")
    return int(value)


def _yarn_attention_factor(scaling: HFConfig, factor: float) -> float:
    """Return the factor of cosine and sine in YaRN (https://arxiv.org/abs/2309.00071)."""
    if scaling.get("attention_factor") is not None:
        return _read_number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        mscale, mscale_all_dim = (
            _read_number(scaling, key) for key in ("mscale", "mscale_all_dim")
        )
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def yarn_scores_scale(config: HFConfig) -> float:
    """Return the factor of attention scores in DeepSeek's models with a scaled rotary embedding.

    The square of YaRN's temperature for `mscale_all_dim`, as transformers computes it for each type of
    scaling but the default.
    """
    scaling = read_scaling(config)
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    return _mscale(_read_number(scaling, "factor"), _read_number(scaling, "mscale_all_dim")) ** 2


def _mscale(factor: float, mscale: float) -> float:
    """Return YaRN's temperature of attention, as a factor of the rotated queries and keys."""
    # sqrt(1/t) = 0.1 ln(s) + 1, the temperature of attention (YaRN, equation 22). DeepSeek scales
    # the first term by mscale.
    if factor > 1:
        return 0.1 * mscale * math.log(factor) + 1.0
    return 1.0


def _read_factors(scaling: HFConfig, key: str, count: int) -> tuple[float, ...]:
    """Return a list of positive numbers, one per rotated pair."""
    values = scaling.get(key)
    if not isinstance(values, list) or len(values) != count:
        why = f"{key} of the rope scaling is {values!r:.60}, it must be {count} numbers, one per rotated pair"
        raise invalid_config_error(why)
    factors = tuple(_read_number({key: value}, key) for value in values)
    if (smallest := min(factors, default=1.0)) <= 0:
        raise invalid_config_error(
            f"{key} of the rope scaling has {smallest:g}, it must be above 0"
        )
    return factors


def _longrope_attention_factor(scaling: HFConfig, stretch: float, original: int) -> float:
    """Return the factor of cosine and sine in LongRoPE (https://arxiv.org/abs/2402.13753), as transformers has it."""
    if scaling.get("attention_factor") is not None:
        return _read_number(scaling, "attention_factor")
    # sqrt(1 + ln(s) / ln(original)) for a stretch s of the context.
    factor = _read_number(scaling, "factor", stretch)
    if factor > 1 and original == 1:
        raise invalid_config_error("longrope cannot stretch a model with 1 original position")
    if factor > 1:
        return math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0


def _read_number(config: HFConfig, key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) <= MAX_FLOAT32
    ):
        raise invalid_config_error(
            f"{key} of the rope scaling is {value!r:.60}, it must be a number"
        )
    return float(value)
