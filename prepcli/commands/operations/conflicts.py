"""Checks of exclusive and of dependent options. An option without effect is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prepcli.core.errors import Option, join_texts, text, usage_error


def check_mutually_exclusive(options: Mapping[str, object]) -> None:
    """Raise UsageError if more than one of these options has a value.

    Args:
        options: Values of the options, by their names in Python.
    """
    names = [name for name, value in options.items() if _is_set(value)]
    if len(names) > 1:
        values = _join_options(" and ", [Option(name, options[name]) for name in names])
        raise usage_error(
            text("{} exclude each other", values),
            "each alone determines the result",
            text("pass only one of {}", _join_options(", ", [Option(name) for name in names])),
        )


def reject_without(option: Option, value: object, needed: Option, why: str) -> None:
    """Raise UsageError if `option` is set. It requires `needed`, and the caller has checked that `needed` is not set.

    Args:
        option: Option without effect.
        value: Its value. None or False if it is not set.
        needed: Required other option.
        why: Why it has no effect without `needed`.
    """
    if _is_set(value):
        raise usage_error(
            text("{} has no effect without {}", option, needed),
            why,
            text("add {}, or remove {}", needed, option),
        )


def _join_options(separator: str, options: Sequence[Option]) -> str:
    return join_texts(separator, [text("{}", option) for option in options])


def _is_set(value: object) -> bool:
    # 0 is a value that a caller set, e.g. `seed=0`. Only None and False mean an omitted option.
    return value is not None and value is not False
