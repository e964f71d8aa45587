"""A user's loss and metrics: their values, gradients, independence of mesh and micro-batches, and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.core.errors import PrepError
from prepcli.models.param_tree import Tree, flatten_tree
from tests.helpers import runs
from tests.helpers.optimizers import compile_step
from tests.helpers.training_plans import load_text
from trainer.distributed.sharding import ShardingContext, zigzag_order
from trainer.nn import transformer
from trainer.nn.lm_head import LMHead, LossTerms, loss_sums
from trainer.nn.model_spec import AttentionOptions
from trainer.training import feed
from trainer.training.eval_metrics import TokenFunctions, function_name
from trainer.training.evaluation import evaluate, jit_eval_step
from trainer.training.step import StepSetup, TrainState, leaf_name


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


def first_moments(state: TrainState) -> dict[str, Array]:
    """Return the first moments of a state by parameter."""
    leaves = {
        leaf_name(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(state["opt_state"])[0]
    }
    return {name.partition("mu.")[2]: leaf for name, leaf in leaves.items() if "mu." in name}


def focal_setup(**options: Any) -> StepSetup:
    """Return a setup with the focal loss and without warm-up."""
    optimizer = replace(runs.ADAMW, lr_schedule=replace(runs.ADAMW.lr_schedule, warmup=0))
    return replace(
        runs.make_setup(**options), optimizer=optimizer, loss_terms=LossTerms(token_loss=focal_loss)
    )


@pytest.mark.parametrize("softcap", [0.0, 3.0])
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


# By default test_step compares losses of a mesh and micro-batches, and the test above this loss.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "accumulate", "options"),
    [
        ("2,2,2", 2, {}),
        ("1,8,1", 1, {}),
        ("1,2,4", 4, {}),
        ("fsdp:2,mp:2,sp:2", 2, {"attention_options": AttentionOptions("blockwise", 2, 3)}),
    ],
)
def test_token_loss_does_not_depend_on_mesh_or_micro_batches(
    mesh: str, accumulate: int, options: dict[str, Any]
):
    weights = np.random.default_rng(0).integers(0, 3, (8, runs.LENGTH)).astype(np.float32)
    loss, state = take_step(focal_setup(mesh=mesh, accumulate=accumulate, **options), weights)
    expected_loss, expected = take_step(focal_setup(), weights)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    moments, expected_moments = (first_moments(tree) for tree in (state, expected))
    assert moments.keys() == {*flatten_tree(expected["params"])}
    # The first moment is a tenth of the gradient.
    for path, moment in moments.items():
        np.testing.assert_allclose(
            moment, expected_moments[path], rtol=2e-4, atol=2e-7, err_msg=path
        )


@pytest.mark.parametrize("mesh", ["", "2,2,2"])
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
