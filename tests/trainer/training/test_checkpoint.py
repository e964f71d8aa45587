"""Checkpoints and batches on devices: exact states on any mesh, each shard read once."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from prepcli.algebra.boxes import Box
from prepcli.core.errors import PrepError
from prepcli.core.worker_thread import WorkerThread
from tests.helpers import runs
from tests.helpers.slow_cases import slow_except
from tests.helpers.waiting import MAX_S
from trainer.data.order import RowOrder, eval_batches
from trainer.data.packing import PackedDataset
from trainer.data.seq2seq import seq2seq_dataset
from trainer.data.store import MappedTokens
from trainer.distributed import leaf_slices
from trainer.nn.model_spec import AttentionOptions
from trainer.training import feed, leaf_loading
from trainer.training.checkpoint import host_leaves, init_state, restore_state
from trainer.training.leaf_loading import LeafLoader

# Checkpoints: the state is restored exactly, on any mesh, and each shard is read once.


def reader_of(state: runs.TrainState, optimizer_state: bool = True) -> runs.MemoryReader:
    """Return a checkpoint in memory of a state."""
    return runs.MemoryReader(
        {name: leaf.fetch() for name, leaf in host_leaves(state, optimizer_state).items()}
    )


@pytest.mark.parametrize("mesh", slow_except(["1,2,4", "8,1,1", ""], ["1,2,4"]))
def test_restore_state_is_exact_on_any_mesh(mesh: str):
    before = runs.make_state(runs.make_setup(mesh="1,4,2"), seed=3)
    after = restore_state(reader_of(before), setup := runs.make_setup(mesh=mesh))
    assert runs.state_bytes(after) == runs.state_bytes(before)
    if mesh == "1,2,4":
        leaf = after["params"]["layers"]["mlp"]["up"]["weight"]
        assert leaf.sharding == setup.forward_config.sharding.param_sharding(
            setup.model.leaves["layers.mlp.up.weight"]
        )
        assert leaf.addressable_shards[0].data.shape == (2, 32, 16)


def test_restore_state_reads_each_shard_once():
    read_nbytes: dict[str, list[int]] = {}

    class CountingReader(runs.MemoryReader):
        def read(self, name, parts):
            read_nbytes.setdefault(name, []).append(sum(array.nbytes for array in parts.values()))
            super().read(name, parts)

    before = runs.make_state(runs.make_setup())
    restore_state(CountingReader(reader_of(before).arrays), runs.make_setup(mesh="2,1,4"))
    expected = {name: [array.nbytes] for name, array in reader_of(before).arrays.items()}
    assert read_nbytes == expected, "two replicas of each shard share one read"


def test_init_state_widens_half_precision_to_float32():
    import ml_dtypes

    arrays = reader_of(runs.make_state(runs.make_setup())).arrays
    half = {
        name: array.astype(ml_dtypes.bfloat16)
        for name, array in arrays.items()
        if name.startswith("params.")
    }
    after = init_state(runs.MemoryReader(half), runs.make_setup(mesh="1,2,4"))
    leaf = after["params"]["embed"]["tokens"]
    assert leaf.dtype == np.float32
    assert np.array_equal(np.asarray(leaf), half["params.embed.tokens"].astype(np.float32))


def test_init_state_shards_moments_like_parameters():
    setup = runs.make_setup(mesh="1,2,4")
    after = init_state(reader_of(runs.make_state(setup), optimizer_state=False), setup)
    assert runs.state_bytes(after) == runs.state_bytes(runs.make_state(setup))
    moments = after["opt_state"]["adam"].mu
    same_sharding = jax.tree.map(lambda a, b: a.sharding == b.sharding, moments, after["params"])
    assert all(jax.tree.leaves(same_sharding))


def test_restore_state_names_missing_or_mismatched_leaf():
    setup = runs.make_setup()
    arrays = dict(reader_of(runs.make_state(setup)).arrays)
    lost = arrays.pop("opt_state.adam.nu.head.weight", None) or arrays.pop(
        "opt_state.adam.nu.embed.tokens"
    )
    assert lost is not None
    with pytest.raises(
        PrepError, match=r"the checkpoint has no opt_state\.adam\.nu\.embed\.tokens"
    ):
        restore_state(runs.MemoryReader(arrays), setup)
    arrays["opt_state.adam.nu.embed.tokens"] = lost[:-1]
    with pytest.raises(PrepError, match="has another shape"):
        restore_state(runs.MemoryReader(arrays), setup)


def test_host_leaves_do_not_keep_fetched_arrays():
    """A save holds one leaf at a time: no array caches its host copy."""
    leaves = host_leaves(runs.make_state(runs.make_setup(mesh="1,2,4")))
    fetched = [weakref.ref(leaf.fetch()) for leaf in leaves.values()]
    assert not [name for name, array in zip(leaves, fetched) if array() is not None]


@pytest.mark.parametrize("mesh", slow_except(["1,2,4", "2,2,2"], ["1,2,4"]))
def test_host_leaves_keep_their_values_in_later_steps(mesh: str):
    state = runs.make_state(runs.make_setup(mesh=mesh))
    expected = runs.state_bytes(jax.tree.map(jax.numpy.copy, state))
    leaves = {name: leaf.on_host() for name, leaf in host_leaves(state).items()}
    change = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    for _ in range(3):
        state = jax.block_until_ready(change(state))
    assert {name: leaf.fetch().tobytes() for name, leaf in leaves.items()} == expected


def test_host_leaves_have_every_element_once():
    state = runs.make_state(runs.make_setup(mesh="4,2,1"))
    for leaf in host_leaves(state).values():
        counts = np.zeros(leaf.shape, int)
        for shard in leaf.shards:
            counts[tuple(slice(*ends) for ends in shard.box)] += 1
        assert (counts == 1).all()


# Loaded leaves equal the stored ones, on any mesh, whether devices exchange what they read or not.

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
@pytest.mark.parametrize("mesh", slow_except(MESHES, ["2,2,2", "1,1,8"]))
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


@pytest.mark.parametrize("exchange", ["host"], indirect=True)
@pytest.mark.usefixtures("exchange")
@pytest.mark.parametrize("axes", [(None, ("mp", "fsdp")), (None, None)], ids=["cut", "whole"])
def test_exchange_of_cpus_copies_no_block(
    monkeypatch: pytest.MonkeyPatch, axes: tuple[str | tuple[str, ...] | None, ...]
):
    """XLA sends the arrays of the reader, and receives the arrays that are written into the shards."""
    compile_program = leaf_loading._exchange_program
    temporary_nbytes: list[int] = []

    def compile_measured(*args: Any) -> Callable[..., Any]:
        program: Any = compile_program(*args)

        def run(*blocks: jax.Array) -> Any:
            memory = program.lower(*blocks).compile().memory_analysis()
            temporary_nbytes.append(memory.temp_size_in_bytes)
            return program(*blocks)

        return run

    monkeypatch.setattr(leaf_loading, "_exchange_program", compile_measured)
    array = np.random.default_rng(0).integers(0, 99, (100, 256), np.int32)
    check_exchange(array, (1, 256), sharding_of("1,4,2", *axes))
    assert len(temporary_nbytes) > 1
    # Pointers of the blocks. The blocks of a slice have a KiB or more.
    assert max(temporary_nbytes) < 256


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


def test_signal_at_the_end_of_a_read_ends_the_load(monkeypatch: pytest.MonkeyPatch):
    """The signal comes when the thread of the first read has ended. The load does not wait for it again."""
    stop = WorkerThread.stop
    signals = iter([KeyboardInterrupt()])

    def stop_interrupted(thread: WorkerThread) -> None:
        stop(thread)
        if signal := next(signals, None):
            raise signal

    def load() -> None:
        with pytest.raises(KeyboardInterrupt):
            load_both(reader)

    monkeypatch.setattr(WorkerThread, "stop", stop_interrupted)
    reader = MeetingReader({"a": np.arange(6), "b": np.ones((2, 3))})
    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(MAX_S)
    assert not thread.is_alive()


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

    def compile_recorded(*args: Any) -> Callable[..., tuple[jax.Array, ...]]:
        def run(*blocks: jax.Array) -> tuple[jax.Array, ...]:
            order.append(blocks[0].shape)
            return compile_program(*args)(*blocks)

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


# Tests of batches on devices: each device holds its shard of the same batch on any mesh.


@pytest.mark.parametrize("mesh", ["", "2,2,2", "dp:2,mp:4"])
def test_load_batch_returns_rows_of_step(mesh: str):
    job = runs.make_job(runs.make_setup(mesh=mesh))
    expected = job.train.get_batch(job.order.rows(3))
    batch = feed.load_batch(job.train, job.order.rows(3), job.setup.sharding)
    assert batch.keys() == expected.keys()
    for name, array in batch.items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("mesh", ["", "2,2,2"])
def test_load_batch_returns_source_and_target_of_step(mesh: str):
    """Sources and targets have different lengths."""
    setup, rows = runs.make_setup(mesh=mesh), RowOrder(20, 8, 1, True).rows(2)
    ids, ends = np.arange(200, dtype="<u2") % 131, np.arange(5, 201, 5, dtype="<u8")
    dataset = seq2seq_dataset(MappedTokens(ids, ends, "x", 4), 7, decoder_start_id=0, eos_id=1)
    expected, batch = dataset.get_batch(rows), feed.load_batch(dataset, rows, setup.sharding)
    assert {name: array.shape for name, array in batch.items()} == {
        "source": (8, 7),
        "present": (8, 7),
        "tokens": (8, 4),
        "targets": (8, 4),
        "weights": (8, 4),
    }
    for name, array in batch.items():
        np.testing.assert_array_equal(array, expected[name])
    last = feed.load_batch(dataset, [*eval_batches(20, 8, limit=0)][-1], setup.sharding)
    assert not np.asarray(last["weights"])[4:].any()
    assert not np.asarray(last["present"])[4:].any()


def test_load_batch_gives_sp_devices_two_blocks_per_row():
    setup = runs.make_setup(mesh="fsdp:2,sp:4", attention_options=AttentionOptions("blockwise"))
    job = runs.make_job(setup)
    expected = job.train.get_batch(job.order.rows(0))
    # Each device has two of the 8 blocks of 2 tokens.
    blocks = [(0, 7), (1, 6), (2, 5), (3, 4)]
    for name, array in feed.load_batch(job.train, job.order.rows(0), setup.sharding).items():
        for shard in array.addressable_shards:
            rows, columns = shard.index
            first, second = blocks[(columns.start or 0) // 4]
            positions = [2 * first, 2 * first + 1, 2 * second, 2 * second + 1]
            np.testing.assert_array_equal(shard.data, expected[name][rows][:, positions])


def test_load_batch_rejects_rows_that_sp_does_not_divide():
    setup = runs.make_setup(mesh="dp:2,sp:4", attention_options=AttentionOptions("blockwise"))
    tokens = MappedTokens(np.arange(40, dtype="<u2"), np.array([40], "<u8"), "x", 20)
    with pytest.raises(
        PrepError,
        match=r"20 tokens cannot be split over sp 4.*20 mod 8 = 4.*a multiple of 8 tokens",
    ):
        feed.load_batch(PackedDataset(tokens, first_row=0, n_rows=2), np.arange(2), setup.sharding)


def test_batch_shapes_reject_indivisible_batch():
    setup = runs.make_setup(mesh="8,1,1")
    with pytest.raises(PrepError, match="batch 6 cannot be split over dp 8"):
        feed.batch_shapes(runs.make_job(setup).train, 6, setup.sharding)
