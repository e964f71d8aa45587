"""Steps that several processes write together equal those of one process. A failure of one fails all."""

from __future__ import annotations

import errno
import itertools
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.core.process_group import ProcessGroup
from prepcli.engine.blobs import HostLeaf, HostShard
from prepcli.formats.manifest import saved_steps
from tests.helpers.slow_cases import slow_except
from tests.helpers.thread_groups import run_together
from tests.helpers.training_states import TrainingState, host_leaves, open_manager, save_steps

DEVICES = 8


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def shards_of(value: np.ndarray, index: int, count: int) -> tuple[HostShard, ...]:
    """Return the shards of process `index` of `count`: the last dim that 2, 4 or 8 devices divide is split."""
    splits = [
        (dim, n)
        for dim, extent in enumerate(value.shape)
        for n in (2, 4, DEVICES)
        if extent % n == 0
    ]
    dim, n = splits[-1] if splits else (0, 1)
    shards = []
    for device in range(n):
        box = [(0, extent) for extent in value.shape]
        if splits:
            length = value.shape[dim] // n
            box[dim] = (device * length, (device + 1) * length)
        if device * count // n == index:  # consecutive devices belong to one process
            shards.append(HostShard(tuple(box), partial(_cut, value, tuple(box))))
    return tuple(shards)


def _cut(value: np.ndarray, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    return value[tuple(itertools.starmap(slice, box))]


def own_leaves(state: TrainingState, group: ProcessGroup) -> dict[str, HostLeaf]:
    return {
        name: HostLeaf(value.shape, value.dtype.name, shards_of(value, group.index, group.count))
        for name, value in state.items()
    }


@pytest.mark.parametrize("count", slow_except([2, 3], [3]))
def test_processes_write_the_files_of_one_process(
    init: Path, state: TrainingState, tmp_path: Path, count: int
):
    save_steps(tmp_path / "one", init, {1: state, 2: state}, keep=1)

    def save(group: ProcessGroup) -> None:
        with open_manager(tmp_path / "many", init, keep=1, group=group) as store:
            for step in (1, 2):
                store.start_save(
                    step, own_leaves(state, group), {"recipe": f"steps = {step}"}
                ).wait()

    assert run_together(count, save) == [None] * count
    assert files_of(tmp_path / "many/2") == files_of(tmp_path / "one/2")
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == [".lock", "2"]
    assert main(["verify", str(tmp_path / "many"), "-q"]) == 0


def no_fetch() -> np.ndarray:
    raise RuntimeError("the device is lost")


@pytest.mark.parametrize("failing", slow_except([0, 1], [0]))
def test_save_fails_in_all_processes(
    init: Path, state: TrainingState, tmp_path: Path, failing: int
):
    save_steps(tmp_path / "run", init, {1: state})
    before = files_of(tmp_path / "run/1")

    def save(group: ProcessGroup) -> None:
        leaves = own_leaves(state, group)
        if group.index == failing:
            leaf = leaves["params.embed.tokens"]
            broken = HostShard(leaf.shards[0].box, no_fetch)
            leaves["params.embed.tokens"] = HostLeaf(
                leaf.shape, leaf.dtype, (broken, *leaf.shards[1:])
            )
        with open_manager(tmp_path / "run", init, group=group, keep=1) as store:
            store.save(2, leaves, {})

    errors = run_together(2, save)
    assert str(errors[failing]) == "the device is lost"
    other_error = errors[1 - failing]
    assert isinstance(other_error, PrepError)
    assert other_error.what == f"process {failing}: the work failed"
    assert "RuntimeError: the device is lost" in other_error.why
    assert files_of(tmp_path / "run/1") == before
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "1"]


def test_start_save_fetches_in_the_callers_thread(init: Path, state: TrainingState, tmp_path: Path):
    threads: set[int] = set()

    def fetch(value: np.ndarray) -> np.ndarray:
        threads.add(threading.get_ident())
        return value

    leaves = {
        name: HostLeaf.whole(value.shape, value.dtype.name, fetch=partial(fetch, value))
        for name, value in state.items()
    }
    with open_manager(tmp_path / "run", init) as store:
        save = store.start_save(1, leaves, {"recipe": "steps = 1"})
        assert threads == {threading.get_ident()}
        assert save.wait() > 0
        assert save.is_done
    save_steps(tmp_path / "expected", init, {1: state})
    assert files_of(tmp_path / "run/1") == files_of(tmp_path / "expected/1")


@pytest.mark.parametrize(
    ("free_nbytes", "is_copied"), [(None, True), (1 << 40, True), (1000, False)]
)
def test_start_save_copies_only_into_free_memory(
    init: Path,
    state: TrainingState,
    tmp_path: Path,
    free_nbytes: int | None,
    is_copied: bool,
    monkeypatch,
):
    copies: list[HostLeaf] = []
    on_host = HostLeaf.on_host
    monkeypatch.setattr(HostLeaf, "on_host", lambda leaf: copies.append(leaf) or on_host(leaf))
    with open_manager(tmp_path / "run", init, free_memory_nbytes=lambda: free_nbytes) as store:
        save = store.start_save(1, host_leaves(state), {})
        assert save.is_done or is_copied
        save.wait()
    assert bool(copies) == is_copied
    assert store.steps() == [1]


def test_checkpoint_manager_waits_for_save_on_exit(
    init: Path, state: TrainingState, tmp_path: Path
):
    def diverge() -> None:
        with open_manager(tmp_path / "run", init) as store:
            store.start_save(1, host_leaves(state), {})
            raise PrepError("diverged")

    with pytest.raises(PrepError, match="diverged"):
        diverge()
    assert saved_steps(tmp_path / "run") == [1]


def test_checkpoint_manager_raises_save_error_on_exit(
    init: Path, state: TrainingState, tmp_path: Path
):
    save_steps(tmp_path / "run", init, {1: state})
    with (
        pytest.raises(PrepError, match="1 exists"),
        open_manager(tmp_path / "run", init) as store,
    ):
        store.start_save(1, host_leaves(state), {})


def test_checkpoint_manager_warns_without_file_locks(
    init: Path, state: TrainingState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    notes: list[str] = []
    with open_manager(tmp_path / "run", init, say=notes.append) as store:
        store.save(1, host_leaves(state), {})
        assert store.steps() == [1]
    assert notes == [
        f"{tmp_path}/run cannot be locked (No locks available): start no second run there meanwhile"
    ]
