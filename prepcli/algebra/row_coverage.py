"""Check that the rows of a map cover each element of a tensor once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from prepcli.algebra.axis_map import AxisMap, TensorDim
from prepcli.algebra.boxes import strides

# Rows that name one tensor. Each pair of them is compared.
MAX_ROWS_PER_TENSOR = 1_024
# Pairs of rows of all tensors of a map, 3 to 10 us each.
MAX_ROW_PAIRS = 1 << 21
# Indices of dims of all tensors of a map, about 60 bytes each. Rows with the same parts of a dim need none.
MAX_LISTED_INDICES = 1 << 19


class RowCoverage:
    """Check of the rows of all tensors of a map.

    A map may come with a checkpoint from elsewhere, so the work is bounded.
    """

    def __init__(self) -> None:
        self._num_pairs = 0
        self._num_listed = 0
        # Layers with rows of their own have the same dims.
        self._problems: dict[tuple[tuple[TensorDim, ...], ...], str] = {}

    def problem(self, sides: Sequence[AxisMap]) -> str:
        """Return why the rows of one tensor do not cover each element once, or "".

        Args:
            sides: The side of each row with this tensor.
        """
        key = tuple(side.source_dims for side in sides)
        if key not in self._problems:
            self._problems[key] = self._find_problem(sides)
        return self._problems[key]

    def _find_problem(self, sides: Sequence[AxisMap]) -> str:
        shapes = {side.source_shape for side in sides}
        if len(shapes) > 1:
            first, second = sorted(shapes)[:2]
            return f"has the shapes {[*first]} and {[*second]}"
        self._num_pairs += math.comb(len(sides), 2)
        if len(sides) > MAX_ROWS_PER_TENSOR or self._num_pairs > MAX_ROW_PAIRS:
            return f"is named by {len(sides):,} rows, which are too many to compare"
        for a, b in itertools.combinations(sides, 2):
            if not self._are_disjoint(a, b):
                if self._num_listed > MAX_LISTED_INDICES:
                    return "has rows with different parts of a long dim, which are not supported"
                return "is covered twice"
        covered = sum(map(_element_count, sides))
        total = math.prod(sides[0].source_shape)
        if covered != total:
            return f"is covered in part: {covered:,} of {total:,} elements"
        return ""

    def _are_disjoint(self, a: AxisMap, b: AxisMap) -> bool:
        """Return whether two rows use different elements: different indices along one dim of the tensor."""
        undecided: list[tuple[TensorDim, TensorDim]] = []
        for dims in zip(a.source_dims, b.source_dims):
            are_disjoint = dims_are_disjoint(*dims)
            if are_disjoint:
                return True
            if are_disjoint is None:
                undecided.append(dims)
        return any(self._lists_are_disjoint(*dims) for dims in undecided)

    def _lists_are_disjoint(self, a: TensorDim, b: TensorDim) -> bool:
        self._num_listed += _index_count(a) + _index_count(b)
        if self._num_listed > MAX_LISTED_INDICES:
            return False
        return set(_dim_indices(a)).isdisjoint(_dim_indices(b))


def dims_are_disjoint(a: TensorDim, b: TensorDim) -> bool | None:
    """Return whether two rows use different indices of a dim. None if the dims have no common digits.

    The dims `(half=0 ffn)` and `(half=1 ffn)` differ in the digit of `half`. The dims `(a=0 b)` and `(c d=1)` with
    a = 4 and c = 2 have the common digits 2, 2 and so on. With a = 3 and c = 2 they have none.
    """
    if a.start + a.selected_extent <= b.start or b.start + b.selected_extent <= a.start:
        return True
    if (a.start, a.selected_extent) != (b.start, b.selected_extent):
        return None
    steps = sorted({1, a.selected_extent, *_steps(a), *_steps(b)})
    if any(large % small for small, large in itertools.pairwise(steps)):
        return None
    first = _fixed_digits(a, steps)
    second = _fixed_digits(b, steps)
    return any(first[step] != second[step] for step in first.keys() & second.keys())


def _steps(dim: TensorDim) -> Sequence[int]:
    """Return the distance between neighbours along each axis of a dim."""
    return strides([factor.extent for factor in dim.factors])


def _fixed_digits(dim: TensorDim, steps: Sequence[int]) -> dict[int, int]:
    """Return the fixed digits of the indices of a dim, by step. A fixed axis has one or several digits."""
    digits: dict[int, int] = {}
    for factor, axis_step in zip(dim.factors, _steps(dim)):
        if factor.fixed is None:
            continue
        for step, next_step in itertools.pairwise(steps):
            if axis_step <= step < axis_step * factor.extent:
                digits[step] = factor.fixed * axis_step // step % (next_step // step)
    return digits


def _dim_indices(dim: TensorDim) -> Iterator[int]:
    """Yield the indices of a tensor's dim in a row."""
    offsets: list[Sequence[int]] = []
    for factor, step in zip(dim.factors, _steps(dim)):
        if factor.fixed is None:
            offsets.append(range(0, factor.extent * step, step))
        else:
            offsets.append([factor.fixed * step])
    for parts in itertools.product(*offsets):
        yield dim.start + sum(parts)


def _index_count(dim: TensorDim) -> int:
    """Return the number of indices of a tensor's dim in a row."""
    return math.prod(factor.extent for factor in dim.factors if factor.fixed is None)


def _element_count(side: AxisMap) -> int:
    """Return the number of a tensor's elements in a row."""
    return math.prod(map(_index_count, side.source_dims))
