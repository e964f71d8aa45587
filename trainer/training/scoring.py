"""Log likelihoods of token sequences under a decoder-only model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from prepcli.models.param_tree import Tree
from trainer.distributed.sharding import ShardingContext
from trainer.training.evaluation import EvalStep
from trainer.training.feed import place_batch

# Lengths are rounded up to this number times a power of two, so that few shapes are compiled.
LENGTH_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A sequence with scored last tokens.

    Attributes:
        tokens: Token ids, at least two.
        num_scored: Number of the last tokens to score, given all tokens before them.
    """

    tokens: Sequence[int]
    num_scored: int


@dataclass(frozen=True, slots=True)
class Score:
    """Score of the last tokens of a sequence.

    Attributes:
        log_likelihood: Sum of the logarithms of their probabilities.
        is_greedy: Whether each of them is the most likely token.
    """

    log_likelihood: float
    is_greedy: bool


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
    """Return inputs, targets and weights [num_rows, length].

    Padding, and rows beyond the requests, have weight 0.
    """
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
