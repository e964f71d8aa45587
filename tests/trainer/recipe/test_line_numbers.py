"""Line numbers of TOML keys."""

from __future__ import annotations

import tomllib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.recipe.formatting import to_toml
from trainer.recipe.raw_recipe import key_line_numbers

DOCUMENT = '''\
# a comment with [model] in it
name = "x"

  [model]  # and here
path = """
[data]
type = 1
"""
data.deep.er = 3
[data]
path = [
  "a = 1",   # = ]
  "b",
]
inline = { a = 1, "b c" = { d = 2 } }
[[tables]]
x = 1
'''


def test_key_line_numbers_finds_keys_and_tables():
    assert key_line_numbers(DOCUMENT) == {
        ("name",): 2,
        ("model",): 4,
        ("model", "path"): 5,
        ("model", "data"): 9,
        ("model", "data", "deep"): 9,
        ("model", "data", "deep", "er"): 9,
        ("data",): 10,
        ("data", "path"): 11,
        ("data", "inline"): 15,
        ("data", "inline", "a"): 15,
        ("data", "inline", "b c"): 15,
        ("data", "inline", "b c", "d"): 15,
        ("tables",): 16,
        ("tables", "x"): 17,
    }


def test_statements_of_several_lines_are_parsed_once(monkeypatch: pytest.MonkeyPatch):
    """Parsing the lines again after each of them took time with the square of their number."""
    parsed = list[str]()

    def count(text: str) -> dict[str, object]:
        parsed.append(text)
        return tomllib.loads(text)

    monkeypatch.setattr("trainer.recipe.raw_recipe.tomllib", SimpleNamespace(loads=count))
    lines = "".join(f'  "{number}",\n' for number in range(1000))
    assert key_line_numbers(f"first = [\n{lines}]\nlast = 1\n") == {("first",): 1, ("last",): 1003}
    assert len(parsed) == 3


@given(
    st.dictionaries(
        st.text(), st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.integers())
    )
)
def test_values_of_any_text_have_line_numbers(values: dict[str, object]):
    text = "\n".join(f"{to_toml(key)} = {to_toml(value)}" for key, value in values.items())
    lines = key_line_numbers(text)
    assert [lines[(key,)] for key in values] == [*range(1, len(values) + 1)]


QUOTES = '''\
a = """x""""
b = """
y"""""
c = ""
d = """"""
e = "\\\\"
f = 'it ends in \\'
g = 1
'''


def test_strings_that_end_in_quotes_have_line_numbers():
    assert key_line_numbers(QUOTES) == {
        ("a",): 1,
        ("b",): 2,
        ("c",): 4,
        ("d",): 5,
        ("e",): 6,
        ("f",): 7,
        ("g",): 8,
    }
