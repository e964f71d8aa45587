"""Tests of batches on devices: each device holds its shard of the same batch on any mesh."""

from __future__ import annotations

import numpy as np
import pytest

from prepcli.core.errors import PrepError
from tests.helpers import runs
from trainer.data.order import RowOrder, eval_batches
from trainer.data.packing import PackedDataset
from trainer.data.seq2seq import seq2seq_dataset
from trainer.data.store import MappedTokens
from trainer.nn.model_spec import AttentionOptions
from trainer.training import feed


@pytest.mark.parametrize("mesh", ["", "2,2,2", "dp:2,mp:4"])
def test_load_batch_returns_rows_of_step(mesh: str):
    job = runs.make_job(runs.make_setup(mesh=mesh))
    expected = job.train.get_batch(job.order.rows(3))
    batch = feed.load_batch(job.train, job.order.rows(3), job.setup.sharding)
    assert batch.keys() == expected.keys()
    for name, array in batch.items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("mesh", ["", "2,2,2"])
def test_load_batch_returns_source_and_target_of_step(mesh: str):
    """Sources and targets have different lengths."""
    setup, rows = runs.make_setup(mesh=mesh), RowOrder(20, 8, 1, True).rows(2)
    ids, ends = np.arange(200, dtype="<u2") % 131, np.arange(5, 201, 5, dtype="<u8")
    dataset = seq2seq_dataset(MappedTokens(ids, ends, "x", 4), 7, decoder_start_id=0, eos_id=1)
    expected, batch = dataset.get_batch(rows), feed.load_batch(dataset, rows, setup.sharding)
    assert {name: array.shape for name, array in batch.items()} == {
        "source": (8, 7),
        "present": (8, 7),
        "tokens": (8, 4),
        "targets": (8, 4),
        "weights": (8, 4),
    }
    for name, array in batch.items():
        np.testing.assert_array_equal(array, expected[name])
    last = feed.load_batch(dataset, [*eval_batches(20, 8, limit=0)][-1], setup.sharding)
    assert not np.asarray(last["weights"])[4:].any()
    assert not np.asarray(last["present"])[4:].any()


def test_load_batch_gives_sp_devices_two_blocks_per_row():
    setup = runs.make_setup(mesh="fsdp:2,sp:4", attention_options=AttentionOptions("blockwise"))
    job = runs.make_job(setup)
    expected = job.train.get_batch(job.order.rows(0))
    # Each device has two of the 8 blocks of 2 tokens.
    blocks = [(0, 7), (1, 6), (2, 5), (3, 4)]
    for name, array in feed.load_batch(job.train, job.order.rows(0), setup.sharding).items():
        for shard in array.addressable_shards:
            rows, columns = shard.index
            first, second = blocks[(columns.start or 0) // 4]
            positions = [2 * first, 2 * first + 1, 2 * second, 2 * second + 1]
            np.testing.assert_array_equal(shard.data, expected[name][rows][:, positions])


def test_load_batch_rejects_rows_that_sp_does_not_divide():
    setup = runs.make_setup(mesh="dp:2,sp:4", attention_options=AttentionOptions("blockwise"))
    tokens = MappedTokens(np.arange(40, dtype="<u2"), np.array([40], "<u8"), "x", 20)
    with pytest.raises(
        PrepError,
        match=r"20 tokens cannot be split over sp 4.*20 mod 8 = 4.*a multiple of 8 tokens",
    ):
        feed.load_batch(PackedDataset(tokens, first_row=0, n_rows=2), np.arange(2), setup.sharding)


def test_batch_shapes_reject_indivisible_batch():
    setup = runs.make_setup(mesh="8,1,1")
    with pytest.raises(PrepError, match="batch 6 cannot be split over dp 8"):
        feed.batch_shapes(runs.make_job(setup).train, 6, setup.sharding)
