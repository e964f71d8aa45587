"""Calls that a kernel does not support are refused when they are traced: no kernel ignores a part of a mask."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from prepcli.core.errors import UsageError
from prepcli.models.layer_config import RelativePositionBias
from tests.trainer.nn.test_attention import make_arch
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention_mask import KV, AttentionMask, ScoreBias
from trainer.nn.kernels import attend
from trainer.nn.model_spec import AttentionOptions

LENGTH = 4
POSITIONS, IDS = jnp.arange(LENGTH), jnp.zeros((1, LENGTH), jnp.int32)
CAUSAL: dict[str, Any] = {"q_positions": POSITIONS, "kv_positions": POSITIONS}
BIAS = ScoreBias(jnp.zeros((8, 2)), RelativePositionBias(8, 16, bidirectional=False))
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "encoder": (CAUSAL | {"is_causal": False}, "attention without a causal mask"),
    "no positions": ({}, "attention without a causal mask"),
    "padding": (CAUSAL | {"kv_valid": IDS == 0}, "padding of keys that differs between rows"),
    "bias": (CAUSAL | {"bias": BIAS}, "relative position bias"),
    "sinks": (CAUSAL | {"sinks": jnp.zeros(2)}, "attention sinks"),
    "positions of rows": (
        dict.fromkeys(CAUSAL, POSITIONS[None]),
        "positions other than 0 to T - 1",
    ),
    "fewer queries": (CAUSAL | {"q_positions": POSITIONS[3:]}, "positions other than 0 to T - 1"),
}


def trace_attention(kernel: str, mask: AttentionMask, softcap: float = 0.0) -> tuple[int, ...]:
    """Trace attention with two heads of 8 elements. Return the shape of the output."""
    heads = jax.ShapeDtypeStruct((1, LENGTH, 2, 8), jnp.bfloat16)
    options: dict[str, Any] = {
        "arch_config": dataclasses.replace(make_arch(), attn_logit_softcap=softcap),
        "mask": mask,
        "options": AttentionOptions(kernel),
        "sharding": ShardingContext(),
    }
    return jax.eval_shape(lambda q, k, v: attend(q, KV(k, v), **options), heads, heads, heads).shape


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("kernel", ["cudnn", "pallas-splash"])
def test_unsupported_mask_is_refused(kernel: str, name: str):
    mask, feature = UNSUPPORTED[name]
    with pytest.raises(UsageError) as caught:
        trace_attention(kernel, AttentionMask(**mask))
    assert caught.value.why == f"it does not support {feature}"


def test_cudnn_refuses_segments_and_softcaps():
    with pytest.raises(UsageError, match="softcap of scores"):
        trace_attention("cudnn", AttentionMask(**CAUSAL), softcap=2.0)
    with pytest.raises(UsageError, match="segment ids"):
        trace_attention("cudnn", AttentionMask(**CAUSAL, q_segment_ids=IDS, kv_segment_ids=IDS))


def test_general_kernels_accept_every_mask():
    for mask, _ in UNSUPPORTED.values():
        shape = trace_attention("reference", AttentionMask(**mask), softcap=2.0)
        assert shape == (1, LENGTH, 2, 8)
