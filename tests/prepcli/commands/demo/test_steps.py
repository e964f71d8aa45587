"""Steps of the demo: training is killed after a durable step, in whatever order the run saves and logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.demo import steps
from prepcli.commands.demo.steps import DemoStep
from prepcli.commands.demo.tiny_model import STEPS
from prepcli.core.errors import PrepError
from prepcli.formats.manifest import MANIFEST_FILE, STATE_ITEM
from prepcli.planning.item_storage import METADATA_FILE
from trainer.training.metrics import METRICS_FILE

ShouldKill = Callable[[], bool]
BY_TITLE = {step.title: step for step in steps.demo_steps()}
KILL = BY_TITLE["train, kill -9"]


def log(run: Path, count: int) -> None:
    run.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "loss": 5.0}) + "\n" for step in range(1, count + 1)]
    (run / METRICS_FILE).write_text("".join(lines))


def save(run: Path, step: int) -> None:
    (run / str(step) / STATE_ITEM).mkdir(parents=True)
    for name in (MANIFEST_FILE, f"{STATE_ITEM}/{METADATA_FILE}"):
        (run / str(step) / name).write_text("{}")


def use_runs(monkeypatch: pytest.MonkeyPatch, *runs: Callable[[Path, ShouldKill], bool]) -> None:
    """Replace the processes that the step starts by functions, one per start."""
    remaining = list(runs)

    def run_prep(folder: Path, step: DemoStep, should_kill: ShouldKill) -> dict[str, Any]:
        was_killed = remaining.pop(0)(folder / steps.KILLED_RUN, should_kill)
        return {} if was_killed else {"ok": True}

    monkeypatch.setattr(steps, "run_prep", run_prep)


def run_that_saves_late(run: Path, should_kill: ShouldKill) -> bool:
    """Log steps while the first save is still under way, as on a slow disk."""
    assert not should_kill()
    log(run, 8)
    assert not should_kill()
    save(run, 4)
    assert should_kill()
    return True


def run_that_saves_first(run: Path, should_kill: ShouldKill) -> bool:
    """Save a step before a later one is logged."""
    log(run, 4)
    save(run, 4)
    assert not should_kill(), "no step would be lost"
    log(run, 5)
    assert should_kill()
    return True


def run_that_ends(run: Path, should_kill: ShouldKill) -> bool:
    """End before the kill."""
    log(run, STEPS)
    save(run, 4)
    save(run, STEPS)
    return False


def run_that_saves_its_end(run: Path, should_kill: ShouldKill) -> bool:
    """Save the last step between the decision and the signal."""
    run_that_ends(run, should_kill)
    return True


def test_kill_step_waits_for_a_durable_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_runs(monkeypatch, run_that_saves_late)
    assert KILL.run(tmp_path, KILL).result == "killed after step 8, step 4 is durable"


def test_kill_step_kills_after_an_unsaved_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_runs(monkeypatch, run_that_saves_first)
    assert KILL.run(tmp_path, KILL).result == "killed after step 5, step 4 is durable"


@pytest.mark.parametrize("early_end", [run_that_ends, run_that_saves_its_end])
def test_kill_step_repeats_a_run_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early_end: Callable[[Path, ShouldKill], bool]
) -> None:
    use_runs(monkeypatch, early_end, run_that_saves_first)
    assert (
        KILL.run(tmp_path, KILL).result
        == "killed after step 5, step 4 is durable (try 2: it was too fast)"
    )


def test_kill_step_fails_if_each_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_runs(monkeypatch, *[run_that_ends] * 5)
    with pytest.raises(PrepError, match="the run ended 5 times before it could be killed"):
        KILL.run(tmp_path, KILL)


def test_compare_step_fails_for_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (steps.INIT, steps.UNBROKEN):
        (tmp_path / name / "d").mkdir(parents=True)
        (tmp_path / name / "d" / "data").write_text(name)
    monkeypatch.setattr(steps, "run_prep", lambda folder, step: {})
    compare = BY_TITLE["convert without a kill"]
    with pytest.raises(PrepError, match="different files in tiny-padded-init: d/data"):
        compare.run(tmp_path, compare)


def test_kill_step_fails_if_the_command_ends_first(tmp_path: Path) -> None:
    step = replace(BY_TITLE["save an init, kill -9"], args=("models",))
    with pytest.raises(PrepError, match="ended 5 times before it could be killed"):
        step.run(tmp_path, step)
