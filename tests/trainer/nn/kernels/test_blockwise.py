"""Blockwise attention: tiles, sinks, and dropout."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.commands.testing.tiny_model import relative_error
from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP
from prepcli.models.layer_config import Alibi, RelativePositionBias, alibi_slopes
from prepcli.models.mesh import parse_mesh
from tests.helpers.jaxprs import walk_equations
from tests.helpers.slow_cases import slow_except
from tests.trainer.nn.test_attention import make_arch
from trainer.distributed.sharding import ShardingContext, zigzag_order
from trainer.nn.attention_mask import (
    KV,
    AttentionMask,
    ScoreBias,
    causal_mask,
    relative_position_buckets,
)
from trainer.nn.dropout import AttentionDropout, RandomKey, derive_key, uint32
from trainer.nn.kernels import KERNELS, attend
from trainer.nn.kernels.accelerators import AttentionKernel
from trainer.nn.kernels.blockwise import blockwise_attention
from trainer.nn.kernels.reference import reference_attention
from trainer.nn.model_spec import AttentionOptions

# Tests of blockwise attention against attention in float64, within error bounds derived from the operations.

# The unit roundoff of float32.
UNIT_ROUNDOFF = 2.0**-24

SEEDS = (0, 4, 5, 8, 9, 12, 14, 15, 24, 38, 50, 56, 272)

# The problems of these seeds have every window, chunk size, mask, bias and softcap.
FAST_SEEDS = (15, 24, 38, 56, 272)


@dataclass(frozen=True, slots=True)
class Draw:
    """A random problem: float32 arrays q [B, T, H, E], k and v [B, S, K, E], output gradient, and the options."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    output_gradient: np.ndarray
    mask: dict[str, Any]
    bias_table: np.ndarray | None
    bias_config: RelativePositionBias
    softcap: float
    options: AttentionOptions


def split_over(num_devices: int) -> ShardingContext:
    """Return a mesh that splits tokens over the first devices."""
    devices = np.array(jax.devices()[:num_devices]).reshape(1, 1, 1, num_devices)
    axis_types = (jax.sharding.AxisType.Auto,) * devices.ndim
    device_mesh = jax.sharding.Mesh(devices, ("dp", "fsdp", "mp", "sp"), axis_types=axis_types)
    return ShardingContext(parse_mesh(f"sp:{num_devices}"), device_mesh=device_mesh)


def draw_problem(seed: int, length_multiple: int = 1) -> Draw:
    """Draw shapes, mask, tile sizes, softcap and bias."""
    rng = np.random.default_rng(seed)
    num_rows, num_queries, num_kv_heads, group, head_dim = (
        int(n) for n in rng.integers((1, 1, 1, 1, 1), (3, 24, 3, 4, 9))
    )
    is_causal = bool(rng.integers(2))
    num_keys = num_queries if is_causal else int(rng.integers(1, 24))
    num_queries, num_keys = (
        -(-length // length_multiple) * length_multiple for length in (num_queries, num_keys)
    )

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    mask: dict[str, Any] = {
        "is_causal": is_causal,
        "window": int(rng.choice([FULL_ATTENTION, 1, 3, 7])),
    }
    mask |= {"q_positions": np.arange(num_queries), "kv_positions": np.arange(num_keys)}
    if rng.integers(2):
        mask["kv_valid"] = rng.random((num_rows, num_keys)) < 0.7
    if rng.integers(2):
        mask["q_segment_ids"] = np.sort(rng.integers(0, 3, (num_rows, num_queries)), axis=1)
        mask["kv_segment_ids"] = (
            mask["q_segment_ids"]
            if is_causal
            else np.sort(rng.integers(0, 3, (num_rows, num_keys)), axis=1)
        )
    num_heads = num_kv_heads * group
    return Draw(
        q=normal(num_rows, num_queries, num_heads, head_dim),
        k=normal(num_rows, num_keys, num_kv_heads, head_dim),
        v=normal(num_rows, num_keys, num_kv_heads, head_dim),
        output_gradient=normal(num_rows, num_queries, num_heads, head_dim),
        mask=mask,
        bias_table=normal(8, num_heads) if rng.integers(2) else None,
        bias_config=RelativePositionBias(8, 16, bool(rng.integers(2))),
        softcap=float(rng.choice([NO_SOFTCAP, 2.0])),
        options=AttentionOptions(
            "blockwise", *(int(rng.choice([-1, 1, 3, 8, 64])) for _ in range(2))
        ),
    )


def run_blockwise(draw: Draw) -> tuple[Array, dict[str, Array]]:
    """Return the output and the gradients of q, k, v and the bias table."""
    arch_config = dataclasses.replace(
        make_arch(), attn_logit_softcap=draw.softcap, attn_scale=scale_of(draw)
    )

    def attend(inputs: dict[str, Array]) -> Array:
        table = inputs.get("bias_table")
        bias = None if table is None else ScoreBias(table, draw.bias_config)
        mask = AttentionMask(**{key: as_jax(value) for key, value in draw.mask.items()}, bias=bias)
        return blockwise_attention(
            inputs["q"], KV(inputs["k"], inputs["v"]), arch_config, mask, draw.options
        )

    @jax.jit
    def run(inputs: dict[str, Array], output_gradient: Array) -> tuple[Array, dict[str, Array]]:
        output, pullback = jax.vjp(attend, inputs)
        return output, pullback(output_gradient)[0]

    return run(float32_inputs(draw), jnp.asarray(draw.output_gradient))


def as_jax(value: Any) -> Any:
    """Return an array as a jax array, and any other value as it is."""
    return jnp.asarray(value) if isinstance(value, np.ndarray) else value


def float32_inputs(draw: Draw) -> dict[str, Array]:
    """Return the arrays that have a gradient."""
    inputs = {"q": draw.q, "k": draw.k, "v": draw.v}
    return {name: jnp.asarray(x) for name, x in inputs.items()} | (
        {} if draw.bias_table is None else {"bias_table": jnp.asarray(draw.bias_table)}
    )


def scale_of(draw: Draw) -> float:
    """Return the scale of scores."""
    return 1 / math.sqrt(draw.q.shape[-1])


def visible_keys(draw: Draw) -> np.ndarray:
    """Return the rule of visible keys, written out: bool [B, 1, 1, T, S]."""
    mask, (num_rows, num_queries), num_keys = draw.mask, draw.q.shape[:2], draw.k.shape[1]
    visible = np.ones((num_rows, num_queries, num_keys), bool)
    distance = np.arange(num_queries)[:, None] - np.arange(num_keys)
    if mask["is_causal"]:
        visible &= distance >= 0
        if mask["window"] != FULL_ATTENTION:
            visible &= distance < mask["window"]
    if "kv_valid" in mask:
        visible &= mask["kv_valid"][:, None, :]
    if "q_segment_ids" in mask:
        visible &= mask["q_segment_ids"][:, :, None] == mask["kv_segment_ids"][:, None, :]
    return visible[:, None, None]


def exact_attention(draw: Draw) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Compute output and gradients in float64, and a bound of the float32 error of each.

    Error analysis to first order in the unit roundoff u (Higham 2002, section 3.1): a dot product of n terms has an
    error of at most n u times the dot product of absolute values. A score thus has an error of s = (E + 6) u scale
    |q| |k| + 4 u (softcap + |bias|), a probability a relative error of 2 max(s) + (S + 8) u, the sums over keys of
    online softmax are rescaled at most S times (2 S u), and the terms of each gradient add the errors of their factors.
    """
    q, k, v, d_output = (
        x.astype(np.float64) for x in (draw.q, draw.k, draw.v, draw.output_gradient)
    )
    num_rows, num_queries, num_heads, head_dim = q.shape
    num_keys, num_kv_heads = k.shape[1:3]
    q, d_output = (
        x.reshape(num_rows, num_queries, num_kv_heads, -1, head_dim) for x in (q, d_output)
    )
    scale, visible = scale_of(draw), visible_keys(draw)
    scores = np.einsum("btkge,bske->bkgts", q, k) * scale
    derivative = np.full_like(scores, scale)
    if draw.softcap != NO_SOFTCAP:
        derivative *= 1 - np.tanh(scores / draw.softcap) ** 2
        scores = draw.softcap * np.tanh(scores / draw.softcap)
    one_hot = np.zeros((num_queries, num_keys, 8))
    if draw.bias_table is not None:
        maximum = draw.bias_config.max_distance
        distance = np.clip(np.arange(num_keys) - np.arange(num_queries)[:, None], -maximum, maximum)
        one_hot = np.eye(8)[relative_position_buckets(draw.bias_config)[distance + maximum]]
        bias = np.einsum("tsn,nh->hts", one_hot, draw.bias_table.astype(np.float64))
        scores += bias.reshape(num_kv_heads, -1, num_queries, num_keys)
    masked = np.where(visible, scores, -np.inf)
    weights = np.exp(masked - masked.max(-1, keepdims=True, initial=-1e30))
    total = weights.sum(-1, keepdims=True)
    probabilities = weights / np.where(total == 0, 1, total)
    d_probabilities = np.einsum("btkge,bske->bkgts", d_output, v)
    row_dots = (probabilities * d_probabilities).sum(-1, keepdims=True)
    d_scores = probabilities * (d_probabilities - row_dots)
    d_dots = d_scores * derivative

    absolute_dots = np.einsum("btkge,bske->bkgts", abs(q), abs(k)) * scale
    score_error = (head_dim + 6) * UNIT_ROUNDOFF * absolute_dots + 8 * UNIT_ROUNDOFF * (
        abs(scores) + draw_bias(draw)
    )
    relative = (
        2 * np.where(visible, score_error, 0).max(-1, keepdims=True)
        + (3 * num_keys + 12) * UNIT_ROUNDOFF
    )
    absolute_d = np.einsum("btkge,bske->bkgts", abs(d_output), abs(v))
    absolute_rows = (probabilities * absolute_d).sum(-1, keepdims=True)
    d_error = (
        probabilities
        * (absolute_d + absolute_rows)
        * (2 * relative + (2 * head_dim + num_keys + 8) * UNIT_ROUNDOFF)
    )
    d_dots_error = d_error * derivative + abs(d_scores) * scale * 4 * (score_error + UNIT_ROUNDOFF)
    terms = (num_queries * q.shape[3] + num_keys) * UNIT_ROUNDOFF

    def merge(x: np.ndarray) -> np.ndarray:
        return x.reshape(num_rows, num_queries, num_heads, head_dim)

    output = merge(np.einsum("bkgts,bske->btkge", probabilities, v))
    gradients = {
        "q": merge(np.einsum("bkgts,bske->btkge", d_dots, k)),
        "k": np.einsum("bkgts,btkge->bske", d_dots, q),
        "v": np.einsum("bkgts,btkge->bske", probabilities, d_output),
        "bias_table": np.einsum("bkgts,tsn->nkg", d_scores, one_hot).reshape(8, -1),
    }
    bounds = {
        "output": merge(np.einsum("bkgts,bske->btkge", probabilities * (relative + terms), abs(v))),
        "q": merge(np.einsum("bkgts,bske->btkge", d_dots_error + terms * abs(d_dots), abs(k))),
        "k": np.einsum("bkgts,btkge->bske", d_dots_error + terms * abs(d_dots), abs(q)),
        "v": np.einsum("bkgts,btkge->bske", probabilities * (relative + terms), abs(d_output)),
        "bias_table": np.einsum(
            "bkgts,tsn->nkg", d_error + num_rows * terms * abs(d_scores), one_hot
        ).reshape(8, -1),
    }
    return output, gradients, bounds


def draw_bias(draw: Draw) -> float:
    """Return the largest bias."""
    return 0.0 if draw.bias_table is None else float(abs(draw.bias_table).max())


def check_draw(seed: int) -> None:
    """Compare output and gradients with float64 within the bounds."""
    draw = draw_problem(seed)
    output, gradients = run_blockwise(draw)
    expected_output, expected, bounds = exact_attention(draw)
    for name, actual in {"output": output, **gradients}.items():
        reference = expected_output if name == "output" else expected[name]
        assert (abs(np.asarray(actual, np.float64) - reference) <= bounds[name] + 1e-30).all(), (
            seed,
            name,
        )


@pytest.mark.parametrize("seed", slow_except(SEEDS, FAST_SEEDS))
def test_output_and_gradients_match_float64(seed: int):
    check_draw(seed)


@pytest.mark.slow
def test_output_and_gradients_match_float64_in_600_draws():
    for seed in range(600):
        check_draw(seed)
        if seed % 50 == 0:
            jax.clear_caches()


@pytest.mark.parametrize(
    ("window", "poisoned"),
    slow_except([(FULL_ATTENTION, slice(8, 16)), (3, slice(0, 4))], [(3, slice(0, 4))]),
)
def test_tiles_without_visible_keys_are_not_computed(window: int, poisoned: slice):
    """A computed tile with keys of nan would turn the results to nan, although its probabilities are 0."""
    q, k, v = (
        jnp.asarray(np.random.default_rng(n).standard_normal((1, 16, 2, 4)), jnp.float32)
        for n in range(3)
    )
    queries = q[:, :8] if window == FULL_ATTENTION else q[:, 8:]
    positions = jnp.arange(8) if window == FULL_ATTENTION else jnp.arange(8, 16)
    mask = AttentionMask(q_positions=positions, kv_positions=jnp.arange(16), window=window)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return blockwise_attention(
            q, KV(k, v), make_arch(), mask, AttentionOptions("blockwise", 4, 4)
        ).sum()

    poison = [x.at[:, poisoned].set(jnp.nan) for x in (k, v)]
    run = jax.jit(jax.value_and_grad(attend, argnums=(0, 1, 2)))
    clean, poisoned_results = run(queries, k, v), run(queries, *poison)
    assert jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), poisoned_results) == jax.tree.map(
        lambda _: True, poisoned_results
    )
    assert float(clean[0]) == float(poisoned_results[0])


def test_layers_in_a_scan_save_no_array_of_all_scores():
    """JAX moves values that depend on loop constants out of a scan: masks of all tiles would be kept at once."""
    length, num_layers = 256, 3
    q = jnp.zeros((1, length, 1, 2))
    positions = jnp.arange(length)
    mask = AttentionMask(q_positions=positions, kv_positions=positions, window=100)

    def loss(x: Array) -> Array:
        def layer(x: Array, _: None) -> tuple[Array, None]:
            options = AttentionOptions("blockwise", 16, 16)
            return x + blockwise_attention(x, KV(x, x), make_arch(), mask, options), None

        return jax.lax.scan(jax.checkpoint(layer), x, None, length=num_layers)[0].sum()

    equations = walk_equations(jax.make_jaxpr(jax.grad(loss))(q).jaxpr)
    largest = max(out.aval.size for equation in equations for out in equation.outvars)
    assert largest < length**2 / 4, "arrays of tokens and tiles only"


@pytest.mark.parametrize("window", slow_except([FULL_ATTENTION, 6], [6]))
def test_alibi_matches_reference(window: int):
    """Compare outputs and gradients with linear biases, computed in tiles and with all scores at once."""
    rng = np.random.default_rng(0)
    q, k, v, gradient = (
        rng.standard_normal((2, 13, heads, 8), np.float32) for heads in (4, 2, 2, 4)
    )
    slopes = alibi_slopes(4)
    options = AttentionOptions("blockwise", 4, 5)

    def run(kernel: AttentionKernel) -> list[Array]:
        def attend(q: Array, k: Array, v: Array) -> Array:
            bias = ScoreBias(jnp.asarray([slopes], jnp.float32), Alibi(slopes))
            mask = dataclasses.replace(causal_mask(jnp.arange(13)), bias=bias, window=window)
            return kernel(q, KV(k, v), make_arch(), mask, options)

        @jax.jit
        def output_and_gradients(q: Array, k: Array, v: Array) -> list[Array]:
            output, pullback = jax.vjp(attend, q, k, v)
            return [output, *pullback(gradient)]

        return output_and_gradients(q, k, v)

    for tiled, dense in zip(run(blockwise_attention), run(reference_attention)):
        np.testing.assert_allclose(tiled, dense, atol=2e-6)


# Tests of dropout of attention probabilities: one mask for all kernels and tiles, and exact gradients.

NUM_ROWS, LENGTH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 3, 19, 4, 2, 8

RATE, SCALE = 0.3, 0.5

REFERENCE = AttentionOptions()

TILES = [(5, 3), (8, 64), (-1, 7), (19, 1), (1, -1)]

MASKS = ("causal", "window and hidden keys", "bidirectional with bias")

VISIBLE_SHAPES: dict[str, tuple[int, ...]] = dict(
    zip(MASKS, ((1, 1, LENGTH, LENGTH), (NUM_ROWS, 1, LENGTH, LENGTH), (1, 1, 1, 1)))
)

BIAS = RelativePositionBias(8, 16, bidirectional=True)


def make_dropout(seed: int = 0) -> AttentionDropout:
    """Return dropout of rows with ids 0, 7 and 14."""
    row_keys = derive_key(RandomKey(uint32(seed), uint32(0)), jnp.arange(NUM_ROWS) * 7)
    return AttentionDropout(row_keys, jnp.arange(NUM_HEADS, dtype=jnp.uint32), RATE)


def make_inputs() -> dict[str, np.ndarray]:
    """Return q, k, v, the gradient of the output, and the table of a score bias."""
    rng = np.random.default_rng(0)
    shapes = {"q": NUM_HEADS, "k": NUM_KV_HEADS, "v": NUM_KV_HEADS, "output_gradient": NUM_HEADS}
    arrays = {
        name: rng.standard_normal((NUM_ROWS, LENGTH, heads, HEAD_DIM))
        for name, heads in shapes.items()
    }
    return {**arrays, "table": rng.standard_normal((BIAS.num_buckets, NUM_HEADS))}


def make_mask(name: str, table: Array | None, dropout: AttentionDropout | None) -> AttentionMask:
    """Return one of `MASKS`; with "window and hidden keys" some queries have no visible key."""
    positions = jnp.arange(LENGTH)
    fields: dict[str, Any] = {
        "q_positions": positions,
        "kv_positions": positions,
        "dropout": dropout,
    }
    if name == "causal":
        return AttentionMask(**fields)
    if name == "bidirectional with bias":
        return AttentionMask(
            **fields, is_causal=False, bias=None if table is None else ScoreBias(table, BIAS)
        )
    valid = jnp.asarray(np.random.default_rng(1).random((NUM_ROWS, LENGTH)) < 0.5)
    return AttentionMask(**fields, kv_valid=valid, window=2)


@cache
def run_kernel(name: str, options: AttentionOptions) -> tuple[Array, dict[str, Array]]:
    """Return the output of a kernel, and the gradients of its inputs."""
    inputs = {key: x.astype(np.float32) for key, x in make_inputs().items()}
    output_gradient = inputs.pop("output_gradient")

    def attend(inputs: dict[str, Array]) -> Array:
        mask = make_mask(name, inputs["table"], make_dropout())
        return KERNELS[options.kernel](
            inputs["q"], KV(inputs["k"], inputs["v"]), make_arch(SCALE), mask, options
        )

    @jax.jit
    def run(
        inputs: dict[str, np.ndarray], output_gradient: np.ndarray
    ) -> tuple[Array, dict[str, Array]]:
        output, pullback = jax.vjp(attend, inputs)
        return output, pullback(output_gradient)[0]

    return run(inputs, output_gradient)


@cache
def exact_results(name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Compute output and gradients in float64 with dense attention; only the mask comes from the code under test."""
    positions = np.arange(LENGTH)

    @jax.jit
    def compute_masks() -> tuple[Array | None, Array, Array]:
        visible = make_mask(name, None, None).materialize()
        is_kept = kept(make_dropout(), positions, positions)
        one_hot = ScoreBias(jnp.eye(BIAS.num_buckets), BIAS)
        return visible, is_kept, one_hot.materialize(jnp.arange(LENGTH), jnp.arange(LENGTH))

    bools, is_kept, in_bucket = jax.device_get(compute_masks())
    visible = np.reshape(True if bools is None else bools, VISIBLE_SHAPES[name])
    with jax.enable_x64(True):
        inputs = {key: jnp.asarray(x) for key, x in make_inputs().items()}
        output_gradient = inputs.pop("output_gradient")

        def attend(inputs: dict[str, Array]) -> Array:
            group = NUM_HEADS // NUM_KV_HEADS
            k, v = (jnp.repeat(inputs[key], group, axis=2) for key in ("k", "v"))
            scores = jnp.einsum("bthe,bshe->bhts", inputs["q"], k) * SCALE
            if "bias" in name:
                scores += jnp.einsum("nh,nts->hts", inputs["table"], in_bucket)
            probabilities = jax.nn.softmax(jnp.where(visible, scores, -1e300), axis=-1) * visible
            return jnp.einsum("bhts,bshe->bthe", probabilities * is_kept / (1 - RATE), v)

        @jax.jit
        def run(inputs: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            output, pullback = jax.vjp(attend, inputs)
            return output, pullback(output_gradient)[0]

        output, gradients = run(inputs)
        return np.asarray(output), {
            key: np.asarray(gradient) for key, gradient in gradients.items()
        }


def kept(dropout: AttentionDropout, q_positions: np.ndarray, kv_positions: np.ndarray) -> Array:
    """Return the mask of kept probabilities [B, H, T, S]."""
    ones = jnp.ones((NUM_ROWS, NUM_HEADS, 1, q_positions.shape[-1], kv_positions.shape[-1]))
    return (
        dropout.for_queries(jnp.asarray(q_positions)).apply(ones, jnp.asarray(kv_positions))[
            :, :, 0
        ]
        > 0
    )


OPTIONS = [REFERENCE, *(AttentionOptions("blockwise", *sizes) for sizes in TILES[:2])]

CASES = [(name, options) for name in MASKS for options in OPTIONS]

# Cases with each mask and each kernel.
FAST = [*zip(MASKS[::-1], OPTIONS)]


@pytest.mark.parametrize(("name", "options"), slow_except(CASES, FAST))
def test_kernels_match_exact_dropout(name: str, options: AttentionOptions):
    output, gradients = run_kernel(name, options)
    expected, expected_gradients = exact_results(name)
    np.testing.assert_allclose(output, expected, atol=2e-6)
    for key, gradient in expected_gradients.items():
        np.testing.assert_allclose(gradients[key], gradient, atol=1e-5, err_msg=key)
    assert "bias" not in name or np.abs(expected_gradients["table"]).max() > 0.1


def test_mask_follows_positions_rows_and_heads_in_any_order():
    dropout, positions = make_dropout(), np.arange(LENGTH)
    whole = np.asarray(kept(dropout, positions, positions))
    order = np.random.default_rng(2).permutation(LENGTH)
    np.testing.assert_array_equal(kept(dropout, order, order), whole[:, :, order][..., order])
    by_row = kept(dropout, np.stack([order] * NUM_ROWS), positions)
    np.testing.assert_array_equal(by_row, whole[:, :, order])
    rows, heads = np.array([2, 0, 1]), np.array([3, 1, 0, 2])
    row_keys = RandomKey(*(words[rows] for words in dropout.row_keys))
    moved = AttentionDropout(row_keys, dropout.head_ids[heads], RATE)
    np.testing.assert_array_equal(kept(moved, positions, positions), whole[rows][:, heads])


# Tests of attention with sinks, and with values of another width than keys, against dense attention in float64.

ROWS, SINK_LENGTH, KV_HEADS, GROUP, KEY_WIDTH, VALUE_WIDTH = 2, 24, 2, 3, 6, 4

Inputs = dict[str, Array]


def random_inputs() -> dict[str, np.ndarray]:
    """Generate queries, keys, values and sinks. The sinks of two heads hide most keys."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (ROWS, SINK_LENGTH, KV_HEADS * GROUP, KEY_WIDTH),
        "k": (ROWS, SINK_LENGTH, KV_HEADS, KEY_WIDTH),
        "v": (ROWS, SINK_LENGTH, KV_HEADS, VALUE_WIDTH),
        "sinks": (KV_HEADS * GROUP,),
    }
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    inputs["sinks"][:2] += 4
    return inputs


def dense_attention(inputs: Inputs, window: int) -> Array:
    """Compute exp(score) / (exp(sink) + sum exp(score)) directly, [B, T, H, V]."""
    keys = jnp.repeat(inputs["k"], GROUP, axis=2)
    values = jnp.repeat(inputs["v"], GROUP, axis=2)
    scores = jnp.einsum("bthe,bshe->bhts", inputs["q"], keys) * make_arch().attn_scale
    distance = jnp.arange(SINK_LENGTH)[:, None] - jnp.arange(SINK_LENGTH)
    visible = (distance >= 0) & ((distance < window) | (window == FULL_ATTENTION))
    weights = jnp.where(visible, jnp.exp(scores), 0)
    total = weights.sum(-1) + jnp.exp(inputs["sinks"])[:, None]
    return jnp.einsum("bhts,bshv->bthv", weights / total[..., None], values)


def sink_run_kernel(inputs: Inputs, window: int, kernel: str, sharding: ShardingContext) -> Array:
    """Compute the output with a kernel."""
    positions = jnp.asarray(zigzag_order(SINK_LENGTH, sharding))
    mask = AttentionMask(positions, positions, sinks=inputs["sinks"], window=window)
    return attend(
        inputs["q"][:, positions],
        KV(inputs["k"][:, positions], inputs["v"][:, positions]),
        arch_config=make_arch(),
        mask=mask,
        options=AttentionOptions(kernel, 5, 7),
        sharding=sharding,
    )[:, jnp.argsort(positions)]


def outputs_and_gradients(function: Any, inputs: dict[str, np.ndarray], dtype: Any) -> list[Array]:
    """Return the output, and the gradients of its product with fixed numbers."""
    arrays = {name: jnp.asarray(array, dtype) for name, array in inputs.items()}

    def loss(arrays: Inputs) -> tuple[Array, Array]:
        output = function(arrays)
        return (output * jnp.cos(jnp.arange(output.size)).reshape(output.shape)).sum(), output

    gradients, output = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return [output, *(gradients[name] for name in sorted(gradients))]


WINDOWS = (FULL_ATTENTION, 5)

SINK_KERNELS = (("reference", 1), ("blockwise", 1), ("blockwise", 2))

SINK_CASES = [(*kernel, window) for window in WINDOWS for kernel in SINK_KERNELS]


# The first kernel is the reference of the others, and two devices need tiles of one.
@pytest.mark.parametrize(
    ("kernel", "num_devices", "window"),
    slow_except(SINK_CASES, [("blockwise", 2, 5)]),
)
def test_sinks_and_other_value_width_are_exact(kernel: str, num_devices: int, window: int):
    inputs = random_inputs()
    sharding = split_over(num_devices) if num_devices > 1 else ShardingContext()
    with jax.enable_x64(True):
        expected = outputs_and_gradients(lambda x: dense_attention(x, window), inputs, jnp.float64)
    actual = outputs_and_gradients(
        lambda x: sink_run_kernel(x, window, kernel, sharding), inputs, jnp.float32
    )
    errors = [relative_error(np.asarray(a), np.asarray(e)) for a, e in zip(actual, expected)]
    assert max(errors) < 2e-6
