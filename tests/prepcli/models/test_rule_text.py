"""Partition rules as text: parsing, errors, and merging with presets and defaults."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, Key
from prepcli.models.mesh import MESH_AXES
from prepcli.models.rules import (
    ACTIVATION_DIMS,
    DEFAULT_RULES,
    KEEP_LEAF_WHOLE,
    PARAM_RULES,
    PRESETS,
    WHOLE,
    DimRule,
    LeafRule,
    Preset,
    Rule,
    activation_rules,
    merge_rules,
    parse_rule,
    rule_texts,
)
from tests.helpers.meshes import error_of, read

CHOICE = st.lists(st.sampled_from(MESH_AXES), min_size=1, max_size=3, unique=True).map(tuple)
CHOICES = st.tuples(st.lists(CHOICE, max_size=2), st.sampled_from([(), ((),)])).map(
    lambda parts: (*parts[0], *parts[1])
)
DIM_RULES = st.builds(DimRule, st.sampled_from(tuple(PARAM_RULES)), CHOICES.filter(bool))
ACTIVATION_RULES = st.builds(
    DimRule,
    st.sampled_from(ACTIVATION_DIMS[1:]),
    CHOICES.filter(bool),
    of_activations=st.just(True),
)
LEAF_RULES = st.builds(
    LeafRule,
    st.from_regex(r"\^?[a-z]+(\\\.(q\|v|\(k\|v\)|[a-z=,]+))*\$?", fullmatch=True),
    st.permutations(MESH_AXES).flatmap(
        lambda axes: st.tuples(
            *(st.sampled_from([((axis,),), ((axis,), ()), WHOLE]) for axis in axes[:3])
        )
    ),
)
PRESET_RULES = st.sampled_from(list(PRESETS)).map(Preset)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("embed=fsdp+sp", DimRule("embed", (("fsdp", "sp"),))),
        ("kv_heads=mp|none", DimRule("kv_heads", (("mp",), ()))),
        ("vocab = none", DimRule("vocab", WHOLE)),
        ("mlp=mp+sp | mp | none", DimRule("mlp", (("mp", "sp"), ("mp",), ()))),
        ("act:seq=sp|none", DimRule("seq", (("sp",), ()), of_activations=True)),
        (r"re:^head\.weight$=mp, fsdp", LeafRule(r"^head\.weight$", ((("mp",),), (("fsdp",),)))),
        (r"re:\.(q|v)=a\.=fsdp|none,none", LeafRule(r"\.(q|v)=a\.", ((("fsdp",), ()), WHOLE))),
        ("re:norm=none", LeafRule("norm", KEEP_LEAF_WHOLE)),
        ("flaxlm:1,1", Preset("flaxlm:1,1")),
        ("auto", Preset("auto")),
    ],
)
def test_parse_rule_reads_each_kind(text: str, rule: Rule):
    assert parse_rule(text) == rule
    assert parse_rule(str(rule)) == rule


@given(DIM_RULES | ACTIVATION_RULES | LEAF_RULES | PRESET_RULES)
def test_parse_rule_inverts_str(rule: Rule):
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("embed", "`--rule embed` is invalid", "`--rule 'kv_heads=mp|none'`"),
        ("embed=", "`--rule embed=` is invalid", "`--rule 'kv_heads=mp|none'`"),
        ("embd=fsdp", "`--rule embd=fsdp`: unknown dim `embd`", "did you mean `embed`?"),
        ("embed=fdsp", "`--rule embed=fdsp`: unknown mesh axis `fdsp`", "did you mean `fsdp`?"),
        ("embed=|mp", "`--rule 'embed=|mp'`: unknown mesh axis ``", ""),
        ("embed=mp+mp", "`--rule embed=mp+mp` names an axis twice", "name each axis at most once"),
        ("embed=none|mp", "`--rule 'embed=none|mp'` has choices after `none`", "put `none` last"),
        ("seq=sp", "`--rule seq=sp`: unknown dim `seq`", "did you mean `act:seq`?"),
        ("act:layers=mp", "`--rule act:layers=mp`: unknown dim of activations `layers`", ""),
        ("act:seq", "`--rule act:seq` is invalid", "`--rule 'kv_heads=mp|none'`"),
        ("act:batch=dp|none", "`--rule 'act:batch=dp|none'` has several choices", "`act:batch=dp`"),
        ("re:head", "`--rule re:head` is invalid", r"`re:^head\.weight$=mp,fsdp`"),
        ("re:=mp", "`--rule re:=mp` is invalid", r"`re:^head\.weight$=mp,fsdp`"),
        (
            "re:(=mp",
            "`--rule 're:(=mp'` has an invalid pattern",
            r"a regular expression, such as `^head\.weight$`",
        ),
        (
            "re:head=mp,mp",
            "`--rule re:head=mp,mp` splits two dims over mp",
            "`none` for one of the dims",
        ),
        ("re:head=mp,,fsdp", "`--rule re:head=mp,,fsdp`: unknown mesh axis ``", ""),
        ("flaxlm:1,3", "`--rule flaxlm:1,3`: unknown preset", "did you mean `flaxlm:1,2`?"),
        ("t5x:0,0", "`--rule t5x:0,0`: unknown preset", "did you mean `t5x:2,2`?"),
    ],
)
def test_parse_rule_rejects_invalid_text(text: str, what: str, hint: str):
    error = error_of(parse_rule, text)
    assert (error.what, error.hint, error.code) == (what, hint, USAGE)


def test_unknown_preset_error_lists_all_presets():
    error = error_of(parse_rule, "flaxlm:1,3", origin=Key("rules"))
    flaxlm = "flaxlm:0,0, flaxlm:1,0, flaxlm:1,1, flaxlm:2,1, flaxlm:1,2, flaxlm:2,2"
    presets = f"{flaxlm}, t5x:1,1, t5x:2,1, t5x:1,2, t5x:2,2"
    assert (error.what, error.why) == (
        '`rules = ["flaxlm:1,3"]`: unknown preset',
        f"the presets are auto, {presets}",
    )


@given(
    st.text(max_size=30)
    | st.text("embdfsp=+|none ", max_size=30).map("embed=".__add__)
    | st.text("act:seqmp=+|none ", max_size=30).map("act:".__add__)
    | st.text("q()[]{}*+?\\.^$=mp,|none", max_size=30).map("re:".__add__)
)
def test_parse_rule_returns_rule_or_usage_error(text: str):
    rule = read(parse_rule, text)
    assert rule is None or parse_rule(str(rule)) == rule


def test_merge_rules_keeps_order():
    rules = merge_rules(["embed=fsdp+sp", "positions=fsdp"])
    assert list(rules.params) == list(PARAM_RULES)
    assert rules.params["embed"] == (("fsdp", "sp"),)
    assert rules.params["vocab"] == PARAM_RULES["vocab"]


def test_merge_rules_of_nothing_are_the_defaults():
    assert merge_rules([]) == DEFAULT_RULES


def test_merge_rules_changes_preset():
    rules = merge_rules(["kv_heads=none", "act:seq=sp", "re:^head=none", "flaxlm:2,2"])
    assert rules.params == {**PRESETS["flaxlm:2,2"].params, "kv_heads": WHOLE}
    assert rules.activations == {**PRESETS["flaxlm:2,2"].activations, "seq": (("sp",),)}
    assert rules.leaves == (LeafRule("^head", KEEP_LEAF_WHOLE),)


@pytest.mark.parametrize(
    ("texts", "what", "why"),
    [
        (["embed=mp", "embed=fsdp"], "two rules for embed", "`embed=mp` and `embed=fsdp`"),
        (["act:mlp=mp", "act:mlp=sp"], "two rules for act:mlp", "`act:mlp=mp` and `act:mlp=sp`"),
        (["re:q=mp", "re:q=none"], "two rules for re:q", "`re:q=mp` and `re:q=none`"),
        (["auto", "flaxlm:1,1"], "two presets", "`auto` and `flaxlm:1,1`"),
        (
            ["auto", "embed=mp"],
            "`embed=mp` has no effect with `auto`",
            "auto splits parameters by size, not by the names of their dims",
        ),
    ],
)
def test_merge_rules_rejects_contradictions(texts: list[str], what: str, why: str):
    error = error_of(merge_rules, texts)
    assert (error.what, error.why, error.code) == (what, why, USAGE)


def test_rules_of_parameters_and_activations_are_separate():
    rules = merge_rules(["embed=mp", "heads=fsdp", "act:embed=sp", "act:mlp=none"])
    assert (rules.params["embed"], rules.params["mlp"]) == ((("mp",),), (("mp",),))
    of_activations = activation_rules(rules)
    assert (of_activations["embed"], of_activations["mlp"]) == ((("sp",),), WHOLE)
    assert of_activations["heads"] == (("fsdp",),)
    assert next(iter(of_activations)) == "batch"


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        ([], ["vocab=mp", "embed=fsdp"]),
        (
            ["embed=none", "act:seq=none", "act:embed=none"],
            ["vocab=mp", "embed=none", "act:seq=none"],
        ),
        ([r"re:^head=mp,none", "auto"], ["re:^head=mp,none", "auto"]),
        (
            ["flaxlm:1,1"],
            [
                "vocab=mp",
                "embed=none",
                "act:residual_seq=sp|none",
                "act:heads=none",
                "act:kv_heads=none",
            ],
        ),
    ],
)
def test_rule_texts_show_rules_of_a_model(texts: list[str], shown: list[str]):
    assert rule_texts(merge_rules(texts), {"vocab", "embed"}) == shown


@given(
    st.lists(
        DIM_RULES | ACTIVATION_RULES | LEAF_RULES,
        max_size=4,
        unique_by=lambda rule: str(rule).partition("=")[0],
    )
)
def test_rule_texts_give_equal_rules(rules: list[Rule]):
    merged = read(lambda _: merge_rules(map(str, rules)), "")
    if merged is not None:
        again = merge_rules(rule_texts(merged, PARAM_RULES))
        assert (again.params, again.leaves) == (merged.params, merged.leaves)
        assert activation_rules(again) == activation_rules(merged)
