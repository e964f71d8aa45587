"""Parse JSON with limits."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.json_values import MAX_DEPTH, load_json

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
