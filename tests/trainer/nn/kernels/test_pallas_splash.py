"""Splash attention against the reference kernel, interpreted on CPU devices, and its lowering for TPUs."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP
from prepcli.models.mesh import parse_mesh
from tests.helpers.slow_cases import slow_except
from tests.trainer.nn.test_attention import make_arch
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels import AttentionKernel, attend
from trainer.nn.kernels.accelerators import attend_per_device, splash_attention
from trainer.nn.kernels.reference import reference_attention
from trainer.nn.kernels.splash_kernel import BlockMask, make_row_kernel
from trainer.nn.model_spec import AttentionOptions

HEADS, KV_HEADS, HEAD_DIM, ROWS = 4, 2, 8, 2
ARCH = dataclasses.replace(make_arch(), attn_scale=0.3)
SPLASH = partial(splash_attention, interpret=True)
Heads = tuple[Array, Array, Array]


def random_heads(length: int, rows: int = ROWS) -> Heads:
    """Return random queries, keys and values."""
    random = np.random.default_rng(0)
    shapes = [(rows, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)
    return q, k, v


def run(
    kernel: AttentionKernel, heads: Heads, mask: dict[str, Any], softcap: float = NO_SOFTCAP
) -> tuple[Any, ...]:
    """Return output and gradients of a kernel; the gradient of the output is the output of the reference kernel."""
    positions = jnp.arange(heads[0].shape[1])
    attention_mask = AttentionMask(positions, positions, **mask)
    arch_config = dataclasses.replace(ARCH, attn_logit_softcap=softcap)

    def attend(kernel: AttentionKernel, q: Array, k: Array, v: Array) -> Array:
        return kernel(q, KV(k, v), arch_config, attention_mask, AttentionOptions())

    @jax.jit
    def compute(*heads: Array) -> tuple[Any, ...]:
        output, pullback = jax.vjp(partial(attend, kernel), *heads)
        return output, *pullback(attend(reference_attention, *heads))

    return compute(*heads)


def check(length: int, mask: dict[str, Any], softcap: float = NO_SOFTCAP) -> None:
    """Compare output and gradients with the reference kernel; a sum of n products has an error of n roundings.

    The gradients of a query with one key are differences of equal terms: their error is that of the terms, which have
    about the norm of the output.
    """
    heads = random_heads(length)
    results, references = (
        run(SPLASH, heads, mask, softcap),
        run(reference_attention, heads, mask, softcap),
    )
    for actual, expected in zip(results, references):
        norm = jnp.linalg.norm(expected if expected.any() else references[0])
        assert jnp.linalg.norm(actual - expected) <= (length + HEAD_DIM) * 2.0**-24 * norm


SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (ROWS, 640)), axis=1)
CASES: dict[str, tuple[int, dict[str, Any], float]] = {
    "padded": (100, {}, NO_SOFTCAP),
    "window and softcap": (200, {"window": 5}, 2.0),
    "several blocks": (
        640,
        {"window": 200, "q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS},
        NO_SOFTCAP,
    ),
    "layer scale": (128, {"layer_score_scale": jnp.float32(0.5)}, NO_SOFTCAP),
    "window of one": (128, {"window": 1}, NO_SOFTCAP),
    "wide window": (300, {"window": 300}, 2.0),
}


@pytest.mark.parametrize("name", slow_except(CASES, ["window and softcap", "several blocks"]))
def test_splash_matches_reference(name: str):
    check(*CASES[name])


@pytest.mark.parametrize(
    "window", [FULL_ATTENTION, 1, 2, 100, 128, 129, 255, 256, 257, 383, 384, 500, 640]
)
def test_block_mask_equals_dense_mask(window: int):
    length, size = 640, 128
    distance = np.arange(length)[:, None] - np.arange(length)
    expected = (distance >= 0) & ((distance < window) | (window == FULL_ATTENTION))
    mask = BlockMask(length, window)
    for q_start, k_start in np.ndindex(length // size, length // size):
        block = (
            slice(q_start * size, (q_start + 1) * size),
            slice(k_start * size, (k_start + 1) * size),
        )
        actual = mask[block]
        assert (actual == expected[block]).all(), "as broadcast"
        assert actual.shape in ((1, 1), (size, size))


def test_equal_block_masks_have_equal_hashes():
    assert BlockMask(256, 5) == BlockMask(256, 5)
    assert hash(BlockMask(256, 5)) == hash(BlockMask(256, 5))
    assert BlockMask(256, 5) != BlockMask(256, 6)


def test_devices_compute_their_rows_and_heads():
    """On mesh 2,2,2 each device has one of four rows and two of four query heads."""
    sharding, length = make_sharding_context(parse_mesh("2,2,2")), 32
    q, k, v = random_heads(length, rows=4)
    positions = jnp.arange(length)
    ids = jnp.sort(jnp.asarray(np.random.default_rng(1).integers(0, 3, (4, length))), axis=1)
    mask = AttentionMask(
        positions,
        positions,
        q_segment_ids=ids,
        kv_segment_ids=ids,
        layer_score_scale=jnp.float32(0.5),
        window=7,
    )

    def kernel(q: Array, kv: KV, *arguments: Any) -> Array:
        assert (q.shape[0], q.shape[2], kv.keys.shape[2]) == (1, 2, 1)
        return SPLASH(q, kv, *arguments)

    options: dict[str, Any] = {
        "arch_config": ARCH,
        "mask": mask,
        "options": AttentionOptions(),
        "sharding": sharding,
    }
    actual = jax.jit(lambda q, k, v: attend_per_device(kernel, q, KV(k, v), **options))(q, k, v)
    expected = reference_attention(q, KV(k, v), ARCH, mask, AttentionOptions())
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_mask_field_not_passed_to_devices_is_rejected():
    @dataclasses.dataclass(frozen=True)
    class OtherMask(AttentionMask):
        rate: float = 0.0

    q, k, v = random_heads(8)
    options: dict[str, Any] = {
        "arch_config": ARCH,
        "options": AttentionOptions(),
        "sharding": ShardingContext(),
    }
    with pytest.raises(ValueError, match="`rate` of the mask is not passed"):
        attend_per_device(SPLASH, q, KV(k, v), mask=OtherMask(rate=0.5), **options)


@pytest.mark.parametrize("mesh", ["", "2,2,2"])
def test_splash_is_lowered_for_tpus(mesh: str):
    sharding = make_sharding_context(parse_mesh(mesh)) if mesh else ShardingContext()
    positions = jnp.arange(256)
    mask = AttentionMask(positions, positions)

    def loss(q: Array, k: Array, v: Array) -> Array:
        options = AttentionOptions("pallas-splash")
        return attend(
            q, KV(k, v), arch_config=ARCH, mask=mask, options=options, sharding=sharding
        ).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*random_heads(256, rows=4))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 3, (
        "forward, gradient of queries, gradient of keys and values"
    )


def test_blocks_divide_the_length():
    heads = jnp.zeros((HEADS, 384, HEAD_DIM))
    kernel = make_row_kernel(
        384, num_heads=HEADS, window=FULL_ATTENTION, softcap=NO_SOFTCAP, interpret=True
    )
    assert kernel(heads, heads, heads, None).shape == heads.shape
