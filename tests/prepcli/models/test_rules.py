"""Partition rules: of single leaves and by size, and as text with presets and defaults."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, Key
from prepcli.models.mesh import MESH_AXES, parse_mesh
from prepcli.models.param_tree import ParamLeaf, param_leaves
from prepcli.models.partition import device_boxes, leaf_spec, num_replicas, vocab_multiple
from prepcli.models.registry import FAMILIES
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
    Rules,
    activation_rules,
    check_leaf_rules,
    merge_rules,
    parse_rule,
    path_without_layers,
    rule_texts,
)
from tests.helpers.meshes import MESHES, error_of, read

CONFIG = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
QUERY = r"re:^layers\.attn\.(q|k|v)\.weight$=none,fsdp,mp"


def llama_leaves(*, is_tied: bool = False, **layout: Any) -> dict[str, ParamLeaf]:
    """Return the parameters of a tiny LLaMA."""
    return param_leaves(FAMILIES["llama"], CONFIG, is_tied, **layout)


def spec_text(path: str, rules: Rules, mesh: str = "1,2,4", **layout: Any) -> str:
    """Return the sharding of a parameter of a tiny LLaMA as text."""
    leaf = llama_leaves(**layout)[path]
    return str(leaf_spec(path, leaf.dims, leaf.shape, mesh=parse_mesh(mesh), rules=rules))


def check(*texts: str, **layout: Any) -> None:
    """Check rules of leaves against the parameters of a tiny LLaMA."""
    check_leaf_rules(
        merge_rules(texts), {path: leaf.dims for path, leaf in llama_leaves(**layout).items()}
    )


@pytest.mark.parametrize(
    ("layout", "path", "text"),
    [
        ({}, "layers.attn.q.weight", "P(None, None, fsdp, mp)"),
        ({"scan_axis": 1}, "layers.attn.q.weight", "P(None, None, fsdp, mp)"),
        ({"scan": False}, "layers.1.attn.v.weight", "P(None, fsdp, mp)"),
        ({}, "layers.attn.o.weight", "P(None, fsdp, mp, None)"),
    ],
)
def test_leaf_rule_does_not_depend_on_stacking(layout: dict[str, Any], path: str, text: str):
    check(QUERY, **layout)
    assert spec_text(path, merge_rules([QUERY]), **layout) == text


def test_first_matching_leaf_rule_is_used():
    rules = merge_rules(
        [
            r"re:^embed\.tokens$=fsdp,mp",
            "re:^(embed|head)=mp|none,none",
            "re:norm=none",
            "embed=none",
        ]
    )
    assert spec_text("embed.tokens", rules) == "P(fsdp, mp)"
    assert spec_text("head.weight", rules) == "P(mp, None)"
    assert spec_text("layers.mlp_norm.scale", rules) == "P(None, None)"
    assert spec_text("layers.mlp.up.weight", rules) == "P(None, mp, None)"


def test_leaf_rule_takes_later_choice():
    leaf = llama_leaves()["layers.attn.k.weight"]
    rules, mesh = merge_rules([r"re:\.k\.=mp|none,none,mp|fsdp"]), parse_mesh("1,2,4")
    spec = leaf_spec("layers.attn.k.weight", leaf.dims, leaf.shape, mesh=mesh, rules=rules)
    assert str(spec) == "P(None, None, None, mp)"
    assert [str(fallback) for fallback in spec.fallbacks] == [
        "kv_heads 2 stays whole, not split over mp: 2 mod 4 = 2"
    ]


def test_indivisible_leaf_error_names_rule():
    error = error_of(spec_text, "layers.attn.k.weight", merge_rules([r"re:\.k\.=mp,none,none"]))
    assert (error.what, error.why, error.code) == (
        "kv_heads 2 cannot be split over mp 4",
        "2 mod 4 = 2",
        USAGE,
    )
    assert (
        error.hint == r"a mesh that divides 2, or `mp|none` for kv_heads in `re:\.k\.=mp,none,none`"
    )


def test_rule_for_other_number_of_dims_is_rejected():
    error = error_of(check, r"re:^layers\.attn\.q=fsdp,mp")
    assert error.what == r"`re:^layers\.attn\.q=fsdp,mp` has 2 dims, and layers.attn.q.weight has 3"
    assert (error.why, error.code) == (
        "the dims of layers.attn.q.weight are heads, head_dim, embed",
        USAGE,
    )
    assert (
        error_of(spec_text, "layers.attn.q.weight", merge_rules(["re:q=fsdp,mp"])).why == error.why
    )


def test_rule_without_leaf_is_rejected():
    error = error_of(check, r"re:^layers\.attn\.qq\.weight$=none,none,fsdp")
    assert error.what == r"`re:^layers\.attn\.qq\.weight$=none,none,fsdp` matches no leaf"
    assert (error.why, error.hint) == (
        "the first leaf is embed.tokens",
        "did you mean `layers.attn.q.weight`?",
    )
    assert error_of(check, "re:zzz=mp").hint == "`prep inspect CHECKPOINT` lists the leaves"
    assert error_of(check, "re:^head=none", is_tied=True).what == "`re:^head=none` matches no leaf"


def test_shadowed_rule_is_rejected():
    error = error_of(check, "re:attn=none", QUERY)
    assert error.what == f"`{QUERY}` is never used"
    assert error.why == "an earlier rule has the same leaves: `re:attn=none`"
    check(QUERY, "re:attn=none")


def test_path_without_layers_drops_numbers_and_placeholders():
    for path in (
        "layers.attn.q.weight",
        "layers.11.attn.q.weight",
        "layers.{layers}.attn.q.weight",
    ):
        assert path_without_layers(path) == "layers.attn.q.weight"


@pytest.mark.parametrize(
    ("path", "mesh", "text"),
    [
        ("embed.tokens", "1,2,4", "P(mp, fsdp)"),
        ("embed.tokens", "1,3,5", "P(fsdp, None)"),
        ("layers.attn.k.weight", "1,2,4", "P(None, None, fsdp, mp)"),
        ("layers.attn.k.weight", "2,4,1", "P(None, None, None, fsdp)"),
        ("layers.mlp.down.weight", "1,2,4", "P(None, fsdp, mp)"),
        ("layers.attn_norm.scale", "1,2,4", "P(None, None)"),
    ],
)
def test_auto_splits_largest_dims(path: str, mesh: str, text: str):
    assert spec_text(path, merge_rules(["auto"]), mesh) == text


def test_auto_leaves_unknown_state_whole():
    spec = leaf_spec(
        None,
        [("d0",), ("d1",)],
        (8, 8),
        mesh=parse_mesh("1,2,4"),
        rules=merge_rules(["auto", "re:.=mp,fsdp"]),
    )
    assert spec.shards_per_dim == (1, 1)


@pytest.mark.parametrize(
    ("texts", "multiple"),
    [
        ([], 4),
        (["vocab=fsdp+mp"], 24),
        (["vocab=none"], 1),
        (["auto"], 4),
        ([r"re:^embed\.tokens$=fsdp,mp"], 12),
        ([r"re:^(embed|head)=fsdp|none,none"], 6),
        (["re:^(embed|head)=none"], 1),
    ],
)
def test_vocab_multiple_covers_all_vocab_dims(texts: list[str], multiple: int):
    leaves = {path: leaf.dims for path, leaf in llama_leaves().items()}
    assert vocab_multiple(leaves, parse_mesh("1,6,4"), merge_rules(texts)) == multiple
    assert vocab_multiple(leaves, None, merge_rules(texts)) == 1


@st.composite
def ruled_leaves(draw: st.DrawFn):
    """Draw a mesh, a rule of a leaf or rules by size, and a leaf of any shape."""
    shape = tuple(draw(st.lists(st.integers(1, 12), max_size=4)))
    dims = [(draw(st.sampled_from(("heads", "embed", "mlp", "vocab"))),) for _ in shape]
    if shape and draw(st.booleans()):
        dims[draw(st.integers(0, len(dims) - 1))] = ("layers",)
    axes = draw(st.permutations(MESH_AXES))
    entries = [
        draw(st.sampled_from([f"{axes[i % 4]}|none", "none"]))
        for i, dim in enumerate(dims)
        if dim != ("layers",)
    ]
    texts = ["auto"] if draw(st.booleans()) or not entries else [f"re:.={','.join(entries)}"]
    return draw(MESHES), merge_rules(texts), dims, shape


@given(ruled_leaves())
def test_every_leaf_rule_covers_leaf_once_per_replica(leaf: Any):
    mesh, rules, dims, shape = leaf
    spec = leaf_spec("a.b", dims, shape, mesh=mesh, rules=rules)
    counts = collections.Counter(device_boxes(spec, mesh, shape))
    assert set(counts.values()) == {num_replicas(spec, mesh)}
    assert sum(math.prod(stop - start for start, stop in box) for box in counts) == math.prod(shape)
    assert all(axes == () for dim, axes in zip(dims, spec.mesh_axes) if dim == ("layers",))


# Partition rules as text: parsing, errors, and merging with presets and defaults.

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
