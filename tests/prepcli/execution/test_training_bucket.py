"""Steps of a run in an object store: complete or invisible, with the digests of a local run."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.core.process_group import ProcessGroup
from prepcli.engine.blobs import HostLeaf, HostShard
from prepcli.engine.budget import make_budget
from prepcli.execution import training_bucket, training_storage
from prepcli.execution.training_bucket import BucketStorage
from prepcli.execution.training_storage import MEMORY_NBYTES
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.formats.orbax import COMMIT_MARKER
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import OutputLeaf
from prepcli.planning.tensors import LeafSpec
from prepcli.restore.item_reader import open_reader
from prepcli.stores import byte_ranges, object_store, paths
from prepcli.stores.addresses import parse_url
from prepcli.stores.byte_ranges import LOCK_FILE, RetryPolicy
from prepcli.stores.object_store import Bucket
from prepcli.targets.orbax_item import plan_training_step
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.slow_cases import slow_except
from tests.helpers.thread_groups import run_together
from tests.helpers.training_states import (
    TrainingState,
    host_leaves,
    open_manager,
    read_leaves,
    save_steps,
)
from tests.helpers.waiting import MAX_S
from trainer.run.storage import check_last_step

URL = "gs://bucket/runs/tuned"
PREFIX = "bucket/runs/tuned/"
DIGEST_KEYS = ("tensors", "slots", "others", "leaves")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeObjectStore]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.001)
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "PREP_"))]:
        monkeypatch.delenv(name)
    with use_objects(monkeypatch) as fake:
        yield fake


def make_run(timeout_s: float = MAX_S, recipe: str = "recipe") -> BucketStorage:
    return BucketStorage(parse_url(URL), Path("local"), RetryPolicy(timeout_s), recipe)


def test_files_of_a_run_are_moved_in_pieces(
    store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch
):
    """The metrics of a long run are larger than the files that are fetched whole."""
    for module, name in (
        (object_store, "DOWNLOAD_PIECE_NBYTES"),
        (training_bucket, "STORED_PIECE_NBYTES"),
    ):
        monkeypatch.setattr(module, name, 1000)
    monkeypatch.setattr(paths, "SMALL_NBYTES", 1000)
    content, run = os.urandom(12_345), make_run()
    Path("local").mkdir()
    path = Path("local/metrics.jsonl")
    path.write_bytes(content)
    run.store_file(path.name)
    assert store.objects[PREFIX + path.name] == content
    path.write_bytes(b"old")
    run.fetch_file(path.name, path.parent)
    assert path.read_bytes() == content
    del store.objects[PREFIX + path.name]
    run.fetch_file(path.name, path.parent)
    assert os.listdir("local") == []
    run.store_file(path.name)
    os.mkfifo(path)
    with pytest.raises(PrepError, match="is not a file"):
        run.store_file(path.name)


def grids(init: Path, state: TrainingState) -> dict[str, OutputLeaf]:
    """Return the leaves of the plan of several processes."""
    specs = {name: LeafSpec(value.shape, value.dtype.name) for name, value in state.items()}
    with open_reader(init) as reader:
        manifest = reader.manifest | Manifest(name="tuned")
    slab_nbytes = make_budget(MEMORY_NBYTES).slab_nbytes
    plan = plan_training_step(
        specs, manifest, request="", slab_nbytes=slab_nbytes, min_split_nbytes=0
    )
    return {leaf.name: leaf for leaf in plan.leaves}


def own_leaves(init: Path, state: TrainingState, group: ProcessGroup) -> dict[str, HostLeaf]:
    """Return the leaves with the shards of one process: the chunks of all leaves are dealt to the processes."""
    leaves = {}
    for number, (name, leaf) in enumerate(grids(init, state).items()):
        length = leaf.grid.chunk_shape
        indices = itertools.product(*map(range, leaf.grid.chunk_counts))
        boxes = [
            tuple(
                (i * n, min((i + 1) * n, stop))
                for i, n, stop in zip(index, length, leaf.grid.shape)
            )
            for index in indices
        ]
        own = [
            box
            for position, box in enumerate(boxes)
            if (number + position) % group.count == group.index
        ]
        shards = tuple(HostShard(box, partial(_cut, state[name], box)) for box in own)
        leaves[name] = HostLeaf(state[name].shape, state[name].dtype.name, shards)
    return {name: leaves[name] for name in state}


def _cut(value: np.ndarray, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    return value[tuple(itertools.starmap(slice, box))]


def read_manifest(store: FakeObjectStore, step: int) -> dict[str, Any]:
    return json.loads(store.objects[f"{PREFIX}{step}/{MANIFEST_FILE}"])


def assert_equals_local_step(
    init: Path, state: TrainingState, store: FakeObjectStore, step: int
) -> None:
    """Assert that a step has the digests of a local run, and that every bit of it is verified."""
    save_steps(Path("one"), init, {step: state})
    expected = json.loads(Path(f"one/{step}/{MANIFEST_FILE}").read_text())
    saved = read_manifest(store, step)
    assert {key: saved[key] for key in DIGEST_KEYS[:3]} == {
        key: expected[key] for key in DIGEST_KEYS[:3]
    }
    assert main(["verify", f"{URL}/{step}", "-q"]) == 0
    with make_run().open_step(step) as reader:
        restored = read_leaves(reader)
    assert reader.is_checked
    assert reader.is_remote
    assert all(np.array_equal(restored[name], value) for name, value in state.items())


def test_another_recipe_cannot_write_to_a_run(
    init: Path, state: TrainingState, store: FakeObjectStore
):
    with open_manager(make_run(), init, keep=1) as run:
        run.save(1, host_leaves(state), {})
        before = store.objects_below(PREFIX)
        with (
            pytest.raises(PrepError, match=f"{URL} is locked - process {os.getpid()} on "),
            open_manager(make_run(recipe="other"), init, keep=1),
        ):
            pass
        assert store.objects_below(PREFIX) == before
        run.save(2, host_leaves(state), {})


def test_a_take_over_during_a_save_leaves_no_damaged_step(
    init: Path, state: TrainingState, store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch
):
    """The new holder deletes the objects of the step that the old one is writing."""
    new = make_run()
    write = training_storage.write_last_files

    def take_over(*args: Any, **options: Any) -> Manifest:
        new.acquire(lambda text: None)
        return write(*args, **options)

    with open_manager(make_run(), init, keep=1) as old:
        old.save(1, host_leaves(state), {})
        monkeypatch.setattr(training_storage, "write_last_files", take_over)
        with pytest.raises(PrepError, match="was taken over"):
            old.save(2, host_leaves(state), {})
    assert new.steps() == [1], (
        "a step without its data is not visible, and the step before it stays"
    )
    new.release()


def test_a_take_over_just_before_the_manifest_is_noticed(
    init: Path, state: TrainingState, store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch
):
    """The marker of Orbax is uploaded between the data and the manifest."""
    new = make_run()
    write = Bucket.write_pieces

    def write_and_take_over(bucket: Bucket, path: str, *args: Any, **options: Any) -> Any:
        file = write(bucket, path, *args, **options)
        if path.endswith(COMMIT_MARKER):
            new.acquire(lambda text: None)
        return file

    monkeypatch.setattr(Bucket, "write_pieces", write_and_take_over)
    with (
        open_manager(make_run(), init, keep=1) as old,
        pytest.raises(PrepError, match="was taken over"),
    ):
        old.save(1, host_leaves(state), {})
    assert new.steps() == []
    new.release()


def test_a_failed_run_stays_locked_while_a_thread_saves(
    init: Path, state: TrainingState, store: FakeObjectStore, monkeypatch: pytest.MonkeyPatch
):
    """A start that took the lock would delete the objects of the step, which then gets its manifest."""
    place, write = make_run(), training_storage.write_last_files
    is_locked: list[bool] = []

    def fail_meanwhile(*args: Any, **options: Any) -> Manifest:
        place.release(after_error=True)
        is_locked.append(f"{PREFIX}{LOCK_FILE}" in store.objects)
        return write(*args, **options)

    monkeypatch.setattr(training_storage, "write_last_files", fail_meanwhile)
    with open_manager(place, init, keep=1) as run:
        run.save(1, host_leaves(state), {})
    assert is_locked == [True]


def test_a_run_that_was_taken_over_stores_no_files(store: FakeObjectStore):
    """The metrics of the new holder stay when the old one ends with an error."""
    old, new = make_run(), make_run()
    for run in (old, new):
        run.acquire(lambda text: None)
    Path("local").mkdir()
    Path("local/metrics.jsonl").write_bytes(b"new")
    new.store_file("metrics.jsonl")
    Path("local/metrics.jsonl").write_bytes(b"old")
    with pytest.raises(PrepError, match="was taken over"):
        old.store_file("metrics.jsonl")
    assert store.objects[f"{PREFIX}metrics.jsonl"] == b"new"
    for run in (old, new):
        run.release()


@pytest.mark.parametrize("count", slow_except([2, 3], [3]))
def test_saved_digests_do_not_depend_on_process_count(
    init: Path, state: TrainingState, store: FakeObjectStore, count: int
):
    def save(group: ProcessGroup) -> None:
        with open_manager(make_run(), init, keep=1, group=group) as run:
            for step in (1, 2):
                run.start_save(step, own_leaves(init, state, group), {}).wait()

    assert run_together(count, save) == [None] * count
    files = store.objects_below(f"{PREFIX}2/state/d/")
    assert len(files) == count + 1, "one data file per process, and the index"
    assert not [
        path for path in store.objects_below(PREFIX) if path.startswith("1/") or ".prep" in path
    ]
    assert_equals_local_step(init, state, store, 2)


@pytest.mark.parametrize("has_conditions", slow_except([True, False], [True]))
def test_last_step_is_listed_again_before_a_run_changes(
    has_conditions: bool, store: FakeObjectStore
):
    """Another start of the same recipe may take the lock over, or the store may have no locks."""
    store.has_conditions = has_conditions
    run = make_run()
    run.acquire(lambda text: None)
    check_last_step(run, 0)
    store.store(f"{PREFIX}3/{MANIFEST_FILE}", b"{}")
    with pytest.raises(PrepError, match="is at step 3, and this process has read step 0"):
        check_last_step(run, 0)
    run.release()
