"""One of several processes that load parameters together: `python -m tests.helpers.parameters_process LOADS`.

LOADS is JSON: a list of [checkpoint, mesh, local folder of the same model]. The shards are compared with those that are
read from the local folder.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np

import prepcli as prep
from tests.helpers.processes import join_job


def main() -> None:
    """Load and compare."""
    join_job()
    for checkpoint, mesh, local_folder in json.loads(sys.argv[1]):
        loaded = prep.load_params(checkpoint, mesh, stream="://" not in checkpoint)
        expected = prep.load_params(local_folder, mesh)
        for leaf, expected_leaf in zip(
            jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True
        ):
            for shard, expected_shard in zip(
                leaf.addressable_shards, expected_leaf.addressable_shards, strict=True
            ):
                np.testing.assert_array_equal(
                    np.asarray(shard.data), np.asarray(expected_shard.data)
                )


if __name__ == "__main__":
    main()
