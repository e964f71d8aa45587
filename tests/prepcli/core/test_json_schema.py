"""JSON objects with declared keys, and values compared with type annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from prepcli.core.json_schema import JsonRecord, Lenient, Omittable, find_type_fault


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
