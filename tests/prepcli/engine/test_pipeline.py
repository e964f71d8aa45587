"""The pipeline compared with whole arrays: random axis maps, grids and slab sizes; saved, exported and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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
from prepcli.engine.budget import Budget
from prepcli.engine.casts import Cast
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import Files
from prepcli.engine.fills import Fill, numpy_dtype
from prepcli.engine.pipeline import Pipeline, PipelineUnit
from prepcli.engine.write_policy import WritePolicy
from prepcli.planning import coverage
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import PAGE, Slab
from tests.helpers.durable_units import DurableUnit
from tests.helpers.plans import (
    dividing_chunks,
    flat,
    make_save_plan,
    reverse_streams,
    split_streams,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.strategies import complete_tables, leaf_by_numpy

QUIET = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def make_budget(slab_nbytes: int) -> Budget:
    return Budget(1 << 30, slab_nbytes, 6)


@pytest.mark.parametrize("count", slow_except((15, 60), (15,)))
def test_pipeline_saves_and_exports_the_same_bytes(tmp_path_factory, count: int):
    @settings(QUIET, max_examples=count)
    @given(complete_tables(), st.data())
    def check(rows: tuple[AxisMap, ...], data):
        tmp = tmp_path_factory.mktemp("engine")
        shift, limit = (
            data.draw(st.integers(0, 9)) * 4,
            data.draw(st.sampled_from([4, 20, 64, 4096, 1 << 20])),
        )
        save_plan = make_save_plan(
            rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows], shift
        )
        plan, tensors = save_plan.plan, save_plan.tensors
        coverage.check(plan, limit)
        source, paths = save_plan.write_source(tmp), save_plan.data_files(tmp)
        with Files([source]) as reader, Files(paths, save_plan.layout.file_sizes) as sink:
            sink.policy = WritePolicy(0, has_direct=data.draw(st.booleans()))
            result = Pipeline(
                plan.streams, reader, sink=sink, budget=make_budget(limit), progress=NullProgress()
            ).run()
        for number, row in enumerate(rows):
            assert np.array_equal(save_plan.read_leaf(paths, number), leaf_by_numpy(row, tensors))
        assert [digest.read for digest in result.digests.values()] == [
            xxhash.xxh3_128_hexdigest(t.tobytes()) for t in tensors.values()
        ]

        copy = tmp / "back"
        with Files(paths) as reader, Files([copy], [source.stat().st_size]) as sink:
            exported = Pipeline(
                reverse_streams(plan.streams),
                reader,
                sink=sink,
                budget=make_budget(limit),
                progress=NullProgress(),
            ).run()
        assert copy.read_bytes()[shift:] == source.read_bytes()[shift:]
        assert exported.digests == result.digests

    check()


@pytest.mark.parametrize("count", slow_except((15, 60), (15,)))
def test_pipeline_casts_while_saving_and_exporting(tmp_path_factory, count: int):
    @settings(QUIET, max_examples=count)
    @given(complete_tables(), st.sampled_from(["float16", "bfloat16"]), st.data())
    def check(rows: tuple[AxisMap, ...], cast: str, data):
        tmp = tmp_path_factory.mktemp("cast")
        shift, limit = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([4, 20, 64, 4096]))
        save_plan = make_save_plan(
            rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows], shift, cast
        )
        plan = save_plan.plan
        coverage.check(plan, limit)
        source, paths = save_plan.write_source(tmp), save_plan.data_files(tmp)
        with Files([source]) as reader, Files(paths, save_plan.layout.file_sizes) as sink:
            result = Pipeline(
                plan.streams, reader, sink=sink, budget=make_budget(limit), progress=NullProgress()
            ).run()
        written = {
            name: tensor.astype(numpy_dtype(cast)) for name, tensor in save_plan.tensors.items()
        }
        bits = {name: tensor.view(np.int16) for name, tensor in written.items()}
        for number, row in enumerate(rows):
            assert np.array_equal(
                save_plan.read_leaf(paths, number).view(np.int16), leaf_by_numpy(row, bits)
            )
        for digest, name in zip(result.digests.values(), save_plan.tensors):
            assert digest.read == xxhash.xxh3_128_hexdigest(save_plan.tensors[name].tobytes())
            assert digest.written == xxhash.xxh3_128_hexdigest(written[name].tobytes())
            changed = written[name].astype(np.float32) != save_plan.tensors[name]
            assert digest.counts
            assert (digest.counts.values, digest.counts.changed) == (changed.size, changed.sum())

        wider = tuple(
            replace(s, dtype=cast, operations=(Cast("float32"),))
            for s in reverse_streams(plan.streams)
        )
        copy = tmp / "back"
        with Files(paths) as reader, Files([copy], [source.stat().st_size]) as sink:
            Pipeline(
                wider, reader, sink=sink, budget=make_budget(limit), progress=NullProgress()
            ).run()
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
    stream = Stream(
        "w",
        "int32",
        (5, PAGE // 4),
        (0, 5),
        (flat("int32", (5, PAGE // 4), 8),),
        (flat("int32", (5, PAGE // 4), 4),),
    )
    with Files([tmp_path / "in"]) as reader, Files([tmp_path / "out"], [4 + 5 * PAGE]) as sink:
        sink.policy = WritePolicy(0, has_direct=has_direct)
        result = Pipeline(
            [stream], reader, sink=sink, budget=make_budget(2 * PAGE), progress=NullProgress()
        ).run()
    assert result.copied_nbytes == copied_nbytes
    assert (tmp_path / "out").read_bytes() == bytes(4) + content[8:]


class Killed(BaseException):
    """A simulated signal."""


@pytest.mark.parametrize("count", slow_except((15, 60), (15,)))
def test_killed_run_resumes_to_the_same_bytes(tmp_path_factory, count: int):
    @settings(QUIET, max_examples=count)
    @given(complete_tables(), st.data())
    def check(rows: tuple[AxisMap, ...], data):
        tmp = tmp_path_factory.mktemp("resume")
        save_plan = make_save_plan(
            rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows]
        )
        plan, tensors = save_plan.plan, save_plan.tensors
        source, paths = save_plan.write_source(tmp), save_plan.data_files(tmp)
        count = len(split_streams(plan.streams, 8))
        stop = data.draw(st.integers(0, count))

        class Stopping(NullProgress):
            remaining = stop

            def advance(self, written_bytes: int) -> None:
                self.remaining -= 1
                if self.remaining < 0:
                    raise Killed

        durable = DurableUnit(plan.streams)
        with Files([source]) as reader, Files(paths, save_plan.layout.file_sizes) as sink:
            try:
                Pipeline(
                    plan.streams,
                    reader,
                    sink=sink,
                    budget=make_budget(8),
                    progress=Stopping(),
                    observer=durable,
                ).run()
            except Killed:
                assert not durable.is_complete
        with Files([source]) as reader, Files(paths, save_plan.layout.file_sizes) as sink:
            result = Pipeline(
                plan.streams,
                reader,
                sink=sink,
                budget=make_budget(64),
                progress=NullProgress(),
                units=durable.resumed(),
                observer=durable,
            ).run()
        assert durable.is_complete
        for number, row in enumerate(rows):
            assert np.array_equal(save_plan.read_leaf(paths, number), leaf_by_numpy(row, tensors))
        assert [digest.read for digest in result.digests.values()] == [
            xxhash.xxh3_128_hexdigest(t.tobytes()) for t in tensors.values()
        ]

    check()


@pytest.mark.parametrize("limit", [28, 100, 4096])
@pytest.mark.parametrize("kind", ["zeros", "mean", "normal"])
def test_pipeline_fills_padding_rows_by_fill_kind(tmp_path, kind: str, limit: int):
    table = np.random.default_rng(1).standard_normal((131, 7)).astype(np.float32)
    (tmp_path / "source").write_bytes(table.tobytes())
    true_rows = Stream(
        "t",
        "float32",
        (136, 7),
        (0, 131),
        (flat("float32", (136, 7)),),
        (flat("float32", (136, 7)),),
    )
    padding = Stream(
        "t",
        "float32",
        (136, 7),
        (131, 136),
        (),
        (flat("float32", (136, 7)),),
        (Fill(kind, seed=3, std=0.5),),
    )
    with Files([tmp_path / "source"]) as reader, Files([tmp_path / "out"], [136 * 28]) as sink:
        Pipeline(
            (true_rows, padding),
            reader,
            sink=sink,
            budget=make_budget(limit),
            progress=NullProgress(),
        ).run()
    out = np.fromfile(tmp_path / "out", np.float32).reshape(136, 7)
    assert np.array_equal(out[:131], table)
    if kind == "zeros":
        assert not out[131:].any()
    elif kind == "mean":
        np.testing.assert_allclose(
            out[131:], np.tile(table.astype(np.float64).mean(0), (5, 1)), rtol=1e-6
        )
        assert len({row.tobytes() for row in out[131:]}) == 1
    else:
        assert len({row.tobytes() for row in out[131:]}) == 5
        assert 0.1 < out[131:].std() < 1.0


def test_other_values_of_a_durable_stream_are_an_error(tmp_path):
    """It is read again for the mean of its rows, which the new rows then have."""
    (tmp_path / "source").write_bytes(bytes(16 * 4))
    whole = (flat("float32", (6, 4)),)
    true_rows = Stream("t", "float32", (6, 4), (0, 4), whole, whole)
    padding = Stream("t", "float32", (6, 4), (4, 6), (), whole, (Fill("mean"),))
    digest = xxhash.xxh3_128_hexdigest(b"\1" * 64)
    durable = {0: StreamDigest(digest, digest)}
    with (
        Files([tmp_path / "source"]) as reader,
        Files([tmp_path / "out"], [6 * 16]) as sink,
        pytest.raises(PrepError, match="t was read with other values than by an earlier run"),
    ):
        Pipeline(
            (true_rows, padding),
            reader,
            sink=sink,
            budget=make_budget(64),
            progress=NullProgress(),
            units=[PipelineUnit(0, range(2), durable)],
        ).run()


def test_empty_tensors_have_digests(tmp_path):
    (tmp_path / "source").write_bytes(bytes(20))
    streams = tuple(
        Stream(
            name, "int32", shape, (0, shape[0]), (flat("int32", shape),), (flat("int32", shape),)
        )
        for name, shape in {"first": (0, 5), "full": (5,), "last": (3, 0)}.items()
    )
    with Files([tmp_path / "source"]) as reader, Files([tmp_path / "out"], [20]) as sink:
        expected = [xxhash.xxh3_128_hexdigest(bytes(n)) for n in (0, 20, 0)]
        # The second run has nothing to read.
        for read_nbytes, durable in ((20, {}), (0, {1: StreamDigest(expected[1], expected[1])})):
            result = Pipeline(
                streams,
                reader,
                sink=sink,
                budget=make_budget(64),
                progress=NullProgress(),
                units=[PipelineUnit(0, range(3), durable)],
            ).run()
            assert [result.digests[number].read for number in range(3)] == expected
            assert result.read_nbytes == read_nbytes


def test_run_names_a_truncated_source(tmp_path):
    (tmp_path / "source").write_bytes(b"\0" * 10)
    stream = Stream("t", "int32", (5,), (0, 5), (flat("int32", (5,)),), (flat("int32", (5,)),))
    with (
        Files([tmp_path / "source"]) as reader,
        Files([tmp_path / "out"], [20]) as sink,
        pytest.raises(PrepError, match="source is cut short"),
    ):
        Pipeline(
            (stream,), reader, sink=sink, budget=make_budget(64), progress=NullProgress()
        ).run()


def test_rows_larger_than_a_slab_are_split(tmp_path):
    row = bind_row(
        parse_row("experts mlp embed <- w: experts mlp embed"),
        {"experts": 3, "mlp": 10, "embed": 6},
    )
    save_plan = make_save_plan([row], [(1, 5, 3)])
    plan, paths = save_plan.plan, save_plan.data_files(tmp_path)
    assert all(slab.nbytes <= 60 for slab in split_streams(plan.streams, 60))
    with (
        Files([save_plan.write_source(tmp_path)]) as reader,
        Files(paths, save_plan.layout.file_sizes) as sink,
    ):
        Pipeline(
            plan.streams, reader, sink=sink, budget=make_budget(60), progress=NullProgress()
        ).run()
    assert np.array_equal(save_plan.read_leaf(paths), save_plan.tensors["w"])


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
    paths, plan = save_plan.data_files(tmp_path), save_plan.plan
    with (
        Files([save_plan.write_source(tmp_path)]) as reader,
        Files(paths, save_plan.layout.file_sizes) as sink,
    ):
        Pipeline(
            plan.streams, reader, sink=sink, budget=make_budget(limit), progress=NullProgress()
        ).run()
    assert np.array_equal(save_plan.read_leaf(paths), save_plan.tensors["w"].T)
    copy = tmp_path / "back"
    with Files(paths) as reader, Files([copy], [300 * 200 * 4]) as sink:
        Pipeline(
            reverse_streams(plan.streams),
            reader,
            sink=sink,
            budget=make_budget(limit),
            progress=NullProgress(),
        ).run()
    assert copy.read_bytes() == save_plan.tensors["w"].tobytes()


@pytest.mark.parametrize("text", ["mlp embed <- {n}: embed mlp", "embed mlp <- {n}: embed mlp"])
def test_run_never_syncs_between_slabs_that_share_pages(tmp_path, text: str):
    row = bind_row(parse_row(text), {"mlp": 40, "embed": 60, "n": 3})
    save_plan = make_save_plan([row], [row.leaf_shape])
    durable = DurableUnit(save_plan.plan.streams)
    small = Budget(4000, 1600, 6)  # a sync every 2000 bytes
    with (
        Files([save_plan.write_source(tmp_path)]) as reader,
        Files(save_plan.data_files(tmp_path), save_plan.layout.file_sizes) as sink,
    ):
        Pipeline(
            save_plan.plan.streams,
            reader,
            sink=sink,
            budget=small,
            progress=NullProgress(),
            observer=durable,
        ).run()
    complete_nbytes = [n * 40 * 60 * 4 for n in range(4)]
    is_turned = text.startswith("mlp")
    assert ({*durable.marks()} <= {*complete_nbytes}) == is_turned
    assert durable.marks()[-1] == complete_nbytes[-1]


def test_pipeline_transposes_a_leaf_in_one_slab(tmp_path):
    row = bind_row(parse_row("mlp embed <- w: embed mlp"), {"mlp": 300, "embed": 200})
    save_plan = make_save_plan([row], [(300, 200)])
    paths = save_plan.data_files(tmp_path)
    with (
        Files([save_plan.write_source(tmp_path)]) as reader,
        Files(paths, save_plan.layout.file_sizes) as sink,
    ):
        Pipeline(
            save_plan.plan.streams,
            reader,
            sink=sink,
            budget=make_budget(1 << 20),
            progress=NullProgress(),
        ).run()
    assert np.array_equal(save_plan.read_leaf(paths), save_plan.tensors["w"].T)
