"""Several starts of `prep train` for one run: the lock is taken before the saved steps are listed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prepcli.core.errors import FAILED, OK, STOPPED
from prepcli.formats.manifest import saved_steps
from tests.helpers.fork_server import PREP, ForkedProcess, run_prep, start_python
from tests.helpers.slow_cases import slow_except
from tests.helpers.train_runs import set_keys
from trainer.training.metrics import METRICS_FILE, read_metrics

pytestmark = pytest.mark.waits

WAIT_S = 240.0
RUN = Path("runs/recipe")
WORDS = ("train", "recipe.toml", *set_keys("train.steps=6", "data.holdout=0"))
# The start has read the saved steps. It goes on once the file `continue` exists.
WAITING_PREP = f"""
import time
from pathlib import Path

from trainer.run import train

configure = train.configure

def configure_later(*arguments, **options):
    Path("waiting").touch()
    while not Path("continue").exists():
        time.sleep(0.01)
    return configure(*arguments, **options)

train.configure = configure_later
{PREP}
"""


@contextmanager
def waiting_start(*words: str) -> Iterator[ForkedProcess]:
    """Start `prep train`, and let it wait after it has read the steps of the run."""
    process = start_python(WAITING_PREP, *WORDS, *words, cwd=".", has_jax=True)
    deadline_s = time.monotonic() + WAIT_S
    try:
        while not Path("waiting").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield process
    finally:
        process.kill()


def finish(process: ForkedProcess) -> str:
    """Let a start continue, and return its output."""
    Path("continue").touch()
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == OK, err
    return err.decode()


def logged_steps() -> list[int]:
    return [line["step"] for line in read_metrics(RUN / METRICS_FILE)]


@pytest.mark.parametrize("stop_after", slow_except([0, 2], [2]), ids=["new", "resumed"])
def test_second_start_of_a_run_is_refused_until_the_first_ends(work_dir: Path, stop_after: int):
    if stop_after:
        stopped = run_prep(*WORDS, "--stop-after", str(stop_after), cwd=work_dir, has_jax=True)
        assert stopped.returncode == STOPPED, stopped.stderr
    with waiting_start() as first:
        second = run_prep(*WORDS, cwd=work_dir, has_jax=True)
        assert second.returncode == FAILED
        assert "runs/recipe is locked" in second.stderr
        finish(first)
    assert saved_steps(RUN)[-1] == 6
    assert logged_steps() == [1, 2, 3, 4, 5, 6]


def test_failed_start_removes_its_lock(work_dir: Path):
    failed = run_prep(*WORDS, "--set", "data.path=nothing.txt", cwd=work_dir, has_jax=True)
    assert failed.returncode == FAILED
    assert not Path("runs").exists()
