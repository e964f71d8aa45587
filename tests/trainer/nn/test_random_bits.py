"""Tests of random keys and bits: known answers, and statistics of streams."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from trainer.nn.dropout import RandomKey, derive_key, random_bits, uint32

# A correct generator exceeds a bound of 5 standard deviations once in 1.7 million draws.
SIGMAS = 5.0
NUM_STREAMS, LENGTH = 256, 4096


def make_key(first: int, second: int) -> RandomKey:
    return RandomKey(uint32(first), uint32(second))


# Known answers from kat_vectors of Random123.
@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_derived_keys_are_known_answers_of_threefry(
    key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]
):
    assert tuple(map(int, derive_key(make_key(*key), *counter))) == expected


def test_derived_keys_equal_jax():
    key, numbers = make_key(5, 7), jnp.arange(100)
    derived = derive_key(key, numbers, numbers * 3)
    expected = threefry_2x32(tuple(key), jnp.concatenate([numbers, numbers * 3]).astype(jnp.uint32))
    np.testing.assert_array_equal(jnp.concatenate(derived), expected)


def test_bits_are_the_documented_hash():
    first, second, index = 0x12345678, 0x9ABCDEF0, 77
    x = index ^ first
    x = ((x ^ x >> 16) * 0x21F0AAAD + second) % 2**32
    x = (x ^ x >> 15) * 0xD35A2D97 % 2**32
    assert int(random_bits(make_key(first, second), uint32(index))) == x ^ x >> 15


def test_negative_integers_count_modulo_two_to_the_32():
    key = make_key(1, 2)
    np.testing.assert_array_equal(derive_key(key, jnp.int32(-1)), derive_key(key, 2**32 - 1))


@pytest.fixture(scope="module")
def streams() -> np.ndarray:
    """Return consecutive bits of streams with consecutive numbers, uint32 [NUM_STREAMS, LENGTH]."""
    keys = derive_key(make_key(0, 0), jnp.arange(NUM_STREAMS)[:, None])
    return np.asarray(random_bits(keys, jnp.arange(LENGTH)))


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_bytes_are_uniform(streams: np.ndarray, shift: int, axis: int | None):
    """Chi-square of the 256 values of a byte: over all numbers, over streams of an index, and over each stream."""
    values = (
        (streams >> shift & 0xFF).reshape(1, -1)
        if axis is None
        else np.moveaxis(streams >> shift & 0xFF, axis, 1)
    )
    counts = np.stack([np.bincount(row, minlength=256) for row in values[:256]])
    expected = values.shape[1] / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    degrees = 255 * len(counts)
    assert abs(chi_square - degrees) < SIGMAS * np.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "lag", [(0, 1), (0, 2), (0, 16), (0, 1024), (1, 0), (2, 0), (16, 0), (1, 1)]
)
def test_neighbours_are_not_correlated(streams: np.ndarray, lag: tuple[int, int]):
    uniform = streams / 2.0**32 - 0.5
    rows, columns = NUM_STREAMS - lag[0], LENGTH - lag[1]
    products = uniform[:rows, :columns] * uniform[lag[0] :, lag[1] :]
    # The variance of each factor is 1 / 12.
    assert abs(products.mean()) < SIGMAS / 12 / np.sqrt(products.size)


def test_each_bit_of_an_index_changes_half_of_the_bits():
    key, index = derive_key(make_key(3, 0), 0), jnp.arange(1 << 14)
    base = np.asarray(random_bits(key, index))
    for bit in range(20):
        changed = np.asarray(random_bits(key, index ^ (1 << bit)))
        flips = np.unpackbits((base ^ changed).view(np.uint8)).reshape(-1, 32).mean(0)
        assert np.abs(flips - 0.5).max() < 0.03, bit
