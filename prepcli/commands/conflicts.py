"""Options that exclude or need each other: an option that would have no effect is an error, not a silent default."""

from __future__ import annotations

from collections.abc import Mapping

from prepcli.errors import usage_error
from prepcli.sources.locate import LocatedCheckpoint


def check_mutually_exclusive(options: Mapping[str, object]) -> None:
    """Raise a usage PrepError where more than one of these options has a value."""
    given = [option for option, value in options.items() if _is_set(value)]
    if len(given) > 1:
        what = " and ".join(f"`{option} {options[option]}`" for option in given)
        raise usage_error(f"{what} exclude each other", "each says the whole of it", f"only one of {', '.join(given)}")


def check_needs(option: str, value: object, needed: str, why: str) -> None:
    """Raise a usage PrepError where `option` has a value. Called where `needed` is missing."""
    if _is_set(value):
        raise usage_error(
            f"`{option}` has no effect without `{needed}`", why, f"add `{needed}`, or leave `{option}` out"
        )


def check_stream(stream: bool, *located: LocatedCheckpoint) -> None:
    """Raise a usage PrepError for `--stream` where every checkpoint is a folder here."""
    if stream and all(each.remote is None for each in located):
        names = " and ".join(each.model_name for each in located)
        raise usage_error("`--stream` has no effect", f"{names} is read from a folder here", "leave `--stream` out")


def _is_set(value: object) -> bool:
    return value is not None and value is not False
