"""Rules of single leaves: matching of paths, dims, and the shardings that they and rules by size give."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE
from prepcli.models.mesh import MESH_AXES, parse_mesh
from prepcli.models.param_tree import ParamLeaf, param_leaves
from prepcli.models.partition import device_boxes, leaf_spec, num_replicas, vocab_multiple
from prepcli.models.registry import FAMILIES
from prepcli.models.rules import Rules, check_leaf_rules, merge_rules, path_without_layers
from tests.helpers.meshes import MESHES, error_of

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
