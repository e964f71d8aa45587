"""Metrics in Weights & Biases, without its service."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from trainer.run.logs import ID_FILE, WandbLog

TABLE = {"project": "p", "group": "g", "offline": True}


class FakeWandb:
    """The parts of the module `wandb` that the log uses; it records the calls."""

    Error = RuntimeError

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_codes: list[int] = []
        # The error that each call of a run raises, or None.
        self.error: Exception | None = None

    def Settings(self, **values: Any) -> dict[str, Any]:  # noqa: N802
        return values

    def init(self, **arguments: Any) -> Any:
        self.inits.append(arguments)
        run_id = arguments["id"] or f"new{len(self.inits)}"
        return SimpleNamespace(id=run_id, log=self._log, finish=self._finish)

    def _log(self, values: dict[str, float], step: int) -> None:
        if self.error is not None:
            raise self.error
        self.logged.append((step, values))

    def _finish(self, exit_code: int) -> None:
        if self.error is not None:
            raise self.error
        self.exit_codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    """Replace the module."""
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def open_log(
    folder: Path, step: int, logged: int = 0, warnings: list[str] | None = None
) -> WandbLog:
    """Open the log of a run that has logged the lines of training up to a step."""
    keys = {(number, False) for number in range(1, logged + 1)}
    warn = [].append if warnings is None else warnings.append
    log = WandbLog(folder, TABLE, name="run", config={"seed": 3}, step=step, logged=keys, warn=warn)
    (folder / ID_FILE).write_text(f"{log.run_id}\n")
    return log


def test_new_run_passes_the_table_and_keeps_its_id(wandb: FakeWandb, tmp_path: Path):
    log = open_log(tmp_path, 0)
    log.write({"step": 0, "eval_loss": 2.0})
    log.write({"step": 1, "loss": 1.0, "grad_norm": None})
    log.close()
    (arguments,) = wandb.inits
    assert (arguments["project"], arguments["group"], arguments["name"]) == ("p", "g", "run")
    assert (arguments["mode"], arguments["id"], arguments["config"]) == (
        "offline",
        None,
        {"seed": 3},
    )
    assert "offline" not in arguments
    assert wandb.logged == [(0, {"eval/loss": 2.0}), (1, {"train/loss": 1.0})]
    assert (wandb.exit_codes, (tmp_path / ID_FILE).read_text()) == ([0], "new1\n")


def test_resumed_run_keeps_its_id_and_logs_no_step_twice(wandb: FakeWandb, tmp_path: Path):
    open_log(tmp_path, 0)
    log = open_log(tmp_path, 6, logged=8)
    for step in range(7, 11):
        log.write({"step": step, "loss": 1.0})
    assert wandb.inits[-1]["id"] == "new1"
    assert [step for step, _ in wandb.logged] == [9, 10]


def test_evaluation_is_logged_after_a_kill_at_its_step(wandb: FakeWandb, tmp_path: Path):
    open_log(tmp_path, 0)
    log = open_log(tmp_path, 6, logged=8)
    for step in (7, 8):
        log.write({"step": step, "loss": 1.0})
    log.write({"step": 8, "eval_loss": 2.0})
    assert wandb.logged == [(8, {"eval/loss": 2.0})]


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), RuntimeError("refused")])
def test_failure_of_wandb_is_one_warning(wandb: FakeWandb, tmp_path: Path, error: Exception):
    warnings: list[str] = []
    log, wandb.error = open_log(tmp_path, 0, warnings=warnings), error
    log.write({"step": 1, "loss": 1.0})
    log.write({"step": 2, "loss": 1.0})
    log.close()
    assert warnings == [f"W&B failed and gets no more metrics of this run: {error}"]
    log = open_log(tmp_path, 0, warnings=warnings)
    log.close()
    assert len(warnings) == 2


def test_failed_run_has_an_exit_code(wandb: FakeWandb, tmp_path: Path):
    open_log(tmp_path, 0).close(has_failed=True)
    assert wandb.exit_codes == [1]


def test_wandb_enabled_on_resume_logs_from_resumed_step(wandb: FakeWandb, tmp_path: Path):
    open_log(tmp_path, 6, logged=8).write({"step": 7, "loss": 1.0})
    assert (wandb.inits[-1]["id"], [step for step, _ in wandb.logged]) == (None, [7])


def test_restarted_run_has_a_new_id(wandb: FakeWandb, tmp_path: Path):
    open_log(tmp_path, 0)
    open_log(tmp_path, 0, logged=8).write({"step": 1, "loss": 1.0})
    assert wandb.inits[-1]["id"] is None
    assert ((tmp_path / ID_FILE).read_text(), len(wandb.logged)) == ("new2\n", 1)


def test_missing_wandb_is_an_error_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PrepError, match=r"log\.wandb") as raised:
        open_log(tmp_path, 0)
    assert "prepcli[wandb]" in raised.value.hint


def test_offline_runs_of_wandb_continue_one_id(tmp_path: Path):
    pytest.importorskip("wandb")
    for step in (0, 1):
        log = open_log(tmp_path, step, logged=step)
        log.write({"step": step + 1, "loss": 1.0})
        log.close()
    run_id = (tmp_path / ID_FILE).read_text().strip()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.stem for path in files] == [f"run-{run_id}"] * len(files)
    assert files
