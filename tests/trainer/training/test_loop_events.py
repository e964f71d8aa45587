"""Events between the steps of a loop: saves by epochs, milestones, the best step, casts and profiles."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.core.errors import PrepError
from tests.helpers import runs
from trainer.training import loop as loop_module
from trainer.training.checkpoint import count_changed_values
from trainer.training.events import StepProfiler, is_due
from trainer.training.loop import Loop
from trainer.training.metrics import METRICS_FILE, MetricsFileLog


def run_loop(
    tmp_path: Path, *, options: dict[str, Any] | None = None, **changes: Any
) -> tuple[runs.MemoryStore, Loop]:
    """Run a job of 12 steps; return its checkpoints and the loop."""
    setup = runs.make_setup()
    store = runs.MemoryStore()
    loop = Loop(
        runs.make_job(setup, steps=12, **changes),
        runs.make_state(setup),
        store=store,
        logs=[MetricsFileLog(tmp_path / METRICS_FILE, 0), runs.RecordingLog()],
        **(options or {}),
    )
    loop.run()
    return store, loop


def test_interval_is_due_at_the_first_step_that_completes_it():
    every = Fraction(5, 2)
    assert [step for step in range(1, 11) if is_due(step, every)] == [3, 5, 8, 10]
    assert [step for step in range(1, 11) if is_due(step, 4)] == [4, 8]
    assert not any(is_due(step, 0) for step in range(1, 11))


def test_unrounded_steps_for_epochs_are_exact_fractions():
    order = runs.make_job(runs.make_setup(), batch_size=8).order
    assert order.unrounded_steps_for_epochs(1) == Fraction(45, 8)
    assert order.unrounded_steps_for_epochs(0.5) == Fraction(45, 16)
    assert order.unrounded_steps_for_epochs(4e-7) == Fraction(45, 8) * Fraction(4, 10**7)
    assert order.unrounded_steps_for_epochs(0.1) == Fraction(45, 80)
    assert order.unrounded_steps_for_epochs(0.6666666666666667) == Fraction(15, 4)


def test_loop_saves_and_evaluates_by_epochs(tmp_path: Path):
    store, loop = run_loop(tmp_path, save_every=Fraction(45, 8), eval_every=Fraction(45, 16))
    assert store.steps() == [6, 12]
    recording = loop.logs[-1]
    assert isinstance(recording, runs.RecordingLog)
    assert [line["step"] for line in recording.evaluations] == [0, 3, 6, 9, 12]


def test_loop_saves_milestones_beside_the_interval(tmp_path: Path):
    assert run_loop(tmp_path, save_every=5, also_save_every=(4, 0))[0].steps() == [4, 5, 8, 10, 12]


def test_loop_saves_each_step_with_a_lower_loss(tmp_path: Path):
    store, loop = run_loop(tmp_path, eval_every=2, saves_best=True)
    recording = loop.logs[-1]
    assert isinstance(recording, runs.RecordingLog)
    losses = {line["step"]: line["eval_loss"] for line in recording.evaluations if line["step"]}
    expected, best = [], math.inf
    for step, loss in losses.items():
        if loss < best:
            best = loss
            expected.append(step)
    assert store.steps() == sorted({*expected, 12})
    assert {step: store.open(step).manifest["eval_loss"] for step in expected} == {
        s: losses[s] for s in expected
    }


def test_resumed_loop_saves_only_below_the_best_loss(tmp_path: Path):
    store, _ = run_loop(tmp_path, options={"lowest_cost": 0.0}, eval_every=2, saves_best=True)
    assert store.steps() == [12]


def test_loop_that_does_not_save_best_records_no_eval_loss(tmp_path: Path):
    store, _ = run_loop(tmp_path, eval_every=6, save_every=6)
    assert not any("eval_loss" in store.open(step).manifest for step in store.steps())


def test_saved_parameters_are_cast_and_changes_counted(tmp_path: Path):
    store, loop = run_loop(tmp_path, optimizer_state=False, saved_dtype="bfloat16")
    reader = store.open(12)
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
    store, _ = run_loop(
        tmp_path, optimizer_state=False, saved_dtype="float16", options={"warn": warnings.append}
    )
    reader = store.open(12)
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


# By default tests/trainer/run/test_train_events.py writes a profile.
@pytest.mark.slow
def test_profile_records_the_steps(tmp_path: Path):
    profiler = StepProfiler(2, 3, tmp_path / "profile", raise_warning)
    run_loop(tmp_path, options={"profiler": profiler})
    assert not profiler.is_recording
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


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
