"""Batches on devices: whatever the mesh splits, each device has its part of the same batch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer import runs
from trainer import feed, sharding
from trainer.data.blocks import examples


@pytest.mark.parametrize("mesh", ["", "2,2,2", "fsdp:2,mp:2,sp:2"])
def test_a_batch_is_that_of_its_step(mesh: str):
    job = runs.job(runs.setup(mesh=mesh))
    wanted = examples(job.train, job.order.rows(3))
    found = feed.batch(job.setup, job.train, job.order, 3)
    assert found.keys() == wanted.keys()
    for name, each in found.items():
        np.testing.assert_array_equal(each, wanted[name])


def test_sequences_may_be_split_as_well(monkeypatch: pytest.MonkeyPatch):
    rules = {**sharding.ACTIVATION_RULES, "seq": (("sp",),)}
    monkeypatch.setattr(sharding, "ACTIVATION_RULES", rules)
    job = runs.job(runs.setup(mesh="fsdp:2,sp:4"))
    wanted = examples(job.train, job.order.rows(0))
    for name, each in feed.batch(job.setup, job.train, job.order, 0).items():
        assert each.addressable_shards[0].data.shape == (4, runs.LENGTH // 4)
        np.testing.assert_array_equal(each, wanted[name])
