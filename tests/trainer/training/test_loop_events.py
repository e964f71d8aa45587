"""Events between the steps of a loop: saves, casts, profiles, samples, and stop signals."""

from __future__ import annotations

import math
import queue
import threading
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.core.worker_thread import run_abandonable
from tests.helpers import runs
from tests.helpers.slow_cases import slow_except
from tests.helpers.training_folder import write_tokenizer
from tests.helpers.waiting import MAX_S
from tests.trainer.training.test_loop import make_sampler
from trainer.data.tokenizer import load_tokenizer
from trainer.distributed.sharding import ShardingContext
from trainer.training import loop as loop_module
from trainer.training.checkpoint import count_changed_values, restore_state
from trainer.training.events import (
    NO_MISSING_EVENTS,
    EventTimes,
    LoopConfig,
    MissingEvents,
    StepProfiler,
)
from trainer.training.loop import Loop
from trainer.training.metrics import METRICS_FILE, MetricsFileLog, SamplesFileLog, read_metrics
from trainer.training.samples import Sampler

# Events between the steps of a loop: saves by epochs, milestones, the best step, casts and profiles.


def run_loop(
    tmp_path: Path, *, options: dict[str, Any] | None = None, **changes: Any
) -> tuple[runs.MemoryCheckpoints, Loop]:
    """Run a job of 12 steps; return its checkpoints and the loop."""
    setup = runs.make_setup()
    checkpoints = runs.MemoryCheckpoints()
    loop = Loop(
        runs.make_job(setup, steps=12, **changes),
        runs.make_state(setup),
        checkpoints=checkpoints,
        logs=[MetricsFileLog(tmp_path / METRICS_FILE, 0), runs.RecordingLog()],
        **(options or {}),
    )
    loop.run()
    return checkpoints, loop


def test_unrounded_steps_for_epochs_are_exact_fractions():
    order = runs.make_job(runs.make_setup(), batch_size=8).order
    assert order.unrounded_steps_for_epochs(1) == Fraction(45, 8)
    assert order.unrounded_steps_for_epochs(0.5) == Fraction(45, 16)
    assert order.unrounded_steps_for_epochs(4e-7) == Fraction(45, 8) * Fraction(4, 10**7)
    assert order.unrounded_steps_for_epochs(0.1) == Fraction(45, 80)
    assert order.unrounded_steps_for_epochs(0.6666666666666667) == Fraction(15, 4)


def test_loop_saves_and_evaluates_by_epochs(tmp_path: Path):
    checkpoints, loop = run_loop(tmp_path, save_every=Fraction(45, 8), eval_every=Fraction(45, 16))
    assert checkpoints.steps() == [6, 12]
    recording = loop.logs[-1]
    assert isinstance(recording, runs.RecordingLog)
    assert [line["step"] for line in recording.evaluations] == [0, 3, 6, 9, 12]


def test_loop_saves_milestones_beside_the_interval(tmp_path: Path):
    assert run_loop(tmp_path, save_every=5, also_save_every=(4, 0))[0].steps() == [4, 5, 8, 10, 12]


def test_loop_saves_each_step_with_a_lower_loss(tmp_path: Path):
    checkpoints, loop = run_loop(tmp_path, eval_every=2, saves_best=True)
    recording = loop.logs[-1]
    assert isinstance(recording, runs.RecordingLog)
    losses = {line["step"]: line["eval_loss"] for line in recording.evaluations if line["step"]}
    expected, best = [], math.inf
    for step, loss in losses.items():
        if loss < best:
            best = loss
            expected.append(step)
    assert checkpoints.steps() == sorted({*expected, 12})
    assert {step: checkpoints.open(step).manifest["eval_loss"] for step in expected} == {
        s: losses[s] for s in expected
    }


def test_resumed_loop_saves_only_below_the_best_loss(tmp_path: Path):
    checkpoints, _ = run_loop(tmp_path, options={"lowest_cost": 0.0}, eval_every=2, saves_best=True)
    assert checkpoints.steps() == [12]


def test_loop_that_does_not_save_best_records_no_eval_loss(tmp_path: Path):
    checkpoints, _ = run_loop(tmp_path, eval_every=6, save_every=6)
    assert not any("eval_loss" in checkpoints.open(step).manifest for step in checkpoints.steps())


def test_saved_parameters_are_cast_and_changes_counted(tmp_path: Path):
    checkpoints, loop = run_loop(tmp_path, optimizer_state=False, saved_dtype="bfloat16")
    reader = checkpoints.open(12)
    names = [name for name in reader.arrays if name.startswith("params.")]
    assert {reader.arrays[name].dtype.name for name in names} == {"bfloat16"}
    assert reader.arrays["step"].dtype == np.int32
    state = {
        name: np.frombuffer(data, np.float32)
        for name, data in runs.state_bytes(loop.state).items()
        if name in names
    }
    num_changed = sum(
        int((reader.arrays[name].astype(np.float32).ravel() != state[name]).sum()) for name in names
    )
    assert num_changed > 0
    assert reader.manifest["param_cast"] == {
        "from": "float32",
        "to": "bfloat16",
        "values": sum(array.size for array in state.values()),
        "changed": num_changed,
    }


def test_changed_values_do_not_depend_on_the_mesh():
    one, meshed = (runs.make_state(runs.make_setup(mesh=mesh))["params"] for mesh in ("", "2,2,2"))
    assert count_changed_values(meshed, "bfloat16") == count_changed_values(one, "bfloat16")


def test_cast_to_float16_refuses_overflow():
    with pytest.raises(PrepError, match="cannot be saved in float16") as raised:
        count_changed_values({"embed": {"tokens": jnp.array([[1.0, 7e4]])}}, "float16")
    assert raised.value.why == "embed.tokens has values that are too large for it"
    leaf = jnp.array([7e4])
    with pytest.raises(PrepError) as raised:
        count_changed_values({"a": leaf, "b": leaf}, "float16")
    assert raised.value.why == "2 parameters, a first, have values that are too large for it"


def test_parameters_too_large_for_the_cast_are_saved_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise PrepError(
            "parameters cannot be saved in float16",
            "embed.tokens has values that are too large for it",
        )

    monkeypatch.setattr(loop_module, "count_changed_values", refuse)
    warnings = list[str]()
    checkpoints, _ = run_loop(
        tmp_path, optimizer_state=False, saved_dtype="float16", options={"warn": warnings.append}
    )
    reader = checkpoints.open(12)
    assert {
        array.dtype.name for name, array in reader.arrays.items() if name.startswith("params.")
    } == {"float32"}
    assert "param_cast" not in reader.manifest
    assert warnings == [
        "step 12: parameters cannot be saved in float16 - embed.tokens has values that are too large for it; "
        "they are saved without a cast"
    ]


def test_counts_of_equal_leaves_are_compiled_once(caplog: pytest.LogCaptureFixture):
    leaves = {"a": jnp.ones((5, 7)), "b": jnp.zeros((5, 7))}
    # Commands of other tests silence the log of jax.
    with (
        jax.log_compiles(),
        caplog.at_level("WARNING", logger="jax"),
    ):
        count_changed_values(leaves, "bfloat16")
        count_changed_values(leaves, "bfloat16")
    assert (
        sum("Compiling" in message and "_count_rows" in message for message in caplog.messages) == 1
    )


def raise_warning(text: str) -> None:
    raise AssertionError(text)


@pytest.fixture
def profiler_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the functions of JAX's profiler, and return the list of their calls.

    tests/trainer/run/test_train_events.py writes a profile, which takes seconds.
    """
    calls = list[str]()
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def test_profile_ends_with_the_run(tmp_path: Path, profiler_calls: list[str]):
    profiler = StepProfiler(11, 30, tmp_path / "profile", raise_warning)
    run_loop(tmp_path, options={"profiler": profiler})
    assert not profiler.is_recording
    assert profiler_calls == ["start", "stop"]


def test_profile_ends_with_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiler_calls: list[str]
):
    profiler = StepProfiler(2, 30, tmp_path / "profile", raise_warning)

    def fail(step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.RecordingLog, "on_step", lambda self, step, _: fail(step))
    with pytest.raises(KeyboardInterrupt):
        run_loop(tmp_path, options={"profiler": profiler})
    assert not profiler.is_recording
    assert profiler_calls == ["start", "stop"]


@pytest.mark.parametrize("function", ["start_trace", "stop_trace"])
@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("disk full")])
def test_failed_profile_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: Exception
):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(jax.profiler, function, fail)
    warnings = list[str]()
    profiler = StepProfiler(2, 1, tmp_path / "profile", warnings.append)
    profiler.before_step(2, lambda: None)
    profiler.stop()
    assert warnings == ["no profile was recorded: disk full"]


# Stop signals between the steps of a loop: before and during evaluations and samples, and the resumed run.

STEPS = 6

SAMPLES_FILE = "samples.jsonl"


@dataclass
class StoppingLog(runs.RecordingLog):
    """Log that gives the reason of a stop from an event on.

    Attributes:
        stop_phase: The phase of the event, e.g. `evaluate 4`.
        stop_done: Number of finished batches or tokens of the phase.
        events: Phases, and the steps whose saves were reported.
    """

    stop_phase: str = ""
    stop_done: int = 0
    reason: str = ""
    phase: str = ""
    events: list[str] = field(default_factory=list)

    def on_phase(self, phase: str) -> None:
        self.phase = phase
        self.events.append(phase)
        if phase == self.stop_phase and not self.stop_done:
            self.reason = "SIGTERM"

    def on_progress(self, done: int, total: int) -> None:
        super().on_progress(done, total)
        if self.phase == self.stop_phase and done >= self.stop_done:
            self.reason = "SIGTERM"


@dataclass
class StartedRun:
    """A run in a folder: its checkpoints, and the loop and the result of its last start."""

    folder: Path
    checkpoints: runs.MemoryCheckpoints = field(default_factory=runs.MemoryCheckpoints)

    def start(
        self,
        job: LoopConfig,
        *,
        stop: tuple[str, int] = ("", 0),
        missing: MissingEvents = NO_MISSING_EVENTS,
    ) -> StoppingLog:
        """Start or resume the run, up to a stop at a phase and its progress. Return its recording."""
        steps = self.checkpoints.steps()
        state = runs.make_state(job.setup)
        if steps:
            state = restore_state(self.checkpoints.open(steps[-1]), job.setup)
        recording = StoppingLog(stop_phase=stop[0], stop_done=stop[1])
        step = int(state["step"])
        self.loop = Loop(
            job,
            state,
            checkpoints=self.checkpoints,
            logs=[
                MetricsFileLog(self.folder / METRICS_FILE, step),
                SamplesFileLog(self.folder / SAMPLES_FILE, step),
                recording,
            ],
            missing_events=missing,
        )
        self.loop.run(lambda: recording.reason)
        self.result = self.loop
        return recording

    def lines(self, name: str = METRICS_FILE) -> list[dict[str, Any]]:
        """Return the log lines without the values that are measured."""
        lines = read_metrics(self.folder / name)
        return [
            {key: value for key, value in line.items() if key not in ("seconds", "tokens_per_s")}
            for line in lines
        ]


def make_job(**changes: Any) -> LoopConfig:
    """Return a run with evaluations of five batches after each second step."""
    options = {"steps": STEPS, "batch_size": 8, "eval_every": 2, **changes}
    setup = runs.make_setup(accumulate=8)
    return runs.make_job(setup, **options)


@pytest.fixture
def sampler(tmp_path: Path) -> Sampler:
    write_tokenizer(tmp_path)
    setup = runs.make_setup(accumulate=8)
    return make_sampler(load_tokenizer(tmp_path), setup, max_new_tokens=20)


STOPS = [("evaluate 4", 0), ("evaluate 4", 3), ("evaluate 6", 2)]


@pytest.mark.parametrize("stop", slow_except([(stop,) for stop in STOPS], [(STOPS[1],)]))
def test_stop_in_an_evaluation_keeps_all_steps(tmp_path: Path, stop: tuple[str, int]):
    """The resumed run has the evaluation that was stopped, and ends as an undisturbed one."""
    whole, cut = StartedRun(tmp_path / "whole"), StartedRun(tmp_path / "cut")
    for run in (whole, cut):
        run.folder.mkdir()
    whole.start(make_job())
    step = int(stop[0].split()[1])
    recording = cut.start(make_job(), stop=stop)
    assert (cut.result.step, cut.result.stop_reason) == (step, "SIGTERM")
    assert cut.checkpoints.steps() == [step]
    # No batch is computed after the signal.
    assert recording.progress[-1] == (stop[1], 5)
    assert [line["step"] for line in recording.evaluations] == list(range(0, step, 2))
    cut.start(make_job(), missing=MissingEvents(evaluation=True))
    assert not cut.result.stop_reason
    assert cut.lines() == whole.lines()
    assert runs.state_bytes(cut.loop.state) == runs.state_bytes(whole.loop.state)


def test_due_step_is_saved_before_its_evaluation(tmp_path: Path):
    run = StartedRun(tmp_path)
    recording = run.start(make_job(save_every=2))
    for step in (2, 4, 6):
        events = recording.events
        assert events.index(f"save {step}") < events.index(f"evaluate {step}")
    assert recording.steps == [2, 4, 6]


def test_best_step_is_saved_after_its_evaluation(tmp_path: Path):
    """The loss is in the manifest. A signal during the evaluation saves the step without it."""
    run = StartedRun(tmp_path)
    job = make_job(save_every=2, saves_best=True)
    run.start(job, stop=("evaluate 4", 3))
    assert run.checkpoints.steps() == [2, 4]
    assert "eval_loss" in run.checkpoints.open(2).manifest
    assert "eval_loss" not in run.checkpoints.open(4).manifest


@dataclass
class StoppedProcess:
    """A process of a run that receives a signal during a step."""

    setup: runs.StepSetup
    signal_step: int

    def last_step(self, *, save_every: int = 0, profiler: StepProfiler | None = None) -> int:
        """Return the step after which the process stops."""
        loop = Loop(
            runs.make_job(self.setup, steps=20, save_every=save_every),
            runs.make_state(self.setup),
            checkpoints=runs.MemoryCheckpoints(),
            profiler=profiler,
        )
        loop.run(lambda: "SIGTERM" if loop.step >= self.signal_step else "")
        assert loop.stop_reason == "SIGTERM"
        return loop.step


def test_processes_with_and_without_profile_stop_at_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiler_calls: list[str]
):
    """Only process 0 records a profile, which waits for the steps in flight."""
    monkeypatch.setattr(ShardingContext, "has_other_processes", True)
    monkeypatch.setattr(loop_module, "CPU_METRICS_LAG", loop_module.METRICS_LAG)
    process = StoppedProcess(runs.make_setup(runs.LLAMA, mesh="1,8,1"), signal_step=4)
    # The batch of step 5 carries the signal. Its metrics are read two steps later.
    assert process.last_step() == 7
    for first_step in (4, 6, 7):
        profiler = StepProfiler(first_step, 1, tmp_path / "profile", raise_warning)
        assert process.last_step(profiler=profiler) == 7, first_step
    assert profiler_calls == ["start", "stop"] * 3


def test_signal_of_a_saved_step_stops_the_run_there(monkeypatch: pytest.MonkeyPatch):
    """All processes have waited for the step before its save. The next steps would need another save."""
    monkeypatch.setattr(ShardingContext, "has_other_processes", True)
    monkeypatch.setattr(loop_module, "CPU_METRICS_LAG", loop_module.METRICS_LAG)
    process = StoppedProcess(runs.make_setup(runs.LLAMA, mesh="1,8,1"), signal_step=4)
    assert process.last_step(save_every=5) == 5


def test_pending_stop_skips_the_first_evaluation(tmp_path: Path):
    run = StartedRun(tmp_path)
    recording = run.start(make_job(), stop=("compile", 0))
    assert (run.result.step, run.result.stop_reason) == (0, "SIGTERM")
    assert not recording.evaluations
    assert not run.checkpoints.steps()


def test_stop_in_samples_keeps_all_steps(tmp_path: Path, sampler: Sampler):
    whole, cut = StartedRun(tmp_path / "whole"), StartedRun(tmp_path / "cut")
    for run in (whole, cut):
        run.folder.mkdir()
    job = make_job(eval_every=0, sampler=sampler, sample_every=4)
    whole.start(job)
    cut.start(job, stop=("sample 4", 1))
    assert (cut.result.step, cut.checkpoints.steps()) == (4, [4])
    assert [line["step"] for line in cut.lines(SAMPLES_FILE)] == [0, 0]
    cut.start(job, missing=MissingEvents(num_samples=2))
    assert cut.lines(SAMPLES_FILE) == whole.lines(SAMPLES_FILE)
    assert cut.lines() == whole.lines()


def test_resumed_run_logs_only_missing_samples(tmp_path: Path, sampler: Sampler):
    run = StartedRun(tmp_path)
    job = make_job(eval_every=0, sampler=sampler, sample_every=4, stop_after=4)
    run.start(job)
    run.start(job, missing=MissingEvents(num_samples=1))
    repeated = [line["prompt"] for line in run.lines(SAMPLES_FILE) if line["step"] == 4]
    assert repeated == [*sampler.prompts, sampler.prompts[1]]


def test_run_that_lacks_an_evaluation_compiles_no_step(tmp_path: Path):
    run = StartedRun(tmp_path)
    run.start(make_job(), stop=("evaluate 6", 1))
    recording = run.start(make_job(), missing=MissingEvents(evaluation=True))
    assert run.loop.compiled_step is None
    assert [line["step"] for line in recording.evaluations] == [6]
    assert run.checkpoints.steps() == [6]


def test_missing_evaluation_is_compiled_once(tmp_path: Path):
    run = StartedRun(tmp_path)
    run.start(make_job(), stop=("evaluate 6", 1))
    recording = StoppingLog()
    job = make_job()
    loop = Loop(
        job,
        restore_state(run.checkpoints.open(6), job.setup),
        checkpoints=run.checkpoints,
        logs=[MetricsFileLog(tmp_path / METRICS_FILE, 6), recording],
        missing_events=MissingEvents(evaluation=True),
    )
    loop.compile()
    loop.run()
    assert recording.events.count("compile") == 1


def test_evaluation_is_compiled_before_the_first_step(tmp_path: Path):
    """A later compilation could outlast the time between a stop signal and a kill."""
    job = make_job(eval_at_start=False)
    recording = StoppingLog()
    loop = Loop(
        job,
        runs.make_state(job.setup),
        checkpoints=runs.MemoryCheckpoints(),
        logs=[MetricsFileLog(tmp_path / METRICS_FILE, 0), recording],
    )
    eval_step, phases = loop.eval_step, list[str]()

    def record_phase(*arguments: Any) -> Any:
        phases.append(recording.phase)
        return eval_step(*arguments)

    loop.eval_step = record_phase
    loop.run()
    assert phases[:2] == ["compile", "evaluate 2"]


def test_abandoned_call_does_not_hold_its_caller():
    """An exception of a signal ends the wait for a call that runs no Python code for long."""
    may_end, has_ended = threading.Event(), queue.SimpleQueue[None]()

    def call() -> None:
        may_end.wait(MAX_S)
        has_ended.put(None)

    class SimpleQueue(queue.SimpleQueue[Any]):
        def get(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prepcli.core.worker_thread.queue.SimpleQueue", SimpleQueue)
        with pytest.raises(KeyboardInterrupt):
            run_abandonable(call)
    may_end.set()
    has_ended.get(timeout=MAX_S)


def test_error_of_an_abandonable_call_is_raised():
    def fail() -> None:
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"):
        run_abandonable(fail)


def test_remaining_time_has_evaluations_saves_and_samples(sampler: Sampler):
    job = make_job(steps=10, eval_every=4, save_every=5, sampler=sampler, sample_every=10)
    seconds = {"evaluate": 60.0, "save": 3.0, "write": 2.0, "sample": 7.0}
    # Steps 3 to 10, evaluations after 4, 8 and 10, saves after 5 and 10, the write of the last save, and samples
    assert job.remaining_s(2, step_s=2.0, seconds=seconds) == 16 + 180 + 6 + 2 + 7
    # Before the first evaluation: five sequences of 8 in a step, and a third of the operations
    assert job.remaining_s(2, step_s=2.0, seconds={}) == pytest.approx(16 + 3 * 2 * 5 / 8 / 3)


def test_remaining_time_has_the_saves_of_all_intervals():
    job = make_job(steps=12, eval_every=0, save_every=4, also_save_every=(6, 5))
    # Saves after steps 4, 5, 6, 8, 10 and 12, and the evaluation after the last step
    seconds = {"evaluate": 0.0, "save": 3.0}
    assert job.remaining_s(2, step_s=1.0, seconds=seconds) == 10 + 6 * 3


def test_interrupted_events_are_not_measured():
    now = [0.0]
    times = EventTimes(lambda: now[0])
    with times.measure("evaluate"):
        now[0] = 5.0
    with pytest.raises(KeyboardInterrupt), times.measure("evaluate"):
        raise KeyboardInterrupt
    assert times.seconds == {"evaluate": 5.0}
