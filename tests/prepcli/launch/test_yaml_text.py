"""Values as YAML, read back by PyYAML."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.launch.yaml_text import yaml_document
from tests.helpers.scripts import texts

yaml = pytest.importorskip("yaml")

any_text = st.one_of(texts, texts.map("{}\n".format), st.sampled_from(["yes", "1", "~", "a: b", "a\n\n b\n", "\ta\n"]))
values = st.recursive(
    st.one_of(any_text, st.integers(), st.booleans()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(any_text, inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(any_text, values, min_size=1, max_size=3))
def test_yaml_document_reads_back_as_the_value(value: dict[str, object]):
    assert yaml.safe_load(yaml_document(value)) == value  # pyright: ignore[reportArgumentType]


def test_yaml_document_is_in_block_style():
    text = yaml_document({"a": [{"b": 1, "c": "x y"}, "d"], "script": "set -e\n\nexec prep\n", "e": {}})
    assert text == 'a:\n  - b: 1\n    c: "x y"\n  - "d"\nscript: |\n  set -e\n\n  exec prep\ne: {}\n'
