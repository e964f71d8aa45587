"""Evaluation without a loop: against the sums of each row, for any batch size, limit and mesh."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import pytest

from prepcli.models.dropout_config import DropoutConfig
from tests.helpers import runs
from tests.helpers.slow_cases import slow_except
from trainer.data.packing import Dataset
from trainer.nn import transformer
from trainer.nn.lm_head import LossSums, LossTerms
from trainer.training.evaluation import (
    combine_results,
    evaluate,
    jit_eval_step,
    jit_fast_row_eval_step,
    jit_row_eval_step,
)
from trainer.training.feed import place_batch
from trainer.training.loop import Loop
from trainer.training.metrics import METRICS_FILE, EvaluationResult, MetricsFileLog
from trainer.training.step import StepSetup


def evaluation_data(setup: StepSetup) -> Dataset:
    """Return the five evaluation rows of a job."""
    dataset = runs.make_job(setup).evaluation
    assert dataset is not None
    return dataset


def run_evaluate(setup: StepSetup, batch_size: int = 4, limit: int = 0) -> EvaluationResult:
    """Evaluate random parameters."""
    return evaluate(
        runs.make_state(setup)["params"],
        evaluation_data(setup),
        eval_step=jit_eval_step(setup.model, setup.forward_config),
        sharding=setup.sharding,
        batch_size=batch_size,
        limit=limit,
    )


@cache
def sums_of_rows() -> list[LossSums]:
    """Compute the sums of each row alone, with the parameters of `run_evaluate` on one device."""
    setup = runs.make_setup()
    data, params = evaluation_data(setup), runs.make_state(setup)["params"]
    compute = jax.jit(
        partial(transformer.loss_sums, model=setup.model, forward_config=setup.forward_config)
    )
    return [jax.device_get(compute(params, data.get_batch([row]))) for row in range(data.n_rows)]


def assert_is_mean_of_rows(result: EvaluationResult, num_rows: int) -> None:
    """Compare a result with the sums of the first rows."""
    loss, weight, correct = (
        sum(float(getattr(sums, name)) for sums in sums_of_rows()[:num_rows])
        for name in ("loss", "weight", "correct")
    )
    assert result.num_tokens == num_rows * (runs.LENGTH - 1)
    assert result.mean_loss == pytest.approx(loss / weight, rel=1e-6)
    assert result.accuracy == pytest.approx(correct / weight)
    assert result.perplexity == pytest.approx(math.exp(result.mean_loss))


@pytest.mark.parametrize(
    ("mesh", "batch_size"),
    slow_except([("", 1), ("", 3), ("", 8), ("2,2,2", 4)], [("", 3), ("2,2,2", 4)]),
)
def test_evaluate_returns_mean_over_all_tokens(mesh: str, batch_size: int):
    assert_is_mean_of_rows(run_evaluate(runs.make_setup(mesh=mesh), batch_size), num_rows=5)


def test_evaluate_takes_the_first_rows():
    assert_is_mean_of_rows(run_evaluate(runs.make_setup(), limit=2), num_rows=2)


def test_loss_terms_and_dropout_do_not_change_evaluation(tmp_path: Path):
    def first_line_and_evaluation(name: str, **changes: Any) -> tuple[Mapping[str, Any], float]:
        setup = replace(runs.make_setup(), **changes)
        recording = runs.RecordingLog()
        Loop(
            runs.make_job(setup, batch_size=4, steps=1, eval_every=1, stop_after=1),
            runs.make_state(setup),
            store=runs.MemoryStore(),
            logs=[MetricsFileLog(tmp_path / name, 0), recording],
        ).run()
        return recording.lines[0], recording.evaluations[0]["eval_loss"]

    plain, evaluation = first_line_and_evaluation("plain")
    changes = {
        "loss_terms": LossTerms(0.5, 0.9),
        "dropout": DropoutConfig(0.1, 0.1, 0.1, (0.1, 0.2)),
    }
    penalized, penalized_evaluation = first_line_and_evaluation("penalized", **changes)
    assert "z_loss" not in plain
    assert list(penalized)[:3] == ["step", "loss", "z_loss"]
    assert penalized["z_loss"] > 0.1
    assert penalized["loss"] != plain["loss"]
    assert penalized_evaluation == evaluation


def test_evaluate_without_tokens_is_nan():
    zeros = {name: jax.numpy.zeros(()) for name in ("loss", "weight", "correct")}
    setup = runs.make_setup()
    data, sharding = evaluation_data(setup), setup.sharding
    result = evaluate(
        {}, data, eval_step=lambda params, batch: zeros, sharding=sharding, batch_size=4
    )
    assert math.isnan(result.mean_loss)
    assert math.isnan(result.accuracy)
    assert math.isnan(result.perplexity)
    assert result.num_tokens == 0


def test_perplexity_of_a_huge_loss_is_finite():
    assert EvaluationResult(mean_loss=1e6, accuracy=0.0, num_tokens=1).perplexity == math.exp(700)


@pytest.mark.parametrize(
    ("at_start", "eval_every", "steps"),
    [(None, 0, [1]), (None, 1, [0, 1]), (True, 0, [0, 1]), (False, 1, [1])],
)
def test_loop_evaluates_at_the_start_if_asked_to(
    tmp_path: Path, at_start: bool | None, eval_every: int, steps: list[int]
):
    setup, recording = runs.make_setup(), runs.RecordingLog()
    job = runs.make_job(setup, batch_size=4, steps=1, eval_every=eval_every, eval_at_start=at_start)
    Loop(
        job,
        runs.make_state(setup),
        store=runs.MemoryStore(),
        logs=[MetricsFileLog(tmp_path / METRICS_FILE, 0), recording],
    ).run()
    assert [line["step"] for line in recording.evaluations] == steps


def test_loop_logs_the_result_of_evaluate(tmp_path: Path):
    setup = runs.make_setup()
    job = runs.make_job(setup, batch_size=4, steps=1, eval_every=1, stop_after=1)
    state, recording = runs.make_state(setup), runs.RecordingLog()
    Loop(
        job,
        state,
        store=runs.MemoryStore(),
        logs=[MetricsFileLog(tmp_path / METRICS_FILE, 0), recording],
    ).run()
    result = run_evaluate(setup)
    expected = {
        "step": 0,
        "eval_loss": result.mean_loss,
        "eval_perplexity": result.perplexity,
        "eval_accuracy": result.accuracy,
        "eval_tokens": result.num_tokens,
    }
    assert recording.evaluations[0] == expected
    assert (tmp_path / METRICS_FILE).read_text().splitlines()[0] == json.dumps(expected)


def run_row_evaluation(
    mesh: str, batch_size: int, config: Mapping[str, Any] = runs.GPT_NEO
) -> EvaluationResult:
    """Evaluate random parameters row by row."""
    setup = runs.make_setup(config, mesh=mesh)
    return evaluate(
        runs.make_state(setup)["params"],
        evaluation_data(setup),
        eval_step=jit_row_eval_step(setup.model, setup.forward_config),
        sharding=setup.sharding,
        batch_size=batch_size,
    )


@pytest.mark.parametrize(
    ("mesh", "batch_size"),
    slow_except(
        [("1,1,1", 3), ("1,1,1", 8), ("2,2,2", 4), ("2,2,2", 8), ("1,8,1", 8), ("1,2,4", 6)],
        [("2,2,2", 8)],
    ),
)
def test_row_evaluation_is_equal_on_any_mesh(mesh: str, batch_size: int):
    with_all_devices = mesh != "1,1,1"
    result = run_row_evaluation(mesh if with_all_devices else "", batch_size)
    assert result == run_row_evaluation("", 1)
    assert result.mean_loss == pytest.approx(run_evaluate(runs.make_setup()).mean_loss, rel=1e-6)


@pytest.mark.parametrize("mesh", ["", "2,2,2", "1,2,4"])
def test_fast_sums_of_rows_equal_single_row_sums(mesh: str):
    setup = runs.make_setup(mesh=mesh)
    params, rows = runs.make_state(setup)["params"], evaluation_data(setup).get_batch([0, 1, 2, 3])
    sums = jit_fast_row_eval_step(setup.model, setup.forward_config)(
        params, place_batch(rows, setup.sharding)
    )
    for row in range(4):
        for name, value in sums_of_rows()[row]._asdict().items():
            assert float(sums[name][row]) == pytest.approx(float(value), rel=1e-5)


def test_fast_sums_of_rows_leave_parameters_split():
    """No array of the compiled program has the shape of a whole matrix of the MLP, which the mesh splits."""
    setup = runs.make_setup(mesh="1,2,4")
    params = runs.make_state(setup)["params"]
    batch = place_batch(evaluation_data(setup).get_batch([0, 1, 2, 3]), setup.sharding)
    shapes = {
        leaf.shape[1:]
        for path, leaf in setup.model.leaves.items()
        if path.endswith("mlp.up.weight")
    }
    assert shapes
    for jit_step, is_whole in ((jit_row_eval_step, True), (jit_fast_row_eval_step, False)):
        step: Any = jit_step(setup.model, setup.forward_config)
        text = step.lower(params, batch).compile().as_text()
        assert any(f"{','.join(map(str, shape))}]" in text for shape in shapes) == is_whole


def test_combined_result_weighs_datasets_by_tokens():
    parts = [
        EvaluationResult(2.0, 0.5, 30),
        EvaluationResult(4.0, 0.0, 10),
        EvaluationResult(math.nan, math.nan, 0),
    ]
    assert combine_results(parts) == EvaluationResult(2.5, 0.375, 40)
    assert math.isnan(combine_results(parts[2:]).mean_loss)


def test_evaluation_of_an_infinite_loss_is_infinite():
    sums = {
        "loss": jax.numpy.array([1.0, math.inf]),
        "weight": jax.numpy.ones(2),
        "correct": jax.numpy.zeros(2),
    }
    setup = runs.make_setup()
    data, sharding = evaluation_data(setup), setup.sharding
    result = evaluate(
        {}, data, eval_step=lambda params, batch: sums, sharding=sharding, batch_size=4
    )
    assert result.mean_loss == math.inf
