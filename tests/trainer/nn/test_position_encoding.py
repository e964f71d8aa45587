"""Tests of rotary embeddings against complex rotations, and of relative position biases against T5's formula."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import exact_log
from prepcli.models.layer_config import RelativePositionBias, alibi_slopes
from prepcli.models.rope_config import QueryScale, Rope
from trainer.nn.attention_mask import (
    CosSin,
    alibi_bias,
    inverse_frequencies,
    relative_position_bias,
    relative_position_buckets,
    rotary_cos_sin,
    rotary_cos_sin_at,
    sinusoidal_positions,
)


@pytest.mark.parametrize(("length", "factors"), [(16, (1.0, 3.0)), (17, (2.0, 5.0))])
def test_longrope_switches_factors_beyond_original_length(
    length: int, factors: tuple[float, float]
):
    rope = Rope(4, 100.0, 16, "longrope", short_factors=(1.0, 3.0), long_factors=(2.0, 5.0))
    np.testing.assert_allclose(
        inverse_frequencies(rope, length), [1 / factors[0], 0.1 / factors[1]], rtol=1e-6
    )


ROPES = [
    Rope(4, 100.0, 16),
    Rope(4, 100.0, 16, "linear", 3.0),
    Rope(4, 100.0, 16, "dynamic", 3.0),
    Rope(
        4,
        100.0,
        16,
        "longrope",
        attention_factor=1.2,
        short_factors=(1.0, 3.0),
        long_factors=(2.0, 5.0),
    ),
    Rope(4, 100.0, 16, "yarn", 2.0, 1.0, 32.0, 1.1),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.rope_type)
def test_rotary_cos_sin_at_uses_length_of_each_row(rope: Rope):
    """The rows have lengths below, at and beyond the original positions, and the maximum."""
    lengths = np.array([3, 16, 17, 40])
    positions = np.stack([np.arange(length - 3, length) for length in lengths])

    @jax.jit
    def compute() -> tuple[CosSin, list[CosSin]]:
        at_lengths = rotary_cos_sin_at(rope, jnp.asarray(positions), jnp.asarray(lengths), 40)
        return at_lengths, [rotary_cos_sin(rope, jnp.arange(length)) for length in lengths]

    cos_sin, expected_rows = compute()
    for row, (length, expected) in enumerate(zip(lengths, expected_rows)):
        cosine, sine = expected.cosine[length - 3 :], expected.sine[length - 3 :]
        np.testing.assert_allclose(cos_sin.cosine[row], cosine, atol=1e-5)
        np.testing.assert_allclose(cos_sin.sine[row], sine, atol=1e-5)


def test_query_scale_grows_in_steps_of_positions():
    rope = Rope(4, 100.0, 8, query_scale=QueryScale(beta=0.5, step_length=4))
    scale = rotary_cos_sin(rope, jnp.array([0, 3, 4, 11])).query_scale
    assert scale is not None
    expected = [1, 1, 1 + 0.5 * math.log(2), 1 + 0.5 * math.log(3)]
    np.testing.assert_allclose(scale[:, 0], expected, rtol=1e-6)
    assert rotary_cos_sin(Rope(4, 100.0, 8), jnp.arange(3)).query_scale is None


def test_query_scale_of_negative_positions_is_finite():
    """Slots before the first token of a row have negative positions when a row is decoded."""
    rope = Rope(4, 100.0, 8, query_scale=QueryScale(beta=0.5, step_length=4))
    positions = jnp.array([[-6, -5, 0]])
    scale = rotary_cos_sin_at(rope, positions, jnp.array([1]), 8).query_scale
    assert scale is not None
    np.testing.assert_array_equal(scale, 1)


BIAS_CONFIGS = [
    RelativePositionBias(num_buckets, max_distance, bidirectional)
    for num_buckets in (4, 9, 32)
    for max_distance in (17, 20, 128, 301)
    for bidirectional in (False, True)
]


def assert_buckets_match_transformers(config: RelativePositionBias) -> None:
    """Compare the buckets of all distances up to beyond the maximum; skip without transformers."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-config.max_distance - 9, config.max_distance + 10)
    with exact_log():
        expected = modeling.T5Attention._relative_position_bucket(
            distances, config.bidirectional, config.num_buckets, config.max_distance
        )
    indices = (
        np.clip(distances.numpy(), -config.max_distance, config.max_distance) + config.max_distance
    )
    np.testing.assert_array_equal(
        relative_position_buckets(config)[indices], expected.numpy(), err_msg=str(config)
    )


# buckets and maximum distance of those of 16,032 tables that NumPy's float32 logarithm gets wrong
ROUNDED = (
    *(
        (36, 50),
        (36, 98),
        (48, 81),
        (51, 49),
        (54, 125),
        (55, 75),
        (55, 147),
        (65, 108),
        (72, 50),
        (72, 100),
    ),
    *((72, 196), (17, 27), (19, 25), (19, 49), (34, 27), (38, 25), (39, 49)),
)


def test_buckets_match_transformers_with_exact_log():
    sizes = [(config.num_buckets, config.max_distance) for config in BIAS_CONFIGS]
    for num_buckets, max_distance in (*sizes, *ROUNDED):
        for bidirectional in (False, True):
            assert_buckets_match_transformers(
                RelativePositionBias(num_buckets, max_distance, bidirectional)
            )


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_position_bias_looks_up_bucket_of_distance(bidirectional: bool):
    config = RelativePositionBias(8, 11, bidirectional)
    table = np.random.default_rng(0).standard_normal((8, 3), np.float32)
    buckets = relative_position_buckets(config)
    q_positions, kv_positions = np.array([0, 5, 30]), np.arange(20)

    @jax.jit
    def compute_bias(q_positions: jax.Array, kv_positions: jax.Array) -> jax.Array:
        return relative_position_bias(jnp.asarray(table), q_positions, kv_positions, config)

    bias = np.asarray(compute_bias(q_positions, kv_positions))
    assert bias.shape == (3, 3, 20)
    for t, query in enumerate(q_positions):
        for s, key in enumerate(kv_positions):
            expected = table[buckets[max(-11, min(11, int(key - query))) + 11]]
            np.testing.assert_array_equal(bias[:, t, s], expected)
    shifted_q, shifted_kv = (np.stack([p, p + 1]) for p in (q_positions, kv_positions))
    per_row = compute_bias(shifted_q, shifted_kv)
    np.testing.assert_array_equal(per_row, np.stack([bias, bias]))


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        # The example of the paper, section 3.
        (8, (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625)),
        (3, (2**-4, 2**-8, 2**-2)),
        (1, (2**-8,)),
    ],
)
def test_alibi_slopes_are_geometric_sequences(num_heads: int, slopes: tuple[float, ...]):
    assert alibi_slopes(num_heads) == pytest.approx(slopes)


def test_alibi_bias_is_linear_in_the_distance():
    slopes, q_positions, kv_positions = jnp.array([0.5, 0.25]), jnp.array([3, 9]), jnp.arange(5)
    bias = np.asarray(alibi_bias(slopes, q_positions, kv_positions))
    assert bias.shape == (2, 2, 5)
    assert bias[1, 0].tolist() == [-0.75, -0.5, -0.25, 0.0, 0.25]
    assert bias[0, 1].tolist() == [-4.5, -4.0, -3.5, -3.0, -2.5]
    per_row = alibi_bias(slopes, q_positions[:, None], jnp.stack([kv_positions, kv_positions + 1]))
    assert per_row.shape == (2, 2, 1, 5)
    np.testing.assert_array_equal(per_row[0, :, 0], bias[:, 0])


def test_sinusoidal_positions_match_formula():
    table = np.asarray(sinusoidal_positions(jnp.array([[0, 7], [2, 300]]), 9))
    assert table.shape == (2, 2, 9)
    angles = 300 * 10_000.0 ** -(np.arange(4) / 3)
    np.testing.assert_allclose(table[1, 1, :4], np.sin(angles), atol=1e-4)
    np.testing.assert_allclose(table[1, 1, 4:8], np.cos(angles), atol=1e-4)
    assert not table[..., 8].any()
