"""Chunk shapes of leaves with and without a mesh."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import LAYER_ATOMS
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import (
    UNSHARDED_CHUNK_BYTES,
    chunk_shape,
    join_experts,
    partition_spec,
    shard_shape,
)
from prepcli.models.rules import PARAM_RULES
from tests.helpers.meshes import split_leaves


@given(split_leaves())
def test_chunk_shape_is_shard_on_mesh(leaf):
    mesh, rules, dims, shape = leaf
    spec = partition_spec(dims, shape, mesh, rules)
    chunk = chunk_shape(dims, shape, spec=spec, itemsize=2, min_split_bytes=0)
    shard = shard_shape(spec, shape)
    stacked = [(name,) for name in (*LAYER_ATOMS, "experts")]  # one source tensor per index
    assert chunk == tuple(1 if dim in stacked else extent for dim, extent in zip(dims, shard))


@pytest.mark.parametrize(("embed", "chunk"), [(504, (1, 512, 504)), (512, (1, 128, 64))])
def test_chunk_shape_does_not_split_small_leaf(embed, chunk):
    dims, shape = [("layers",), ("mlp",), ("embed",)], (24, 512, embed)
    spec = partition_spec(dims, shape, parse_mesh("1,8,4"), PARAM_RULES)
    assert chunk_shape(dims, shape, spec=spec, itemsize=4) == chunk


@pytest.mark.parametrize(
    ("dims", "shape", "chunk"),
    [
        (
            "vocab embed",
            (50264, 2048),
            (488, 2048),
        ),  # 512 rows fit; 488 is the largest divisor of 50264 below that
        ("layers mlp embed", (24, 8192, 2048), (1, 512, 2048)),
        ("mlp layers embed", (8192, 24, 2048), (512, 1, 2048)),
        ("layers embed", (24, 2048), (1, 2048)),
        ("vocab embed", (3, 1 << 21), (1, 1 << 20)),  # a row is more than 4 MiB
        ("vocab embed", (50257, 1 << 20), (1, 1 << 20)),
        ("vocab", (0x1FFFFF,), (299593,)),
        ("", (), ()),
    ],
)
def test_chunk_shape_without_mesh_has_whole_rows(dims, shape, chunk):
    assert chunk_shape([(name,) for name in dims.split()], shape, spec=None, itemsize=4) == chunk


@given(st.lists(st.integers(1, 5000), max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_chunk_shape_without_mesh_is_contiguous(shape, itemsize):
    chunk = chunk_shape([("mlp",)] * len(shape), shape, spec=None, itemsize=itemsize)
    assert math.prod(chunk) * itemsize <= 4 << 20
    assert all(extent % part == 0 for extent, part in zip(shape, chunk))
    cut = [i for i, (extent, part) in enumerate(zip(shape, chunk)) if part != extent]
    assert all(part == 1 for part in chunk[: max(cut, default=0)])


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_chunk_shape_without_mesh_is_largest_that_fits(rows, columns):
    chunk = chunk_shape([("vocab",), ("embed",)], (rows, columns * 64), spec=None, itemsize=8)
    fitting = [k for k in range(1, rows + 1) if rows % k == 0 and k * columns * 512 <= 4 << 20]
    assert chunk == (max(fitting), columns * 64)


def test_chunk_shape_takes_stacked_dims():
    dims, shape = [("blocks",), ("experts",), ("mlp",)], (4, 8, 1 << 20)
    spec = partition_spec(dims, shape, parse_mesh("1,1,4"), PARAM_RULES)
    assert chunk_shape(dims, shape, spec=spec, itemsize=4, stacked_dims=("blocks",)) == (
        1,
        8,
        1 << 18,
    )
    without_mesh = chunk_shape(
        dims, shape, spec=None, itemsize=4, stacked_dims=("blocks", "experts")
    )
    assert without_mesh == (1, 1, 1 << 20)


@given(st.integers(1, 6), st.integers(1, 48), st.sampled_from([1, 2, 4]))
def test_joined_experts_are_of_one_shard(layers: int, experts: int, shards: int):
    dims = [("layers",), ("experts",), ("mlp",), ("embed",)]
    shape = (layers, experts * shards, 512, 256)
    spec = partition_spec(dims, shape, parse_mesh(f"1,1,{shards}"), {"experts": (("mp",),)})
    single = chunk_shape(dims, shape, spec=spec, itemsize=2)
    joined = join_experts(single, dims, shape, spec=spec, itemsize=2)
    assert experts % joined[1] == 0
    assert math.prod(joined) * 2 <= UNSHARDED_CHUNK_BYTES
    assert (joined[0], *joined[2:]) == (single[0], *single[2:])
