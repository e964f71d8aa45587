"""Slices of leaves that devices exchange, sums over a tree of devices, and the order of split tokens."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from prepcli.algebra.boxes import Box, intersection, slices, volume
from prepcli.core.errors import PrepError
from prepcli.models.mesh import parse_mesh
from tests.helpers import runs
from tests.helpers.meshes import error_of
from trainer.distributed import leaf_slices
from trainer.distributed.exact_reduction import fixed_order_psum, square_sums, sum_in_tree
from trainer.distributed.leaf_slices import (
    SlicePlan,
    exchange_is_faster,
    local_boxes,
    own_read_ratio,
    plan_exchange,
    plan_own_reads,
)
from trainer.distributed.sharding import ShardingContext, order_tokens, zigzag_order

# Slices of a leaf: devices read every element once, share the work evenly, and receive their shards.

AXES = ("dp", "fsdp", "mp")

MESHES = ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4), (4, 1, 2), (1, 3, 2), (2, 1, 3), (1, 1, 1))

Case = tuple[tuple[int, ...], NamedSharding, tuple[int, ...]]


def sharding_of(sizes: tuple[int, ...], *axes: str | tuple[str, ...] | None) -> NamedSharding:
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    return NamedSharding(mesh, PartitionSpec(*axes))


@st.composite
def leaves_with_units(draw: st.DrawFn) -> Case:
    """Draw a leaf on a mesh, and the shape of its read units: one index in some dims, blocks of one dim, whole dims."""
    sizes = draw(st.sampled_from(MESHES))
    num_dims = draw(st.integers(1, 3))
    split_axes: list[tuple[str, ...]] = [()] * num_dims
    for axis in draw(st.permutations(AXES)):
        dim = draw(st.integers(-1, num_dims - 1))
        if dim >= 0:
            split_axes[dim] += (axis,)
    shape: list[int] = []
    for axes in split_axes:
        num_shards = math.prod(sizes[AXES.index(axis)] for axis in axes)
        shape.append(num_shards * draw(st.integers(1, 9)))
    block_dim = draw(st.integers(0, num_dims - 1))
    block = draw(st.integers(1, shape[block_dim]))
    unit = (*(1,) * block_dim, block, *shape[block_dim + 1 :])
    return tuple(shape), sharding_of(sizes, *split_axes), unit


def plan_with_limits(
    case: Case, slice_nbytes: int = 1 << 20, min_part_nbytes: int = 0
) -> SlicePlan:
    """Plan an exchange of float32 elements with small limits."""
    shape, sharding, unit = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaf_slices, "SLICE_NBYTES", slice_nbytes)
        patch.setattr(leaf_slices, "MAX_SLICE_NBYTES", slice_nbytes)
        patch.setattr(leaf_slices, "MIN_PART_NBYTES", min_part_nbytes)
        return plan_exchange("x", shape, sharding, unit=unit, itemsize=4)


def count_reads(plan: SlicePlan) -> tuple[np.ndarray, list[int]]:
    """Return how often each element is read, and the elements that each device reads."""
    counts = np.zeros(plan.shape, int)
    volumes: dict[Any, int] = {}
    for start in plan.starts():
        for device, box in plan.leaf_boxes(start, plan.parts).items():
            volumes[device] = volumes.get(device, 0) + volume(box)
            counts[tuple(slice(*span) for span in box)] += 1
    return counts, [*volumes.values()]


SLICE_NBYTES = st.sampled_from([64, 1024, 1 << 20])


@given(leaves_with_units(), SLICE_NBYTES, st.sampled_from([0, 256]))
def test_parts_of_an_exchange_cover_each_element_once(
    case: Case, slice_nbytes: int, min_part_nbytes: int
):
    assert (count_reads(plan_with_limits(case, slice_nbytes, min_part_nbytes))[0] == 1).all()


@given(leaves_with_units(), SLICE_NBYTES)
def test_parts_of_an_exchange_cut_no_unit(case: Case, slice_nbytes: int):
    shape, _, unit = case
    plan = plan_with_limits(case, slice_nbytes)
    for start in plan.starts():
        for box in plan.leaf_boxes(start, plan.parts).values():
            for (low, high), length, extent in zip(box, unit, shape, strict=True):
                assert low == high or (low % length == 0 and (high % length == 0 or high == extent))


@given(leaves_with_units(), SLICE_NBYTES)
def test_placed_slices_cover_each_shard_once(case: Case, slice_nbytes: int):
    shape, sharding, _ = case
    plan = plan_with_limits(case, slice_nbytes)
    if plan.makes_leaf:
        assert plan.placed == sharding
        return
    for device, shard_box in local_boxes(sharding, shape).items():
        counts = np.zeros(sharding.shard_shape(shape), int)
        for start in plan.starts():
            part = intersection(plan.leaf_boxes(start, plan.placed)[device], shard_box)
            counts[slices(part, shard_box)] += 1
        assert (counts == 1).all()


@given(leaves_with_units())
def test_devices_read_equal_shares_within_a_unit_per_slice(case: Case):
    shape, _, unit = case
    plan = plan_with_limits(case)
    row_dim = plan.row_dim
    assume(plan.reader is None)
    assume(plan.extents[row_dim] % plan.steps[row_dim] == 0)
    _, volumes = count_reads(plan)
    unit_volume = unit[row_dim] * math.prod(shape) // shape[row_dim]
    assert max(volumes) - min(volumes) <= plan.num_slices * unit_volume


@given(leaves_with_units(), SLICE_NBYTES)
def test_slices_of_own_reads_cover_each_shard_once(case: Case, slice_nbytes: int):
    shape, sharding, unit = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaf_slices, "SLICE_NBYTES", slice_nbytes)
        plan = plan_own_reads(shape, sharding, unit, 4)
    if plan is None:
        assert all(extent <= length for extent, length in zip(shape, unit, strict=True))
        return
    for device, shard_box in local_boxes(sharding, shape).items():
        counts = np.zeros(sharding.shard_shape(shape), int)
        for start in plan.starts():
            box = plan.leaf_boxes(start, plan.parts)[device]
            counts[slices(box, shard_box)] += 1
        assert (counts == 1).all()


@pytest.mark.parametrize("unit_rows", [2048, 4096])
def test_slice_of_own_reads_is_at_most_the_shard(unit_rows: int):
    """A checkpoint for 2 or 4 devices has units with the rows of several of 8 devices."""
    shape, sharding = (8192, 8192), sharding_of((1, 8, 1), "fsdp")
    plan = plan_own_reads(shape, sharding, (unit_rows, 8192), 4)
    assert plan is not None
    assert plan.parts.shard_shape(plan.slice_shape) == sharding.shard_shape(shape)


def test_plan_exchange_reads_whole_layers_of_a_stack():
    sharding = sharding_of((1, 2, 4), None, "mp", "fsdp")
    plan = plan_exchange("x", (24, 2048, 768), sharding, unit=(1, 682, 768), itemsize=4)
    assert plan.row_dim == 0
    assert set(count_reads(plan)[1]) == {3 * 2048 * 768}


def test_plan_exchange_splits_large_layers_by_rows():
    sharding = sharding_of((2, 2, 2), None, "fsdp", "mp")
    plan = plan_exchange("x", (32, 4096, 11008), sharding, unit=(1, 16, 11008), itemsize=4)
    assert plan.row_dim == 1
    assert plan.extents == (32, 2048, 11008), "rows of other fsdp shards are not exchanged"
    placed = plan.placed.shard_shape(plan.slice_shape)
    assert math.prod(placed) * 4 <= leaf_slices.SLICE_NBYTES // 2


def test_all_gather_has_twice_the_slices_of_an_all_to_all():
    nbytes: list[int] = []
    for axes in ((), (None, "fsdp")):
        sharding = sharding_of((1, 8, 1), *axes)
        plan = plan_exchange("x", (16384, 4096), sharding, unit=(1, 4096), itemsize=4)
        nbytes.append(math.prod(plan.placed.shard_shape(plan.slice_shape)) * 4)
    assert nbytes == [leaf_slices.SLICE_NBYTES, leaf_slices.SLICE_NBYTES // 2]


@pytest.mark.parametrize(
    ("shape", "unit"), [((768,), (1,)), ((1 << 20,), (1 << 20,)), ((2, 4096), (1, 1))]
)
def test_plan_exchange_reads_small_leaves_and_single_units_whole(
    shape: tuple[int, ...], unit: tuple[int, ...]
):
    readers: set[int | None] = set()
    for name in "abcdef":
        plan = plan_exchange(name, shape, sharding_of((8, 1, 1)), unit=unit, itemsize=4)
        assert sorted(count_reads(plan)[1])[-2:] == [0, math.prod(shape)]
        readers.add(plan.reader)
    assert len(readers) > 1, "different names spread the reads over the devices"


def test_many_small_layers_are_one_slice():
    """A slice costs more than the uneven shares of 30 layers on 8 devices."""
    sharding = sharding_of((8, 1, 1))
    plan = plan_exchange("x", (30, 4096), sharding, unit=(1, 1), itemsize=4)
    assert (plan.row_dim, plan.num_slices) == (0, 1)


def test_own_slices_of_a_process_have_a_size_together():
    for sharding, num_devices in (
        (sharding_of((1, 8, 1), None, "fsdp"), 8),
        (SingleDeviceSharding(jax.devices()[0]), 1),
    ):
        plan = plan_own_reads((4, 4096, 8192), sharding, (1, 1, 8192), 4)
        assert plan is not None
        nbytes = num_devices * math.prod(plan.parts.shard_shape(plan.slice_shape)) * 4
        assert nbytes == leaf_slices.SLICE_NBYTES


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
def test_own_read_ratio_counts_shared_units_per_process(boxes: dict[int, list[Box]], ratio: float):
    indices: dict[Any, tuple[slice, ...]] = {}
    for process, process_boxes in boxes.items():
        for box in process_boxes:
            indices[_Device(process)] = tuple(slice(*span) for span in box)
    sharding: Any = SimpleNamespace(devices_indices_map=lambda shape: indices)
    assert own_read_ratio(sharding, (8, 8), (2, 8)) == ratio


class _Device:
    def __init__(self, process_index: int) -> None:
        self.process_index = process_index


@pytest.mark.parametrize(
    ("processes", "hosts", "expected"), [(1, 1, (0, 0)), (2, 1, (0, 1)), (2, 2, (1, 1))]
)
def test_exchange_is_faster_on_several_hosts_or_from_a_server(
    monkeypatch: pytest.MonkeyPatch, processes: int, hosts: int, expected: tuple[bool, bool]
):
    def gather(facts: np.ndarray) -> np.ndarray:
        kernel, *others = facts.tolist()
        return np.array([[kernel + host, *others] for host in range(hosts)], np.uint32)

    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(leaf_slices.multihost_utils, "process_allgather", gather)
    monkeypatch.setattr(leaf_slices, "kernel_id", lambda: "kernel")
    local, remote = runs.MemoryReader({}), runs.MemoryReader({}, is_remote=True)
    assert (exchange_is_faster(local), exchange_is_faster(remote)) == expected


def test_processes_with_other_leaves_cannot_load_together(monkeypatch: pytest.MonkeyPatch):
    def gather(facts: np.ndarray) -> np.ndarray:
        kernel, is_remote, layout = facts.tolist()
        return np.array([[kernel, is_remote, layout], [kernel, is_remote, layout ^ 1]], np.uint32)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(leaf_slices.multihost_utils, "process_allgather", gather)
    with pytest.raises(PrepError, match="the processes cannot load together"):
        exchange_is_faster(runs.MemoryReader({}))


# Sums in the order of a binary tree, in loops and over devices, against NumPy.

ONE = jnp.int32(1)


def random_parts(num_parts: int, *shape: int) -> np.ndarray:
    """Return float32 arrays whose sum depends on the order of the additions."""
    random = np.random.default_rng(0)
    return (
        random.normal(size=(num_parts, *shape)) * 10 ** random.uniform(-4, 4, (num_parts, *shape))
    ).astype("f4")


def numpy_tree_sum(parts: np.ndarray) -> np.ndarray:
    """Add neighbors until one part is left."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


@pytest.mark.parametrize("num_parts", [1, 2, 8, 32])
def test_sum_in_tree_adds_neighbors_first(num_parts: int):
    parts = random_parts(num_parts, 64)
    total = jax.jit(partial(sum_in_tree, lambda part: {"x": part["x"]}))(
        {"x": jnp.asarray(parts)}, one=ONE
    )
    np.testing.assert_array_equal(total["x"], numpy_tree_sum(parts))
    assert num_parts < 8 or not np.array_equal(total["x"], parts.sum(0)), (
        "the order does not matter here"
    )


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 6), PartitionSpec()),
        # The devices do not divide the elements.
        ((3, 5), PartitionSpec()),
        ((8, 6), PartitionSpec("fsdp")),
        ((6, 8), PartitionSpec(None, "dp")),
        ((16, 3), PartitionSpec(("dp", "fsdp"))),
        ((16, 3), PartitionSpec(("fsdp", "dp"))),
        ((4, 6), PartitionSpec("fsdp", "dp")),
    ],
)
def test_sum_over_devices_is_the_tree_sum(shape: tuple[int, ...], spec: PartitionSpec):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "fsdp"))
    parts = random_parts(8, *shape)

    def reduce(part: jax.Array) -> jax.Array:
        return fixed_order_psum(part[0], spec, dict(mesh.shape))

    rows = PartitionSpec(("dp", "fsdp"))
    total = jax.jit(
        jax.shard_map(reduce, mesh=mesh, in_specs=rows, out_specs=spec, check_vma=False)
    )(parts)
    np.testing.assert_array_equal(total, numpy_tree_sum(parts))


def test_square_sums_equal_numpy():
    rows = random_parts(3, 50)
    np.testing.assert_allclose(
        square_sums(jnp.asarray(rows), one=ONE), np.square(rows).sum(1), rtol=1e-5
    )


# Tests of the order of tokens on a mesh that splits them.


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
