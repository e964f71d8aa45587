"""Checks of options that exclude or require each other: an option without effect is an error, not ignored."""

from __future__ import annotations

from prepcli.errors import Option, join_texts, text, usage_error


def check_mutually_exclusive(*options: Option) -> None:
    """Raise UsageError if more than one of these options has a value."""
    set_options = [option for option in options if _is_set(option)]
    if len(set_options) > 1:
        requested = join_texts(" and ", [text("{}", option) for option in set_options])
        names = join_texts(", ", [text("{}", Option(option.name)) for option in set_options])
        raise usage_error(
            text("{} exclude each other", requested),
            "each alone determines the result",
            text("only one of {}", names),
        )


def check_needs(option: Option, needed: Option, why: str) -> None:
    """Raise UsageError if `option` has a value.

    Call this if `needed` is not set, and `option` has no effect without it.

    Args:
        option: The option with its value. None and False mean that it is not set.
        needed: The missing option.
        why: Why `option` requires it.
    """
    if _is_set(option):
        named = Option(option.name)
        raise usage_error(
            text("{} has no effect without {}", named, needed),
            why,
            text("add {}, or remove {}", needed, named),
        )


def _is_set(option: Option) -> bool:
    return option.value is not None and option.value is not False
