"""Batches from a dataset to devices.

A process reads only the rows of its own devices. On a mesh that splits the tokens of a row, all
columns of a batch are in its `zigzag_order`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial

import jax
import numpy as np
from jax import Array

from trainer.data.order import Int64Array
from trainer.data.packing import Arrays, ColumnSpecs, Dataset
from trainer.distributed.sharding import ShardingContext, local_device_sharding, zigzag_order

# Entry of a batch, and of the metrics of a step, with the stop signals of all processes. See `StopSignals`.
STOP = "stop"
TokenBatch = Mapping[str, Array]
Index = tuple[slice, ...]


def batch_shapes(
    dataset: Dataset, batch_size: int, sharding: ShardingContext
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape, dtype and sharding of each array in a batch. See `column_shapes`."""
    return column_shapes(dataset.columns, batch_size, sharding)


def column_shapes(
    columns: ColumnSpecs, batch_size: int, sharding: ShardingContext
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape, dtype and sharding of each array of a batch.

    Without a mesh, the arrays are on a device of this process.

    Args:
        columns: Length and dtype of each array of a row, by name.
        batch_size: Sequences of the batch.
        sharding: The device mesh of the batch.

    Raises:
        UsageError: The mesh does not divide the batch.
    """
    first_device = local_device_sharding()
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    for name, (length, dtype) in columns.items():
        shape = (batch_size, length)
        column_sharding = sharding.activation_sharding(shape, "batch", "seq") or first_device
        shapes[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=column_sharding)
    return shapes


def place_batch(rows: Arrays, sharding: ShardingContext) -> dict[str, Array]:
    """Place the columns of a whole batch, which all processes have, on the devices of a mesh without sp."""
    columns = {name: (array.shape[1], array.dtype) for name, array in rows.items()}
    shapes = column_shapes(columns, len(rows["tokens"]), sharding)
    batch: dict[str, Array] = {}
    for name, shape in shapes.items():
        batch[name] = jax.make_array_from_callback(
            shape.shape, shape.sharding, rows[name].__getitem__
        )
    return batch


def load_batch(
    dataset: Dataset,
    rows: Int64Array,
    sharding: ShardingContext,
    *,
    epochs: Int64Array | None = None,
) -> dict[str, Array]:
    """Load rows of a dataset as sharded arrays.

    Devices that hold the same rows share one read.

    Args:
        dataset: The dataset.
        rows: Indices of the rows. -1 is padding.
        sharding: The device mesh of the batch.
        epochs: Epoch of each row. None if all are of epoch 0.

    Raises:
        UsageError: The mesh does not divide the batch or its rows.
    """

    # JAX calls `read_shard` for each device and column. The cache reads the rows of a slice once
    # for all of them.
    @cache
    def read_rows(start: int, stop: int) -> Arrays:
        if epochs is None:
            return dataset.get_batch(rows[start:stop])
        return dataset.get_batch(rows[start:stop], epochs[start:stop])

    orders = {name: zigzag_order(length, sharding) for name, (length, _) in dataset.columns.items()}

    def read_shard(name: str, index: Index | None) -> np.ndarray:
        row_slice, column_slice = index or (slice(None), slice(None))
        start, stop, _ = row_slice.indices(len(rows))
        column = read_rows(start, stop)[name]
        # A slice of a NumPy array is a view. The zigzag order is an index array, which copies, and
        # is therefore used only on a mesh that splits tokens.
        if sharding.sequence_parallel_size == 1:
            return column[:, column_slice]
        return column[:, orders[name][column_slice]]

    batch: dict[str, Array] = {}
    for name, target in batch_shapes(dataset, len(rows), sharding).items():
        batch[name] = jax.make_array_from_callback(
            target.shape, target.sharding, partial(read_shard, name)
        )
    return batch
