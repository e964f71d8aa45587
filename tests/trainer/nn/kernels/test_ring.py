"""Tests of ring attention: exact for any order of the tokens, balanced, and without a copy of all keys."""

from __future__ import annotations

import dataclasses
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP
from prepcli.models.layer_config import RelativePositionBias
from tests.helpers.slow_cases import slow_except
from tests.trainer.nn.kernels.test_blockwise import (
    Draw,
    as_jax,
    draw_problem,
    exact_attention,
    float32_inputs,
    scale_of,
    split_over,
)
from tests.trainer.nn.test_attention import make_arch
from trainer.distributed.sharding import ShardingContext, zigzag_order
from trainer.nn.attention_mask import KV, AttentionMask, ScoreBias
from trainer.nn.kernels.blockwise import Labels, has_visible, tile_config
from trainer.nn.kernels.ring import ring_attention
from trainer.nn.model_spec import AttentionOptions


def make_draw(window: int, *, has_segments: bool, group: int) -> Draw:
    """Return a causal problem of 24 tokens."""
    rng = np.random.default_rng(0)
    positions, shape = np.arange(24), (2, 24, 2, 4)
    q, k, v, output_gradient = (
        rng.standard_normal((*shape[:2], heads, shape[3])).astype(np.float32)
        for heads in (2 * group, 2, 2, 2 * group)
    )
    mask = {
        "q_positions": positions,
        "kv_positions": positions,
        "window": window,
        "is_causal": True,
    }
    if has_segments:
        mask |= dict.fromkeys(
            ("q_segment_ids", "kv_segment_ids"), np.sort(rng.integers(0, 3, shape[:2]), axis=1)
        )
    options = AttentionOptions("blockwise", 2, 5)
    return Draw(
        q,
        k,
        v,
        output_gradient,
        mask,
        None,
        RelativePositionBias(8, 16, False),
        NO_SOFTCAP,
        options,
    )


def run_ring(
    draw: Draw, sharding: ShardingContext, *, is_balanced: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return output and gradients of tokens in the order of positions; the kernel gets them in another order."""
    num_queries, num_keys = draw.q.shape[1], draw.k.shape[1]
    q_order, kv_order = (
        zigzag_order(n, sharding) if is_balanced else np.arange(n, dtype=np.int32)
        for n in (num_queries, num_keys)
    )
    arch_config = dataclasses.replace(
        make_arch(), attn_logit_softcap=draw.softcap, attn_scale=scale_of(draw)
    )
    orders = {"q": q_order, "k": kv_order, "v": kv_order}
    labels = {
        name: as_jax(value[..., q_order if name.startswith("q_") else kv_order])
        if isinstance(value, np.ndarray)
        else value
        for name, value in draw.mask.items()
    }

    def attend(inputs: dict[str, Array]) -> Array:
        table = inputs.get("bias_table")
        mask = AttentionMask(
            **labels, bias=None if table is None else ScoreBias(table, draw.bias_config)
        )
        kv = KV(inputs["k"], inputs["v"])
        return ring_attention(inputs["q"], kv, arch_config, mask, draw.options, sharding=sharding)

    @jax.jit
    def output_and_gradients(
        inputs: dict[str, Array], output_gradient: Array
    ) -> tuple[Array, dict[str, Array]]:
        output, pullback = jax.vjp(attend, inputs)
        return output, pullback(output_gradient)[0]

    inputs = {
        name: x[:, orders[name]] if name in orders else x
        for name, x in float32_inputs(draw).items()
    }
    output, gradients = output_and_gradients(inputs, jnp.asarray(draw.output_gradient[:, q_order]))
    inverse = {name: np.argsort(order) for name, order in orders.items()}
    by_position = {
        name: np.asarray(x)[:, inverse[name]] if name in inverse else np.asarray(x)
        for name, x in gradients.items()
    }
    return np.asarray(output)[:, inverse["q"]], by_position


def check_ring(draw: Draw, num_devices: int, *, is_balanced: bool) -> None:
    """Compare output and gradients with float64.

    Merging the results of n shards adds at most n (2 |log-sum-exp| + 4) roundings to the relative error, for at most 4
    shards and 24 keys fewer than the 3 S + 12 roundings of the bound of a single device.
    """
    output, gradients = run_ring(draw, split_over(num_devices), is_balanced=is_balanced)
    expected_output, expected, bounds = exact_attention(draw)
    for name, actual in {"output": output, **gradients}.items():
        reference = expected_output if name == "output" else expected[name]
        assert (abs(actual.astype(np.float64) - reference) <= 2 * bounds[name] + 1e-30).all(), name


CASES = list(product((1, 2, 4), (True, False), (FULL_ATTENTION, 5), (False, True), (1, 3)))
FAST = [(4, True, 5, True, 3)]


@pytest.mark.parametrize(
    ("num_devices", "is_balanced", "window", "has_segments", "group"),
    slow_except(CASES, FAST),
)
def test_output_and_gradients_match_float64(
    num_devices: int, is_balanced: bool, window: int, has_segments: bool, group: int
):
    check_ring(
        make_draw(window, has_segments=has_segments, group=group),
        num_devices,
        is_balanced=is_balanced,
    )


@pytest.mark.slow
def test_random_masks_biases_and_softcaps_match_float64_in_many_draws():
    for seed in range(40):
        for num_devices in (2, 4):
            check_ring(
                draw_problem(seed, length_multiple=8), num_devices, is_balanced=seed % 2 == 0
            )
        jax.clear_caches()


def live_tiles(num_devices: int, *, is_balanced: bool) -> np.ndarray:
    """Count the tiles that each device computes in each step of the ring, [devices, steps], of 1,024 tokens."""
    length, tile = 1024, 16
    order = zigzag_order(length, split_over(num_devices)) if is_balanced else np.arange(length)
    config = tile_config(make_arch(), AttentionMask(), q_size=tile, kv_size=tile)
    tiles = Labels(
        jnp.asarray(order).reshape(-1, 1, tile), valid=jnp.ones((length // tile, 1, tile), bool)
    )
    by_key = jax.vmap(lambda q, kv: has_visible(config, q, kv), in_axes=(None, 0))
    is_live = np.asarray(jax.vmap(by_key, in_axes=(0, None))(tiles, tiles))
    by_shard = is_live.reshape(num_devices, -1, num_devices, length // tile // num_devices).sum(
        (1, 3)
    )
    return np.stack([np.roll(row[::-1], device + 1) for device, row in enumerate(by_shard)])


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_devices_compute_equally_many_tiles_in_each_step(num_devices: int):
    tiles, contiguous = (
        live_tiles(num_devices, is_balanced=is_balanced) for is_balanced in (True, False)
    )
    assert tiles.sum() == contiguous.sum() == 64 * 65 // 2, "tiles on and below the diagonal"
    slowest = tiles.max(0).sum()
    assert slowest <= 1.05 * tiles.sum() / num_devices
    assert contiguous.max(0).sum() > 1.3 * slowest
