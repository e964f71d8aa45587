"""The entries that a training run adds to the manifest of each of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from prepcli.core.json_types import JsonValue

# `from` and `to` are dtypes, `values` and `changed` numbers of all and of the changed values.
CastCounts = TypedDict("CastCounts", {"from": str, "to": str, "values": int, "changed": int})


class StepFields(TypedDict, total=False):
    """The manifest entries of a training step, in addition to the entries of every checkpoint.

    Attributes:
        recipe: The recipe as TOML.
        environment: Versions and settings that decide how sums are rounded.
        data: Identity of the data.
        batch_size: Sequences of a step.
        rate: Fields of the learning rate schedule.
        loss_fn: Name of a user's loss.
        eval_sequences: Sequences of an evaluation. Losses over other sequences are not comparable.
        eval_loss: Loss of the evaluation after the step.
        eval_metric: Name and value of another metric of the evaluation, and whether the lowest or the highest is best.
        eval_stride: Tokens between two windows of an evaluation. Absent for sequences side by side.
        patience: Evaluations so far, for `eval.patience`. See `Patience`.
        param_cast: Counts of the cast to the dtype of the saved parameters.
        base: Name and digests of the frozen parameters of a run with adapters.
    """

    recipe: str
    environment: Mapping[str, str | int]
    data: str
    batch_size: int
    rate: Mapping[str, JsonValue]
    loss_fn: str
    eval_sequences: int
    eval_loss: float
    eval_metric: Mapping[str, JsonValue]
    eval_stride: int
    patience: Mapping[str, JsonValue]
    param_cast: CastCounts
    base: Mapping[str, str]
