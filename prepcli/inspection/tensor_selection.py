"""Elements of a tensor along one of its dims, as a tensor."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.planning.composed_locations import compose_location
from prepcli.planning.map_file import parse_map
from prepcli.planning.map_rows import bind_map
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import SourceTensor


@dataclass(frozen=True, slots=True)
class TensorSelection:
    """Elements of a tensor along one of its dims.

    The dim is `(outer count inner)` with one index of `count`, or a part with other parts before and after it.

    Attributes:
        axis: The dim.
        outer: Extent before the count.
        count: Number of alternatives. 0 for a part.
        index: The selected one.
        inner: Extent after the count, or the length of the part.
        start: First element of a part.
        extent: Extent of the dim.
    """

    axis: int
    outer: int
    count: int
    index: int
    inner: int
    start: int
    extent: int

    @classmethod
    def of_index(cls, axis: int, index: int, extent: int) -> TensorSelection:
        """Return the selection of one index of a dim."""
        return cls(axis, 1, extent, index, 1, index, extent)

    @property
    def is_slice(self) -> bool:
        """Whether the selection is one index of the dim."""
        return self.count == self.extent

    @property
    def length(self) -> int:
        """Number of selected indices."""
        return self.outer * self.inner


def select_tensor(tensor: SourceTensor, selection: TensorSelection) -> SourceTensor | None:
    """Return a selection of a tensor as a tensor. None if the tensor is stored in several parts."""
    names = [f"e{axis}" for axis in range(len(tensor.shape))]
    sizes = dict(zip(names, tensor.shape))
    sizes |= {"outer": selection.outer, "count": selection.count, "inner": selection.inner}
    sizes["before"] = selection.start
    sizes["after"] = selection.extent - selection.start - selection.inner
    source = list(names)
    target = list(names)
    axis = selection.axis
    target[axis] = "(outer inner)"
    if selection.is_slice:
        del target[axis]
        source[axis] = f"count={selection.index}"
    elif selection.count:
        source[axis] = f"(outer count={selection.index} inner)"
    else:
        parts = [">outer inner"]
        if sizes["before"]:
            parts.insert(0, "before")
        if sizes["after"]:
            parts.append("after")
        source[axis] = f"({' | '.join(parts)})"
    row = f"t: {' '.join(target)} <- s: {' '.join(source)}"
    (bound,), _ = bind_map(parse_map("selection", row), sizes, {})
    if len(tensor.placement) != 1:
        return None
    location = compose_location(bound, {}, tensor.placement[0], itemsize(tensor.dtype))
    if location is None:
        return None
    return SourceTensor(tensor.name, tensor.dtype, bound.target.source_shape, (location,))
