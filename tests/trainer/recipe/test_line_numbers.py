"""Line numbers of TOML keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.recipe.formatting import key_line_numbers, to_toml

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
        "name": 2,
        "model": 4,
        "model.path": 5,
        "model.data": 9,
        "model.data.deep": 9,
        "model.data.deep.er": 9,
        "data": 10,
        "data.path": 11,
        "data.inline": 15,
        "tables": 16,
        "tables.x": 17,
    }


@given(st.lists(st.text() | st.lists(st.text()) | st.dictionaries(st.text(), st.integers())))
def test_keys_after_any_value_have_line_numbers(values: list[object]):
    lines = key_line_numbers("\n".join(f"k{i} = {to_toml(v)}" for i, v in enumerate(values)))
    assert lines == {f"k{number}": number + 1 for number in range(len(values))}


LISTS = """\
a = [
  [1],
  [ "b" ]
]
"c" = 1
[ d . "e" ]
f = { g = [
  1 ] }
"""


def test_lines_of_nested_lists_are_no_tables():
    assert key_line_numbers(LISTS) == {"a": 1, "c": 5, "d": 6, "d.e": 6, "d.e.f": 7}


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
    assert key_line_numbers(QUOTES) == {"a": 1, "b": 2, "c": 4, "d": 5, "e": 6, "f": 7, "g": 8}
