"""YAML documents: PyYAML reads back the values, and strings are quoted."""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.json_values import JsonObject
from prepcli.launch.yaml_documents import yaml_text
from tests.helpers.scripts import texts

any_text = st.one_of(
    texts,
    texts.map("{}\n".format),
    st.sampled_from(["yes", "y", "1", "1e3", "~", "a: b", "a\n\n b\n", "\ta\n", "a\x85b\n"]),
)
values = st.recursive(
    st.one_of(any_text, st.integers(), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(any_text, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(any_text, values, min_size=1, max_size=3))
def test_yaml_text_reads_back_as_the_value(value: JsonObject):
    assert list(yaml.safe_load_all(yaml_text([value, value]))) == [value, value]


def test_yaml_text_is_in_block_style_with_quoted_values():
    shared: JsonObject = {"cpu": "8"}
    text = yaml_text(
        [
            {"a1": [{"b1": 1, "y": "x y"}, "1e3"], "script": "set -e\n\nexec prep\n", "e1": {}},
            {"requests": shared, "limits": shared, "null": "é" * 200},
        ]
    )
    long = "é" * 200
    assert text == (
        'a1:\n- b1: 1\n  "y": "x y"\n- "1e3"\nscript: |\n  set -e\n\n  exec prep\ne1: {}\n'
        f'---\nrequests:\n  cpu: "8"\nlimits:\n  cpu: "8"\n\'null\': "{long}"\n'
    )
