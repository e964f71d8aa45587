"""Insertions into JSON texts: the members are added, all other bytes stay, and removal is exact."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.formats.added_tokens import insert_members, remove_insertion

SCALARS = st.none() | st.booleans() | st.integers(0, 99) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FORMATS: list[dict[str, Any]] = [{}, {"indent": 2}, {"indent": 1}, {"separators": (",", ":")}]


@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES, st.booleans(), st.sampled_from(FORMATS), st.booleans(), st.data())
def test_insert_adds_members_and_removal_undoes_it(
    first: Any, last: Any, is_list: bool, form: dict[str, Any], ascii_only: bool, data: Any
):
    strategy = st.lists(VALUES, max_size=3)
    if not is_list:
        strategy = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
    old = data.draw(strategy)
    new = data.draw(strategy.filter(bool))
    if not is_list:
        new = {f"new {key}": value for key, value in new.items()}
    document = {"first": first, "tokens": old, "last": last}
    text = json.dumps(document, ensure_ascii=ascii_only, **form).encode()
    changed, inserted = insert_members(text, ("tokens",), new)
    assert json.loads(changed) == document | {"tokens": old + new if is_list else old | new}
    assert remove_insertion(changed, inserted) == text


def test_insert_refuses_a_key_of_the_object():
    with pytest.raises(ValueError, match=r"ids has 'b' already"):
        insert_members(b'{"ids": {"a": 1, "\\u0062": 2}}', ("ids",), {"c": 3, "b": 4})


def test_insert_keeps_the_indentation_of_a_list():
    text = json.dumps({"a": [{"id": 1}]}, indent=2).encode()
    changed, _ = insert_members(text, ("a",), [{"id": 2}])
    assert changed.decode() == json.dumps({"a": [{"id": 1}, {"id": 2}]}, indent=2)


def test_insert_adds_members_to_the_root():
    assert insert_members(b' {"a": 1} \n', (), {"b": [2]})[0] == b' {"a": 1,"b":[2]} \n'


@pytest.mark.parametrize(
    ("keys", "message"),
    [(("b",), "there is no b"), (("a",), "a is not a list"), (("a", "c"), "there is no c")],
)
def test_insert_needs_a_list_of_that_name(keys: tuple[str, ...], message: str):
    with pytest.raises(ValueError, match=message):
        insert_members(b'{"a": {}}', keys, [1])
