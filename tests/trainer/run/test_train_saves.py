"""Checkpoints of training in several processes: complete or absent, and readable by every number of processes."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from prepcli.core.errors import FAILED, OK, STOPPED
from prepcli.formats.manifest import saved_steps
from tests.helpers.fork_server import ForkedProcess
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import run_ok
from tests.helpers.train_runs import set_keys
from tests.helpers.waiting import wait_until
from trainer.training.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[3]
SETTINGS = ("mesh=1,2,2", "checkpoint.every=1", "checkpoint.keep='all'", "data.holdout=0")


def start(run: str, count: int, *words: str, steps: int) -> list[ForkedProcess]:
    """Start a training in `count` processes with four devices together."""
    settings = set_keys(*SETTINGS, f"train.steps={steps}")
    command = ("train", "recipe.toml", "--out", run, *settings, *words)
    return start_processes(*command, count=count, devices=4 // count, env={"PYTHONPATH": str(ROOT)})


def check_codes(results: list[tuple[int, str, str]], code: int = OK) -> None:
    assert [result[0] for result in results] == [code] * len(results), results


@pytest.mark.slow  # test_train_buckets shows it too
def test_one_process_resumes_a_step_of_two(work_dir: Path):
    check_codes(finish(start("run", 2, "--stop-after", "2", steps=3)), STOPPED)
    assert saved_steps(Path("run")) == [1, 2]
    assert not [path for path in Path("run").iterdir() if path.name.endswith(".partial")]
    run_ok("verify", "run")
    run_ok("export", "run", "--out", "learned")
    check_codes(finish(start("run", 1, steps=3)))
    assert saved_steps(Path("run")) == [1, 2, 3]


# test_watchdog shows that a failed process ends all, and test_train_buckets that a failed save keeps earlier steps.
@pytest.mark.slow
def test_failed_save_ends_all_processes(work_dir: Path):
    """The save in the background fails in process 0: something else has the name of the step."""
    Path("run").mkdir()
    for name in (".lock", "2"):
        Path("run", name).touch()
    results = finish(start("run", 2, steps=200))
    assert [code for code, _, _ in results] == [FAILED] * 2, results
    assert all("run/2 exists" in stderr for _, _, stderr in results), results
    assert saved_steps(Path("run")) == [1]


def kill_during_a_save(processes: list[ForkedProcess], rng: random.Random) -> None:
    """Kill one process while a step is staged, and the other a moment later."""
    wait_until(lambda: list(Path("run").glob("[0-9]*.partial")), processes[0])
    time.sleep(rng.uniform(0.0, 0.1))
    first, other = rng.sample(processes, 2)
    first.kill()
    time.sleep(2.0)
    other.kill()
    finish(processes)


@pytest.mark.slow
def test_killed_process_leaves_complete_steps(work_dir: Path):
    """Each next start continues from a complete step, and the losses are those of a run without kills."""
    rng = random.Random(3)
    last_step = 0
    for _ in range(4):
        kill_during_a_save(start("run", 2, steps=60), rng)
        steps = saved_steps(Path("run"))
        assert max(steps, default=0) >= last_step
        last_step = max(steps, default=0)
        for step in steps:
            run_ok("verify", f"run/{step}")
    check_codes(finish(start("run", 2, steps=60)))
    assert saved_steps(Path("run"))[-1] == 60
    assert not [path for path in Path("run").iterdir() if path.name.endswith(".partial")]
    check_codes(finish(start("whole", 2, steps=60)))
    killed, whole = (
        {line["step"]: line["loss"] for line in read_metrics(Path(run) / METRICS_FILE)}
        for run in ("run", "whole")
    )
    assert killed == whole
