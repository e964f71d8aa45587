"""JSON values: their types, parsers with limits for untrusted texts, and objects with declared keys."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    NotRequired,
    Self,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
JsonObject: TypeAlias = dict[str, JsonValue]
# The content of a config.json.
HFConfig: TypeAlias = Mapping[str, JsonValue]


# Nested objects and lists. Python's recursion limit of 1,000 frames stops recursive code at about
# 900.
MAX_DEPTH = 100
# Floats end at 1.8e308: a larger integer cannot become a float.
MAX_INTEGER_DIGITS = 300
NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}
# Returns the place and the kind of the first fault, e.g. ".w.shape is 'x'", or empty for a value of the type.
_Check = Callable[[Any], str]
# Characters of a value in a message.
MAX_VALUE_CHARS = 60
_LENIENT = "a value of another type is no fault"
_OMITTABLE = "null is a fault"
T = TypeVar("T")
# Type of a key that never makes a file invalid: the attribute of a malformed value is the default of the class.
Lenient = Annotated[T, _LENIENT]
# Type of a key that may be missing, and then has the attribute None. A file with the value null is invalid.
Omittable = Annotated[T | None, _OMITTABLE]


def load_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    `NaN`, `Infinity` and `-Infinity` are accepted: Python writes them, e.g. into the config.json of
    Falcon-H1.

    Args:
        data: The text in UTF-8.

    Raises:
        ValueError: It is not JSON, a number has too many digits, a text is not Unicode, or objects
            or lists are nested too deeply.

    Example:
        >>> load_json(b'{"time_step_limit": [0.0, Infinity]}')
        {'time_step_limit': [0.0, inf]}
    """
    try:
        value = _DECODER.decode(data.decode("utf-8-sig"))
    except UnicodeError as error:
        raise ValueError("its text is not UTF-8") from error
    except RecursionError as error:
        raise _depth_error() from error
    check_depth(value)
    if b"\\ud" in data.lower():
        _check_surrogates(value)
    return value


def check_depth(value: JsonValue) -> None:
    """Raise ValueError if objects or lists are nested too deeply."""
    # A stack of (value, depth) instead of recursion, which would end at Python's own limit.
    pending: list[tuple[JsonObject | list[JsonValue], int]] = []
    if isinstance(value, dict | list):
        pending.append((value, 1))
    while pending:
        container, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _depth_error()
        children: Iterable[JsonValue] = container
        if isinstance(container, dict):
            children = container.values()
        pending += [(child, depth + 1) for child in children if isinstance(child, dict | list)]


def _check_surrogates(value: Any) -> None:
    """Raise ValueError for a text that no file can have in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text has half of a surrogate pair") from error


def _depth_error() -> ValueError:
    return ValueError(f"its JSON is nested more than {MAX_DEPTH} levels deep")


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_parse_integer)


def json_value(value: object) -> object:
    """Return a path as text, and a dataclass as an object. It is the `default` of `json.dumps`."""
    if isinstance(value, PurePath):
        return str(value)
    return json_fields(value)


def json_fields(result: Any, *names: str) -> dict[str, Any]:
    """Return fields of a dataclass for a JSON object, all of them by default. Infinity and NaN become null.

    >>> json_fields(complex(1, float("inf")), "real", "imag")
    {'real': 1.0, 'imag': None}
    """
    names = names or tuple(field.name for field in dataclasses.fields(result))
    fields: dict[str, Any] = {}
    for name in names:
        value = getattr(result, name)
        if isinstance(value, tuple):
            value = [None if is_non_finite(item) else item for item in value]
        fields[name] = None if is_non_finite(value) else value
    return fields


def is_non_finite(value: object) -> bool:
    """Return whether a value is infinity or NaN, which JSON lacks."""
    return isinstance(value, float) and not math.isfinite(value)


def json_type_name(value: object) -> str:
    """Return the JSON name of a value's type with its article, e.g. `a list`."""
    return NAMES.get(type(value)) or f"a value of type {type(value).__name__}"


def quote_name(name: str) -> str:
    """Quote a name for a message: without control characters and at most 100 characters long."""
    if len(name) <= 100 and name.isprintable():
        return f"`{name}`"
    return ascii(name[:100])


def is_json_list(value: object) -> bool:
    """Return whether a value is a text that looks like a JSON list, as in CSV files."""
    return isinstance(value, str) and value.lstrip().startswith("[")


def parse_json(text: bytes) -> Any:
    """Parse JSON. Integers outside of 0 to 10^19 - 1 become -1.

    Raises:
        ValueError: The text is not JSON, or an object has a duplicate name.
    """
    try:
        value = _STRICT_DECODER.decode(text.decode())
        check_depth(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON is broken: {error.msg}") from error
    except UnicodeError as error:
        raise ValueError("its text is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    return value


def _unique_object(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    document = dict(pairs)
    if len(document) != len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it names {quote_name(duplicate)} twice")
    for name in document:
        # Python's JSON accepts half of a surrogate pair, other parsers do not.
        name.encode()
    return document


def _parse_count(digits: str) -> int:
    # int() of a million digits takes hours.
    return int(digits) if digits.isdigit() and len(digits) < 20 else -1


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


# json.loads would accept duplicate names (two parsers could see two values), NaN, and integers of
# any length.
_STRICT_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_object, parse_int=_parse_count, parse_constant=_reject_constant
)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class JsonRecord(dict[str, Any]):
    """JSON object with an attribute for each key that its class declares.

    The object keeps the order of its keys, and keys that the class does not declare. A missing key is not in the
    object, and its attribute is the default of the class. Only a checked object has attributes of the declared types:
    see `find_type_fault`.

    Example:
        >>> class Layout(JsonRecord):
        ...     scan: bool = True
        ...     mesh: str | None = None
        >>> layout = Layout(mesh="1,2,1") | {"later": 3}
        >>> layout.scan, layout.mesh, layout
        (True, '1,2,1', {'mesh': '1,2,1', 'later': 3})
    """

    def __init_subclass__(cls) -> None:
        for key, annotation in cls.__annotations__.items():
            is_lenient = _has_mark(annotation, _LENIENT)
            if isinstance(annotation, str):
                # Evaluating the types of a manifest takes milliseconds, and most of its keys are not lenient.
                is_lenient = annotation.startswith("Lenient[")
            setattr(cls, key, _attribute(key, getattr(cls, key), is_lenient=is_lenient))

    def __or__(self, other: Mapping[str, Any]) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return both objects in one. As in a dict, a key of both keeps its place and has the value of `other`."""
        return type(self)(**{**self, **other})

    def __ior__(self, other: Mapping[str, Any]) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return both objects in one, as `|` does. Other holders of this object keep it as it is."""
        return self | other


def _attribute(key: str, default: object, *, is_lenient: bool) -> property:
    def read(record: JsonRecord) -> object:
        value = record.get(key, default)
        if is_lenient and key in record and _lenient_check(type(record), key)(value):
            return default
        return value

    return property(read)


@functools.cache
def _lenient_check(schema: type, key: str) -> _Check:
    """Return the check of the value of a lenient key."""
    return _make_check(get_args(_type_hints(schema)[key])[0])


def find_type_fault(value: object, annotation: object) -> str:
    """Return where and how a JSON value differs from a type, or empty if it has the type.

    Supported are the types of JSON, `object` for any value, unions, `Literal`, and `list`, `Sequence`, `tuple`, `dict`,
    `Mapping`, `TypedDict` and `JsonRecord` of supported types. An object may have more keys than its class declares.

    Args:
        value: The value.
        annotation: The type.

    Example:
        >>> find_type_fault({"w": {"shape": [2, "3"]}}, dict[str, dict[str, list[int]]])
        "`w`.`shape`.1 is '3'"
    """
    return _make_check(annotation)(value).removeprefix(".")


@functools.cache
def _make_check(annotation: Any) -> _Check:
    """Return the check of a type. It is made once: a manifest has thousands of records of one type."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if annotation in (object, Any) or _has_mark(annotation, _LENIENT):
        return lambda value: ""
    if _has_mark(annotation, _OMITTABLE):
        kind, _none = get_args(arguments[0])
        return _make_check(kind)
    is_record = isinstance(annotation, type) and issubclass(annotation, JsonRecord)
    if is_record or is_typeddict(annotation):
        return _schema_check(annotation)
    if origin in (Union, types.UnionType):
        checks = [*map(_make_check, arguments)]
        return lambda value: "" if "" in [check(value) for check in checks] else _fault(value)
    if origin is Literal:
        return lambda value: "" if value in arguments else _fault(value)
    if origin in (dict, Mapping):
        return _object_check({}, _make_check(arguments[1]))
    if origin in (list, Sequence):
        return _list_check([_make_check(arguments[0])], is_tuple=False)
    if origin is tuple:
        return _list_check([*map(_make_check, arguments)], is_tuple=True)
    # JSON has one type of numbers, and `bool` is no number here.
    accepted = (int, float) if annotation is float else (annotation or types.NoneType,)
    return lambda value: "" if type(value) in accepted else _fault(value)


def _schema_check(schema: Any) -> _Check:
    checks: dict[str, _Check] = {}
    required: list[str] = []
    is_total = is_typeddict(schema) and schema.__total__
    for key, hint in _type_hints(schema).items():
        # `__required_keys__` is wrong for annotations that are texts (`from __future__ import annotations`).
        is_optional = get_origin(hint) is NotRequired
        if is_total and not is_optional:
            required.append(key)
        checks[key] = _make_check(get_args(hint)[0] if is_optional else hint)
    return _object_check(checks, required=required)


def _object_check(
    checks: Mapping[str, _Check], other: _Check | None = None, required: Sequence[str] = ()
) -> _Check:
    """Return the check of an object: `checks` by key, and `other` for the remaining keys."""

    def check(value: JsonValue) -> str:
        if not isinstance(value, dict):
            return _fault(value)
        for key in required:
            if key not in value:
                return f".{quote_name(key)} is missing"
        for key, item in value.items():
            check_item = checks.get(key, other)
            if check_item and (fault := check_item(item)):
                return f".{quote_name(key)}{fault}"
        return ""

    return check


def _list_check(checks: Sequence[_Check], *, is_tuple: bool) -> _Check:
    """Return the check of a list: with one check for all items, or of a tuple with a check for each item."""

    def check(value: JsonValue) -> str:
        if not isinstance(value, list) or (is_tuple and len(value) != len(checks)):
            return _fault(value)
        for number, (item, check_item) in enumerate(zip(value, itertools.cycle(checks))):
            if fault := check_item(item):
                return f".{number}{fault}"
        return ""

    return check


@functools.cache
def _type_hints(schema: type) -> Mapping[str, Any]:
    # The type of any JSON value is defined by itself, which Python 3.11 cannot evaluate.
    return get_type_hints(schema, localns={"JsonValue": object}, include_extras=True)


def _has_mark(annotation: object, mark: str) -> bool:
    return mark in getattr(annotation, "__metadata__", ())


def _fault(value: JsonValue) -> str:
    return f" is {value!r:.{MAX_VALUE_CHARS}}"


def is_utf8(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8, e.g. for JSON.

    Other bytes of a file name, and escapes in JSON, are halves of surrogate pairs in Python.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
