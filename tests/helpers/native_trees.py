"""Leaves of prep's native tree from the tensors of a model, and their arrays in an Orbax item."""

from __future__ import annotations

import numpy as np

from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.boxes import full_box
from prepcli.formats.orbax_chunks import unplaced_array
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import FAMILIES
from prepcli.planning.arrays import Array
from tests.helpers.leaf_copies import leaf_box_copies
from tests.prepcli.algebra.test_strided_copies import as_bytes, move


def expected_leaves(
    config: dict, tensors: dict[str, np.ndarray], scan: bool, scan_axis: int
) -> dict[str, np.ndarray]:
    """Assemble every leaf of the tree from the tensors with the axis map. Padding is zeros."""
    family = FAMILIES[config["model_type"]]
    true, padded = config["vocab_size"], -(-config["vocab_size"] // 8) * 8
    leaves = {}
    for path, row in parameter_rows(family, config, scan, scan_axis).items():
        if path == family.tying.head_leaf and family.is_tied(config):
            continue
        bound = bind_row(row, family.sizes(config) | {"vocab": true}, {"vocab": padded})
        for layer in range(3 if "{layers}" in path else 1):
            item = next(iter(tensors.values())).dtype.itemsize
            out = np.zeros(int(np.prod(bound.leaf_shape)) * item, np.uint8)
            fixed = {"layers": layer} if "{layers}" in path else {}
            for name, copy in leaf_box_copies(
                bound, full_box(bound.leaf_shape), itemsize=item, unscanned_indices=fixed
            ):
                full = name if name in family.unprefixed else family.prefix + name
                move(copy, as_bytes(tensors[full]), out)
            dtype = next(iter(tensors.values())).dtype
            leaves[f"params.{path.format(layers=layer)}"] = out.view(dtype).reshape(
                bound.leaf_shape
            )
    return leaves


def array_metas(
    leaves: dict[str, np.ndarray], root: str = "", pieces: int = 1
) -> dict[Array, np.ndarray]:
    """Return each leaf with array metadata for `pieces` chunks along its first and last axes."""
    metas = {}
    for name, leaf in leaves.items():
        ends = {0, leaf.ndim - 1}
        chunk = tuple(-(-n // pieces) if axis in ends else n for axis, n in enumerate(leaf.shape))
        path = tuple(f"{root}{name}".split("."))
        metas[unplaced_array(path, leaf.shape, leaf.dtype.name, chunk)] = leaf
    return metas
