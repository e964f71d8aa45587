"""The option that turns notes about the source of a conversion into errors.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from prepcli.core.option_spec import NOT_RECORDED, OptionSpec

STRICT = OptionSpec(
    None,
    "Fail on differences that are otherwise only noted.",
    "Raise for differences that are otherwise only noted, such as tensors outside of an index. Default: False.",
    default=False,
    position=22,
    record=NOT_RECORDED,
)


class StrictOptions(TypedDict, total=False):
    """Whether differences that are only noted are errors."""

    strict: Annotated[bool, STRICT]
