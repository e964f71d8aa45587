"""Tables of leaves in the parameter trees of other libraries. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Mapping

from prepcli.models.parameters import Parameter
from prepcli.models.rows import map_rows, split_row

# Path of a parameter in prep's tree -> its leaf and dims in the other tree, e.g. `lm_head.w: embed vocab`.
LeafTable = Mapping[str, str]

LAYERS_PREFIX = "layers."


def leaf_parameters(
    parameters: Mapping[str, Parameter], leaves: LeafTable, layer: LeafTable, *, layer_path: str
) -> dict[str, Parameter]:
    """Return the parameters of a tree by their paths in it. Parameters without a line in the tables are omitted.

    Args:
        parameters: Parameters of the family, by their paths in prep's tree.
        leaves: Leaves outside of the layers.
        layer: Leaves of a layer, with paths relative to a layer in both trees.
        layer_path: Path of a layer in the other tree, with `{layers}` in place of its number.
    """
    renamed: dict[str, Parameter] = {}
    for path, parameter in parameters.items():
        if path in leaves:
            leaf_path, dims = _split_leaf(leaves[path])
        elif path.removeprefix(LAYERS_PREFIX) in layer:
            leaf_path, dims = _split_leaf(layer[path.removeprefix(LAYERS_PREFIX)])
            leaf_path = f"{layer_path}.{leaf_path}"
        else:
            continue
        renamed[leaf_path] = _with_leaf_dims(parameter, dims)
    return renamed


def _split_leaf(line: str) -> tuple[str, str]:
    """Return the path and the dims of a leaf.

    >>> _split_leaf("lm_head.w: embed vocab")
    ('lm_head.w', 'embed vocab')
    """
    path, _, dims = line.partition(": ")
    return path, dims


def _with_leaf_dims(parameter: Parameter, dims: str) -> Parameter:
    """Return a parameter with another left side of its rows."""

    def replace_leaf(row: str) -> str:
        _, tensor, tensor_dims = split_row(row)
        return f"{dims} <- {tensor}: {tensor_dims}"

    return map_rows(parameter, replace_leaf)
