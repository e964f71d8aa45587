"""Rotations of parts of heads, of halves and of neighbours, as complex numbers turn; biases by distance."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.models.architecture import RelativePositionBias
from trainer.models.rope_config import Rope
from trainer.nn.position_encoding import (
    apply_rotary,
    inverse_frequencies,
    relative_position_bias,
    relative_position_buckets,
    rotary_cos_sin,
    rotary_cos_sin_at,
)

T, DIM = 5, 8
X = np.random.default_rng(0).standard_normal((2, T, 3, DIM))


@pytest.mark.parametrize("turning", [2, 4, 8])
@pytest.mark.parametrize("neighbours", [False, True])
def test_pairs_turn_and_the_rest_stays(turning: int, neighbours: bool):
    rope = Rope(turning, 100.0, T)
    found = np.asarray(apply_rotary(jnp.asarray(X, jnp.float32), *rotary_cos_sin(rope, T), neighbours))
    half = turning // 2
    first, second = (slice(0, turning, 2), slice(1, turning, 2)) if neighbours else (slice(half), slice(half, turning))
    angles = np.arange(T)[:, None] * 100.0 ** (-np.arange(half) / half)
    wanted = (X[..., first] + 1j * X[..., second]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(found[..., first], wanted.real, atol=1e-6)
    np.testing.assert_allclose(found[..., second], wanted.imag, atol=1e-6)
    np.testing.assert_array_equal(found[..., turning:], X[..., turning:].astype(np.float32))


@pytest.mark.parametrize(("length", "factors"), [(16, (1.0, 3.0)), (17, (2.0, 5.0))])
def test_long_ropes_change_as_a_whole_beyond_their_positions(length: int, factors: tuple[float, float]):
    rope = Rope(4, 100.0, 16, "longrope", short_factors=(1.0, 3.0), long_factors=(2.0, 5.0))
    np.testing.assert_allclose(inverse_frequencies(rope, length), [1 / factors[0], 0.1 / factors[1]], rtol=1e-6)


OF_LENGTHS = [
    Rope(4, 100.0, 16),
    Rope(4, 100.0, 16, "linear", 3.0),
    Rope(4, 100.0, 16, "dynamic", 3.0),
    Rope(4, 100.0, 16, "longrope", attention_factor=1.2, short_factors=(1.0, 3.0), long_factors=(2.0, 5.0)),
    Rope(4, 100.0, 16, "yarn", 2.0, 1.0, 32.0, 1.1),
]


@pytest.mark.parametrize("rope", OF_LENGTHS, ids=lambda rope: rope.kind)
def test_each_row_turns_by_its_own_length(rope: Rope):
    """Short of the positions that a rotation was made for, at their end, beyond it, and at the longest."""
    lengths = np.array([3, 16, 17, 40])
    positions = np.stack([np.arange(length - 3, length) for length in lengths])
    found = rotary_cos_sin_at(rope, jnp.asarray(positions), jnp.asarray(lengths), 40)
    for row, length in enumerate(lengths):
        for table, wanted in zip(found, rotary_cos_sin(rope, length)):
            np.testing.assert_allclose(table[row], wanted[length - 3 :], atol=1e-5)


KINDS = [RelativePositionBias(n, far, ways) for n in (4, 9, 32) for far in (17, 20, 128, 301) for ways in (False, True)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_buckets_of_distances(kind: RelativePositionBias):
    """Distance by distance, in whole numbers as far as that goes."""
    count = kind.num_buckets // 2 if kind.bidirectional else kind.num_buckets
    exact, table = count // 2, relative_position_buckets(kind)
    assert table.shape == (2 * kind.max_distance + 1,)
    for distance in range(-kind.max_distance, kind.max_distance + 1):
        away = abs(distance) if kind.bidirectional else max(-distance, 0)
        after = count if kind.bidirectional and distance > 0 else 0
        found = table[distance + kind.max_distance] - after
        if away < exact:
            assert found == away
        else:  # the last one that is not further than where it begins, but for rounding
            at = math.log(away / exact) / math.log(kind.max_distance / exact) * (count - exact)
            assert found in {min(exact + int(at + wrong), count - 1) for wrong in (-1e-5, 1e-5)}


def assert_as_transformers(kind: RelativePositionBias) -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-kind.max_distance - 9, kind.max_distance + 10)
    wanted = modeling.T5Attention._relative_position_bucket(
        distances, kind.bidirectional, kind.num_buckets, kind.max_distance
    )
    near = np.clip(distances.numpy(), -kind.max_distance, kind.max_distance) + kind.max_distance
    np.testing.assert_array_equal(relative_position_buckets(kind)[near], wanted.numpy())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_buckets_are_those_of_transformers(kind: RelativePositionBias):
    assert_as_transformers(kind)


# of 16,032 tables those that NumPy's float32 logarithm gets wrong
ROUNDED = [
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
        (72, 196),
    ),
    *((17, 27), (19, 25), (19, 49), (34, 27), (38, 25), (39, 49)),
]


@pytest.mark.parametrize(("count", "farthest"), ROUNDED)
def test_buckets_round_logarithms_as_torch_does(count: int, farthest: int):
    for both_ways in (False, True):
        assert_as_transformers(RelativePositionBias(count, farthest, both_ways))


@pytest.mark.slow
@pytest.mark.parametrize("count", range(4, 132))
def test_buckets_of_every_table_are_those_of_torch(count: int):
    for farthest in (*range(count // 2 + 1, 260), 300, 400, 512, 777, 1000, 1024, 2048):
        for both_ways in (False, True):
            assert_as_transformers(RelativePositionBias(count, farthest, both_ways))


@pytest.mark.parametrize("both_ways", [False, True])
def test_biases_are_looked_up_by_distance(both_ways: bool):
    kind = RelativePositionBias(8, 11, both_ways)
    table, order = jnp.asarray(np.random.default_rng(0).standard_normal((8, 3))), relative_position_buckets(kind)
    queries, keys = jnp.array([0, 5, 30]), jnp.arange(20)
    found = np.asarray(relative_position_bias(table, queries, keys, kind))
    assert found.shape == (3, 3, 20)
    for t, query in enumerate(queries):
        for s, key in enumerate(keys):
            wanted = table[order[max(-11, min(11, int(key - query))) + 11]]
            np.testing.assert_array_equal(found[:, t, s], wanted)
    apart = relative_position_bias(table, jnp.stack([queries, queries + 1]), jnp.stack([keys, keys + 1]), kind)
    np.testing.assert_array_equal(apart, np.stack([found, found]))
