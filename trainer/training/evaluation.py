"""Evaluation of a model on a dataset, with or without a training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import numpy as np
from jax import Array

from prepcli.core.errors import usage_error
from prepcli.models.param_tree import Tree
from trainer.data.order import eval_batches, num_eval_batches
from trainer.data.packing import Dataset
from trainer.distributed.sharding import ShardingContext
from trainer.nn import transformer
from trainer.nn.loss_terms import LossSums, TokenMetrics
from trainer.nn.model_spec import ForwardConfig, ModelSpec
from trainer.training.best_metric import METRIC_PREFIX
from trainer.training.exact_reduction import ExactReduction, compiler_options
from trainer.training.feed import TokenBatch, load_batch

# Names of the values of each evaluation. `metric_fn` must use other names.
RESERVED_NAMES = ("loss", "perplexity", "accuracy", "tokens")
# exp(700) is finite in float64.
MAX_EXPONENT = 700.0
# Returns the sums of a batch [], or of each of its rows [batch].
EvalStep = Callable[[Tree, TokenBatch], Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Loss and accuracy over the predicted tokens of a dataset.

    Attributes:
        mean_loss: Mean cross-entropy of a token. NaN without tokens.
        accuracy: Fraction of the tokens that are predicted correctly. NaN without tokens.
        num_tokens: Number of predicted tokens.
        metrics: Mean over the tokens of each value that `metric_fn` computes. NaN without tokens.
    """

    mean_loss: float
    accuracy: float
    num_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss, limited to stay finite."""
        return math.exp(min(self.mean_loss, MAX_EXPONENT))


def jit_eval_step(
    model: ModelSpec, forward_config: ForwardConfig, metric_fn: TokenMetrics | None = None
) -> EvalStep:
    """Return a function that computes the sums `loss`, `weight` and `correct` of a batch, compiled once per shape.

    Args:
        model: The model.
        forward_config: Execution options.
        metric_fn: Computes values of each token by name. Their sums have the names with
            `METRIC_PREFIX`.
    """

    def sum_batch(params: Tree, batch: TokenBatch) -> dict[str, Array]:
        sums, metrics = transformer.evaluation_sums(params, batch, model, forward_config, metric_fn)
        named_sums: dict[str, Array] = sums._asdict()
        for name, value in metrics.items():
            if name in RESERVED_NAMES:
                what = f"`metric_fn` returned the name {name!r}"
                why = "evaluations have a value of this name"
                raise usage_error(what, why, "use another name")
            named_sums[f"{METRIC_PREFIX}{name}"] = value
        return named_sums

    return jax.jit(sum_batch)


def jit_exact_eval_step(
    model: ModelSpec, forward_config: ForwardConfig, num_shards: int
) -> EvalStep:
    """Return a function that computes the sums of `jit_eval_step` over logical shards, in a fixed order.

    Args:
        model: The model.
        forward_config: Execution options.
        num_shards: Logical shards of a batch.
    """
    exact = ExactReduction(num_shards, forward_config.sharding, model.leaves)
    on_device = replace(forward_config, sharding=ShardingContext())

    def sum_losses(params: Tree, rows: TokenBatch) -> Mapping[str, Array]:
        return transformer.loss_sums(params, rows, model, on_device)._asdict()

    return jax.jit(partial(exact.sum_losses, sum_losses), compiler_options=compiler_options())


def jit_fast_row_eval_step(model: ModelSpec, forward_config: ForwardConfig) -> EvalStep:
    """Return a function that computes the sums of `jit_eval_step` for each row, with parameters split by the mesh.

    Args:
        model: The model.
        forward_config: Execution options.
    """

    def sum_rows(params: Tree, batch: TokenBatch) -> Mapping[str, Array]:
        return transformer.row_loss_sums(params, batch, model, forward_config)._asdict()

    return jax.jit(sum_rows, out_shardings=forward_config.sharding.replicated_sharding())


def jit_row_eval_step(model: ModelSpec, forward_config: ForwardConfig) -> EvalStep:
    """Return a function that computes the sums of `jit_eval_step` per row, with the same rounding on every mesh.

    Each device has all parameters, and computes its rows one at a time. `evaluate` then returns the same bits
    for every mesh and batch size.

    Args:
        model: The model.
        forward_config: Execution options.
    """
    sharding = forward_config.sharding
    on_device = replace(forward_config, sharding=ShardingContext())

    def sum_row(params: Tree, row: TokenBatch) -> Mapping[str, Array]:
        return transformer.loss_sums(params, row, model, on_device)._asdict()

    def sum_rows(params: Tree, batch: TokenBatch) -> Mapping[str, Array]:
        exact = ExactReduction(len(batch["tokens"]), sharding, model.leaves)
        return exact.map_shards(sum_row, params, batch)

    return jax.jit(
        sum_rows, out_shardings=sharding.replicated_sharding(), compiler_options=compiler_options()
    )


def evaluate(
    params: Tree,
    dataset: Dataset,
    *,
    eval_step: EvalStep,
    sharding: ShardingContext,
    batch_size: int,
    limit: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvaluationResult:
    """Compute loss and accuracy on a dataset.

    The sums of batches or rows are added without rounding.

    Args:
        params: Parameters in float32 or bfloat16, sharded by the partition rules of `sharding`.
        dataset: The rows to evaluate on.
        eval_step: Computes the sums of a batch or of its rows, from `jit_eval_step` or
            `jit_row_eval_step`.
        sharding: The device mesh of the batches.
        batch_size: Rows per batch.
        limit: Number of rows to evaluate on, from the first. 0 means all.
        on_progress: Called before each batch and after the last one, with the number of batches so far and of all. Its
            exception ends the evaluation.

    Raises:
        UsageError: The mesh does not divide the batch.
    """
    values: dict[str, list[float]] = {name: [] for name in LossSums._fields}
    num_batches = num_eval_batches(dataset.n_rows, batch_size, limit=limit)
    for done, rows in enumerate(eval_batches(dataset.n_rows, batch_size, limit=limit)):
        on_progress(done, num_batches)
        for name, sums in eval_step(params, load_batch(dataset, rows, sharding)).items():
            values.setdefault(name, []).extend(np.ravel(sums).tolist())
    on_progress(num_batches, num_batches)
    weight = _exact_sum(values["weight"])
    means: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for name, sums in values.items():
        # Without a token there is no mean.
        mean = math.nan
        if weight:
            mean = _exact_sum(sums) / weight
        means[name] = mean
        if name.startswith(METRIC_PREFIX):
            metrics[name.removeprefix(METRIC_PREFIX)] = mean
    return EvaluationResult(
        mean_loss=means["loss"],
        accuracy=means["correct"],
        num_tokens=int(weight),
        metrics=metrics,
    )


def combine_results(results: Iterable[EvaluationResult]) -> EvaluationResult:
    """Return the result over the tokens of several datasets.

    Datasets without tokens do not count.
    """
    num_tokens = 0
    loss_sums: list[float] = []
    correct_sums: list[float] = []
    for result in results:
        # The means of a dataset without tokens are NaN.
        if result.num_tokens:
            num_tokens += result.num_tokens
            loss_sums.append(result.mean_loss * result.num_tokens)
            correct_sums.append(result.accuracy * result.num_tokens)
    if not num_tokens:
        return EvaluationResult(mean_loss=math.nan, accuracy=math.nan, num_tokens=0)
    return EvaluationResult(
        mean_loss=math.fsum(loss_sums) / num_tokens,
        accuracy=math.fsum(correct_sums) / num_tokens,
        num_tokens=num_tokens,
    )


def _exact_sum(values: list[float]) -> float:
    """Return the correctly rounded sum, which does not depend on the order.

    Infinite and NaN values are added too.
    """
    if all(map(math.isfinite, values)):
        return math.fsum(values)
    # `fsum` raises an error for inf - inf, where a sum is NaN.
    return sum(values)
