"""Split leaves by rules: the box of each device, the shapes of chunks, and the bytes that hosts read."""

from __future__ import annotations

import collections
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import LAYER_ATOMS
from prepcli.core.errors import USAGE
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import (
    UNSHARDED_CHUNK_BYTES,
    Fallback,
    HostReads,
    chunk_shape,
    device_boxes,
    join_experts,
    num_replicas,
    partition_spec,
    read_amplification,
    reads_per_host,
    shard_shape,
)
from prepcli.models.rules import PARAM_RULES, merge_rules
from tests.helpers.meshes import error_of, split_leaves

QUERY = [("layers",), ("heads",), ("head_dim",), ("embed",)]
OUTPUT = [("layers",), ("embed",), ("heads",), ("head_dim",)]
EMBEDDING = [("vocab",), ("embed",)]


def test_partition_spec_rejects_a_mesh_with_an_open_axis():
    error = error_of(partition_spec, EMBEDDING, (64, 64), parse_mesh("1,-1,4"), PARAM_RULES)
    assert (error.what, error.code) == ("mesh 1,-1,4 has no size for fsdp", USAGE)


def test_partition_spec_splits_common_leaves_by_rules():
    mesh = parse_mesh("1,64,4")
    assert str(partition_spec(EMBEDDING, (32000, 5120), mesh, PARAM_RULES)) == "P(mp, fsdp)"
    assert (
        str(partition_spec(QUERY, (40, 40, 128, 5120), mesh, PARAM_RULES))
        == "P(None, mp, None, fsdp)"
    )
    assert (
        str(partition_spec(EMBEDDING, (50264, 2048), parse_mesh("1,1,8"), PARAM_RULES))
        == "P(mp, None)"
    )
    assert str(partition_spec([("norm",)], (5120,), mesh, PARAM_RULES)) == "P(None)"
    assert str(partition_spec([], (), mesh, PARAM_RULES)) == "P()"
    assert partition_spec(EMBEDDING, (32000, 5120), mesh, PARAM_RULES).shards_per_dim == (4, 64)


def test_partition_spec_uses_first_atom_of_merged_dim():
    dims = [(), ("half",), ("heads", "head_dim"), ("embed",)]
    assert (
        str(partition_spec(dims, (1, 2, 512, 64), parse_mesh("1,2,8"), PARAM_RULES))
        == "P(None, None, mp, fsdp)"
    )


def test_partition_spec_gives_axis_to_earlier_rule():
    mesh, rules = parse_mesh("1,8,4"), merge_rules(["embed=mp+fsdp"]).params
    q, o = (
        partition_spec(QUERY, (2, 8, 16, 128), mesh, rules),
        partition_spec(OUTPUT, (2, 128, 8, 16), mesh, rules),
    )
    assert (str(q), str(o)) == ("P(None, mp, None, fsdp)", "P(None, fsdp, mp, None)")
    assert (
        q.fallbacks
        == o.fallbacks
        == (Fallback("embed", 128, ("mp", "fsdp"), ("fsdp",), "mp splits heads"),)
    )
    assert str(partition_spec([("embed",)], (128,), mesh, rules)) == "P((mp, fsdp))"


def test_partition_spec_reports_dim_without_free_axes():
    dims, shape, mesh = [("experts",), ("mlp",)], (8, 64), parse_mesh("1,2,4")
    spec = partition_spec(dims, shape, mesh, merge_rules(["experts=mp"]).params)
    assert spec.mesh_axes == (("mp",), ())
    assert [str(f) for f in spec.fallbacks] == [
        "mlp 64 stays whole, not split over mp: mp splits experts"
    ]
    assert partition_spec(
        dims, shape, mesh, merge_rules(["experts=mp", "mlp=mp|fsdp"]).params
    ).mesh_axes == (
        ("mp",),
        ("fsdp",),
    )


def test_partition_spec_reports_unsplit_kv_heads():
    dims = [("layers",), ("kv_heads",), ("head_dim",), ("embed",)]
    assert (
        partition_spec(dims, (32, 8, 128, 4096), parse_mesh("1,4,8"), PARAM_RULES).fallbacks == ()
    )
    spec = partition_spec(dims, (32, 8, 128, 4096), parse_mesh("1,4,16"), PARAM_RULES)
    assert str(spec) == "P(None, None, None, fsdp)"
    assert [str(f) for f in spec.fallbacks] == [
        "kv_heads 8 stays whole, not split over mp: 8 mod 16 = 8"
    ]


def test_partition_spec_reports_later_choice():
    spec = partition_spec(
        [("mlp",)], (12,), parse_mesh("1,4,8"), merge_rules(["mlp=fsdp+mp|fsdp|none"]).params
    )
    assert spec.mesh_axes == (("fsdp",),)
    assert [str(f) for f in spec.fallbacks] == [
        "mlp 12 is split over fsdp, not split over fsdp x mp: 12 mod 32 = 12"
    ]


def test_indivisible_vocabulary_error_suggests_padding():
    error = error_of(
        partition_spec, EMBEDDING, (50257, 2048), parse_mesh("1,1,8"), PARAM_RULES, checkpoint="./m"
    )
    assert error.what == "vocabulary 50257 cannot be split over mp 8"
    assert error.why == "50257 mod 8 = 1"
    assert error.hint == "`prep pad-vocab ./m --multiple 8` (to 50264), or `--pad-vocab auto`"
    assert error.code == USAGE


def test_indivisible_dim_error_suggests_a_rule():
    error = error_of(partition_spec, QUERY, (40, 40, 128, 5120), parse_mesh("1,1,16"), PARAM_RULES)
    assert error.what == "heads 40 cannot be split over mp 16"
    assert error.why == "40 mod 16 = 8"
    assert (
        error.hint
        == "a mesh that divides 40, or `--rule 'heads=mp|none'` (in recipes `rules`) to keep heads whole"
    )


def test_indivisible_dim_error_names_first_choice():
    error = error_of(
        partition_spec,
        [("embed",)],
        (10,),
        parse_mesh("dp:1,fsdp:4,sp:3"),
        merge_rules(["embed=fsdp+sp|sp"]).params,
    )
    assert (error.what, error.why) == (
        "embed 10 cannot be split over fsdp 4 x sp 3",
        "10 mod 12 = 10",
    )
    error = error_of(
        partition_spec,
        [("mlp",), ("embed",)],
        (8, 10),
        parse_mesh("1,4,2"),
        merge_rules(["embed=mp+fsdp"]).params,
    )
    assert error.what == "embed 10 cannot be split over fsdp 4"


@given(split_leaves())
def test_device_boxes_tile_leaf_once_per_replica(leaf):
    mesh, rules, dims, shape = leaf
    spec = partition_spec(dims, shape, mesh, rules)
    counts = collections.Counter(device_boxes(spec, mesh, shape))
    assert set(counts.values()) == {num_replicas(spec, mesh)}
    shard = shard_shape(spec, shape)
    grid = itertools.product(*(range(0, extent, step) for extent, step in zip(shape, shard)))
    assert set(counts) == {
        tuple((low, low + step) for low, step in zip(lows, shard)) for lows in grid
    }


def test_device_boxes_follow_written_axis_order():
    leaf = EMBEDDING, (8, 6)
    for text, box in [("1,3,2", ((0, 4), (2, 4))), ("mp:2,fsdp:3", ((0, 4), (4, 6)))]:
        mesh = parse_mesh(text)
        spec = partition_spec(*leaf, mesh, PARAM_RULES)
        assert device_boxes(spec, mesh, (8, 6))[2] == box


def test_device_boxes_are_row_major_within_dim():
    mesh, rules = parse_mesh("fsdp:2,mp:2"), merge_rules(["embed=mp+fsdp"]).params
    boxes = device_boxes(partition_spec([("embed",)], (8,), mesh, rules), mesh, (8,))
    assert boxes == [((0, 2),), ((4, 6),), ((2, 4),), ((6, 8),)]


def test_device_boxes_of_scalar_are_equal():
    mesh = parse_mesh("1,2,4")
    assert device_boxes(partition_spec([], (), mesh, PARAM_RULES), mesh, ()) == [()] * 8


# Chunk shapes of leaves with and without a mesh.


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


DIMS = [("heads",), ("head_dim",), ("embed",)]


def count_elements(shape, chunk, spec, mesh, devices_per_host) -> list[tuple[int, int]]:
    """Count the elements needed by each host, and the elements of their chunks, one by one."""
    boxes = device_boxes(spec, mesh, shape)
    hosts = []
    for first in range(0, len(boxes), devices_per_host):
        on_host = boxes[first : first + devices_per_host]
        needed = {
            cell for box in on_host for cell in itertools.product(*(range(*ends) for ends in box))
        }
        chunks = {tuple(i // c for i, c in zip(cell, chunk)) for cell in needed}
        hosts.append((len(needed), len(chunks) * math.prod(chunk)))
    return hosts


@given(st.data())
def test_reads_per_host_equal_element_count(data):
    sizes = [data.draw(st.integers(1, 3)) for _ in range(3)]
    mesh = parse_mesh(",".join(map(str, sizes)))
    shape = (sizes[2] * data.draw(st.integers(1, 3)), 2, sizes[1] * data.draw(st.integers(1, 4)))
    chunk = tuple(data.draw(st.integers(1, extent + 1)) for extent in shape)
    devices_per_host = data.draw(st.integers(1, 9))
    spec = partition_spec(DIMS, shape, mesh, PARAM_RULES)
    reads = reads_per_host(
        shape, chunk, itemsize=2, spec=spec, mesh=mesh, devices_per_host=devices_per_host
    )
    expected = count_elements(shape, chunk, spec, mesh, devices_per_host)
    assert [(r.needed_bytes, r.read_bytes) for r in reads] == [
        (2 * needed, 2 * read) for needed, read in expected
    ]


def test_checkpoint_is_read_once_on_its_own_mesh():
    mesh, leaves = parse_mesh("1,64,4"), []
    for dims, shape in [
        ("vocab embed", (32000, 5120)),
        ("layers heads head_dim embed", (40, 40, 128, 5120)),
    ]:
        leaf_dims = [(name,) for name in dims.split()]
        spec = partition_spec(leaf_dims, shape, mesh, PARAM_RULES)
        chunk = chunk_shape(leaf_dims, shape, spec=spec, itemsize=2)
        leaves.append(
            reads_per_host(
                shape,
                chunk,
                itemsize=2,
                spec=spec,
                mesh=mesh,
                devices_per_host=4,
            )
        )
    assert len(leaves[0]) == 64
    assert sum(host.needed_bytes for host in leaves[0]) == 32000 * 5120 * 2
    assert read_amplification(leaves) == 1.0


def test_unsharded_chunks_amplify_reads():
    mesh, shape = parse_mesh("1,1,4"), (8, 2, 64)
    spec = partition_spec([("embed",), ("head_dim",), ("mlp",)], shape, mesh, PARAM_RULES)
    assert (
        read_amplification(
            [
                reads_per_host(
                    shape, (1, 2, 64), itemsize=2, spec=spec, mesh=mesh, devices_per_host=1
                )
            ]
        )
        == 4.0
    )
    assert (
        read_amplification(
            [
                reads_per_host(
                    shape, (1, 2, 64), itemsize=2, spec=spec, mesh=mesh, devices_per_host=2
                )
            ]
        )
        == 2.0
    )
    assert (
        read_amplification(
            [
                reads_per_host(
                    shape, (1, 2, 64), itemsize=2, spec=spec, mesh=mesh, devices_per_host=4
                )
            ]
        )
        == 1.0
    )


def test_read_amplification_is_maximum_over_hosts():
    leaves = [
        [HostReads(100, 100), HostReads(100, 100)],
        [HostReads(100, 100), HostReads(100, 300)],
    ]
    assert read_amplification(leaves) == pytest.approx(2.0)


def test_scalar_leaf_is_read_by_every_host():
    mesh = parse_mesh("1,2,4")
    assert (
        reads_per_host(
            (),
            (),
            itemsize=4,
            spec=partition_spec([], (), mesh, PARAM_RULES),
            mesh=mesh,
            devices_per_host=4,
        )
        == [HostReads(4, 4)] * 2
    )
