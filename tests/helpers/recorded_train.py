"""`prep` with a record of the batches of training, run as `python -m tests.helpers.recorded_train WORDS`.

Each process appends to `PREFIX.INDEX.jsonl`, with the prefix from the environment variable RECORD. A line has the rows
of a step, the rows that the process read from the dataset, and its shards of each array of the batch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash

from prepcli.commands.cli.main import main
from trainer.data.packing import Arrays, Dataset, RowIndices
from trainer.distributed.sharding import ShardingContext
from trainer.training import feed, loop

VARIABLE = "RECORD"


class RecordedDataset:
    """A dataset that keeps the rows of its reads."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.columns = dataset.columns
        self.rows: list[int] = []

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        """Read rows."""
        self.rows += [int(row) for row in rows]
        return self._dataset.get_batch(rows, epochs)


def record_batch(
    dataset: Dataset,
    rows: np.ndarray,
    sharding: ShardingContext,
    *,
    epochs: np.ndarray | None = None,
) -> Mapping[str, jax.Array]:
    """Load a batch as `load_batch` does, and append it to the record of this process."""
    if epochs is None:
        # A batch of an evaluation, which compiles its step
        return feed.load_batch(dataset, rows, sharding)
    recorded: Any = RecordedDataset(dataset)
    batch = feed.load_batch(recorded, rows, sharding, epochs=epochs)
    shards = {
        name: [list(_describe(part, array)) for part in array.addressable_shards]
        for name, array in batch.items()
    }
    line = {"rows": rows.tolist(), "read": sorted(recorded.rows), "shards": shards}
    with Path(f"{os.environ[VARIABLE]}.{jax.process_index()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    return batch


def _describe(shard: Any, array: jax.Array) -> Iterator[Any]:
    """Yield the bounds of a shard in its array, [start, stop] of each axis, and its values."""
    yield [axis_slice.indices(extent)[:2] for axis_slice, extent in zip(shard.index, array.shape)]
    yield np.asarray(shard.data).tolist()


def read_records(prefix: Path) -> list[list[dict[str, Any]]]:
    """Return the lines of each process, by its index."""
    paths = sorted(prefix.parent.glob(f"{prefix.name}.*.jsonl"))
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def batch_digests(prefix: Path) -> list[str]:
    """Return a digest of each recorded batch, put together from the shards of all processes."""
    return [_batch_digest(lines) for lines in zip(*read_records(prefix), strict=True)]


def _batch_digest(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest of a batch; raise AssertionError if shards differ or leave a gap."""
    digest = xxhash.xxh3_64()
    for name in lines[0]["shards"]:
        shards = [shard for line in lines for shard in line["shards"][name]]
        whole = np.full([max(bounds[axis][1] for bounds, _ in shards) for axis in range(2)], np.nan)
        for ((top, bottom), (left, right)), values in shards:
            part = whole[top:bottom, left:right]
            assert np.isnan(part).all() or (part == values).all(), f"shards of {name} differ"
            part[:] = values
        assert not np.isnan(whole).any(), f"shards of {name} leave a gap"
        digest.update(whole.tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    loop.load_batch = record_batch
    sys.exit(main())
