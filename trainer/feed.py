"""Batches from blocks onto devices: each device is given its own part, and no rows but those of it are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding, SingleDeviceSharding

from trainer.data.blocks import Blocks, examples
from trainer.data.order import Int64s, Order, eval_batches
from trainer.step import Setup, batch_sharding

Index = tuple[slice, ...]


def shapes(setup: Setup, size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What a batch of `size` sequences looks like, and where it lies."""
    sharding = _sharding(setup, size, length)
    kinds = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    return {name: jax.ShapeDtypeStruct((size, length), kind, sharding=sharding) for name, kind in kinds.items()}


def batch(setup: Setup, blocks: Blocks, order: Order, step: int) -> dict[str, Array]:
    """The batch of a step (the first one is 0): a function of the step, whatever came before."""
    return _placed(setup, blocks, order.rows(step))


def evaluation(setup: Setup, blocks: Blocks, size: int, limit: int) -> Iterator[dict[str, Array]]:
    """All of `blocks`, or the first `limit` rows, in batches of `size`; rows that fill up the last have no weight."""
    for rows in eval_batches(blocks.n, size, limit):
        yield _placed(setup, blocks, rows)


def _sharding(setup: Setup, size: int, length: int) -> Sharding:
    return batch_sharding(setup, size, length) or SingleDeviceSharding(jax.devices()[0])


def _placed(setup: Setup, blocks: Blocks, rows: Int64s) -> dict[str, Array]:
    shape = len(rows), blocks.seq_length
    made = lru_cache(maxsize=None)(lambda low, high: examples(blocks, rows[low:high]))  # devices of a replica share

    def part(name: str, at: Index | None) -> np.ndarray:
        of_rows, of_columns = at or (slice(None), slice(None))
        low, high, _ = of_rows.indices(shape[0])
        return made(low, high)[name][:, of_columns]

    return {
        name: jax.make_array_from_callback(shape, wanted.sharding, lambda at, name=name: part(name, at))
        for name, wanted in shapes(setup, *shape).items()
    }
