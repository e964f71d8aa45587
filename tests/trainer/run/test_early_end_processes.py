"""`eval.patience` and `checkpoint.best` in several processes, also after a kill: the results of one process."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import OK, STOPPED
from prepcli.formats.manifest import NO_MANIFEST, best_step, read_manifest, saved_steps
from tests.helpers.killed_train import VARIABLE
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import run_json
from tests.trainer.run.test_early_end import PATIENT, evaluations, words

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = (*PATIENT, "checkpoint.every=2", "checkpoint.keep=1")


def run(*command: str, count: int, kill_after: str = "") -> list[tuple[int, str]]:
    """Run `prep` in processes with 8 devices together, and return the exit code and stdout of each."""
    env = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", VARIABLE: kill_after}
    module = "tests.helpers.killed_train" if kill_after else "prepcli"
    started = start_processes(*command, count=count, devices=8 // count, env=env, module=module)
    return [(code, out) for code, out, _ in finish(started, 600)]


def run_to_the_end(*command: str, count: int) -> dict[str, Any]:
    """Run `prep --json` in processes, and return the result of process 0. Assert that the others print nothing."""
    (code, out), *others = run(*command, "--json", count=count)
    assert code == OK
    assert [code for code, _ in others] == [OK] * (count - 1)
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))


def assert_same_end(result: dict[str, Any], folder: str, expected: dict[str, Any]) -> None:
    """Assert that a run ended as the run `one`: step, reason, best step, evaluations and recorded patience."""
    assert (result["step"], result["end_reason"]) == (expected["step"], expected["end_reason"])
    assert best_step(Path(folder)) == best_step(Path("one"))
    assert saved_steps(Path(folder)) == saved_steps(Path("one"))
    losses, expected_losses = evaluations(folder), evaluations("one")
    assert losses.keys() == expected_losses.keys()
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    patience, expected_patience = (_patience(name, result["step"]) for name in (folder, "one"))
    assert patience.pop("cost") == pytest.approx(expected_patience.pop("cost"), rel=1e-5)
    assert patience == expected_patience


def _patience(folder: str, step: int) -> dict[str, Any]:
    """Return the evaluations that the manifest of a step records."""
    fields: Any = read_manifest(Path(folder, str(step))) or NO_MANIFEST
    return dict(fields["patience"])


@pytest.mark.parametrize(
    ("best", "counts"),
    [
        pytest.param(("checkpoint.best=eval_loss",), (2, 2), id="best"),
        pytest.param((), (2, 1), marks=pytest.mark.slow, id="loss"),
        pytest.param(
            ("checkpoint.best=eval_accuracy",), (4, 2), marks=pytest.mark.slow, id="accuracy"
        ),
    ],
)
def test_processes_end_early_at_one_step_after_a_kill(
    work_dir: Path, best: Sequence[str], counts: Sequence[int], capsys: pytest.CaptureFixture[str]
):
    settings = (*SETTINGS, *best)
    expected = run_json(capsys, *words("one", *settings))
    end = expected["step"]
    assert end < 12
    # The last evaluation before the kill is not the best one, so that the count has begun.
    first, second = counts
    killed = run(*words("many", *settings), count=first, kill_after=f"{end - 1} many/{end - 2}")
    # A process may also end because another one has been killed.
    assert -signal.SIGKILL in [code for code, _ in killed]
    assert saved_steps(Path("many"))[-1] == end - 2
    assert _patience("many", end - 2)["evaluations"] == 1
    result = run_to_the_end(*words("many", *settings), count=second)
    assert_same_end(result, "many", expected)


@pytest.mark.slow
def test_processes_end_early_after_stops(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    settings = (*SETTINGS, "checkpoint.best=eval_perplexity")
    expected = run_json(capsys, *words("one", *settings))
    for _ in range(expected["step"] - 1):
        stopped = run(*words("many", *settings), "--stop-after", "1", count=2)
        assert [code for code, _ in stopped] == [STOPPED] * 2
    result = run_to_the_end(*words("many", *settings), count=2)
    assert_same_end(result, "many", expected)
    # The same command again changes nothing.
    again = run_to_the_end(*words("many", *settings), count=2)
    assert_same_end(again, "many", expected)
