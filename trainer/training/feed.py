"""Batches from a dataset to devices; a process reads only the rows of its own devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding, SingleDeviceSharding

from trainer.data.order import Int64Array, SampleOrder, eval_batches
from trainer.data.packing import Dataset
from trainer.training.step import StepSetup, batch_sharding

Index = tuple[slice, ...]


def batch_shapes(setup: StepSetup, dataset: Dataset, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape, dtype and sharding of each array of a batch.

    Raises:
        PrepError: The mesh does not divide the batch (a usage error).
    """
    return {
        name: jax.ShapeDtypeStruct(
            (batch_size, length), dtype, sharding=_sharding_or_first_device(setup, batch_size, length)
        )
        for name, (length, dtype) in dataset.columns.items()
    }


def load_batch(setup: StepSetup, dataset: Dataset, order: SampleOrder, step: int) -> dict[str, Array]:
    """Load the batch of a step, counted from 0; it depends on the step only."""
    return _load_rows(setup, dataset, order.rows(step))


def load_eval_batches(setup: StepSetup, dataset: Dataset, batch_size: int, limit: int) -> Iterator[dict[str, Array]]:
    """Yield the dataset in batches; padding rows of the last batch have weight 0.

    Args:
        setup: The static parts of a step.
        dataset: The rows to evaluate on.
        batch_size: Rows per batch.
        limit: Number of rows to load, from the first; 0 for all.
    """
    for rows in eval_batches(dataset.n_rows, batch_size, limit):
        yield _load_rows(setup, dataset, rows)


def _sharding_or_first_device(setup: StepSetup, batch_size: int, seq_length: int) -> Sharding:
    """Return the sharding of a batch; the first device without a mesh."""
    return batch_sharding(setup, batch_size, seq_length) or SingleDeviceSharding(jax.devices()[0])


def _load_rows(setup: StepSetup, dataset: Dataset, rows: Int64Array) -> dict[str, Array]:
    """Load rows as sharded arrays; devices that hold the same rows share one read."""
    read_rows = lru_cache(maxsize=None)(lambda start, stop: dataset.get_batch(rows[start:stop]))

    def read_shard(name: str, index: Index | None) -> np.ndarray:
        row_slice, column_slice = index or (slice(None), slice(None))
        start, stop, _ = row_slice.indices(len(rows))
        return read_rows(start, stop)[name][:, column_slice]

    return {
        name: jax.make_array_from_callback(
            target.shape, target.sharding, lambda index, name=name: read_shard(name, index)
        )
        for name, target in batch_shapes(setup, dataset, len(rows)).items()
    }
