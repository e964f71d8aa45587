"""Loaded leaves equal the stored ones, on any mesh, whether devices exchange what they read or not."""

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
from trainer.distributed import leaf_slices
from trainer.training import leaf_loading
from trainer.training.leaf_loading import LeafLoader

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


def check_load(
    reader: CountingReader, sharding: NamedSharding, dtype: str = "", *, exchanges: bool
) -> None:
    """Load the array `x`, compare all shards, and check that each element was read once."""
    array = reader.arrays["x"]
    expected = array.astype(dtype or array.dtype)
    target = jax.ShapeDtypeStruct(array.shape, expected.dtype, sharding=sharding)
    loaded = LeafLoader(reader, exchanges).load("x", target)
    assert loaded.sharding.is_equivalent_to(sharding, array.ndim)
    for shard in loaded.addressable_shards:
        values = np.ascontiguousarray(expected[shard.index])
        assert np.asarray(shard.data).tobytes() == values.tobytes()
    assert (reader.counts["x"] == 1).all()


def check_exchange(
    array: np.ndarray, unit: tuple[int, ...], sharding: NamedSharding, dtype: str = ""
) -> None:
    check_load(
        CountingReader({"x": array}, read_units={"x": unit}), sharding, dtype, exchanges=True
    )


@pytest.fixture(params=["host", "devices"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange leaves also in one process, in slices of 2 KiB, into shards on the host or on devices."""
    monkeypatch.setattr(leaf_loading, "MAX_READ_RATIO", 0)
    monkeypatch.setattr(leaf_loading, "copies_host_arrays", lambda _: request.param == "devices")
    monkeypatch.setattr(leaf_slices, "MIN_PART_NBYTES", 0)
    monkeypatch.setattr(leaf_slices, "SLICE_NBYTES", 2 << 10)
    monkeypatch.setattr(leaf_slices, "MAX_SLICE_NBYTES", 2 << 10)


@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "unit", [(1, 4, 48), (1, 32, 48), (6, 32, 48), ()], ids=["rows", "layers", "leaf", "any"]
)
def test_exchange_gives_each_shard_its_stored_values(mesh: str, unit: tuple[int, ...]):
    array = np.random.default_rng(0).standard_normal((6, 32, 48), np.float32)
    check_exchange(array, unit, sharding_of(mesh, None, "fsdp", "mp"))


@pytest.mark.usefixtures("exchange")
def test_exchanged_leaf_may_have_shards_that_cut_units():
    array = np.random.default_rng(0).standard_normal((40, 16), np.float32)
    for mesh in ("1,8,1", "2,4,1", "1,2,4"):
        check_exchange(array, (3, 16), sharding_of(mesh, "fsdp", "mp"))
    layers = np.random.default_rng(0).standard_normal((3, 40, 16), np.float32)
    check_exchange(layers, (1, 3, 16), sharding_of("2,2,2", None, "fsdp", "mp"))


@pytest.mark.usefixtures("exchange")
def test_exchanged_leaf_may_split_a_dim_over_several_axes():
    array = np.random.default_rng(0).integers(0, 99, (16, 24), np.int32)
    check_exchange(array, (2, 24), sharding_of("2,2,2", None, ("mp", "fsdp")))
    check_exchange(array, (2, 24), sharding_of("2,2,2", ("mp", "dp"), "fsdp"))
    check_exchange(array, (16, 1), sharding_of("2,2,2", "fsdp", "mp"))


@pytest.mark.usefixtures("exchange")
def test_exchanged_leaf_may_have_a_row_dim_that_is_not_the_first():
    """Parts of the last slice are not contiguous in a part of full size."""
    array = np.random.default_rng(0).integers(0, 99, (5, 90), np.int32)
    check_exchange(array, (5, 1), sharding_of("2,2,2"))


# Each unit, and each way to split a leaf.
UNITS = ((1, 4, 48), (1, 32, 48), (6, 32, 48), ())
AXES = ((None, "fsdp", "mp"), (None, "mp", None), ("mp", None, "fsdp"))
FAST_FILLS = [*((unit, AXES[0]) for unit in UNITS), (UNITS[0], AXES[1]), (UNITS[1], AXES[2])]


@pytest.mark.parametrize(("unit", "axes"), slow_except(product(UNITS, AXES), FAST_FILLS))
def test_own_shards_are_copied_to_accelerators_in_slices(
    monkeypatch: pytest.MonkeyPatch, unit: tuple[int, ...], axes: tuple[str | None, ...]
):
    monkeypatch.setattr(leaf_loading, "copies_host_arrays", lambda devices: True)
    monkeypatch.setattr(leaf_loading, "MAX_COPY_NBYTES", 0)
    monkeypatch.setattr(leaf_slices, "SLICE_NBYTES", 2 << 10)
    monkeypatch.setattr(leaf_slices, "MAX_SLICE_NBYTES", 2 << 10)
    array = np.random.default_rng(0).standard_normal((6, 32, 48), np.float32)
    reader = BlockReader({"x": array}, read_units={"x": unit})
    check_load(reader, sharding_of("2,2,2", *axes), exchanges=False)
    # Each shard of a slice has at least the rows of a unit. Two devices share the layers.
    num_units = 2 if axes[0] else 1
    largest_slice = max(num_units * math.prod(unit or (1,)), (2 << 10) // 4)
    assert max(reader.read_volumes) <= largest_slice


@pytest.mark.usefixtures("exchange")
def test_exchange_keeps_the_bits_of_all_numbers():
    """Negative zeros and subnormals survive broadcasts, exchanges and the cast from bfloat16."""
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    numbers = np.where(np.isnan(values.astype(np.float32)), 0, values)
    for unit, dtype in (((256, 256), ""), ((8, 256), ""), ((8, 256), "float32")):
        check_exchange(numbers, unit, sharding_of("2,2,2", "fsdp", "mp"), dtype)


def test_scalars_are_not_exchanged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leaf_loading, "MAX_READ_RATIO", 0)
    check_exchange(np.array(7, np.int32), (), sharding_of("2,2,2"))


@pytest.mark.parametrize("exchange", ["host"], indirect=True)
@pytest.mark.usefixtures("exchange")
def test_leaves_of_one_shape_are_exchanged_by_one_program():
    """Slices of matrices, the last of them shorter, and vectors that different devices read."""
    arrays = {name: np.full((71, 40), number) for number, name in enumerate("abc")}
    arrays |= {name: np.full(13, number) for number, name in enumerate("defgh")}
    units = dict.fromkeys("abc", (1, 40)) | dict.fromkeys("defgh", (13,))
    reader = runs.MemoryReader(arrays, read_units=units)
    targets: list[tuple[str, jax.ShapeDtypeStruct]] = []
    for name, array in arrays.items():
        sharding = sharding_of("1,8,1", *[None, "fsdp"][: 2 * array.ndim - 2])
        targets.append((name, jax.ShapeDtypeStruct(array.shape, "int32", sharding=sharding)))
    traced: list[str] = []

    def record(event: str, duration_secs: float, **_: object) -> None:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            traced.append(event)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        leaves = [*LeafLoader(reader, exchanges=True).load_all(targets)]
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
    for leaf, array in zip(leaves, arrays.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), array)
    assert len(traced) == 2


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


def test_few_small_leaves_are_read_ahead():
    taken: list[str] = []

    def targets() -> Iterator[tuple[str, jax.ShapeDtypeStruct]]:
        device = SingleDeviceSharding(jax.devices()[0])
        for name in arrays:
            taken.append(name)
            yield name, jax.ShapeDtypeStruct((1,), "int32", sharding=device)

    arrays = {f"{number}": np.full(1, number, np.int32) for number in range(200)}
    reader = runs.MemoryReader(arrays, is_remote=True)
    leaves = LeafLoader(reader, exchanges=False).load_all(targets())
    assert np.asarray(next(leaves)) == 0
    # Each leaf has a read, and a step at its end.
    assert len(taken) == leaf_loading.MAX_PENDING_READS // 2 + 1
    assert [int(leaf[0]) for leaf in leaves] == [*range(1, 200)]


@pytest.mark.usefixtures("exchange")
def test_order_of_exchanges_does_not_depend_on_the_read_ahead(monkeypatch: pytest.MonkeyPatch):
    """All processes of a job must run their programs in one order, and each reads other bytes ahead."""
    arrays = {"a": np.ones((32, 48)), "b": np.ones(5), "c": np.ones((32, 16))}
    units = {"a": (1, 48), "b": (5,), "c": (1, 16)}
    compile_program = leaf_loading._exchange_program
    order: list[tuple[int, ...]] = []

    def compile_recorded(*args: Any) -> Callable[[jax.Array], jax.Array]:
        def run(parts: jax.Array) -> jax.Array:
            order.append(parts.shape)
            return compile_program(*args)(parts)

        return run

    monkeypatch.setattr(leaf_loading, "_exchange_program", compile_recorded)
    orders: list[list[tuple[int, ...]]] = []
    for max_nbytes in (1, 1 << 20):
        monkeypatch.setattr(leaf_loading, "EXCHANGE_READ_AHEAD_NBYTES", max_nbytes)
        reader = CountingReader(arrays, is_remote=True, read_units=units)
        targets: list[tuple[str, jax.ShapeDtypeStruct]] = []
        for name, array in arrays.items():
            sharding = sharding_of("1,8,1", *[None] * array.ndim)
            targets.append((name, jax.ShapeDtypeStruct(array.shape, "float32", sharding=sharding)))
        loaded = [*LeafLoader(reader, exchanges=True).load_all(targets)]
        assert [array.shape for array in loaded] == [array.shape for array in arrays.values()]
        orders.append([*order])
        order.clear()
    assert len(orders[0]) > len(arrays)
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


# test_bytes_once shows it with `load_params`, and the tests above show the exchange on each mesh.
@pytest.mark.slow
def test_two_processes_read_each_element_once_together():
    outputs = finish(start_processes(count=2, devices=4, module="tests.helpers.loading_process"))
    assert [code for code, _, _ in outputs] == [0, 0], [stderr[-2000:] for *_, stderr in outputs]
    reports = [json.loads(stdout.splitlines()[-1]) for _, stdout, _ in outputs]
    assert sum(report["read"] for report in reports) == reports[0]["elements"]
    assert min(report["read"] for report in reports) > 0.4 * reports[0]["elements"]
