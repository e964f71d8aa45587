"""Regular expressions of module names: equal to Python's `re` by the rule of PEFT, and in bounded time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.models.lora_config import find_pattern

NAMES = ["model.layers.0.self_attn.q_proj", "layers.11.mlp.down_proj", "q_proj"]
TOKENS = [
    *("q_proj", "layers", "mlp", ".", r"\.", "[0-9]", r"\d", "+", "*", "?", "|", "(", ")"),
    *("^", "$", ".*", "0", "{1,2}", "[^a]", "(?:"),
]


@given(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=7).map("".join))
def test_patterns_match_as_in_python(pattern: str):
    try:
        found = [find_pattern([pattern], [name]) is not None for name in NAMES]
    except PrepError:
        return
    rule = re.compile(rf"(.*\.)?({pattern})$")
    assert found == [rule.match(name) is not None for name in NAMES]


def test_first_matching_pattern_counts():
    names = ["model.layers.0.self_attn.q_proj", "layers.0.attn.q"]
    assert find_pattern(["k_proj", "attn.q", "q_proj"], names) == "attn.q"
    assert find_pattern(["proj", "attn.k"], names) is None


@pytest.mark.parametrize("pattern", ["(a*)*b", "((a|b)*a)*c", "a{0,90}" * 90 + "b"])
def test_hostile_patterns_end_in_bounded_time(pattern: str):
    assert find_pattern([pattern], ["a" * 200]) is None


@pytest.mark.parametrize("pattern", ["(?i)q", r"(a)\1", "((a*)*)*b", "a" * 1001, "(" * 60, "[a"])
def test_other_syntax_is_an_error(pattern: str):
    with pytest.raises(PrepError, match="is not supported"):
        find_pattern([pattern], ["a"])
