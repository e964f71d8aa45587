"""Batches from data onto devices: each device is given its own part, and no rows but those of it are read."""

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
    """What a batch of `size` sequences looks like, and where it lies."""
    return {
        name: jax.ShapeDtypeStruct(
            (batch_size, length), kind, sharding=_sharding_or_first_device(setup, batch_size, length)
        )
        for name, (length, kind) in dataset.columns.items()
    }


def load_batch(setup: StepSetup, dataset: Dataset, order: SampleOrder, step: int) -> dict[str, Array]:
    """The batch of a step (the first one is 0): a function of the step, whatever came before."""
    return _load_rows(setup, dataset, order.rows(step))


def load_eval_batches(setup: StepSetup, dataset: Dataset, batch_size: int, limit: int) -> Iterator[dict[str, Array]]:
    """All of `data`, or the first `limit` rows, in batches of `size`; rows that fill up the last have no weight."""
    for rows in eval_batches(dataset.n_rows, batch_size, limit):
        yield _load_rows(setup, dataset, rows)


def _sharding_or_first_device(setup: StepSetup, batch_size: int, seq_length: int) -> Sharding:
    return batch_sharding(setup, batch_size, seq_length) or SingleDeviceSharding(jax.devices()[0])


def _load_rows(setup: StepSetup, dataset: Dataset, rows: Int64Array) -> dict[str, Array]:
    made = lru_cache(maxsize=None)(lambda low, high: dataset.get_batch(rows[low:high]))  # devices of a replica share

    def part(name: str, at: Index | None) -> np.ndarray:
        of_rows, of_columns = at or (slice(None), slice(None))
        low, high, _ = of_rows.indices(len(rows))
        return made(low, high)[name][:, of_columns]

    return {
        name: jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda at, name=name: part(name, at))
        for name, wanted in batch_shapes(setup, dataset, len(rows)).items()
    }
