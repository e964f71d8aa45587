"""One of several processes that load the same leaves: `python -m tests.helpers.loading_process`.

It checks the loaded shards and prints the number of elements that this process has read, and that of the leaves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from prepcli.algebra.boxes import Box
from tests.helpers.processes import join_job
from tests.helpers.runs import MemoryReader
from trainer.distributed.leaf_slices import exchange_is_faster
from trainer.training.leaf_loading import LeafLoader

MESHES = ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2))
SHAPE = (8, 128, 256)
# A device of each process reads one of the leaves with a single unit.
UNITS = {"rows": (1, 16, 256), "layers": (1, 128, 256), "whole": SHAPE, "undivided": SHAPE}


class CountingReader(MemoryReader):
    """A reader that counts elements."""

    count = 0

    def read(self, name: str, parts: Mapping[Box, np.ndarray]) -> None:
        self.count += sum(array.size for array in parts.values())
        super().read(name, parts)


def main() -> None:
    """Load each leaf onto each mesh."""
    join_job()
    array = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    reader = CountingReader(dict.fromkeys(UNITS, array), read_units=UNITS)
    assert not exchange_is_faster(reader), "one host shares its page cache"
    assert exchange_is_faster(MemoryReader({}, is_remote=True))
    loader = LeafLoader(reader, exchanges=True)
    for sizes in MESHES:
        mesh = Mesh(
            np.array(jax.devices()).reshape(sizes),
            ("dp", "fsdp", "mp"),
            axis_types=(AxisType.Auto,) * 3,
        )
        sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp", "mp"))
        for name in UNITS:
            leaf = loader.load(
                name, jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            )
            for shard in leaf.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), array[shard.index])
    print(json.dumps({"read": reader.count, "elements": array.size * len(UNITS) * len(MESHES)}))


if __name__ == "__main__":
    main()
