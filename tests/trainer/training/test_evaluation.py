"""Evaluation without a loop, and a user's loss and metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.core.errors import PrepError
from prepcli.models.param_tree import Tree
from tests.helpers import runs
from tests.helpers.optimizers import compile_step
from tests.helpers.slow_cases import slow_except
from tests.helpers.training_plans import load_text
from trainer.data.packing import Dataset
from trainer.distributed.sharding import ShardingContext, zigzag_order
from trainer.nn import transformer
from trainer.nn.lm_head import LMHead, LossSums, LossTerms, loss_sums
from trainer.training import feed
from trainer.training.eval_metrics import TokenFunctions, function_name
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
from trainer.training.step import StepSetup, TrainState

# Evaluation without a loop: against the sums of each row, for any batch size, limit and mesh.


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
    slow_except([("", 1), ("", 3), ("", 8), ("2,2,2", 4)], [("2,2,2", 4)]),
)
def test_evaluate_returns_mean_over_all_tokens(mesh: str, batch_size: int):
    assert_is_mean_of_rows(run_evaluate(runs.make_setup(mesh=mesh), batch_size), num_rows=5)


def test_evaluate_takes_the_first_rows():
    assert_is_mean_of_rows(run_evaluate(runs.make_setup(), limit=2), num_rows=2)


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
    assert EvaluationResult(mean_loss=1e6, accuracy=0.0, weight=1).perplexity == math.exp(700)


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
        checkpoints=runs.MemoryCheckpoints(),
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
        checkpoints=runs.MemoryCheckpoints(),
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


@pytest.mark.parametrize("mesh", slow_except(["", "2,2,2", "1,2,4"], ["2,2,2"]))
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


def test_combined_result_weighs_fractions_of_tokens():
    """Messages of conversations may have a loss weight below 1, and a dataset less than one token in all."""
    parts = [EvaluationResult(2.0, 1.0, 4.5), EvaluationResult(4.0, 0.0, 0.5)]
    assert combine_results(parts) == EvaluationResult(2.2, 0.9, 5.0)
    assert parts[1].num_tokens == 0


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


# A user's loss and metrics: their values, gradients, independence of mesh and micro-batches, and refusals.


def focal_loss(logits: Array, targets: Array) -> Array:
    """Return the focal loss of each token (arXiv:1708.02002, equation 4) with gamma 2, and a term of all classes."""
    log_probabilities = jax.nn.log_softmax(logits)
    target = jnp.take_along_axis(log_probabilities, targets[..., None], -1)[..., 0]
    return -((1 - jnp.exp(target)) ** 2) * target + 1e-3 * logits.mean(-1)


def metrics(logits: Array, targets: Array) -> dict[str, Array]:
    """Return whether the target is among the five most likely tokens, and the entropy."""
    above = (logits > jnp.take_along_axis(logits, targets[..., None], -1)).sum(-1)
    return {
        "top5": above < 5,
        "entropy": -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1),
    }


def direct_mean_loss(params: Tree, batch: feed.TokenBatch, setup: StepSetup) -> Array:
    """Compute the mean focal loss from the logits of all tokens."""
    logits = transformer.compute_logits(params, batch["tokens"], setup.model, setup.forward_config)
    losses = focal_loss(logits[..., : runs.VOCAB], batch["targets"])
    return (losses * batch["weights"]).sum() / batch["weights"].sum()


def first_batch(setup: StepSetup) -> dict[str, Array]:
    job = runs.make_job(setup)
    return feed.load_batch(job.train, job.order.rows(0), setup.sharding)


def take_step(setup: StepSetup, weights: np.ndarray | None = None) -> tuple[float, TrainState]:
    """Return the mean loss of a step, and the state after it."""
    batch = first_batch(setup)
    if weights is not None:
        order = zigzag_order(runs.LENGTH, setup.sharding)
        batch |= {"weights": jax.device_put(weights[:, order], batch["weights"].sharding)}
    state, sums = compile_step(setup)(runs.make_state(setup), batch)
    return float(sums["loss"]) / float(sums["weight"]), state


def focal_setup(**options: Any) -> StepSetup:
    """Return a setup with the focal loss and without warm-up."""
    optimizer = replace(runs.ADAMW, lr_schedule=replace(runs.ADAMW.lr_schedule, warmup=0))
    return replace(
        runs.make_setup(**options), optimizer=optimizer, loss_terms=LossTerms(token_loss=focal_loss)
    )


@pytest.mark.parametrize("softcap", slow_except([0.0, 3.0], [3.0]))
@pytest.mark.parametrize("chunk_size", [-1, 2])
def test_token_loss_gradients_equal_direct_computation(chunk_size: int, softcap: float):
    rng = np.random.default_rng(0)
    hidden, weight, bias = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 5, 8), (12, 8), (12,))
    )
    targets, weights = (
        jnp.asarray(rng.integers(0, 11, (2, 5))),
        jnp.asarray(rng.integers(0, 3, (2, 5)), jnp.float32),
    )
    head = LMHead(11, chunk_size, ShardingContext(), softcap, LossTerms(token_loss=focal_loss))

    def chunked(*parameters: Array) -> Array:
        hidden, weight, bias = parameters
        return loss_sums(hidden, weight, targets, weights, head, bias).loss

    def direct(*parameters: Array) -> Array:
        hidden, weight, bias = parameters
        logits = hidden @ weight.T + bias
        logits = logits if softcap == 0 else softcap * jnp.tanh(logits / softcap)
        return (focal_loss(logits[..., :11], targets) * weights).sum()

    computed, expected = (
        jax.jit(jax.value_and_grad(f, (0, 1, 2)))(hidden, weight, bias) for f in (chunked, direct)
    )
    for value, other in zip(jax.tree.leaves(computed), jax.tree.leaves(expected)):
        np.testing.assert_allclose(value, other, rtol=2e-5, atol=1e-6)
    # Row 11 of the head's weight is padding.
    assert not computed[1][1][11].any()


def test_loss_of_a_step_equals_a_direct_computation():
    setup = focal_setup()
    loss, state = take_step(setup)
    batch, before = first_batch(setup), runs.make_state(setup)["params"]
    compute_loss = jax.jit(partial(direct_mean_loss, setup=setup))
    expected = compute_loss(before, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    after = compute_loss(state["params"], batch)
    assert after < expected


@pytest.mark.parametrize("mesh", slow_except(["", "2,2,2"], ["2,2,2"]))
def test_evaluation_reports_means_of_metrics(mesh: str):
    setup = runs.make_setup(mesh=mesh)
    job, params = runs.make_job(setup), runs.make_state(setup)["params"]
    assert job.evaluation is not None
    rows = job.evaluation.get_batch(np.arange(5))
    whole = runs.make_setup()
    whole_params = runs.make_state(whole)["params"]
    compute_logits = jax.jit(
        partial(transformer.compute_logits, model=whole.model, forward_config=whole.forward_config)
    )
    logits = compute_logits(whole_params, rows["tokens"])
    values = metrics(logits[..., : runs.VOCAB], jnp.asarray(rows["targets"]))
    expected = {name: np.average(value, weights=rows["weights"]) for name, value in values.items()}
    results = [
        evaluate(
            params,
            job.evaluation,
            eval_step=jit_eval_step(setup.model, setup.forward_config, metric_fn),
            sharding=setup.sharding,
            batch_size=8,
        )
        for metric_fn in (metrics, None)
    ]
    assert results[0].metrics == pytest.approx(expected, rel=1e-5)
    assert results[0] == replace(results[1], metrics=results[0].metrics)
    assert results[1].metrics == {}


def focal_metric(logits: Array, targets: Array) -> dict[str, Array]:
    return {"loss": focal_loss(logits, targets)}


def mean_loss(logits: Array, targets: Array) -> Array:
    return focal_loss(logits, targets).mean()


def test_loss_of_another_shape_is_an_error():
    setup = replace(runs.make_setup(), loss_terms=LossTerms(token_loss=mean_loss))
    with pytest.raises(
        PrepError,
        match=r"`loss_fn` did not return a value for each token - it has shape \[\], the targets have",
    ):
        take_step(setup)


def test_metric_of_another_shape_is_an_error():
    setup = runs.make_setup()
    eval_step = jit_eval_step(
        setup.model, setup.forward_config, lambda logits, targets: {"last": logits}
    )
    with pytest.raises(
        PrepError, match=r"`metric_fn` 'last' did not return a value for each token"
    ):
        eval_step(runs.make_state(setup)["params"], first_batch(setup))


@pytest.mark.parametrize(
    ("metric_fn", "what"),
    [
        (focal_loss, "`metric_fn` did not return a dict - it returned "),
        (
            focal_metric,
            "`metric_fn` returned the name 'loss' - evaluations have a value of this name",
        ),
    ],
)
def test_metrics_without_a_name_of_their_own_are_an_error(metric_fn: Any, what: str):
    setup = runs.make_setup()
    eval_step = jit_eval_step(setup.model, setup.forward_config, metric_fn)
    with pytest.raises(PrepError, match=what):
        eval_step(runs.make_state(setup)["params"], first_batch(setup))


@pytest.mark.parametrize(
    ("functions", "override", "what"),
    [
        (
            TokenFunctions(focal_loss),
            "train.reduction=exact",
            "`train.reduction` is exact - the order of sums",
        ),
        (TokenFunctions(metric_fn=metrics), "train.reduction=exact", "`train.reduction` is exact"),
        (TokenFunctions(focal_loss), "loss.z_loss=0.1", "`loss.z_loss` is set"),
        (TokenFunctions(focal_loss), "loss.label_smoothing=0.1", "`loss.label_smoothing` is set"),
    ],
)
def test_token_functions_refuse_conflicting_keys(
    tmp_path: Path, functions: TokenFunctions, override: str, what: str
):
    recipe = load_text(tmp_path, override)
    with pytest.raises(PrepError, match=what):
        functions.check(recipe)
    TokenFunctions().check(recipe)


def test_function_name_comes_from_function_or_class():
    assert function_name(focal_loss) == f"{__name__}.focal_loss"
    assert function_name(partial(focal_loss)) == "functools.partial"
