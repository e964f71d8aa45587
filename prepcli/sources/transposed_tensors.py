"""Tensors that some files store transposed, in the order of dims of the text class of transformers.

Files of Qwen3-VL-MoE have the experts as [experts, embed, 2 mlp] and [experts, mlp, embed]. The class of its text model
reads [experts, 2 mlp, embed] and [experts, embed, mlp].
"""

from __future__ import annotations

from dataclasses import replace

from prepcli.algebra.axis_map import bind_row
from prepcli.models.parameters import parameter_rows
from prepcli.planning.state_rows import DECODED
from prepcli.planning.tensors import qualify
from prepcli.sources.source import Source, SourceTensor, source_axis_maps


def without_transposed_tensors(source: Source) -> Source:
    """Return a source with its transposed tensors in the usual order of dims.

    They are views of the stored bytes, which have no digest in this order. Tensors with a digest are also read in the
    stored order, for a check.
    """
    orders = _usual_orders(source)
    tensors: list[SourceTensor] = []
    checked: list[SourceTensor] = []
    for tensor in source.tensors:
        order = orders.get(tensor.name)
        if order is None:
            tensors.append(tensor)
            continue
        placement = tuple(location.permuted(order) for location in tensor.placement)
        shape = tuple(tensor.shape[dim] for dim in order)
        tensors.append(replace(tensor, shape=shape, placement=placement, digests=()))
        if tensor.digests:
            checked.append(replace(tensor, name=qualify(DECODED, tensor.name)))
    state_tensors = (*source.state_tensors, *checked)
    return replace(source, tensors=tuple(tensors), state_tensors=state_tensors)


def _usual_orders(source: Source) -> dict[str, tuple[int, ...]]:
    """Return the stored dim of each usual dim, for each transposed tensor, e.g. (0, 2, 1)."""
    family = source.family
    sizes = family.sizes(source.config)
    # Without shapes, a parameter has its usual form.
    names = {tensor.name: () for tensor in source.tensors}
    usual_rows = parameter_rows(family, source.config, tensors=names)
    orders: dict[str, tuple[int, ...]] = {}
    for path, row in source_axis_maps(source).items():
        usual_dims = usual_rows[path].source_dims
        if row.source_dims == usual_dims:
            continue
        order = tuple(row.source_dims.index(dim) for dim in usual_dims)
        for name, _ in bind_row(row, sizes).tensors():
            orders[name] = order
    return orders
