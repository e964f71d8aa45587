"""A value that a key does not take, rewritten in the form that it takes, for the hint of an error."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.recipe.spelling import example, options, spelled

# Other names of values that are known from other trainers, by our value
VALUE_NAMES: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("bf16",),
    "float32": ("fp32", "f32", "float", "single"),
    "float16": ("fp16", "half"),
    "nothing_saveable": ("full",),
    "dots_with_no_batch_dims_saveable": ("minimal", "selective"),
    "constant": ("constant_with_warmup",),
    "cosine": ("cosine_with_warmup", "cosine_decay"),
    "linear": ("linear_with_warmup", "linear_decay"),
    "adamw": ("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_bnb_8bit"),
}
VALUE_OF = {name: value for value, names in VALUE_NAMES.items() for name in names}
_PYTHON_TYPES = {"integer": int, "number": (int, float), "boolean": bool, "string": str}


def suggestion(value: Any, part: Mapping[str, Any]) -> str:
    """Return a value for a key as TOML: the given one where it fits in some form, else the key's example."""
    return corrected(value, part) or example(part)


def corrected(value: Any, part: Mapping[str, Any]) -> str:
    """Return the given value as TOML in the form that a key takes; empty where there is no such form."""
    fitting = (spelled(each) for each in (value, *_forms(value)) if fits(each, part))
    return next(fitting, "")


def _forms(value: Any) -> Iterator[Any]:
    """Yield what a value may have been meant as: text as a number, 20.0 as 20, bf16 as bfloat16, a list as `1,8,1`."""
    if isinstance(value, str):
        yield value.lower()
        yield VALUE_OF.get(value.lower())
        for text in (value.strip(), value.strip().lower()):
            read = _read(text)
            if not isinstance(read, str):
                yield read
                yield from _forms(read)
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, list) and value and all(type(each) is int for each in value):
        yield ",".join(map(str, value))


def _read(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError, KeyError):
        return text


def fits(value: Any, part: Mapping[str, Any]) -> bool:
    """Return whether a key takes a value, by its part of the schema."""
    return any(_fits(value, option) for option in options(part))


def _fits(value: Any, option: Mapping[str, Any]) -> bool:
    if "const" in option:
        return value == option["const"] and type(value) is type(option["const"])
    if "enum" in option:
        return isinstance(value, str) and value in option["enum"]
    if option["type"] == "array":
        return isinstance(value, list) and bool(value) and all(_fits(each, option["items"]) for each in value)
    if isinstance(value, bool) != (option["type"] == "boolean"):
        return False
    if not isinstance(value, _PYTHON_TYPES.get(option["type"], ())):
        return False
    if isinstance(value, str):
        return len(value) >= option.get("minLength", 0) and bool(re.search(option.get("pattern", ""), value))
    return _is_within(value, option)


def _is_within(value: float, option: Mapping[str, Any]) -> bool:
    return (
        (isinstance(value, int) or math.isfinite(value))
        and value >= option.get("minimum", -math.inf)
        and value > option.get("exclusiveMinimum", -math.inf)
        and value <= option.get("maximum", math.inf)
        and value < option.get("exclusiveMaximum", math.inf)
    )
