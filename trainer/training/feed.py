"""Batches from data onto devices: each device is given its own part, and no rows but those of it are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding, SingleDeviceSharding

from trainer.data.order import Int64s, Order, eval_batches
from trainer.data.packing import Dataset
from trainer.training.step import Setup, batch_sharding

Index = tuple[slice, ...]


def shapes(setup: Setup, data: Dataset, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What a batch of `size` sequences looks like, and where it lies."""
    return {
        name: jax.ShapeDtypeStruct((size, length), kind, sharding=_sharding(setup, size, length))
        for name, (length, kind) in data.columns.items()
    }


def batch(setup: Setup, data: Dataset, order: Order, step: int) -> dict[str, Array]:
    """The batch of a step (the first one is 0): a function of the step, whatever came before."""
    return _placed(setup, data, order.rows(step))


def evaluation(setup: Setup, data: Dataset, size: int, limit: int) -> Iterator[dict[str, Array]]:
    """All of `data`, or the first `limit` rows, in batches of `size`; rows that fill up the last have no weight."""
    for rows in eval_batches(data.n, size, limit):
        yield _placed(setup, data, rows)


def _sharding(setup: Setup, size: int, length: int) -> Sharding:
    return batch_sharding(setup, size, length) or SingleDeviceSharding(jax.devices()[0])


def _placed(setup: Setup, data: Dataset, rows: Int64s) -> dict[str, Array]:
    made = lru_cache(maxsize=None)(lambda low, high: data.examples(rows[low:high]))  # devices of a replica share

    def part(name: str, at: Index | None) -> np.ndarray:
        of_rows, of_columns = at or (slice(None), slice(None))
        low, high, _ = of_rows.indices(len(rows))
        return made(low, high)[name][:, of_columns]

    return {
        name: jax.make_array_from_callback(wanted.shape, wanted.sharding, lambda at, name=name: part(name, at))
        for name, wanted in shapes(setup, data, len(rows)).items()
    }
