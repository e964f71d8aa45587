"""Leaves that are read once in the job and exchanged between devices equal the stored ones, on any mesh."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from prepcli.algebra.boxes import Box
from tests.helpers import runs
from tests.helpers.processes import finish, start_processes
from tests.helpers.slow_cases import slow_except
from trainer.distributed import read_plan
from trainer.training import leaf_loading, read_ahead, shard_filling
from trainer.training.leaf_loading import LeafLoader, exchange_is_faster
from trainer.training.read_ahead import LeafRead

MESHES = ["8,1,1", "1,8,1", "1,1,8", "2,2,2", "1,2,4", "4,1,2"]


class CountingReader(runs.MemoryReader):
    """A reader that counts how often each element of a leaf is read."""

    def read(self, name: str, parts: Mapping[Box, np.ndarray]) -> None:
        self.counts = getattr(self, "counts", {})
        counts = self.counts.setdefault(name, np.zeros(self.arrays[name].shape, int))
        for box in parts:
            counts[tuple(slice(*span) for span in box)] += 1
        super().read(name, parts)


class BlockReader(CountingReader):
    """A reader that records the elements of each read."""

    def read(self, name: str, parts: Mapping[Box, np.ndarray]) -> None:
        self.read_volumes = [
            *getattr(self, "read_volumes", []),
            sum(part.size for part in parts.values()),
        ]
        super().read(name, parts)


def sharding_of(mesh: str, *axes: str | tuple[str, ...] | None) -> NamedSharding:
    """Return a sharding on 8 devices."""
    devices = np.array(jax.devices()[:8]).reshape([int(size) for size in mesh.split(",")])
    return NamedSharding(
        Mesh(devices, ("dp", "fsdp", "mp"), axis_types=(AxisType.Auto,) * 3), PartitionSpec(*axes)
    )


def check_exchange(
    array: np.ndarray, unit: tuple[int, ...], sharding: NamedSharding, dtype: str = ""
) -> None:
    """Load an array with exchanges between devices, compare all shards, and check that each element was read once."""
    reader = CountingReader({"x": array}, read_units={"x": unit})
    expected = array.astype(dtype or array.dtype)
    target = jax.ShapeDtypeStruct(array.shape, expected.dtype, sharding=sharding)
    loaded = LeafLoader(reader, exchanges=True).load_exchanged("x", target, sharding)
    assert loaded.sharding.is_equivalent_to(sharding, array.ndim)
    for shard in loaded.addressable_shards:
        assert (
            np.asarray(shard.data).tobytes()
            == np.ascontiguousarray(expected[shard.index]).tobytes()
        )
    assert (reader.counts["x"] == 1).all()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit blocks to 2 KiB, so that each leaf has several."""
    monkeypatch.setattr(read_plan, "BLOCK_NBYTES", 2 << 10)
    monkeypatch.setattr(read_plan, "MAX_BLOCK_NBYTES", 2 << 10)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "unit", [(1, 4, 48), (1, 32, 48), (6, 32, 48), ()], ids=["rows", "layers", "leaf", "any"]
)
def test_load_exchanged_gives_each_shard_its_stored_values(mesh: str, unit: tuple[int, ...]):
    array = np.random.default_rng(0).standard_normal((6, 32, 48), np.float32)
    check_exchange(array, unit, sharding_of(mesh, None, "fsdp", "mp"))


@pytest.mark.usefixtures("small_blocks")
def test_exchanged_leaf_may_have_shards_that_cut_units():
    array = np.random.default_rng(0).standard_normal((40, 16), np.float32)
    for mesh in ("1,8,1", "2,4,1", "1,2,4"):
        check_exchange(array, (3, 16), sharding_of(mesh, "fsdp", "mp"))


@pytest.mark.usefixtures("small_blocks")
def test_exchanged_leaf_may_split_a_dim_over_several_axes():
    array = np.random.default_rng(0).integers(0, 99, (16, 24), np.int32)
    check_exchange(array, (2, 24), sharding_of("2,2,2", None, ("mp", "fsdp")))
    check_exchange(array, (2, 24), sharding_of("2,2,2", ("mp", "dp"), "fsdp"))
    check_exchange(array, (16, 1), sharding_of("2,2,2", "fsdp", "mp"))


# Each unit, and each way to split a leaf.
UNITS = ((1, 4, 48), (1, 32, 48), (6, 32, 48), ())
AXES = ((None, "fsdp", "mp"), (None, "mp", None), ("mp", None, "fsdp"))
FAST_FILLS = [*((unit, AXES[0]) for unit in UNITS), (UNITS[0], AXES[1]), (UNITS[1], AXES[2])]


@pytest.mark.parametrize(("unit", "axes"), slow_except(product(UNITS, AXES), FAST_FILLS))
def test_leaf_filled_by_row_blocks_equals_the_stored_one(
    monkeypatch: pytest.MonkeyPatch, unit: tuple[int, ...], axes: tuple[str | None, ...]
):
    monkeypatch.setattr(shard_filling, "copies_host_arrays", lambda devices: True)
    monkeypatch.setattr(shard_filling, "MIN_FILLED_NBYTES", 0)
    monkeypatch.setattr(shard_filling, "BLOCK_NBYTES", 2 << 10)
    array = np.random.default_rng(0).standard_normal((6, 32, 48), np.float32)
    reader, sharding = (
        BlockReader({"x": array}, read_units={"x": unit}),
        sharding_of("2,2,2", *axes),
    )
    loaded = LeafLoader(reader, exchanges=False).load(
        "x", jax.ShapeDtypeStruct(array.shape, "float32", sharding=sharding)
    )
    assert loaded.sharding == sharding
    for shard in loaded.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index])
    assert (reader.counts["x"] == 1).all()
    largest_unit = max(math.prod(unit or (1,)), (2 << 10) // 4)
    assert max(reader.read_volumes) <= largest_unit


def test_exchange_keeps_the_bits_of_all_numbers():
    """Negative zeros and subnormals survive broadcasts, exchanges and the cast from bfloat16."""
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    numbers = np.where(np.isnan(values.astype(np.float32)), 0, values)
    for unit, dtype in (((256, 256), ""), ((8, 256), ""), ((8, 256), "float32")):
        check_exchange(numbers, unit, sharding_of("2,2,2", "fsdp", "mp"), dtype)


def test_exchanged_leaf_may_be_a_scalar():
    check_exchange(np.array(7, np.int32), (), sharding_of("2,2,2"))


class MeetingReader(CountingReader):
    """A remote reader whose reads end only when two of them run at once."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__(arrays, is_remote=True)
        self.barrier = threading.Barrier(2)

    def read(self, name: str, parts: Mapping[Box, np.ndarray]) -> None:
        self.barrier.wait(10)
        super().read(name, parts)


def load_both(reader: runs.MemoryReader) -> list[np.ndarray]:
    """Load the leaves `a` and `b` onto the first device."""
    device = SingleDeviceSharding(jax.devices()[0])
    targets: list[tuple[str, jax.ShapeDtypeStruct]] = []
    for name in ("a", "b"):
        spec = reader.leaves[name]
        targets.append((name, jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=device)))
    return [np.asarray(array) for array in LeafLoader(reader, exchanges=False).load_all(targets)]


def test_leaves_of_a_remote_checkpoint_are_read_ahead():
    arrays = {"a": np.arange(6, dtype=np.int32), "b": np.ones((2, 3), np.float32)}
    reader = MeetingReader(arrays)
    for loaded, array in zip(load_both(reader), arrays.values(), strict=True):
        np.testing.assert_array_equal(loaded, array)
    assert all((counts == 1).all() for counts in reader.counts.values())


@pytest.mark.parametrize("unit", [(2, 32, 8), (1, 5, 8), (5, 32, 1), ()])
def test_remote_host_arrays_are_read_in_blocks(
    monkeypatch: pytest.MonkeyPatch, unit: tuple[int, ...]
):
    monkeypatch.setattr(shard_filling, "HOST_BLOCK_NBYTES", 2 << 10)
    array = np.random.default_rng(0).standard_normal((5, 32, 8), np.float32)
    reader = BlockReader({"x": array}, is_remote=True, read_units={"x": unit})
    sharding = sharding_of("2,2,2", None, "fsdp", None)
    loaded = LeafLoader(reader, exchanges=False).load(
        "x", jax.ShapeDtypeStruct(array.shape, "float32", sharding=sharding)
    )
    for shard in loaded.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index])
    assert (reader.counts["x"] == 1).all()


def test_read_ahead_takes_few_steps_of_small_leaves():
    taken: list[int] = []

    def steps() -> Iterator[tuple[int, LeafRead]]:
        for number in range(200):
            taken.append(number)
            yield number, LeafRead("a", {((0, 1),): np.zeros(1, np.int32)})

    reader = runs.MemoryReader({"a": np.zeros(1, np.int32)})
    loaded = read_ahead.read_ahead(reader, steps(), 1 << 20)
    assert next(loaded) == 0
    assert len(taken) == read_ahead.MAX_PENDING_STEPS + 1
    assert list(loaded) == list(range(1, 200))


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the list of the programs that run: the function that compiled each, and the size of its result."""
    runs_of_programs: list[tuple[str, int]] = []

    def record(name: str) -> None:
        compile_program = getattr(leaf_loading, name)

        def compile_recorded(*args: Any) -> Callable[..., jax.Array]:
            program = compile_program(*args)

            def run(*arrays: Any) -> jax.Array:
                result = program(*arrays)
                runs_of_programs.append((name, result.size))
                return result

            return run

        monkeypatch.setattr(leaf_loading, name, compile_recorded)

    for name in ("compile_allocation", "compile_block_update", "compile_broadcast"):
        record(name)
    return runs_of_programs


def test_order_of_exchanges_does_not_depend_on_the_read_ahead(
    monkeypatch: pytest.MonkeyPatch, programs: list[tuple[str, int]]
):
    """All processes of a job must run their programs in one order, and each reads other bytes ahead."""
    monkeypatch.setattr(leaf_loading, "MAX_READ_RATIO", 0)
    arrays = {"a": np.ones((32, 48)), "b": np.ones(5), "c": np.ones((32, 16))}
    units = {"a": (1, 48), "b": (5,), "c": (1, 16)}
    orders: list[list[tuple[str, int]]] = []
    for max_nbytes in (1, 1 << 20):
        monkeypatch.setattr(leaf_loading, "EXCHANGE_READ_AHEAD_NBYTES", max_nbytes)
        reader = CountingReader(arrays, is_remote=True, read_units=units)
        targets: list[tuple[str, jax.ShapeDtypeStruct]] = []
        for name, array in arrays.items():
            sharding = sharding_of("1,8,1", *[None] * array.ndim)
            targets.append((name, jax.ShapeDtypeStruct(array.shape, "float32", sharding=sharding)))
        loaded = [*LeafLoader(reader, exchanges=True).load_all(targets)]
        assert [array.shape for array in loaded] == [array.shape for array in arrays.values()]
        orders.append([*programs])
        programs.clear()
    assert len(orders[0]) == 5
    assert orders[0] == orders[1]


def test_error_of_a_read_ahead_is_raised():
    class FailingReader(runs.MemoryReader):
        def read(self, name: str, parts: Mapping[Box, np.ndarray]) -> None:
            if name == "b":
                raise ValueError("b is damaged")
            super().read(name, parts)

    arrays = {"a": np.zeros(6, np.int32), "b": np.ones((2, 3), np.float32)}
    with pytest.raises(ValueError, match="b is damaged"):
        load_both(FailingReader(arrays, is_remote=True))


def test_error_of_a_read_stops_the_reads_ahead():
    class HangingReader(runs.MemoryReader):
        """A reader that fails for `a`. The store does not answer for `b`."""

        stopped = threading.Event()
        was_stopped = False

        def read(self, name: str, parts: Mapping[Box, np.ndarray]) -> None:
            if name == "a":
                raise ValueError("a is damaged")
            self.was_stopped = self.stopped.wait(10)

        def stop_reads(self) -> None:
            self.stopped.set()

    arrays = {"a": np.zeros(6, np.int32), "b": np.ones(6, np.int32)}
    reader = HangingReader(arrays, is_remote=True)
    with pytest.raises(ValueError, match="a is damaged"):
        load_both(reader)
    assert reader.was_stopped


@pytest.mark.parametrize(
    ("processes", "hosts", "expected"), [(1, 1, (0, 0)), (2, 1, (0, 1)), (2, 2, (1, 1))]
)
def test_exchange_is_faster_on_several_hosts_or_from_a_server(
    monkeypatch: pytest.MonkeyPatch, processes: int, hosts: int, expected: tuple[bool, bool]
):
    monkeypatch.setattr(leaf_loading, "has_several_processes", lambda: processes > 1)
    monkeypatch.setattr(
        leaf_loading, "should_exchange_reads", lambda is_remote, _: is_remote or hosts > 1
    )
    local, remote = runs.MemoryReader({}), runs.MemoryReader({}, is_remote=True)
    assert (exchange_is_faster(local), exchange_is_faster(remote)) == expected


# test_bytes_once shows it with `load_params`, and the tests above show the exchange on each mesh.
@pytest.mark.slow
def test_two_processes_read_each_element_once_together():
    outputs = finish(start_processes(count=2, devices=4, module="tests.helpers.loading_process"))
    assert [code for code, _, _ in outputs] == [0, 0], [stderr[-2000:] for *_, stderr in outputs]
    reports = [json.loads(stdout.splitlines()[-1]) for _, stdout, _ in outputs]
    assert sum(report["read"] for report in reports) == reports[0]["elements"]
    assert min(report["read"] for report in reports) > 0.4 * reports[0]["elements"]
