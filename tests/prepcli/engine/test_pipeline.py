"""The engine against whole arrays: random rows, grids and slab sizes; there, back, cut short and gone on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.console.progress import NullProgress
from prepcli.engine import pipeline
from prepcli.engine.budget import Budget
from prepcli.engine.casts import parse_stream_digest
from prepcli.engine.files import Files
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.io_policy import WritePolicy
from prepcli.engine.journal import Journal, StreamPrefix
from prepcli.errors import PrepError
from prepcli.planning import coverage
from prepcli.planning.plan import Contiguous, Fill, Stream
from prepcli.planning.slabs import PAGE, split_streams
from tests.helpers.plans import dividing_chunks, make_save_plan, reverse_streams
from tests.helpers.strategies import complete_tables, leaf_by_numpy
from trainer.models.axis_map import AxisMap, bind_row, parse_row

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_budget(slab_nbytes: int) -> Budget:
    return Budget(1 << 30, slab_nbytes, 6)


@QUIET
@given(complete_tables(), st.data())
def test_save_and_export_any_row_on_any_grid(tmp_path_factory, rows: tuple[AxisMap, ...], data):
    tmp = tmp_path_factory.mktemp("engine")
    shift, limit = data.draw(st.integers(0, 9)) * 4, data.draw(st.sampled_from([4, 20, 64, 4096, 1 << 20]))
    made = make_save_plan(rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows], shift)
    plan, tensors = made.plan, made.tensors
    coverage.check(plan, lambda: split_streams(plan.streams, limit))
    source, paths = made.write_source(tmp), made.data_files(tmp)
    with Files([source]) as left, Files(paths, made.layout.file_sizes) as right:
        right.policy = WritePolicy(0, has_direct=data.draw(st.booleans()))
        outcome = pipeline.run(plan.streams, left, right, make_budget(limit), NullProgress())
    for number, row in enumerate(rows):
        assert np.array_equal(made.read_leaf(paths, number), leaf_by_numpy(row, tensors))
    assert list(outcome.digests.values()) == [xxhash.xxh3_128_hexdigest(t.tobytes()) for t in tensors.values()]

    copy = tmp / "back"
    with Files(paths) as left, Files([copy], [source.stat().st_size]) as right:
        again = pipeline.run(reverse_streams(plan.streams), left, right, make_budget(limit), NullProgress())
    assert copy.read_bytes()[shift:] == source.read_bytes()[shift:]
    assert again.digests == outcome.digests


@QUIET
@given(complete_tables(), st.sampled_from(["float16", "bfloat16"]), st.data())
def test_cast_on_the_way_into_any_row_on_any_grid(tmp_path_factory, rows: tuple[AxisMap, ...], cast: str, data):
    tmp = tmp_path_factory.mktemp("cast")
    shift, limit = data.draw(st.integers(0, 9)), data.draw(st.sampled_from([4, 20, 64, 4096]))
    made = make_save_plan(rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows], shift, cast)
    plan = made.plan
    coverage.check(plan, lambda: split_streams(plan.streams, limit))
    source, paths = made.write_source(tmp), made.data_files(tmp)
    with Files([source]) as left, Files(paths, made.layout.file_sizes) as right:
        outcome = pipeline.run(plan.streams, left, right, make_budget(limit), NullProgress())
    written = {name: tensor.astype(numpy_dtype(cast)) for name, tensor in made.tensors.items()}
    bits = {name: tensor.view(np.int16) for name, tensor in written.items()}
    for number, row in enumerate(rows):
        assert np.array_equal(made.read_leaf(paths, number).view(np.int16), leaf_by_numpy(row, bits))
    for text, name in zip(outcome.digests.values(), made.tensors):
        found = parse_stream_digest(text)
        assert found.read == xxhash.xxh3_128_hexdigest(made.tensors[name].tobytes())
        assert found.written == xxhash.xxh3_128_hexdigest(written[name].tobytes())
        changed = written[name].astype(np.float32) != made.tensors[name]
        assert found.counts
        assert (found.counts.values, found.counts.changed) == (changed.size, changed.sum())

    wider = tuple(replace(s, dtype=cast, cast_to="float32") for s in reverse_streams(plan.streams))
    copy = tmp / "back"
    with Files(paths) as left, Files([copy], [source.stat().st_size]) as right:
        pipeline.run(wider, left, right, make_budget(limit), NullProgress())
    expected = b"".join(tensor.astype(np.float32).tobytes() for tensor in written.values())
    assert copy.read_bytes()[shift:] == expected


@QUIET
@given(complete_tables(), st.data())
def test_coverage_sees_every_single_omission_and_double_use(rows: tuple[AxisMap, ...], data):
    plan = make_save_plan(rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows]).plan
    slabs = list(split_streams(plan.streams, data.draw(st.sampled_from([4, 20, 64]))))
    victim = data.draw(st.integers(0, len(slabs) - 1))
    side = data.draw(st.sampled_from(["left", "right"]))
    copies = getattr(slabs[victim], side)
    which = data.draw(st.integers(0, len(copies) - 1))
    twice = data.draw(st.booleans())
    changed = (*copies, copies[which]) if twice else copies[:which] + copies[which + 1 :]
    slabs[victim] = replace(slabs[victim], **{side: changed})
    with pytest.raises(PrepError, match="does not add up"):
        coverage.check(plan, lambda: slabs)


@pytest.mark.parametrize(("has_direct", "copied_nbytes"), [(True, 5 * PAGE), (False, 0)])
def test_only_direct_writes_are_aligned_in_memory(tmp_path: Path, has_direct: bool, copied_nbytes: int):
    content = np.random.default_rng(0).bytes(8 + 5 * PAGE)
    (tmp_path / "in").write_bytes(content)
    stream = Stream("w", "int32", (5, PAGE // 4), (0, 5), (Contiguous(0, 8),), (Contiguous(0, 4),))
    with Files([tmp_path / "in"]) as left, Files([tmp_path / "out"], [4 + 5 * PAGE]) as right:
        right.policy = WritePolicy(0, has_direct=has_direct)
        outcome = pipeline.run([stream], left, right, make_budget(2 * PAGE), NullProgress())
    assert outcome.copied_nbytes == copied_nbytes
    assert (tmp_path / "out").read_bytes() == bytes(4) + content[8:]


class Killed(BaseException):
    """What stands for a signal."""


@QUIET
@given(complete_tables(), st.data())
def test_a_run_cut_short_anywhere_goes_on_to_the_same_bytes(tmp_path_factory, rows: tuple[AxisMap, ...], data):
    tmp = tmp_path_factory.mktemp("resume")
    made = make_save_plan(rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows])
    plan, tensors = made.plan, made.tensors
    source, paths = made.write_source(tmp), made.data_files(tmp)
    count = sum(1 for _ in split_streams(plan.streams, 8))
    stop = data.draw(st.integers(0, count))

    class Stopping(NullProgress):
        left = stop

        def advance(self, written_bytes: int) -> None:
            self.left -= 1
            if self.left < 0:
                raise Killed

    journal = Journal(tmp / "journal", "run")
    with Files([source]) as left, Files(paths, made.layout.file_sizes) as right:
        try:
            pipeline.run(plan.streams, left, right, make_budget(8), Stopping(), journal)
        except Killed:
            assert journal.done_nbytes < sum(s.nbytes for s in plan.streams)
    journal.close()
    with (tmp / "journal").open("ab") as torn:
        torn.write(b'{"done": 99')
    journal = Journal(tmp / "journal", "run")
    with Files([source]) as left, Files(paths, made.layout.file_sizes) as right:
        outcome = pipeline.run(plan.streams, left, right, make_budget(64), NullProgress(), journal)
    journal.close()
    for number, row in enumerate(rows):
        assert np.array_equal(made.read_leaf(paths, number), leaf_by_numpy(row, tensors))
    assert list(outcome.digests.values()) == [xxhash.xxh3_128_hexdigest(t.tobytes()) for t in tensors.values()]


def test_a_journal_of_another_run_is_refused(tmp_path):
    Journal(tmp_path / "journal", "one").close()
    with pytest.raises(PrepError, match="belongs to another run"):
        Journal(tmp_path / "journal", "two")


@pytest.mark.parametrize("limit", [28, 100, 4096])
@pytest.mark.parametrize("kind", ["zeros", "mean", "normal"])
def test_padding_rows(tmp_path, kind: str, limit: int):
    table = np.random.default_rng(1).standard_normal((131, 7)).astype(np.float32)
    (tmp_path / "source").write_bytes(table.tobytes())
    true = Stream("t", "float32", (136, 7), (0, 131), (Contiguous(0, 0),), (Contiguous(0, 0),))
    padding = Stream("t", "float32", (136, 7), (131, 136), (), (Contiguous(0, 0),), Fill(kind, seed=3, std=0.5))
    with Files([tmp_path / "source"]) as left, Files([tmp_path / "out"], [136 * 28]) as right:
        pipeline.run((true, padding), left, right, make_budget(limit), NullProgress())
    out = np.fromfile(tmp_path / "out", np.float32).reshape(136, 7)
    assert np.array_equal(out[:131], table)
    if kind == "zeros":
        assert not out[131:].any()
    elif kind == "mean":
        np.testing.assert_allclose(out[131:], np.tile(table.astype(np.float64).mean(0), (5, 1)), rtol=1e-6)
        assert len({row.tobytes() for row in out[131:]}) == 1
    else:
        assert len({row.tobytes() for row in out[131:]}) == 5
        assert 0.1 < out[131:].std() < 1.0


def test_tensors_without_elements_have_their_digest_too(tmp_path):
    (tmp_path / "source").write_bytes(bytes(20))
    streams = tuple(
        Stream(name, "int32", shape, (0, shape[0]), (Contiguous(0, 0),), (Contiguous(0, 0),))
        for name, shape in {"first": (0, 5), "full": (5,), "last": (3, 0)}.items()
    )
    with Files([tmp_path / "source"]) as left, Files([tmp_path / "out"], [20]) as right:
        for read_nbytes in (20, 0):  # the second time there is nothing left to do
            journal = Journal(tmp_path / "journal", "run")
            outcome = pipeline.run(streams, left, right, make_budget(64), NullProgress(), journal)
            journal.close()
            expected = [xxhash.xxh3_128_hexdigest(bytes(n)) for n in (0, 20, 0)]
            assert [outcome.digests[number] for number in range(3)] == expected
            assert outcome.read_nbytes == read_nbytes


def test_a_source_that_shrinks_is_named(tmp_path):
    (tmp_path / "source").write_bytes(b"\0" * 10)
    stream = Stream("t", "int32", (5,), (0, 5), (Contiguous(0, 0),), (Contiguous(0, 0),))
    with (
        Files([tmp_path / "source"]) as left,
        Files([tmp_path / "out"], [20]) as right,
        pytest.raises(PrepError, match="source is cut short"),
    ):
        pipeline.run((stream,), left, right, make_budget(64), NullProgress())


def test_a_row_wider_than_a_slab_is_cut_along_a_second_axis(tmp_path):
    row = bind_row(parse_row("experts mlp embed <- w: experts mlp embed"), {"experts": 3, "mlp": 10, "embed": 6})
    made = make_save_plan([row], [(1, 5, 3)])
    plan, paths = made.plan, made.data_files(tmp_path)
    assert all(slab.nbytes <= 60 for slab in split_streams(plan.streams, 60))
    with Files([made.write_source(tmp_path)]) as left, Files(paths, made.layout.file_sizes) as right:
        pipeline.run(plan.streams, left, right, make_budget(60), NullProgress())
    assert np.array_equal(made.read_leaf(paths), made.tensors["w"])


@pytest.mark.parametrize("chunk", [(300, 200), (75, 200), (30, 50), (7, 200)])
@pytest.mark.parametrize("limit", [1 << 20, 100_000, 5_000, 900])
def test_transposes_of_any_part_at_a_time(tmp_path, chunk: tuple[int, int], limit: int):
    row = bind_row(parse_row("mlp embed <- w: embed mlp"), {"mlp": 300, "embed": 200})
    made = make_save_plan([row], [chunk])
    paths, plan = made.data_files(tmp_path), made.plan
    with Files([made.write_source(tmp_path)]) as left, Files(paths, made.layout.file_sizes) as right:
        pipeline.run(plan.streams, left, right, make_budget(limit), NullProgress())
    assert np.array_equal(made.read_leaf(paths), made.tensors["w"].T)
    copy = tmp_path / "back"
    with Files(paths) as left, Files([copy], [300 * 200 * 4]) as right:
        pipeline.run(reverse_streams(plan.streams), left, right, make_budget(limit), NullProgress())
    assert copy.read_bytes() == made.tensors["w"].tobytes()


class RecordingJournal(Journal):
    """A journal that remembers how much was durable each time."""

    def __init__(self, folder: Path) -> None:
        self.marks: list[int] = []
        super().__init__(folder / "journal", "run")

    def record(self, done_nbytes: int, digests: dict[int, str], prefix: StreamPrefix | None = None) -> None:
        self.marks.append(done_nbytes)
        super().record(done_nbytes, digests, prefix)


@pytest.mark.parametrize("text", ["mlp embed <- {n}: embed mlp", "embed mlp <- {n}: embed mlp"])
def test_pages_that_several_slabs_write_to_are_not_made_durable_between_them(tmp_path, text: str):
    row = bind_row(parse_row(text), {"mlp": 40, "embed": 60, "n": 3})
    made = make_save_plan([row], [row.leaf_shape])
    journal = RecordingJournal(tmp_path)
    small = Budget(4000, 1600, 6)  # durable each 2000 bytes
    with (
        Files([made.write_source(tmp_path)]) as left,
        Files(made.data_files(tmp_path), made.layout.file_sizes) as right,
    ):
        pipeline.run(made.plan.streams, left, right, small, NullProgress(), journal)
    journal.close()
    whole = [n * 40 * 60 * 4 for n in range(4)]
    is_turned = text.startswith("mlp")
    assert ({*journal.marks} <= {*whole}) == is_turned
    assert journal.marks[-1] == whole[-1]


def test_a_transpose_of_a_real_size(tmp_path):
    row = bind_row(parse_row("mlp embed <- w: embed mlp"), {"mlp": 300, "embed": 200})
    made = make_save_plan([row], [(300, 200)])
    paths = made.data_files(tmp_path)
    with Files([made.write_source(tmp_path)]) as left, Files(paths, made.layout.file_sizes) as right:
        pipeline.run(made.plan.streams, left, right, make_budget(1 << 20), NullProgress())
    assert np.array_equal(made.read_leaf(paths), made.tensors["w"].T)
