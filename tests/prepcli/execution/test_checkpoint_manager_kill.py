"""SIGKILL while steps are saved and removed: each step is complete, and the next process continues."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.formats.manifest import saved_steps
from prepcli.restore.item_reader import open_reader
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint
from tests.helpers.training_states import (
    host_leaves,
    make_state,
    open_manager,
    read_leaves,
    read_params,
    same_state,
)
from tests.helpers.waiting import wait_until

KEEP = 2


def save_until_killed(run: Path, start: Path) -> None:
    """Save step after step, from the one after the last saved step, until killed."""
    params = read_params(start)
    with open_manager(run, start, keep=KEEP) as store:
        print("begins", flush=True)
        for step in itertools.count(max(store.steps(), default=0) + 1):
            store.save(step, host_leaves(make_state(params, step)), {"recipe": "r"})


def kill_soon(run: Path, start: Path, delay_s: float, *, min_step: int) -> None:
    """Kill a process that saves steps, `delay_s` after it begins, or later when `min_step` is saved."""
    words = [
        sys.executable,
        "-m",
        "tests.prepcli.execution.test_checkpoint_manager_kill",
        str(run),
        str(start),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout
        assert process.stdout.readline() == b"begins\n"
        time.sleep(delay_s)
        wait_until(lambda: max(saved_steps(run), default=0) >= min_step)
        process.kill()
    assert process.returncode == -signal.SIGKILL


def check_killed(folder: Path, kills: int, seed: int) -> None:
    make_checkpoint(
        folder / "m", GPT_NEO, hidden_size=256, num_layers=4, attention_types=[[["global"], 4]]
    )
    assert (
        main(
            ["save-init", str(folder / "m"), "--out", str(folder / "init"), "-q", "--mesh", "1,2,1"]
        )
        == 0
    )
    run, start, rng = folder / "run", folder / "init", random.Random(seed)
    params, last_step, started_s = read_params(start), 1, time.monotonic()
    with open_manager(run, start, keep=KEEP) as store:
        store.save(1, host_leaves(make_state(params, 1)), {"recipe": "r"})
    took_s = time.monotonic() - started_s
    for kill in range(kills):
        # The first kill comes after a new step; the others at any moment.
        kill_soon(run, start, rng.uniform(0.0, 3 * took_s), min_step=2 if kill == 0 else 0)
        steps = saved_steps(run)
        assert max(steps, default=0) >= last_step
        last_step = max(steps, default=0)
        assert len(steps) <= KEEP + 1
        for step in steps:
            with open_reader(run / str(step)) as reader:
                assert same_state(read_leaves(reader), make_state(params, step))
    assert last_step > 1
    with open_manager(run, run / str(last_step), keep=KEEP) as store:
        assert not [path for path in run.iterdir() if path.name.endswith(".partial")]
        store.save(last_step + 1, host_leaves(make_state(params, last_step + 1)), {})
        assert store.steps()[-1] == last_step + 1
        assert len(store.steps()) <= KEEP


def test_manager_survives_kills_at_random_moments(tmp_path: Path):
    check_killed(tmp_path, kills=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_manager_survives_many_kills(tmp_path: Path, seed: int):
    check_killed(tmp_path, kills=10, seed=100 + seed)


if __name__ == "__main__":
    save_until_killed(*map(Path, sys.argv[1:]))
