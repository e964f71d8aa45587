"""The folder of a run and its files: all processes see that of process 0, and it holds no other files."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.commands.console.ui import open_ui
from prepcli.commands.operations.recipes import shipped_recipe
from prepcli.core.errors import FAILED, STOPPED, PrepError
from prepcli.core.process_group import ProcessGroup, SingleProcess
from prepcli.execution import training_folder
from prepcli.execution.training_folder import FolderStorage
from tests.helpers.thread_groups import run_together
from trainer.distributed.agreement import PROBE_PREFIX
from trainer.recipe import load_recipe
from trainer.run.storage import check_last_step, check_shared_folder, hold_run, open_run_storage
from trainer.run.train import list_steps


def test_check_shared_folder_creates_the_folder(tmp_path: Path):
    folder = tmp_path / "runs/tuned"
    assert run_together(3, lambda group: check_shared_folder(folder, group)) == [None] * 3
    assert list(folder.iterdir()) == []


def test_check_shared_folder_fails_in_all_processes(tmp_path: Path):
    """Process 1 has a folder of its own."""
    errors = run_together(
        2, lambda group: check_shared_folder(tmp_path / f"host{group.index}", group)
    )
    assert all(isinstance(error, PrepError) for error in errors)
    assert "does not see the run's folder of process 0" in errors[1].what
    assert errors[0].what == f"process 1: {errors[1].what}"
    assert errors[0].hint == "set `--out` to a folder on a file system that all hosts share"
    assert list((tmp_path / "host0").iterdir()) == []


def test_check_shared_folder_names_an_unwritable_folder(tmp_path: Path):
    (tmp_path / "file").touch()
    errors = run_together(2, lambda group: check_shared_folder(tmp_path / "file/run", group))
    assert [error.what for error in errors] == [
        f"process 0 cannot write to {tmp_path}/file/run"
    ] * 2


@pytest.mark.parametrize("name", ["metrics.jsonl", "1"])
def test_check_shared_folder_keeps_other_files(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    check_shared_folder(tmp_path, SingleProcess())
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_check_accepts_a_probe_of_a_killed_start(tmp_path: Path):
    recipe = load_recipe(shipped_recipe("gpt2")).recipe
    place = open_run_storage(
        tmp_path, recipe, open_ui("train", as_json=False, quiet=True, verbose=0)
    )
    (tmp_path / f"{PROBE_PREFIX}old").touch()
    place.check()
    (tmp_path / f"{PROBE_PREFIX}old").rename(tmp_path / "old")
    with pytest.raises(PrepError, match="is not a run"):
        place.check()


def test_hold_run_accepts_a_read_only_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, locked_path: Path) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(training_folder, "acquire_lock", refuse)
    with hold_run(FolderStorage(tmp_path), SingleProcess(), pytest.fail) as lock_error:
        assert lock_error is not None
        assert "Read-only file system" in lock_error.why


@pytest.mark.parametrize(
    ("steps", "step", "code"), [([3, 6], 3, STOPPED), ([], 3, FAILED), ([3], 0, STOPPED)]
)
def test_check_last_step_refuses_a_run_at_another_step(
    steps: list[int], step: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place = FolderStorage(tmp_path)
    monkeypatch.setattr(place, "steps", lambda: steps)
    with pytest.raises(
        PrepError, match=f"is at step {max(steps, default=0)}, and this process has read"
    ) as caught:
        check_last_step(place, step)
    assert caught.value.code == code
    assert "start again" in caught.value.hint


def test_process_0_alone_lists_the_saved_steps():
    """A listing of a bucket takes requests for all files of all steps."""
    listing: list[int] = []

    def start(group: ProcessGroup) -> list[int]:
        def steps() -> list[int]:
            listing.append(group.index)
            return [3, 6]

        run: Any = SimpleNamespace(
            group=group,
            is_process_0=group.index == 0,
            options=SimpleNamespace(restart=False),
            storage=SimpleNamespace(steps=steps),
        )
        return list_steps(run)

    assert run_together(3, start) == [[3, 6]] * 3
    assert listing == [0]


def test_check_last_step_accepts_the_step_that_was_read(tmp_path: Path):
    check_last_step(FolderStorage(tmp_path), 0)
