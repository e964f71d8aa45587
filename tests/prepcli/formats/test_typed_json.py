"""JSON values compared with type annotations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from prepcli.formats.typed_json import find_type_fault


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
