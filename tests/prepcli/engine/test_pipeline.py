"""The pipeline compared with whole arrays: random axis maps, grids and slab sizes; saved, exported and resumed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.rows import parse_row
from prepcli.core.errors import PrepError
from prepcli.core.observer import NullProgress
from prepcli.engine.background_sync import SyncPoint, UnitPart
from prepcli.engine.budget import Budget
from prepcli.engine.casts import Cast
from prepcli.engine.conversion_result import ConversionResult
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import Files
from prepcli.engine.fills import Fill, numpy_dtype
from prepcli.engine.pipeline import Pipeline, PipelineUnit
from prepcli.engine.write_policy import WritePolicy
from prepcli.planning import coverage
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import PAGE, Slab
from tests.helpers.interruptions import SimulatedSignal, run_interrupted
from tests.helpers.plans import (
    SavePlan,
    dividing_chunks,
    flat,
    make_save_plan,
    reverse_streams,
    split_streams,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.strategies import complete_tables, leaf_by_numpy


@dataclass
class DurableUnit:
    """A `UnitObserver` of one unit with all streams.

    Attributes:
        streams: The streams.
        points: The recorded sync points.
    """

    streams: Sequence[Stream]
    points: list[SyncPoint] = field(default_factory=list)

    def begin_unit(self, unit: PipelineUnit) -> None:
        """Ignore the unit."""

    def complete_unit(self, number: int) -> None:
        """Ignore the unit."""

    def record_durable(self, point: SyncPoint) -> None:
        """Remember a point."""
        self.points.append(point)

    @property
    def is_complete(self) -> bool:
        """Whether the unit is durable."""
        return bool(self.points) and self.points[-1].complete == (0,)

    def part_nbytes(self, part: UnitPart) -> int:
        """Return the number of durable bytes of a part."""
        nbytes = sum(self.streams[number].nbytes for number in part.digests)
        return nbytes + (part.prefix.nbytes if part.prefix else 0)

    def marks(self) -> list[int]:
        """Return the number of durable bytes at each point."""
        total_nbytes = sum(stream.nbytes for stream in self.streams)
        marks: list[int] = []
        for point in self.points:
            marks.append(self.part_nbytes(point.part) if point.part else total_nbytes)
        return marks

    def resumed(self) -> list[PipelineUnit]:
        """Return the unit with its durable part."""
        part = self.points[-1].part if self.points else None
        if part is None:
            return [PipelineUnit(0, range(len(self.streams)))]
        return [PipelineUnit(0, range(len(self.streams)), part.digests, part.prefix)]


QUIET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def run(
    streams: Sequence[Stream],
    sources: Sequence[Path],
    outputs: dict[Path, int],
    budget: int | Budget,
    *,
    policy: WritePolicy | None = None,
    progress: NullProgress | None = None,
    **options: Any,
) -> ConversionResult:
    """Run a pipeline from source files to output files of given sizes. The budget may be a number of bytes per slab."""
    with Files(sources) as reader, Files([*outputs], [*outputs.values()]) as sink:
        if policy:
            sink.policy = policy
        if isinstance(budget, int):
            budget = Budget(1 << 30, budget, 6)
        progress = progress or NullProgress()
        return Pipeline(
            streams, reader, sink=sink, budget=budget, progress=progress, **options
        ).run()


def save(
    save_plan: SavePlan, folder: Path, budget: int | Budget, **options: Any
) -> ConversionResult:
    """Write the source file of a plan, and save its tensors to the output files."""
    source = save_plan.write_source(folder)
    return run(save_plan.plan.streams, [source], outputs(save_plan, folder), budget, **options)


def outputs(save_plan: SavePlan, folder: Path) -> dict[Path, int]:
    """Return the sizes of the output files of a plan, by their paths."""
    return dict(zip(save_plan.data_files(folder), save_plan.layout.file_sizes))


def draw_plan(
    data: st.DataObject, rows: tuple[AxisMap, ...], shift: int = 0, cast: str = ""
) -> SavePlan:
    """Draw the chunk shapes of a plan."""
    chunks = [data.draw(dividing_chunks(row.leaf_shape)) for row in rows]
    return make_save_plan(rows, chunks, shift, cast)


def check_leaves(
    save_plan: SavePlan, folder: Path, rows: tuple[AxisMap, ...], tensors: dict[str, np.ndarray]
) -> None:
    """Compare all leaves, with the dtype of the tensors, with leaves that NumPy computes."""
    dtype = next(iter(tensors.values())).dtype
    for number, row in enumerate(rows):
        leaf = save_plan.read_leaf(save_plan.data_files(folder), number)
        assert np.array_equal(leaf.view(dtype), leaf_by_numpy(row, tensors))


def digests_of(arrays: Iterable[np.ndarray]) -> list[str]:
    """Return the digests of arrays."""
    return [xxhash.xxh3_128_hexdigest(array.tobytes()) for array in arrays]


@pytest.mark.parametrize("count", slow_except((15, 60), (15,)))
def test_pipeline_saves_and_exports_the_same_bytes(tmp_path_factory, count: int):
    @settings(QUIET, max_examples=count)
    @given(complete_tables(), st.data())
    def check(rows: tuple[AxisMap, ...], data: st.DataObject):
        tmp = tmp_path_factory.mktemp("engine")
        shift = data.draw(st.integers(0, 9)) * 4
        limit = data.draw(st.sampled_from([4, 20, 64, 4096, 1 << 20]))
        save_plan = draw_plan(data, rows, shift)
        streams = save_plan.plan.streams
        coverage.check(save_plan.plan, limit)
        policy = WritePolicy(0, has_direct=data.draw(st.booleans()))
        result = save(save_plan, tmp, limit, policy=policy, has_threads=data.draw(st.booleans()))
        check_leaves(save_plan, tmp, rows, save_plan.tensors)
        read = [digest.read for digest in result.digests.values()]
        assert read == digests_of(save_plan.tensors.values())

        source = (tmp / "source").read_bytes()
        saved, copy = save_plan.data_files(tmp), tmp / "back"
        exported = run(reverse_streams(streams), saved, {copy: len(source)}, limit)
        assert copy.read_bytes()[shift:] == source[shift:]
        assert exported.digests == result.digests

    check()


@pytest.mark.parametrize("count", slow_except((15, 60), (15,)))
def test_pipeline_casts_while_saving_and_exporting(tmp_path_factory, count: int):
    @settings(QUIET, max_examples=count)
    @given(complete_tables(), st.sampled_from(["float16", "bfloat16"]), st.data())
    def check(rows: tuple[AxisMap, ...], cast: str, data: st.DataObject):
        tmp = tmp_path_factory.mktemp("cast")
        shift, limit = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([4, 20, 64, 4096]))
        save_plan = draw_plan(data, rows, shift, cast)
        tensors = save_plan.tensors
        coverage.check(save_plan.plan, limit)
        result = save(save_plan, tmp, limit, has_threads=data.draw(st.booleans()))
        written = {name: tensor.astype(numpy_dtype(cast)) for name, tensor in tensors.items()}
        bits = {name: tensor.view(np.int16) for name, tensor in written.items()}
        check_leaves(save_plan, tmp, rows, bits)
        digests = [*result.digests.values()]
        assert [digest.read for digest in digests] == digests_of(tensors.values())
        assert [digest.written for digest in digests] == digests_of(written.values())
        for digest, name in zip(digests, tensors):
            changed = written[name].astype(np.float32) != tensors[name]
            assert digest.counts
            assert (digest.counts.values, digest.counts.changed) == (changed.size, changed.sum())

        wider: list[Stream] = []
        for stream in reverse_streams(save_plan.plan.streams):
            wider.append(replace(stream, dtype=cast, operations=(Cast("float32"),)))
        copy = tmp / "back"
        run(wider, save_plan.data_files(tmp), {copy: (tmp / "source").stat().st_size}, limit)
        expected = b"".join(tensor.astype(np.float32).tobytes() for tensor in written.values())
        assert copy.read_bytes()[shift:] == expected

    check()


@QUIET
@given(complete_tables(), st.data())
def test_coverage_detects_a_missing_or_repeated_copy(rows: tuple[AxisMap, ...], data):
    plan = make_save_plan(rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows]).plan
    slabs = split_streams(plan.streams, data.draw(st.sampled_from([4, 20, 64])))
    damaged_slab = data.draw(st.integers(0, len(slabs) - 1))
    direction = data.draw(st.sampled_from(["reads", "writes"]))
    copies = getattr(slabs[damaged_slab], direction)
    damaged_copy = data.draw(st.integers(0, len(copies) - 1))
    is_repeated = data.draw(st.booleans())
    changed = (
        (*copies, copies[damaged_copy])
        if is_repeated
        else copies[:damaged_copy] + copies[damaged_copy + 1 :]
    )
    slabs[damaged_slab] = replace(slabs[damaged_slab], **{direction: changed})

    def split_damaged(number: int, *_: object, **__: object) -> list[Slab]:
        return [slab for slab in slabs if slab.stream_number == number]

    with (
        mock.patch.object(coverage, "split_stream", split_damaged),
        pytest.raises(PrepError, match="the plan is inconsistent"),
    ):
        coverage.check(plan, 64)


@pytest.mark.parametrize(("has_direct", "copied_nbytes"), [(True, 5 * PAGE), (False, 0)])
def test_only_direct_writes_are_aligned_in_memory(
    tmp_path: Path, has_direct: bool, copied_nbytes: int
):
    content = np.random.default_rng(0).bytes(8 + 5 * PAGE)
    (tmp_path / "in").write_bytes(content)
    shape = (5, PAGE // 4)
    reads, writes = (flat("int32", shape, 8),), (flat("int32", shape, 4),)
    stream = Stream("w", "int32", shape, (0, 5), reads, writes)
    policy = WritePolicy(0, has_direct=has_direct)
    out = tmp_path / "out"
    result = run([stream], [tmp_path / "in"], {out: 4 + 5 * PAGE}, 2 * PAGE, policy=policy)
    assert result.copied_nbytes == copied_nbytes
    assert out.read_bytes() == bytes(4) + content[8:]


class Killed(BaseException):
    """A simulated signal."""


class Stopping(NullProgress):
    """Progress that kills the pipeline after a number of writes."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def advance(self, written_bytes: int) -> None:
        self.remaining -= 1
        if self.remaining < 0:
            raise Killed


@pytest.mark.parametrize("count", slow_except((15, 60), (15,)))
def test_killed_run_resumes_to_the_same_bytes(tmp_path_factory, count: int):
    @settings(QUIET, max_examples=count)
    @given(complete_tables(), st.data())
    def check(rows: tuple[AxisMap, ...], data: st.DataObject):
        tmp = tmp_path_factory.mktemp("resume")
        save_plan = draw_plan(data, rows)
        streams = save_plan.plan.streams
        stop = data.draw(st.integers(0, len(split_streams(streams, 8))))
        durable = DurableUnit(streams)
        options: dict[str, Any] = {"observer": durable, "has_threads": data.draw(st.booleans())}
        try:
            save(save_plan, tmp, 8, progress=Stopping(stop), **options)
        except Killed:
            assert not durable.is_complete
        limit = data.draw(st.sampled_from([8, 64]))
        result = save(save_plan, tmp, limit, units=durable.resumed(), **options)
        assert durable.is_complete
        check_leaves(save_plan, tmp, rows, save_plan.tensors)
        read = [digest.read for digest in result.digests.values()]
        assert read == digests_of(save_plan.tensors.values())

    check()


def padded_streams(rows: int, padded_rows: int, columns: int, fill: Fill) -> tuple[Stream, Stream]:
    """Return the streams of a float32 tensor and of new rows after it."""
    shape = (padded_rows, columns)
    whole = (flat("float32", shape),)
    true_rows = Stream("t", "float32", shape, (0, rows), whole, whole)
    return true_rows, Stream("t", "float32", shape, (rows, padded_rows), (), whole, (fill,))


@pytest.mark.parametrize("limit", [28, 100, 4096])
@pytest.mark.parametrize("kind", ["zeros", "mean", "normal"])
def test_pipeline_fills_padding_rows_by_fill_kind(tmp_path, kind: str, limit: int):
    table = np.random.default_rng(1).standard_normal((131, 7)).astype(np.float32)
    (tmp_path / "source").write_bytes(table.tobytes())
    streams = padded_streams(131, 136, 7, Fill(kind, seed=3, std=0.5))
    run(streams, [tmp_path / "source"], {tmp_path / "out": 136 * 28}, limit)
    out = np.fromfile(tmp_path / "out", np.float32).reshape(136, 7)
    assert np.array_equal(out[:131], table)
    num_different_rows = len({row.tobytes() for row in out[131:]})
    if kind == "zeros":
        assert not out[131:].any()
    elif kind == "mean":
        mean = table.astype(np.float64).mean(0)
        np.testing.assert_allclose(out[131:], np.tile(mean, (5, 1)), rtol=1e-6)
        assert num_different_rows == 1
    else:
        assert num_different_rows == 5
        assert 0.1 < out[131:].std() < 1.0


def test_other_values_of_a_durable_stream_are_an_error(tmp_path):
    """It is read again for the mean of its rows, which the new rows then have."""
    (tmp_path / "source").write_bytes(bytes(16 * 4))
    streams = padded_streams(4, 6, 4, Fill("mean"))
    digest = xxhash.xxh3_128_hexdigest(b"\1" * 64)
    units = [PipelineUnit(0, range(2), {0: StreamDigest(digest, digest)})]
    with pytest.raises(PrepError, match="t was read with other values than by an earlier run"):
        run(streams, [tmp_path / "source"], {tmp_path / "out": 6 * 16}, 64, units=units)


def test_empty_tensors_have_digests(tmp_path):
    (tmp_path / "source").write_bytes(bytes(20))
    streams: list[Stream] = []
    for name, shape in {"first": (0, 5), "full": (5,), "last": (3, 0)}.items():
        whole = (flat("int32", shape),)
        streams.append(Stream(name, "int32", shape, (0, shape[0]), whole, whole))
    expected = [xxhash.xxh3_128_hexdigest(bytes(n)) for n in (0, 20, 0)]
    # The second run has nothing to read.
    for read_nbytes, durable in ((20, {}), (0, {1: StreamDigest(expected[1], expected[1])})):
        units = [PipelineUnit(0, range(3), durable)]
        out = {tmp_path / "out": 20}
        result = run(streams, [tmp_path / "source"], out, 64, units=units)
        assert [result.digests[number].read for number in range(3)] == expected
        assert result.read_nbytes == read_nbytes


def test_rows_larger_than_a_slab_are_split(tmp_path):
    sizes = {"experts": 3, "mlp": 10, "embed": 6}
    row = bind_row(parse_row("experts mlp embed <- w: experts mlp embed"), sizes)
    save_plan = make_save_plan([row], [(1, 5, 3)])
    assert all(slab.nbytes <= 60 for slab in split_streams(save_plan.plan.streams, 60))
    save(save_plan, tmp_path, 60)
    check_leaves(save_plan, tmp_path, (row,), save_plan.tensors)


@pytest.mark.parametrize(
    ("chunk", "limit"),
    slow_except(
        [
            (chunk, limit)
            for limit in (1 << 20, 100_000, 5_000, 900)
            for chunk in ((300, 200), (75, 200), (30, 50), (7, 200))
        ],
        [((300, 200), 1 << 20), ((75, 200), 100_000), ((30, 50), 5_000), ((7, 200), 100_000)],
    ),
)
def test_pipeline_transposes_in_slabs_of_any_size(tmp_path, chunk: tuple[int, int], limit: int):
    row = bind_row(parse_row("mlp embed <- w: embed mlp"), {"mlp": 300, "embed": 200})
    save_plan = make_save_plan([row], [chunk])
    save(save_plan, tmp_path, limit)
    files = save_plan.data_files(tmp_path)
    assert np.array_equal(save_plan.read_leaf(files), save_plan.tensors["w"].T)
    copy = tmp_path / "back"
    run(reverse_streams(save_plan.plan.streams), files, {copy: 300 * 200 * 4}, limit)
    assert copy.read_bytes() == save_plan.tensors["w"].tobytes()


@pytest.mark.parametrize("text", ["mlp embed <- {n}: embed mlp", "embed mlp <- {n}: embed mlp"])
def test_run_never_syncs_between_slabs_that_share_pages(tmp_path, text: str):
    row = bind_row(parse_row(text), {"mlp": 40, "embed": 60, "n": 3})
    save_plan = make_save_plan([row], [row.leaf_shape])
    durable = DurableUnit(save_plan.plan.streams)
    # a sync every 2000 bytes
    save(save_plan, tmp_path, Budget(4000, 1600, 6), observer=durable)
    complete_nbytes = [n * 40 * 60 * 4 for n in range(4)]
    is_turned = text.startswith("mlp")
    assert ({*durable.marks()} <= {*complete_nbytes}) == is_turned
    assert durable.marks()[-1] == complete_nbytes[-1]


# Exceptions of signals anywhere in the main thread
NUM_POINTS = 100  # interrupted points, of about 6,000 calls and returns


def convert(save_plan: SavePlan, folder: Path, durable: DurableUnit) -> None:
    """Run a plan, or resume it, in slabs of 1,200 bytes and with four buffers."""
    budget = Budget(4000, 1200, 4)  # a sync every 2,000 bytes
    source, units = folder.parent / "source", durable.resumed()
    files = outputs(save_plan, folder)
    run(save_plan.plan.streams, [source], files, budget, units=units, observer=durable)


# The warning is about errors in callbacks of weak references.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", slow_except(range(30), (0,)))
def test_run_interrupted_anywhere_ends_and_resumes(tmp_path: Path, part: int):
    row = bind_row(parse_row("mlp embed <- {n}: embed mlp"), {"mlp": 30, "embed": 50, "n": 3})
    save_plan = make_save_plan([row], [row.leaf_shape])
    save_plan.write_source(tmp_path)
    folders = (tmp_path / str(number) for number in range(1, NUM_POINTS + 3))
    (whole := next(folders)).mkdir()
    durable = DurableUnit(save_plan.plan.streams)
    num_events = run_interrupted(lambda: convert(save_plan, whole, durable), None).num_events
    expected = save_plan.read_leaf(save_plan.data_files(whole))
    for at in random.Random(part).sample(range(num_events), NUM_POINTS):
        (folder := next(folders)).mkdir()
        durable = DurableUnit(save_plan.plan.streams)

        def call(folder: Path = folder, durable: DurableUnit = durable) -> None:
            convert(save_plan, folder, durable)

        ended = run_interrupted(call, at)
        assert ended.error is None or isinstance(ended.error, SimulatedSignal), repr(ended.error)
        if not durable.is_complete:
            convert(save_plan, folder, durable)
        assert np.array_equal(save_plan.read_leaf(save_plan.data_files(folder)), expected)


# Results


def make_result() -> ConversionResult:
    return ConversionResult(
        read_nbytes=100,
        written_nbytes=90,
        copied_nbytes=30,
        resumed_nbytes=7,
        peak_nbytes=1 << 20,
        seconds={"read": 0.5, "move": 0.0, "write": 2.125},
    )


def test_result_is_read_from_its_json_fields():
    fields = json.loads(json.dumps(make_result().json_fields(1 << 30)))
    assert fields["bytes"]["moved"] == 220
    assert fields["memory"] == {"budget": 1 << 30, "peak": 1 << 20}
    assert ConversionResult.from_json(fields) == make_result()


@pytest.mark.parametrize("field", ["bytes", "memory", "time"])
def test_report_without_a_field_has_no_result(field: str):
    fields = make_result().json_fields(1 << 30)
    del fields[field]
    assert ConversionResult.from_json(fields) is None


def test_sum_of_results_has_the_bytes_and_times_of_both():
    total = make_result()
    total.add(make_result())
    assert (total.read_nbytes, total.written_nbytes, total.copied_nbytes) == (200, 180, 60)
    assert total.resumed_nbytes == 14
    assert total.seconds == {"read": 1.0, "move": 0.0, "write": 4.25}
