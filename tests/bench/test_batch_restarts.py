"""`bench.batch_restarts`: schedules cover all steps, and other batches are noticed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bench.batch_restarts import (
    BATCH_SIZE,
    MAX_PROCESSES,
    STEPS,
    Run,
    check_step,
    compare_processes,
    random_starts,
    step_digest,
)
from trainer.data.order import RowOrder
from trainer.data.packing import PackedDataset
from trainer.data.store import MappedTokens


def make_run() -> Run:
    """Return a run of random tokens with the digests of one process."""
    ids = np.random.default_rng(0).integers(0, 9000, 1000).astype("<u2")
    tokens = MappedTokens(ids, np.array([1000], "<u8"), "x", 4)
    dataset = PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks)
    order = RowOrder(dataset.n_rows, BATCH_SIZE, seed=0, shuffle=True)
    run = Run(dataset, order, ())
    digests = [step_digest([run.shares(1, step)[0].batch(step)], step) for step in range(STEPS)]
    return Run(dataset, order, tuple(digests))


def test_schedules_take_all_steps():
    rng = random.Random(1)
    for _ in range(100):
        taken = 0
        for start, stop, of in random_starts(rng):
            assert start <= taken
            assert 1 <= of <= MAX_PROCESSES
            taken = max(taken, stop)
        assert taken == STEPS


def test_other_batches_are_noticed():
    run = make_run()
    assert compare_processes(run, [1, 7]) == STEPS * 8
    share = run.shares(1, 0)[0].batch(0)
    share["targets"][5, 2] += 1
    with pytest.raises(SystemExit, match="step 0 of 1 processes differs"):
        check_step(run, [share], 0)
