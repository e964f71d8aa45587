"""Batch shape and learning rate schedule of a recipe."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from trainer.recipe import BatchShape, batch_shape
from trainer.recipe.lr_schedule import build_lr_schedule
from trainer.recipe.optimizer_tables import AdamWTable
from trainer.recipe.tables import Batch


def batch(**keys: int) -> Batch:
    """Return the `[batch]` table of a recipe."""
    return Batch.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "n_devices", "n_replicas", "shape"),
    [
        ({"size": 24}, 8, 1, (24, 1)),
        # `per_device` counts all devices, although dp is 1.
        ({"per_device": 3}, 8, 1, (24, 1)),
        ({"per_replica": 4}, 16, 2, (8, 1)),
        # This is the batch of redco on one node.
        ({"size": 8, "per_replica": 4}, 8, 1, (8, 2)),
        ({"size": 64, "per_device": 2}, 8, 4, (64, 4)),
        ({"size": 64, "accumulate": 4}, 8, 8, (64, 4)),
        ({"per_device": 2, "accumulate": 3}, 8, 4, (48, 3)),
    ],
)
def test_batch_shape_resolves_rows_and_accumulation(
    keys: dict[str, int], n_devices: int, n_replicas: int, shape: tuple[int, int]
):
    resolved = batch_shape(batch(**keys), n_devices=n_devices, n_replicas=n_replicas)
    assert (resolved.size, resolved.accumulate, resolved.micro_batch_size) == (
        *shape,
        shape[0] // shape[1],
    )


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"size": 24, "per_device": 5},
            "`batch.size` 24 is not a whole number of micro-batches - per_device 5 x 8 devices = 40; 24 mod 40 = 24"
            " - `--set batch.size=40`",
        ),
        (
            {"size": 10, "per_replica": 1},
            "`batch.size` 10 is not a whole number of micro-batches - per_replica 1 x 4 replicas = 4; 10 mod 4 = 2"
            " - `--set batch.size=12`",
        ),
        (
            {"size": 10, "accumulate": 4},
            "`batch.size` 10 is not a whole number of micro-batches - accumulate is 4; 10 mod 4 = 2"
            " - `--set batch.size=16`",
        ),
        (
            {"size": 24, "accumulate": 4},
            "a micro-batch of 6 does not divide among 4 replicas - `batch.size` 24 / accumulate 4 = 6; 6 mod 4 = 2"
            " - `--set batch.size=32`",
        ),
    ],
)
def test_batch_shape_rejects_indivisible_batch(keys: dict[str, int], text: str):
    with pytest.raises(PrepError) as caught:
        batch_shape(batch(**keys), n_devices=8, n_replicas=4)
    assert text in caught.value.message
    assert caught.value.code == USAGE


COUNTS = st.integers(1, 6)


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.sampled_from(["size", "accumulate"]))
def test_batch_shape_computes_the_third_key(
    mp: int, replicas: int, micro: int, accumulate: int, third: str
):
    size = micro * mp * replicas * accumulate
    second_key = {"accumulate": accumulate} if third == "size" else {"size": size}
    expected = BatchShape(size, accumulate)
    assert (
        batch_shape(
            batch(per_device=micro, **second_key), n_devices=mp * replicas, n_replicas=replicas
        )
        == expected
    )
    assert (
        batch_shape(
            batch(per_replica=micro * mp, **second_key),
            n_devices=mp * replicas,
            n_replicas=replicas,
        )
        == expected
    )


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6))
def test_batch_shape_hint_is_valid(size: int, accumulate: int, replicas: int):
    try:
        batch_shape(
            batch(size=size, accumulate=accumulate), n_devices=replicas, n_replicas=replicas
        )
    except PrepError as error:
        (better,) = map(int, re.findall(r"size=(\d+)`", error.hint))
        assert better > size
        assert (
            batch_shape(
                batch(size=better, accumulate=accumulate), n_devices=replicas, n_replicas=replicas
            ).size
            == better
        )
    else:
        assert size % (accumulate * replicas) == 0


@pytest.mark.parametrize(
    ("keys", "warmup", "decay"),
    [
        ({}, 0, 1000),
        ({"warmup_steps": 10}, 10, 1000),
        ({"warmup_ratio": 0.07}, 70, 1000),
        ({"warmup_ratio": 0.1, "decay_steps": 200}, 100, 200),
        ({"warmup_steps": 2000, "schedule": "constant"}, 2000, 1000),
    ],
)
def test_schedule_has_steps_of_both_phases(keys: dict[str, Any], warmup: int, decay: int):
    schedule = build_lr_schedule(AdamWTable.model_validate({"lr": 1.0, **keys}), 1000)
    assert (schedule.warmup, schedule.decay, schedule.cooldown) == (warmup, decay, 0)


def test_warmup_as_long_as_the_run_is_rejected():
    with pytest.raises(
        PrepError, match="warm-up takes the first 1000 steps, and the run has 1000 steps"
    ):
        build_lr_schedule(AdamWTable.model_validate({"lr": 1.0, "warmup_ratio": 1.0}), 1000)
