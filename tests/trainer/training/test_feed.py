"""Batches on devices: whatever the mesh splits, each device has its part of the same batch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import runs
from trainer.data.order import SampleOrder
from trainer.data.seq2seq import seq2seq_dataset
from trainer.data.store import MappedTokens
from trainer.distributed import sharding
from trainer.training import feed


@pytest.mark.parametrize("mesh", ["", "2,2,2", "fsdp:2,mp:2,sp:2"])
def test_a_batch_is_that_of_its_step(mesh: str):
    job = runs.make_job(runs.make_setup(mesh=mesh))
    wanted = job.train.get_batch(job.order.rows(3))
    found = feed.load_batch(job.setup, job.train, job.order, 3)
    assert found.keys() == wanted.keys()
    for name, each in found.items():
        np.testing.assert_array_equal(each, wanted[name])


@pytest.mark.parametrize("mesh", ["", "2,2,2"])
def test_a_batch_of_pairs_is_that_of_its_step(mesh: str):
    """The columns of sources and of targets have lengths of their own."""
    setup, order = runs.make_setup(mesh=mesh), SampleOrder(20, 8, 1, True)
    ids, ends = np.arange(200, dtype="<u2") % 131, np.arange(5, 201, 5, dtype="<u8")
    data = seq2seq_dataset(MappedTokens(ids, ends, "x", 4), 7, 0, 1)
    wanted, found = data.get_batch(order.rows(2)), feed.load_batch(setup, data, order, 2)
    assert {name: each.shape for name, each in found.items()} == {
        "source": (8, 7), "present": (8, 7), "tokens": (8, 4), "targets": (8, 4), "weights": (8, 4)
    }  # fmt: skip
    for name, each in found.items():
        np.testing.assert_array_equal(each, wanted[name])
    last = [*feed.load_eval_batches(setup, data, 8, 0)][-1]
    assert not np.asarray(last["weights"])[4:].any()
    assert not np.asarray(last["present"])[4:].any()


def test_sequences_may_be_split_as_well(monkeypatch: pytest.MonkeyPatch):
    rules = {**sharding.ACTIVATION_RULES, "seq": (("sp",),)}
    monkeypatch.setattr(sharding, "ACTIVATION_RULES", rules)
    job = runs.make_job(runs.make_setup(mesh="fsdp:2,sp:4"))
    wanted = job.train.get_batch(job.order.rows(0))
    for name, each in feed.load_batch(job.setup, job.train, job.order, 0).items():
        assert each.addressable_shards[0].data.shape == (4, runs.LENGTH // 4)
        np.testing.assert_array_equal(each, wanted[name])
