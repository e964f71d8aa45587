"""Evaluation of a model: the loss on a dataset, and log likelihoods of token sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax import Array

from prepcli.core.errors import usage_error
from prepcli.models.param_tree import Tree
from trainer.data.order import eval_batches, num_eval_batches
from trainer.data.packing import Dataset
from trainer.distributed.exact_reduction import ExactReduction, compiler_options
from trainer.distributed.sharding import ShardingContext
from trainer.nn import transformer
from trainer.nn.lm_head import LossSums, TokenMetrics
from trainer.nn.model_spec import ForwardConfig, ModelSpec
from trainer.training.eval_metrics import METRIC_PREFIX
from trainer.training.feed import TokenBatch, load_batch, place_batch
from trainer.training.metrics import EvaluationResult

# Names of the values of each evaluation. `metric_fn` must use other names.
RESERVED_NAMES = ("loss", "perplexity", "accuracy", "tokens")
# Returns the sums of a batch [], or of each of its rows [batch].
EvalStep = Callable[[Tree, TokenBatch], Mapping[str, Array]]


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
        weight=weight,
        metrics=metrics,
    )


def combine_results(results: Iterable[EvaluationResult]) -> EvaluationResult:
    """Return the result over the tokens of several datasets. Datasets without tokens do not count."""
    weights: list[float] = []
    loss_sums: list[float] = []
    correct_sums: list[float] = []
    for result in results:
        # The means of a dataset without tokens are NaN.
        if result.weight:
            weights.append(result.weight)
            loss_sums.append(result.mean_loss * result.weight)
            correct_sums.append(result.accuracy * result.weight)
    weight = math.fsum(weights)
    if not weight:
        return EvaluationResult(mean_loss=math.nan, accuracy=math.nan, weight=0.0)
    return EvaluationResult(
        mean_loss=math.fsum(loss_sums) / weight,
        accuracy=math.fsum(correct_sums) / weight,
        weight=weight,
    )


def _exact_sum(values: list[float]) -> float:
    """Return the correctly rounded sum, which does not depend on the order. Infinite and NaN values are added too."""
    if all(map(math.isfinite, values)):
        return math.fsum(values)
    # `fsum` raises an error for inf - inf, where a sum is NaN.
    return sum(values)


# Lengths are rounded up to this number times a power of two, so that few shapes are compiled.
LENGTH_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A sequence with scored last tokens."""

    tokens: Sequence[int]  # Token ids, at least two
    num_scored: int  # Number of the last tokens to score, given all tokens before them


@dataclass(frozen=True, slots=True)
class Score:
    """Score of the last tokens of a sequence."""

    log_likelihood: float  # Sum of the logarithms of their probabilities
    is_greedy: bool  # Whether each of them is the most likely token


def score_sequences(
    params: Tree,
    requests: Sequence[ScoreRequest],
    *,
    eval_step: EvalStep,
    sharding: ShardingContext,
    batch_size: int,
    max_length: int,
) -> list[Score]:
    """Score sequences, the longest first.

    The result has the order of the requests. The rows of a batch have the same rounded length, so
    that the padding of a row does not depend on other rows. With `jit_row_eval_step` a score has
    the same bits in batches of any size.

    Args:
        params: Parameters, sharded by the partition rules of `sharding`.
        requests: The sequences, of at most `max_length + 1` tokens.
        eval_step: Computes the sums of each row, from `jit_row_eval_step` or
            `jit_fast_row_eval_step`.
        sharding: The device mesh of the batches.
        batch_size: Rows per batch.
        max_length: Maximum tokens of a row.
    """
    scores: dict[int, Score] = {}
    for indices, length in _request_batches(requests, batch_size, max_length):
        rows = _make_rows([requests[index] for index in indices], batch_size, length)
        sums = eval_step(params, place_batch(rows, sharding))
        losses = np.ravel(sums["loss"]).tolist()
        weights = np.ravel(sums["weight"]).tolist()
        correct = np.ravel(sums["correct"]).tolist()
        # A batch with fewer requests than rows ends with rows of padding, which have no score.
        for row, index in enumerate(indices):
            # A loss is -log p, summed over the scored tokens.
            scores[index] = Score(-losses[row], is_greedy=correct[row] == weights[row])
    return [scores[index] for index in range(len(requests))]


def _request_batches(
    requests: Sequence[ScoreRequest], batch_size: int, max_length: int
) -> Iterator[tuple[Sequence[int], int]]:
    """Yield the positions of the requests of each batch, and their common rounded length."""
    lengths = [_round_length(len(request.tokens) - 1, max_length) for request in requests]
    # The longest first: a batch that does not fit into memory fails at the start. `sorted` is
    # stable, so equal lengths keep the order of the requests.
    order = sorted(range(len(requests)), key=lambda index: -lengths[index])
    for length, group in groupby(order, key=lengths.__getitem__):
        indices = [*group]
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size], length


def _make_rows(
    requests: Sequence[ScoreRequest], num_rows: int, length: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs, targets and weights [num_rows, length]. Padding, and rows beyond the requests, have weight 0."""
    tokens, targets = np.zeros((2, num_rows, length), np.int32)
    weights = np.zeros((num_rows, length), np.float32)
    for row, request in enumerate(requests):
        end = len(request.tokens) - 1
        tokens[row, :end], targets[row, :end] = request.tokens[:-1], request.tokens[1:]
        # A sequence of 6 tokens has 5 targets. With num_scored = 2 the weights are [0 0 0 1 1].
        weights[row, end - request.num_scored : end] = 1
    return {"tokens": tokens, "targets": targets, "weights": weights}


def _round_length(length: int, max_length: int) -> int:
    """Round a length up to 64, 128, 256 and so on, or to the maximum length."""
    rounded = LENGTH_MULTIPLE
    while rounded < length:
        rounded *= 2
    return min(rounded, max_length)


def rolling_requests(ids: Sequence[int], prefix_id: int, max_length: int) -> Iterator[ScoreRequest]:
    """Yield requests to score each token of a text once.

    Each but the last predicts `max_length` tokens, given the token before them. The last one has as many earlier tokens
    as fit.

    Args:
        ids: Tokens of the text.
        prefix_id: Token before the first one.
        max_length: Maximum tokens of a row.
    """
    tokens = [prefix_id, *ids]
    for start in range(0, len(ids), max_length):
        end = min(start + max_length, len(ids))
        first = max(0, end - max_length)
        yield ScoreRequest(tokens[first : end + 1], end - start)
