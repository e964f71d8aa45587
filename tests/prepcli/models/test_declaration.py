"""Builders of family tables."""

from __future__ import annotations

import pytest

from prepcli.models.declaration import attention, fused_qkv, layer_norm, linear, stack, unless_false
from prepcli.models.parameters import Parameter
from prepcli.models.registry import FAMILIES


@pytest.mark.parametrize(
    ("row", "bias"),
    [
        ("mlp embed <- up.weight: mlp embed", "mlp <- up.bias: mlp"),
        # The matrix is stored as [in, out].
        ("mlp embed <- up.weight: embed mlp", "mlp <- up.bias: mlp"),
        ("embed heads head_dim <- o.weight: embed (heads head_dim)", "embed <- o.bias: embed"),
        ("embed heads head_dim <- o.weight: (heads head_dim) embed", "embed <- o.bias: embed"),
        (
            "layers heads head_dim embed <- l.{layers}.qkv.weight: (heads qkv=1 head_dim) embed",
            "layers heads head_dim <- l.{layers}.qkv.bias: (heads qkv=1 head_dim)",
        ),
    ],
)
def test_linear_bias_has_output_dims(row: str, bias: str):
    assert linear("p", row, "biased") == {
        "p.weight": Parameter(row),
        "p.bias": Parameter(bias, "biased"),
    }
    assert linear("p", row, None) == {"p.weight": Parameter(row)}


def test_layer_norm_has_scale_and_bias():
    assert layer_norm("norm", "embed <- ln.weight: embed", "affine") == {
        "norm.scale": Parameter("embed <- ln.weight: embed", "affine"),
        "norm.bias": Parameter("embed <- ln.bias: embed", "affine"),
    }


def test_attention_rows_split_grouped_kv_heads():
    assert {
        path: parameter.row
        for path, parameter in attention("a.{}_proj", "o", "kv_heads", bias="b").items()
    } == {
        "attn.q.weight": "heads head_dim embed <- a.q_proj.weight: (heads head_dim) embed",
        "attn.q.bias": "heads head_dim <- a.q_proj.bias: (heads head_dim)",
        "attn.k.weight": "kv_heads head_dim embed <- a.k_proj.weight: (kv_heads head_dim) embed",
        "attn.k.bias": "kv_heads head_dim <- a.k_proj.bias: (kv_heads head_dim)",
        "attn.v.weight": "kv_heads head_dim embed <- a.v_proj.weight: (kv_heads head_dim) embed",
        "attn.v.bias": "kv_heads head_dim <- a.v_proj.bias: (kv_heads head_dim)",
        "attn.o.weight": "embed heads head_dim <- a.o_proj.weight: embed (heads head_dim)",
    }


def test_fused_qkv_splits_one_tensor():
    parameters = fused_qkv("c_attn", "embed (qkv={} heads head_dim)")
    assert list(parameters) == [
        f"attn.{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")
    ]
    assert (
        parameters["attn.v.weight"].row
        == "heads head_dim embed <- c_attn.weight: embed (qkv=2 heads head_dim)"
    )
    assert parameters["attn.v.bias"].row == "heads head_dim <- c_attn.bias: (qkv=2 heads head_dim)"


def test_stack_adds_layer_dim_to_every_row():
    layer = {
        "w": Parameter("a b <- w: a b", "when", alternate="a b <- x: a b", else_row="a b <- y: b a")
    }
    assert stack("encoder.layers", "block.{depth}", layer) == {
        "encoder.layers.w": Parameter(
            "depth a b <- block.{depth}.w: a b",
            "when",
            alternate="depth a b <- block.{depth}.x: a b",
            else_row="depth a b <- block.{depth}.y: b a",
        )
    }


def test_unless_false_holds_for_absent_field():
    assert [unless_false("f")(config) for config in ({}, {"f": True}, {"f": False})] == [
        True,
        True,
        False,
    ]


def test_declare_leaves_head_unprefixed():
    assert FAMILIES["gptj"].unprefixed == ("lm_head.weight", "lm_head.bias")
    assert FAMILIES["gpt_neox"].unprefixed == ("embed_out.weight", "lm_head.weight")
