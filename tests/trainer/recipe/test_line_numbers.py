"""Line numbers of TOML keys."""

from __future__ import annotations

from trainer.recipe.line_numbers import key_line_numbers

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
