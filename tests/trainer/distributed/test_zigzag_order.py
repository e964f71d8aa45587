"""Tests of the order of tokens on a mesh that splits them."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from prepcli.models.mesh import parse_mesh
from tests.helpers.meshes import error_of
from trainer.distributed.sharding import ShardingContext, order_tokens, zigzag_order


def mesh_of(text: str) -> ShardingContext:
    """Return the context of a mesh without devices."""
    return ShardingContext(parse_mesh(text))


def test_token_order_pairs_blocks_from_both_ends():
    assert zigzag_order(12, mesh_of("sp:2")).tolist() == [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("sharding", [ShardingContext(), mesh_of("2,2,2")])
def test_token_order_without_sp_is_position_order(sharding: ShardingContext):
    assert zigzag_order(5, sharding).tolist() == [0, 1, 2, 3, 4]
    assert order_tokens(jnp.arange(5) * 2, sharding).tolist() == [0, 2, 4, 6, 8]


def test_order_tokens_reorders_the_first_axis():
    x = jnp.arange(8).reshape(4, 2)
    assert order_tokens(x, mesh_of("sp:2")).tolist() == [[0, 1], [6, 7], [2, 3], [4, 5]]


def test_token_order_rejects_lengths_that_sp_does_not_divide():
    error = error_of(zigzag_order, 20, mesh_of("sp:4"))
    assert error.what == "20 tokens cannot be split over sp 4"
    assert error.why == "each device holds 2 equal blocks: 20 mod 8 = 4"
    assert error.hint == "use a multiple of 8 tokens, or a mesh without sp"
