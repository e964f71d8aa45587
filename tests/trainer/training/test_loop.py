"""The loop: stopped anywhere it goes on to the same bits; what it logs, evaluates and saves, and when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers import runs
from trainer.models.errors import PrepError
from trainer.training import loop
from trainer.training.checkpoint import restore_state
from trainer.training.loop import Job, Loop
from trainer.training.metrics import METRICS_FILE, MetricsWriter, read_metrics
from trainer.training.step import TrainState

STEPS = 20


class Ran:
    """What came of a run, or of a part of one."""

    def __init__(
        self, folder: Path, job: Job, store: runs.MemoryStore | None = None, state: TrainState | None = None
    ) -> None:
        self.store, self.heard = store or runs.MemoryStore(), runs.RecordingCallbacks()
        steps = self.store.steps()
        if state is None:
            made = job.setup
            state = restore_state(self.store.open(steps[-1]), made) if steps else runs.make_state(made)
        self.log = folder / METRICS_FILE
        self.loop = Loop(
            job, state, self.store, MetricsWriter(self.log, int(state["step"])), self.heard, runs.never_stop
        )
        self.ended = self.loop.run()

    def losses(self) -> list[float]:
        return [line["loss"] for line in read_metrics(self.log) if "loss" in line]


COMPILED: dict[tuple[int, int], Any] = {}
compile_step = Loop._compile_step


@pytest.fixture(autouse=True, scope="module")
def compiled_once() -> Iterator[None]:
    """One executable for each setup and batch, as a process that resumes has the same one."""

    def cached(self: Loop) -> Any:
        key = id(self.job.setup), self.job.order.batch_size
        if key not in COMPILED:
            COMPILED[key] = compile_step(self), self.job.setup  # kept, so that no other has its id
        return COMPILED[key][0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_compile_step", cached)
        yield


@pytest.fixture(scope="module")
def made() -> runs.StepSetup:
    return runs.make_setup(mesh="1,2,4", accumulate=2)


@pytest.fixture(scope="module")
def unbroken(made: runs.StepSetup, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("unbroken"), runs.make_job(made, steps=STEPS))


def test_a_whole_run(unbroken: Ran):
    assert unbroken.ended.step == STEPS
    assert not unbroken.ended.stop_reason
    assert unbroken.store.steps() == [STEPS], "with `save_every` 0 only the last step is saved"
    assert [line["step"] for line in unbroken.heard.lines] == list(range(1, STEPS + 1))
    assert unbroken.losses()[-1] < unbroken.losses()[0] - 1
    assert [line["step"] for line in unbroken.heard.evaluations] == [STEPS]
    assert unbroken.heard.lines[-1]["tokens"] == STEPS * 8 * runs.LENGTH


@pytest.mark.parametrize("stop", range(1, STEPS))
def test_stopped_after_any_step_it_goes_on_to_the_same_bits(
    stop: int, made: runs.StepSetup, unbroken: Ran, tmp_path: Path
):
    first = Ran(tmp_path, runs.make_job(made, steps=STEPS, stop_after=stop))
    assert (first.ended.step, first.ended.stop_reason) == (stop, f"--stop-after {stop}")
    assert first.store.steps() == [stop]
    second = Ran(tmp_path, runs.make_job(made, steps=STEPS), first.store)
    assert second.ended.step == STEPS
    assert runs.state_bytes(second.loop.state) == runs.state_bytes(unbroken.loop.state)
    assert second.losses() == unbroken.losses()


def test_on_another_mesh_it_goes_on_with_the_same_batches(made: runs.StepSetup, unbroken: Ran, tmp_path: Path):
    first = Ran(tmp_path, runs.make_job(made, steps=STEPS, stop_after=7))
    second = Ran(tmp_path, runs.make_job(runs.make_setup(mesh="2,4,1"), steps=STEPS), first.store)
    np.testing.assert_allclose(second.losses(), unbroken.losses(), rtol=1e-5)


def test_what_was_logged_after_the_last_checkpoint_is_logged_again(made: runs.StepSetup, unbroken: Ran, tmp_path: Path):
    """A kill between two checkpoints: lines are there of steps that are taken again, and one is cut short."""
    first = Ran(tmp_path, runs.make_job(made, steps=STEPS, stop_after=9, save_every=5))
    del first.store.saved[9]
    with first.log.open("a") as file:
        file.write('{"step": 10, "lo')
    second = Ran(tmp_path, runs.make_job(made, steps=STEPS), first.store)
    assert second.losses() == unbroken.losses()


def test_when_it_evaluates_saves_and_logs(made: runs.StepSetup, tmp_path: Path):
    ran = Ran(tmp_path, runs.make_job(made, steps=7, eval_every=3, save_every=2, log_every=5))
    assert [line["step"] for line in ran.heard.evaluations] == [0, 3, 6, 7]
    assert ran.heard.steps == [2, 4, 6, 7] == ran.store.steps()
    assert [line["step"] for line in ran.heard.lines] == [1, 5, 7]
    assert [line["step"] for line in read_metrics(ran.log)] == [0, 1, 3, 5, 6, 7, 7]


def test_a_run_that_is_done_does_nothing(made: runs.StepSetup, unbroken: Ran, tmp_path: Path):
    again = Ran(tmp_path, runs.make_job(made, steps=STEPS), unbroken.store)
    assert again.ended.step == STEPS
    assert not again.heard.lines
    assert not again.heard.evaluations
    assert not again.heard.steps


def test_a_signal_before_the_first_step_saves_nothing(made: runs.StepSetup, tmp_path: Path):
    store = runs.MemoryStore()
    log = MetricsWriter(tmp_path / METRICS_FILE, 0)
    ended = Loop(
        runs.make_job(made), runs.make_state(made), store, log, runs.RecordingCallbacks(), lambda: "SIGTERM"
    ).run()
    assert (ended.step, ended.stop_reason, store.steps()) == (0, "SIGTERM", [])


@pytest.mark.parametrize("size", [1, 3, 8])
def test_an_evaluation_does_not_depend_on_its_batches(size: int, tmp_path: Path):
    made = runs.make_setup()
    job = runs.make_job(made, size=size, steps=1, eval_every=1)
    state = runs.make_state(made)
    first = Ran(tmp_path, job, state=state).heard.evaluations[0]
    blocks = job.evaluation
    assert blocks is not None
    batch = {name: jax.numpy.asarray(each) for name, each in blocks.get_batch(range(blocks.n_rows)).items()}
    sums = loop.eval_step(runs.make_state(made)["params"], batch, made)
    assert first["eval_tokens"] == 5 * (runs.LENGTH - 1)
    assert first["eval_loss"] == pytest.approx(float(sums["loss"]) / float(sums["weight"]), rel=1e-6)
    assert first["eval_perplexity"] == pytest.approx(math.exp(first["eval_loss"]))


def test_a_limit_takes_the_first_sequences(tmp_path: Path):
    made = runs.make_setup()
    ran = Ran(tmp_path, runs.make_job(made, size=4, steps=1, eval_limit=2))
    assert ran.heard.evaluations[0]["eval_tokens"] == 2 * (runs.LENGTH - 1)


def spoiled(state: TrainState) -> TrainState:
    params = dict(state["params"])
    params["final_norm"] = jax.tree.map(lambda leaf: leaf * np.nan, params["final_norm"])
    return {**state, "params": params}


def test_steps_that_are_not_finite_end_the_run_and_are_never_saved(tmp_path: Path):
    made = runs.make_setup()
    with pytest.raises(PrepError, match="no finite loss in 3 steps, up to step 3") as caught:
        Ran(tmp_path, runs.make_job(made, save_every=10), state=spoiled(runs.make_state(made)))
    assert caught.value.hint == "another run, with a lower `optimizer.lr` or more warm-up"
    assert [line["loss"] for line in read_metrics(tmp_path / METRICS_FILE)] == [None] * 3


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path):
    made = runs.make_setup()
    store = runs.MemoryStore()
    with pytest.raises(PrepError, match="the state after step 1 is not finite"):
        Ran(tmp_path, runs.make_job(made, save_every=1), store, spoiled(runs.make_state(made)))
    assert store.steps() == []


def test_parameters_alone_are_saved_if_the_optimizer_is_not_wanted(made: runs.StepSetup, tmp_path: Path):
    ran = Ran(tmp_path, runs.make_job(made, steps=2, optimizer_state=False))
    names: Any = ran.store.open(2).leaves
    assert "params.embed.tokens" in names
    assert not [name for name in names if name.startswith("opt_state")]


def test_two_equal_jobs_end_in_equal_states(unbroken: Ran, tmp_path: Path):
    again = Ran(tmp_path, replace(runs.make_job(runs.make_setup(mesh="1,2,4", accumulate=2)), steps=STEPS))
    assert runs.state_bytes(again.loop.state) == runs.state_bytes(unbroken.loop.state)


class Device:
    """Takes a second for each step, and does so while others are already asked for."""

    def __init__(self, step: Any) -> None:
        self.step, self.steps_done = step, 0.0

    def __call__(self, *given: Any) -> tuple[TrainState, dict[str, Any]]:
        state, measured = self.step(*given)
        return state, {**measured, "in_row": Result(self, float(measured["in_row"]))}


class Result:
    def __init__(self, device: Device, value: float) -> None:
        self.device, self.value = device, value

    def __int__(self) -> int:
        self.device.steps_done += 1
        return int(self.value)

    def __float__(self) -> float:
        return self.value


def test_every_line_has_the_rate_of_its_steps(made: runs.StepSetup, tmp_path: Path):
    """Also the first one, and those just before a checkpoint, when no further step is under way."""
    job = runs.make_job(made, steps=7, save_every=3)
    running = Loop(
        job,
        runs.make_state(made),
        runs.MemoryStore(),
        MetricsWriter(tmp_path / METRICS_FILE, 0),
        runs.RecordingCallbacks(),
        runs.never_stop,
    )
    device = Device(running._compile_step())
    running.timer.clock = lambda: device.steps_done
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_compile_step", lambda: device)
        running.run()
    assert [line["seconds"] for line in read_metrics(tmp_path / METRICS_FILE) if "loss" in line] == [1.0] * 7
