"""Distance between the outputs of two models on one prompt. Axes: T tokens, V vocabulary rows, D model width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Rows of logits in float64 at the same time: with 256,000 tokens 64 rows take 131 MB.
BLOCK_ROWS = 64
NUM_TOP = 5
# Divisor of hidden states that are all zero.
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LogitDistance:
    """Distance between the logits of two models.

    Attributes:
        kl_mean: Mean over the tokens of KL(a || b) = sum p_a (log p_a - log p_b), in nats.
        kl_max: Largest KL divergence of a token.
        top1_agreement: Fraction of the tokens with the same largest logit.
        top5_overlap: Mean fraction of the five largest logits in common.
        max_abs: Largest |a - b|. Infinite if a logit is not finite.
    """

    kl_mean: float
    kl_max: float
    top1_agreement: float
    top5_overlap: float
    max_abs: float


def logit_distance(a: np.ndarray, b: np.ndarray) -> LogitDistance:
    """Return the distance between two arrays of logits [T, V]."""
    num_tokens = len(a)
    divergences = np.zeros(num_tokens)
    num_same = 0
    overlap = 0.0
    max_abs = 0.0
    for start in range(0, num_tokens, BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        a_rows = a[rows].astype(np.float64)
        b_rows = b[rows].astype(np.float64)
        if not (np.isfinite(a_rows).all() and np.isfinite(b_rows).all()):
            return LogitDistance(np.inf, np.inf, 0.0, 0.0, np.inf)
        divergences[rows] = _kl_divergence(a_rows, b_rows)
        num_same += int((a_rows.argmax(1) == b_rows.argmax(1)).sum())
        overlap += float(_top_overlap(a_rows, b_rows).sum())
        max_abs = max(max_abs, float(np.abs(a_rows - b_rows).max()))
    return LogitDistance(
        kl_mean=float(divergences.mean()),
        kl_max=float(divergences.max()),
        top1_agreement=num_same / num_tokens,
        top5_overlap=overlap / num_tokens,
        max_abs=max_abs,
    )


def _kl_divergence(a: Float64Array, b: Float64Array) -> Float64Array:
    """Return KL(a || b) of each row of logits. Rounding may make it slightly negative, which counts as 0."""
    log_a = _log_softmax(a)
    log_b = _log_softmax(b)
    divergence: Float64Array = (np.exp(log_a) * (log_a - log_b)).sum(1)
    return np.maximum(divergence, 0.0)


def _log_softmax(logits: Float64Array) -> Float64Array:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _top_overlap(a: Float64Array, b: Float64Array) -> Float64Array:
    """Return the fraction of the largest logits that two models have in common, for each row."""
    count = min(NUM_TOP, a.shape[1])
    top_a = np.argpartition(-a, count - 1, axis=1)[:, :count]
    top_b = np.argpartition(-b, count - 1, axis=1)[:, :count]
    is_common = (top_a[:, :, None] == top_b[:, None, :]).any(2)
    return is_common.mean(1)


def relative_differences(a: Sequence[np.ndarray], b: Iterable[np.ndarray]) -> tuple[float, ...]:
    """Return max |a - b| / max |a| for each pair of hidden states [T, D]. Infinite if a value is not finite."""
    differences: list[float] = []
    for a_states, b_states in zip(a, b, strict=True):
        differences.append(_relative_difference(a_states, b_states))
    return tuple(differences)


def _relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return max |a - b| / max |a|, or infinity if a value is not finite."""
    difference = 0.0
    largest = 0.0
    for start in range(0, len(a), BLOCK_ROWS):
        a_rows = a[start : start + BLOCK_ROWS].astype(np.float64)
        distance = float(np.abs(a_rows - b[start : start + BLOCK_ROWS]).max())
        if not np.isfinite(distance):
            return np.inf
        difference = max(difference, distance)
        largest = max(largest, float(np.abs(a_rows).max()))
    if difference == 0:
        return 0.0
    return difference / max(largest, SMALLEST_NORMAL)
