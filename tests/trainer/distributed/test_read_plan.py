"""Read plans: every element of a leaf is read once in the whole job, by devices that share the work evenly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.distributed import read_plan
from trainer.distributed.read_plan import (
    ReadPlan,
    ShardedLeaf,
    aligned_row_blocks,
    choose_read_plan,
    read_ratio,
)

AXES = ("dp", "fsdp", "mp")


@st.composite
def leaves_with_units(draw: st.DrawFn) -> tuple[ShardedLeaf, tuple[int, ...]]:
    """Draw a leaf on a mesh, and the shape of its read units: one index in some dims, blocks of one dim, whole dims."""
    sizes = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in AXES}
    num_dims = draw(st.integers(1, 3))
    split_axes: list[tuple[str, ...]] = [()] * num_dims
    for axis in draw(st.permutations(AXES)):
        dim = draw(st.integers(-1, num_dims - 1))
        if dim >= 0 and sizes[axis] > 1:
            split_axes[dim] += (axis,)
    shape = tuple(
        math.prod(sizes[axis] for axis in axes) * draw(st.integers(1, 9)) for axes in split_axes
    )
    block_dim = draw(st.integers(0, num_dims - 1))
    block = draw(st.integers(1, shape[block_dim]))
    return ShardedLeaf(shape, tuple(split_axes), tuple(sizes.items())), (
        *(1,) * block_dim,
        block,
        *shape[block_dim + 1 :],
    )


def coordinates_of(leaf: ShardedLeaf) -> list[dict[str, int]]:
    """Return the mesh coordinates of all devices."""
    names, sizes = zip(*leaf.mesh_sizes)
    return [dict(zip(names, position)) for position in itertools.product(*map(range, sizes))]


def count_reads(plan: ReadPlan) -> tuple[np.ndarray, list[int]]:
    """Return how often each element is read, and the elements that each device reads."""
    counts = np.zeros(plan.leaf.shape, int)
    volumes: list[int] = []
    for coordinates in coordinates_of(plan.leaf):
        boxes = [plan.box(block, coordinates) for block in plan.row_blocks(4)]
        volumes.append(sum(math.prod(high - low for low, high in box) for box in boxes))
        for box in boxes:
            counts[tuple(slice(*span) for span in box)] += 1
    return counts, volumes


@given(leaves_with_units(), st.sampled_from([64, 1024, 1 << 20]))
def test_boxes_of_a_plan_cover_each_element_once(
    case: tuple[ShardedLeaf, tuple[int, ...]], block_nbytes: int
):
    leaf, unit = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_plan, "BLOCK_NBYTES", block_nbytes)
        patch.setattr(read_plan, "MAX_BLOCK_NBYTES", block_nbytes)
        plan = choose_read_plan(leaf, unit, 4)
        if plan is not None:
            assert (count_reads(plan)[0] == 1).all()


@given(leaves_with_units())
def test_boxes_of_a_plan_cut_no_unit(case: tuple[ShardedLeaf, tuple[int, ...]]):
    leaf, unit = case
    plan = choose_read_plan(leaf, unit, 4)
    if plan is None:
        return
    for block, coordinates in itertools.product(plan.row_blocks(4), coordinates_of(leaf)):
        for (low, high), length, extent in zip(plan.box(block, coordinates), unit, leaf.shape):
            assert low == high or (low % length == 0 and (high % length == 0 or high == extent))


@given(leaves_with_units())
def test_devices_read_equal_shares_within_a_unit_per_block(
    case: tuple[ShardedLeaf, tuple[int, ...]],
):
    leaf, unit = case
    plan = choose_read_plan(leaf, unit, 4)
    if (
        plan is not None
        and plan.num_row_units % plan.num_readers == 0
        and plan.num_rows % plan.unit_rows == 0
    ):
        _, volumes = count_reads(plan)
        slack = (
            len(list(plan.row_blocks(4)))
            * plan.unit_rows
            * math.prod(leaf.shape)
            // leaf.shape[plan.row_dim]
        )
        assert max(volumes) - min(volumes) <= slack


def test_choose_read_plan_reads_whole_layers_of_a_stack():
    leaf = ShardedLeaf(
        (24, 2048, 768), ((), ("mp",), ("fsdp",)), (("dp", 1), ("fsdp", 2), ("mp", 4))
    )
    plan = choose_read_plan(leaf, (1, 682, 768), 4)
    assert plan is not None
    assert (plan.row_dim, plan.collectives) == (0, (("mp", 1), ("fsdp", 2)))
    assert set(count_reads(plan)[1]) == {3 * 2048 * 768}


def test_choose_read_plan_splits_large_layers_by_rows():
    leaf = ShardedLeaf(
        (32, 4096, 11008), ((), ("fsdp",), ("mp",)), (("dp", 2), ("fsdp", 4), ("mp", 2))
    )
    plan = choose_read_plan(leaf, (1, 16, 11008), 4)
    assert plan is not None
    assert (plan.row_dim, plan.outer_dims, plan.keeps_rows) == (1, (0,), True)
    assert plan.collectives == (("mp", 2), ("dp", None)), (
        "rows of other fsdp shards are not exchanged"
    )
    block = next(plan.row_blocks(4))
    assert block.rows * 11008 // 2 * 4 <= read_plan.BLOCK_NBYTES // 2


def test_row_blocks_of_an_all_gather_are_twice_those_of_an_all_to_all():
    block_nbytes: list[int] = []
    for split_axes in ((), ("fsdp",)):
        leaf = ShardedLeaf((16384, 4096), ((), split_axes), (("fsdp", 4),))
        plan = choose_read_plan(leaf, (1, 4096), 4)
        assert plan is not None
        block = next(plan.row_blocks(4))
        block_nbytes.append(block.rows * leaf.shard_extent(1) * 4)
    assert block_nbytes == [read_plan.BLOCK_NBYTES, read_plan.BLOCK_NBYTES // 2]


def test_choose_read_plan_leaves_small_leaves_whole():
    leaf = ShardedLeaf((768,), ((),), (("dp", 8),))
    assert choose_read_plan(leaf, (768,), 4) is None
    assert choose_read_plan(ShardedLeaf((), (), (("dp", 8),)), (), 4) is None


@pytest.mark.parametrize(
    ("boxes", "ratio"),
    [
        ({0: [((0, 4), (0, 8))], 1: [((4, 8), (0, 8))]}, 1.0),
        ({0: [((0, 8), (0, 4))], 1: [((0, 8), (4, 8))]}, 2.0),
        ({0: [((0, 8), (0, 4)), ((0, 8), (4, 8))]}, 1.0),
        ({0: [((0, 3), (0, 8))], 1: [((3, 8), (0, 8))]}, 1.25),
    ],
    ids=["rows", "columns", "columns of one process", "cut unit"],
)
def test_read_ratio_counts_shared_units_per_process(
    boxes: dict[int, list[read_plan.Box]], ratio: float
):
    assert read_ratio(boxes, (8, 8), (2, 8)) == ratio


@given(st.data(), st.integers(1, 400))
def test_aligned_row_blocks_cover_a_box_once_with_whole_units(data: st.DataObject, max_volume: int):
    shape = data.draw(st.lists(st.integers(1, 12), min_size=0, max_size=3))
    unit = [data.draw(st.integers(1, extent)) for extent in shape]
    corners = [
        data.draw(st.tuples(st.integers(0, extent), st.integers(0, extent))) for extent in shape
    ]
    box = tuple((min(pair), max(pair)) for pair in corners)
    counts = np.zeros(shape, int)
    for block in aligned_row_blocks(box, unit, max_volume):
        counts[tuple(slice(*span) for span in block)] += 1
        assert math.prod(high - low for low, high in block) <= max(max_volume, math.prod(unit))
        for span, bounds, length in zip(block, box, unit, strict=True):
            assert all(cut % length == 0 or cut in bounds for cut in span)
    expected = np.zeros(shape, int)
    expected[tuple(slice(*span) for span in box)] = 1
    assert (counts == expected).all()
