"""Compare JSON values with type annotations: the declared types of a manifest are the ones that its reader checks."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from prepcli.core.json_types import JsonValue
from prepcli.formats.untrusted import quote_name
from prepcli.planning.manifest_fields import CHECKED_BY_READER

# Returns the place and the kind of the first fault, e.g. ".w.shape is 'x'", or empty for a value of the type.
_Check = Callable[[Any], str]
# Characters of a value in a message.
MAX_VALUE_CHARS = 60


def find_type_fault(value: object, annotation: object) -> str:
    """Return where and how a JSON value differs from a type, or empty if it has the type.

    Supported are the types of JSON, `object` for any value, unions, `Literal`, and `list`, `Sequence`, `tuple`, `dict`,
    `Mapping` and `TypedDict` of supported types. A dict may have more keys than its TypedDict. A key annotated with
    CHECKED_BY_READER may have any value.

    Args:
        value: The value.
        annotation: The type.

    Example:
        >>> find_type_fault({"w": {"shape": [2, "3"]}}, dict[str, dict[str, list[int]]])
        "`w`.`shape`.1 is '3'"
    """
    return _make_check(annotation)(value).removeprefix(".")


@functools.cache
def _make_check(annotation: object) -> _Check:
    """Return the check of a type. It is made once: a manifest has thousands of records of one type."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if annotation in (object, Any) or CHECKED_BY_READER in getattr(annotation, "__metadata__", ()):
        return lambda value: ""
    if is_typeddict(annotation):
        return _typed_dict_check(annotation)
    if origin in (Union, types.UnionType):
        return _union_check(tuple(map(_make_check, arguments)))
    if origin is Literal:
        return lambda value: "" if value in arguments else _fault(value)
    if origin in (dict, Mapping):
        return _mapping_check(_make_check(arguments[1]))
    if origin in (list, Sequence):
        return _list_check(_make_check(arguments[0]))
    if origin is tuple:
        return _tuple_check(tuple(map(_make_check, arguments)))
    return _scalar_check(annotation)


def _typed_dict_check(annotation: Any) -> _Check:
    # `__required_keys__` is wrong for annotations that are texts (`from __future__ import annotations`).
    checks: dict[str, _Check] = {}
    required: list[str] = []
    # The type of any JSON value is defined by itself, which Python 3.11 cannot evaluate.
    hints = get_type_hints(annotation, localns={"JsonValue": object}, include_extras=True)
    for key, hint in hints.items():
        is_optional = get_origin(hint) is NotRequired
        if annotation.__total__ and not is_optional:
            required.append(key)
        checks[key] = _make_check(get_args(hint)[0] if is_optional else hint)

    def check(value: JsonValue) -> str:
        if not isinstance(value, dict):
            return _fault(value)
        for key in required:
            if key not in value:
                return f".{quote_name(key)} is missing"
        for key, item in value.items():
            if (check_item := checks.get(key)) and (fault := check_item(item)):
                return f".{quote_name(key)}{fault}"
        return ""

    return check


def _union_check(checks: tuple[_Check, ...]) -> _Check:
    def check(value: JsonValue) -> str:
        faults = [check(value) for check in checks]
        return "" if "" in faults else _fault(value)

    return check


def _mapping_check(check_item: _Check) -> _Check:
    def check(value: JsonValue) -> str:
        if not isinstance(value, dict):
            return _fault(value)
        for key, item in value.items():
            if fault := check_item(item):
                return f".{quote_name(key)}{fault}"
        return ""

    return check


def _list_check(check_item: _Check) -> _Check:
    def check(value: JsonValue) -> str:
        if not isinstance(value, list):
            return _fault(value)
        for number, item in enumerate(value):
            if fault := check_item(item):
                return f".{number}{fault}"
        return ""

    return check


def _tuple_check(checks: tuple[_Check, ...]) -> _Check:
    def check(value: JsonValue) -> str:
        if not isinstance(value, list) or len(value) != len(checks):
            return _fault(value)
        for number, (item, check_item) in enumerate(zip(value, checks)):
            if fault := check_item(item):
                return f".{number}{fault}"
        return ""

    return check


def _scalar_check(annotation: object) -> _Check:
    """Return the check of a type of a single value. JSON has one type of numbers, and `bool` is no number here."""
    accepted: tuple[object, ...] = (int, float) if annotation is float else (annotation,)
    if annotation is None:
        accepted = (types.NoneType,)
    return lambda value: "" if type(value) in accepted else _fault(value)


def _fault(value: JsonValue) -> str:
    return f" is {value!r:.{MAX_VALUE_CHARS}}"
