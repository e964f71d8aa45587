"""Parsing of `data.fields`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.models.errors import USAGE, PrepError
from trainer.recipe.text_fields import TextFields, parse_fields

NAMES = st.text("ab c._-é", min_size=1, max_size=5).map(str.strip).filter(bool)


@given(st.text(st.characters(exclude_characters="[]"), min_size=1))
def test_text_without_brackets_is_one_column(name: str):
    assert parse_fields(name) == TextFields((name,))


@given(st.lists(NAMES, min_size=1), st.lists(NAMES, min_size=1), st.randoms())
def test_columns_in_brackets_are_the_source(source: list[str], target: list[str], random):
    items = [f"[{name}]" for name in source] + target
    random.shuffle(items)
    text = ",".join(f"{' ' * random.randrange(3)}{item} " for item in items)
    fields = parse_fields(text)
    assert [f"[{name}]" for name in fields.source] == [item for item in items if item.startswith("[")]
    assert [*fields.target] == [item for item in items if not item.startswith("[")]
    assert fields.columns == (*fields.source, *fields.target)


@pytest.mark.parametrize(
    "text", ["[a]", "[a], [b]", "[], b", "[ ], b", "[a] b", "[a, b], c", "a], b", "[[a]], b", "[a],", "[a], ,b"]
)
def test_malformed_field_list_is_rejected(text: str):
    with pytest.raises(PrepError) as caught:
        parse_fields(text)
    assert caught.value.code == USAGE
    assert f'"{text}"' in caught.value.what
