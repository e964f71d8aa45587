"""The receivers of a run's metrics: their checks, and the end of a run that fails."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.core.errors import PrepError, UsageError
from tests.trainer.run.test_wandb_log import FakeWandb
from trainer.run.logs import ID_FILE, check_logs, open_logs
from trainer.training.metrics import METRICS_FILE, MetricsLog, read_metrics

TABLE = {"project": "p", "offline": True}


class FakeStorage:
    """A storage that records the metrics of each stored file, and may refuse files."""

    is_on_disk = False
    name = "gs://bucket/run"

    def __init__(self, folder: Path) -> None:
        self.local_folder, self.stored = folder, list[tuple[str, list[int]]]()
        self.is_broken = False

    def fetch_file(self, name: str, folder: Path) -> Path:
        """Return the local path: the store is empty."""
        return folder / name

    def store_file(self, name: str) -> None:
        if self.is_broken:
            raise PrepError("cannot reach the store")
        self.stored.append(
            (name, [line["step"] for line in read_metrics(self.local_folder / METRICS_FILE)])
        )


def make_run(folder: Path, **log: Any) -> Any:
    settings = SimpleNamespace(**{"all_workers": False, "tensorboard": False, "wandb": None} | log)
    recipe = SimpleNamespace(name="run", log=settings, model_dump=lambda **options: {})
    group = SimpleNamespace(index=0, count=1)
    observer = SimpleNamespace(warn=print)
    return SimpleNamespace(
        group=group, recipe=recipe, observer=observer, folder=folder, storage=FakeStorage(folder)
    )


def fail_at_step_3(run: Any, *, breaks_storage: bool = False) -> None:
    with open_logs(run, 0, has_sampler=False) as logs:
        for log in logs:
            assert isinstance(log, MetricsLog)
            log.write({"step": 1, "loss": 1.0})
            log.write({"step": 2, "loss": 1.0})
        run.storage.is_broken = breaks_storage
        raise RuntimeError("step 3")


def test_metrics_of_a_failed_run_are_stored(tmp_path: Path):
    run = make_run(tmp_path)
    with pytest.raises(RuntimeError, match="step 3"):
        fail_at_step_3(run)
    assert run.storage.stored == [(METRICS_FILE, []), (METRICS_FILE, [1, 2])]


def test_first_error_is_kept_if_metrics_cannot_be_stored(tmp_path: Path):
    run = make_run(tmp_path)
    with pytest.raises(RuntimeError, match="step 3"):
        fail_at_step_3(run, breaks_storage=True)
    run.storage.is_broken = False
    with pytest.raises(PrepError, match="cannot reach"), open_logs(run, 0, has_sampler=False):
        run.storage.is_broken = True


def test_failed_run_is_failed_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with pytest.raises(RuntimeError, match="step 3"):
        fail_at_step_3(make_run(tmp_path, wandb=TABLE))
    assert wandb.exit_codes == [1]
    with open_logs(make_run(tmp_path, wandb=TABLE), 0, has_sampler=False):
        pass
    assert wandb.exit_codes == [1, 0]
    assert (tmp_path / ID_FILE).read_text() == "new2\n"


@pytest.mark.parametrize(
    ("module", "log"),
    [
        ("tensorboard.summary.writer.event_file_writer", {"tensorboard": "events"}),
        ("wandb", {"wandb": TABLE}),
    ],
)
def test_missing_extras_are_found_by_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, log: dict[str, Any]
):
    run = make_run(tmp_path, **log)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PrepError, match="is not installed"):
        check_logs(run.recipe.log, run.storage)


@pytest.mark.parametrize("value", [True, "gs://bucket/tb"])
def test_event_files_in_an_object_store_are_refused(tmp_path: Path, value: Any):
    run = make_run(tmp_path, tensorboard=value)
    with pytest.raises(UsageError, match=r"log\.tensorboard"):
        check_logs(run.recipe.log, run.storage)
