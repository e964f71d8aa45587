"""Parse JSON with limits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.json_values import (
    MAX_DEPTH,
    JsonRecord,
    Lenient,
    Omittable,
    find_type_fault,
    load_json,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
)


@given(VALUES)
def test_load_json_round_trips_json_dumps(value: object) -> None:
    assert load_json(json.dumps(value).encode()) == value


def test_load_json_reads_numbers_that_are_not_finite() -> None:
    values = load_json(b'{"a": [Infinity, -Infinity], "b": NaN}')
    assert values["a"] == [math.inf, -math.inf]
    assert math.isnan(values["b"])


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_deep_json_is_an_error(depth: int, begin: str, end: str) -> None:
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        load_json((begin * depth + "1" + end * depth).encode())
    load_json((begin * MAX_DEPTH + "1" + end * MAX_DEPTH).encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"9" * 5000, "a number has 5,000 digits"),
        (b"-" + b"9" * 301, "a number has 302 digits"),
        (b'"\xff"', "its text is not UTF-8"),
        (b'{"a": ["\\ud800"]}', "half of a surrogate pair"),
        (b'{"\\uD800": 1}', "half of a surrogate pair"),
        (b"{", "Expecting property name"),
        (b"", "Expecting value"),
    ],
)
def test_invalid_json_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_json(data)


class Record(TypedDict):
    """A record with a key that it must have, and one that it may have."""

    shape: Sequence[int]
    dtype: NotRequired[str]


class Settings(TypedDict, total=False):
    """Settings that may all be missing."""

    records: Mapping[str, Record]
    name: str | None
    rows: list[tuple[int, str]]
    ratio: float
    kind: Literal["a", "b"]
    tied: bool
    other: object
    any: Any


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"unknown": 1},
        {"records": {}, "name": None, "rows": [], "ratio": 1, "kind": "a", "tied": False},
        {
            "records": {"w": {"shape": [2, 3], "dtype": "x", "later": 1}},
            "rows": [[0, "a"], [1, ""]],
        },
        {"name": "x", "ratio": 1.5, "other": [{}], "any": None},
    ],
)
def test_value_of_the_type_has_no_fault(value: Any):
    assert find_type_fault(value, Settings) == ""


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ([], "is []"),
        ({"name": 1}, "`name` is 1"),
        ({"tied": 1}, "`tied` is 1"),
        ({"kind": "c"}, "`kind` is 'c'"),
        ({"kind": []}, "`kind` is []"),
        ({"ratio": True}, "`ratio` is True"),
        ({"rows": {}}, "`rows` is {}"),
        ({"rows": [[0, "a"], [1]]}, "`rows`.1 is [1]"),
        ({"rows": [[0, 1]]}, "`rows`.0.1 is 1"),
        ({"records": []}, "`records` is []"),
        ({"records": {"w": {}}}, "`records`.`w`.`shape` is missing"),
        ({"records": {"w": {"shape": "ab"}}}, "`records`.`w`.`shape` is 'ab'"),
        ({"records": {"w\x1b": {"shape": [True]}}}, "`records`.'w\\x1b'.`shape`.0 is True"),
        ({"name": ["x" * 100]}, "`name` is ['" + "x" * 58),
    ],
)
def test_first_fault_is_named_with_its_place(value: Any, fault: str):
    assert find_type_fault(value, Settings).strip() == fault


class Header(JsonRecord):
    """Declared keys of an object."""

    name: str = "unnamed"
    step: Omittable[int] = None
    record: Lenient[Record | None] = None


def test_record_has_attributes_of_its_keys_and_keeps_their_order():
    header = Header() | {"later": 1, "step": 3} | {"name": "x", "later": 2}
    assert (header.name, header.step, header.record) == ("x", 3, None)
    assert [*header.items()] == [("later", 2), ("step", 3), ("name", "x")]
    assert (Header().name, "name" in Header(), bool(Header())) == ("unnamed", False, False)
    assert header == dict(header)


def test_joining_a_record_in_place_leaves_other_references():
    shared = Header(name="x")
    header = shared
    header |= {"step": 3}
    assert (header.step, shared) == (3, {"name": "x"})


@pytest.mark.parametrize("key", ["get", "self", "_fields", "__class__", "items"])
def test_unknown_key_of_a_file_does_not_replace_a_method(key: str):
    header = Header(**{key: 1, "name": "x"})
    assert (header[key], header.name, header.get("name"), type(header)) == (1, "x", "x", Header)


def test_attributes_of_a_record_cannot_be_set():
    with pytest.raises(AttributeError):
        Header(name="x").name = "y"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"step": 3, "record": {"shape": 1}, "later": None}, ""),
        ({"name": None}, "`name` is None"),
        ({"step": None}, "`step` is None"),
    ],
)
def test_fault_of_an_omittable_key_is_null(value: Any, fault: str):
    assert find_type_fault(value, Header) == fault


@pytest.mark.parametrize(
    ("stored", "attribute"),
    [({"shape": [2]}, {"shape": [2]}), ({"shape": 2}, None), ([], None), (None, None)],
)
def test_malformed_value_of_a_lenient_key_reads_as_default(stored: Any, attribute: object):
    header = Header(record=stored)
    assert header.record == attribute
    assert header["record"] == stored
