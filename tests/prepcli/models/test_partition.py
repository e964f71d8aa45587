"""Split leaves by rules, and find the box of each device."""

from __future__ import annotations

import collections
import itertools

import pytest
from hypothesis import given

from prepcli.core.errors import USAGE
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import (
    Fallback,
    device_box,
    device_boxes,
    num_replicas,
    partition_spec,
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


@given(split_leaves())
def test_partition_spec_uses_each_axis_once(leaf):
    mesh, rules, dims, shape = leaf
    axes = [axis for cut in partition_spec(dims, shape, mesh, rules).mesh_axes for axis in cut]
    assert len(axes) == len(set(axes))
    assert all(mesh.size(axis) > 1 for axis in axes)


def test_device_box_follows_written_axis_order():
    leaf = EMBEDDING, (8, 6)
    for text, box in [("1,3,2", ((0, 4), (2, 4))), ("mp:2,fsdp:3", ((0, 4), (4, 6)))]:
        mesh = parse_mesh(text)
        assert device_box(partition_spec(*leaf, mesh, PARAM_RULES), mesh, 2, (8, 6)) == box


def test_device_boxes_are_row_major_within_dim():
    mesh, rules = parse_mesh("fsdp:2,mp:2"), merge_rules(["embed=mp+fsdp"]).params
    boxes = device_boxes(partition_spec([("embed",)], (8,), mesh, rules), mesh, (8,))
    assert boxes == [((0, 2),), ((4, 6),), ((2, 4),), ((6, 8),)]


@pytest.mark.parametrize("device", [-1, 8])
def test_device_box_rejects_unknown_device(device):
    mesh = parse_mesh("1,2,4")
    with pytest.raises(IndexError, match=f"device {device} of 8"):
        device_box(partition_spec([], (), mesh, PARAM_RULES), mesh, device, ())
