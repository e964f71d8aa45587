"""Lowering of cuDNN attention for GPUs; without a GPU the calls of cuDNN are read, not run."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo

from prepcli.models.architecture import FULL_ATTENTION
from prepcli.models.mesh import parse_mesh
from tests.trainer.nn.test_attention import make_arch
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels import attend
from trainer.nn.model_spec import AttentionOptions

ROWS, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 4, 64, 4, 2, 16


@pytest.fixture(autouse=True)
def _cudnn_is_installed(monkeypatch: pytest.MonkeyPatch):
    """Let JAX find a version of cuDNN; lowering asks for it."""
    monkeypatch.setattr(
        fused_attention_stablehlo,
        "cuda_versions",
        SimpleNamespace(cudnn_get_version=lambda: 91000),
        raising=False,
    )


def lower(window: int, sharding: ShardingContext) -> str:
    """Lower the gradients of attention for CUDA."""
    mask = AttentionMask(jnp.arange(LENGTH), jnp.arange(LENGTH), window=window)

    def loss(q: Array, k: Array, v: Array) -> Array:
        options = AttentionOptions("cudnn")
        output = attend(
            q, KV(k, v), arch_config=make_arch(), mask=mask, options=options, sharding=sharding
        )
        return output.astype(jnp.float32).sum()

    q = jax.ShapeDtypeStruct((ROWS, LENGTH, HEADS, HEAD_DIM), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((ROWS, LENGTH, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    return (
        jax.jit(jax.grad(loss, (0, 1, 2)))
        .trace(q, kv, kv)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


def calls(text: str) -> dict[str, str]:
    """Return the first tensor type of each cuDNN call, by name of its target."""
    lines = [line for line in text.splitlines() if "__cudnn$" in line]
    return {
        re.findall(r"@__cudnn\$(\w+)", line)[0]: re.findall(r"tensor<([0-9x]+)xbf16>", line)[0]
        for line in lines
    }


@pytest.mark.parametrize("window", [FULL_ATTENTION, 5])
def test_cudnn_is_called_with_causal_mask_window_and_scale(window: int):
    text = lower(window, ShardingContext())
    shape = f"{ROWS}x{LENGTH}x{HEADS}x{HEAD_DIM}"
    assert calls(text) == {"fmhaSoftmax": shape, "fmhaSoftmaxBackward": shape}
    settings = {
        key: {*re.findall(rf"{key}\\22: (?:\\22)?([\w.]+)", text)}
        for key in ("mask_type", "fmha_scale")
    }
    assert settings == {"mask_type": {"CAUSAL"}, "fmha_scale": {str(make_arch().attn_scale)}}
    assert {*re.findall(r"sliding_window_length\\22: (\d+)", text)} == {str(window)}, (
        "the token itself included"
    )


def test_each_device_calls_cudnn_for_its_rows_and_heads():
    text = lower(FULL_ATTENTION, make_sharding_context(parse_mesh("2,2,2")))
    shape = f"{ROWS // 4}x{LENGTH}x{HEADS // 2}x{HEAD_DIM}"
    assert calls(text) == {"fmhaSoftmax": shape, "fmhaSoftmaxBackward": shape}
