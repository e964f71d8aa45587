"""Checks of options that exclude or require each other: an option without effect is an error, not ignored."""

from __future__ import annotations

from collections.abc import Mapping

from prepcli.errors import usage_error


def check_mutually_exclusive(options: Mapping[str, object]) -> None:
    """Raise UsageError if more than one of these options has a value."""
    set_options = [option for option, value in options.items() if _is_set(value)]
    if len(set_options) > 1:
        what = " and ".join(f"`{option} {options[option]}`" for option in set_options)
        hint = f"only one of {', '.join(set_options)}"
        raise usage_error(f"{what} exclude each other", "each alone determines the result", hint)


def check_needs(option: str, value: object, needed: str, why: str) -> None:
    """Raise UsageError if `option` has a value.

    Call this if `needed`, which it requires, is not set.
    """
    if _is_set(value):
        raise usage_error(
            f"`{option}` has no effect without `{needed}`",
            why,
            f"add `{needed}`, or remove `{option}`",
        )


def _is_set(value: object) -> bool:
    return value is not None and value is not False
