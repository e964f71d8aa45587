"""Rotary positions as a config describes them, in the spellings of transformers 4 and 5. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.models.errors import PrepError

MAX_FLOAT32 = 3.4e38  # of float32
DEFAULT_ROPE = {"rope_type": "default"}
ROPE_TYPES = {kind: kind for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")}


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions rotate queries and keys; fields beyond `factor` are those that its kind uses.

    Frequencies are transformers' (`modeling_rope_utils.py`).
    """

    rotary_dim: int  # elements of a head that turn: the first ones
    theta: float
    original_max_positions: int  # that the model was made for
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3: low_freq_factor; yarn: beta_slow
    high_freq_factor: float = 4.0  # llama3: high_freq_factor; yarn: beta_fast
    attention_factor: float = 1.0  # of cosine and sine
    truncate: bool = True  # yarn: whole corrections
    short_factors: tuple[float, ...] = ()  # longrope: of each frequency, up to `positions` tokens
    long_factors: tuple[float, ...] = ()  # longrope: beyond

    def __post_init__(self) -> None:
        """PrepError where the rotation makes no sense."""
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise PrepError(
                "config.json makes no sense", f"rotary positions turn pairs, of {self.rotary_dim} elements a head"
            )
        if self.rope_type == "dynamic" and self.rotary_dim == 2:
            raise PrepError("config.json makes no sense", "dynamic rotary positions need heads of 4 elements or more")
        if (
            min(self.factor, self.original_max_positions, self.low_freq_factor, self.high_freq_factor) <= 0
            or self.theta <= 1
        ):
            above_0 = f"factor {self.factor:g}, {self.original_max_positions} positions, low {self.low_freq_factor:g}, high {self.high_freq_factor:g} above 0"
            raise PrepError("config.json makes no sense", f"rope theta {self.theta:g} has to be above 1; {above_0}")


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    default_theta: float = 10_000.0,
    allow_partial: bool = False,
    rope_types: Mapping[str, str] = ROPE_TYPES,
) -> Rope:
    """The rotation that a config asks for; `theta` where it does not say. `partial`: it may turn a part of each head.
    `kinds`: a config's word -> one of KINDS.

    PrepError for kinds that prep, or a family, lacks.
    """
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise PrepError("config.json makes no sense", f"its rope scaling is {found!r:.60}, not an object")
    kind = found.get("rope_type", found.get("type", "default"))
    if not isinstance(kind, str) or kind not in rope_types:
        hint = "another family may have it; prep does not guess"
        raise PrepError(f"rope type `{kind!s:.60}` is not known", f"known: {', '.join(rope_types)}", hint)
    kind = rope_types[kind]
    if nested := [key for key, value in found.items() if isinstance(value, Mapping)]:
        why = f"`{nested[0]:.60}` has a rotation of its own; in this family all layers have the same"
        raise PrepError("rotary positions by kind of layer are not supported for this family", why)
    part = _read_number(found, "partial_rotary_factor", _read_number(config, "partial_rotary_factor", 1.0))
    if part != 1 and not allow_partial:
        raise PrepError("`partial_rotary_factor` is not known", f"it is {part:g}: this family turns heads whole")
    head_dim = check_rotary_dim(int(head_dim * part), head_dim, f"partial_rotary_factor {part:g}")
    base = _read_number(found, "rope_theta", _read_number(config, "rope_theta", default_theta))
    if kind == "default":
        return Rope(head_dim, base, max_positions)
    factor = _read_number(found, "factor", 1.0 if kind == "longrope" else None)
    if kind in ("linear", "dynamic"):
        return Rope(head_dim, base, max_positions, kind, factor)
    original = _read_position_count(
        config, "original_max_position_embeddings", _original_positions(found, max_positions)
    )
    if kind == "llama3":
        low, high = _read_number(found, "low_freq_factor"), _read_number(found, "high_freq_factor")
        return Rope(head_dim, base, original, kind, factor, low, high)
    if kind == "longrope":
        factors = (_read_factors(found, key, head_dim // 2) for key in ("short_factor", "long_factor"))
        attention = _longrope_attention_factor(found, max_positions / original, original)
        return Rope(head_dim, base, original, kind, 1.0, 1.0, 1.0, attention, True, *factors)
    low, high = (
        _read_number(found, key, default) or default for key, default in (("beta_slow", 1.0), ("beta_fast", 32.0))
    )
    attention, truncate = _yarn_attention_factor(found, factor), bool(found.get("truncate", True))
    return Rope(head_dim, base, original, kind, factor, low, high, attention, truncate)


def read_layer_rope(
    config: Mapping[str, Any], kind: str, kinds: Sequence[str], theta: Any, head_dim: int, positions: int
) -> Rope:
    """The rotation in one of several kinds of layers, as `read_rope` reads it; the first kind is that which has what is
    said for all. transformers 5 has a dict for each; before, scaling was of the first alone, thetas had own fields."""
    each, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    own: Any = each.get(kind) if isinstance(each, dict) and {*each} <= {*kinds, "truncate"} else 0
    own = DEFAULT_ROPE if own is None else own  # with a type, so that scaling which says `type` changes nothing
    if not isinstance(own, dict) or not isinstance(scaling, dict):
        why = f"rope_parameters is {each!r:.60}, it has to have an object for each of {' and '.join(kinds)}"
        raise PrepError("config.json makes no sense", f"{why}; rope_scaling is {scaling!r:.60}, an object of its own")
    merged = {**own, **scaling} if kind == kinds[0] else own
    truncate = {"truncate": each.get("truncate", True)}  # transformers reads it from the outer object alone
    return read_rope({"rope_theta": theta, "rope_parameters": merged | truncate}, head_dim, positions)


def check_rotary_dim(dim: int, head_dim: int, why: str) -> int:
    """Return the number of elements of a head that turn. Raise PrepError if a head has fewer."""
    if dim > head_dim:
        raise PrepError("config.json makes no sense", f"{why} turns {dim} elements of a head, which has {head_dim}")
    return dim


def _original_positions(found: Mapping[str, Any], positions: int) -> float:
    return _read_number(found, "original_max_position_embeddings", positions)


def _read_position_count(found: Mapping[str, Any], key: str, default: float) -> int:
    """A number of positions, from 1 on."""
    value = _read_number(found, key, default)
    if value < 1:
        raise PrepError("config.json makes no sense", f"{key} is {value:g}, it has to be a whole number from 1 on")
    return int(value)


def _yarn_attention_factor(found: Mapping[str, Any], factor: float) -> float:
    if found.get("attention_factor") is not None:
        return _read_number(found, "attention_factor")
    if found.get("mscale") and found.get("mscale_all_dim"):
        return _mscale(factor, _read_number(found, "mscale")) / _mscale(factor, _read_number(found, "mscale_all_dim"))
    return _mscale(factor, 1.0)


def _read_factors(found: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    values = found.get(key)
    if not isinstance(values, list) or len(values) != count:
        why = f"{key} of its rope scaling is {values!r:.60}, it has to be {count} numbers, one for each pair that turns"
        raise PrepError("config.json makes no sense", why)
    numbers = tuple(_read_number({key: value}, key) for value in values)
    if min(numbers) <= 0:
        raise PrepError("config.json makes no sense", f"{key} of its rope scaling has {min(numbers):g}, not above 0")
    return numbers


def _longrope_attention_factor(found: Mapping[str, Any], stretch: float, original: int) -> float:
    if found.get("attention_factor") is not None:
        return _read_number(found, "attention_factor")
    factor = _read_number(found, "factor", stretch)
    if factor > 1 and original == 1:
        raise PrepError("config.json makes no sense", "a longrope made for 1 position cannot be stretched")
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _mscale(factor: float, by: float) -> float:
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read_number(found: Mapping[str, Any], key: str, default: Any = None) -> float:
    value = found.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MAX_FLOAT32:
        raise PrepError("config.json makes no sense", f"{key} of its rope scaling is {value!r:.60}, not a number")
    return float(value)
