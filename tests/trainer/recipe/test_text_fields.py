"""Parsing of `data.fields`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from trainer.recipe.text_fields import (
    Field,
    FieldList,
    TextField,
    TokenField,
    TokenIdsField,
    parse_fields,
)

NAMES = (
    st.text(st.characters(exclude_characters="[]{},+<|>"), min_size=1).map(str.strip).filter(bool)
)
FIELDS: st.SearchStrategy[Field] = st.one_of(
    st.lists(NAMES, min_size=1, max_size=3).map(lambda names: TextField(tuple(names))),
    NAMES.map(TokenIdsField),
    st.integers(0, 2**32).map(TokenField),
    st.sampled_from([TokenField("bos"), TokenField("eos")]),
)


def write(field: Field) -> str:
    """Return a field in the grammar."""
    if isinstance(field, TextField):
        return "+".join(field.columns)
    return f"{{{field.column}}}" if isinstance(field, TokenIdsField) else f"<|{field.token}|>"


@given(st.text(st.characters(exclude_characters="[]{},+|"), min_size=1))
def test_text_without_signs_is_one_column(name: str):
    assert parse_fields(name) == FieldList(((TextField((name,)), False),))


@given(st.lists(st.tuples(FIELDS, st.booleans()), min_size=1), st.randoms())
def test_parse_fields_round_trips_formatted_fields(items: list[tuple[Field, bool]], random):
    items.append((TextField(("last", "target")), False))
    texts = [
        f"[ {write(field)} ]" if is_bracketed else f"  {write(field)}"
        for field, is_bracketed in items
    ]
    fields = parse_fields(f"{' ' * random.randrange(3)},".join(texts))
    assert fields.items == tuple(items)
    assert fields.source == tuple(field for field, is_bracketed in items if is_bracketed)
    assert fields.target == tuple(field for field, is_bracketed in items if not is_bracketed)


def test_comma_in_brackets_separates_fields_of_the_bracket():
    assert parse_fields("[a, b+c, <|5|>], d") == parse_fields("[a], [b + c], [<|5|>], d")


def test_columns_in_brackets_come_first():
    assert parse_fields("a+b, [c], {d}, <|bos|>, [{e}]").columns == ("c", "e", "a", "b", "d")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a]", "put one field outside brackets"),
        ("[a], [b]", "put one field outside brackets"),
        ("[], b", "a field is empty"),
        ("[ ], b", "a field is empty"),
        ("[a,], b", "a field is empty"),
        ("[a] b", "commas must separate"),
        ("a], b", "commas must separate"),
        ("[[a]], b", "commas must separate"),
        ("[a],", "a field is empty"),
        ("[a], ,b", "a field is empty"),
        ("a,", "a field is empty"),
        ("a+", '"a+" lacks a column beside +'),
        ("{a", '"{a" is neither a column'),
        ("{a}+b", '"{a}+b" is neither a column'),
        ("{}, b", '"{}" is neither a column'),
        ("<|eos|> a", '"<|eos|> a" is neither a column'),
        ("<|pad|>, a", "<|pad|> is not `<|bos|>`"),
        ("<|-1|>, a", "<|-1|> is not `<|bos|>`"),
    ],
)
def test_malformed_field_list_is_rejected(text: str, why: str):
    with pytest.raises(PrepError) as caught:
        parse_fields(text)
    assert caught.value.code == USAGE
    assert f'"{text}"' in caught.value.what
    assert why in caught.value.why
