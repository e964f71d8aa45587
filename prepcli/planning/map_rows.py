"""The rows of a tensor map with sizes: which tensors they relate, and whether each element is used exactly once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from prepcli.console.lists import join_names
from prepcli.errors import PrepError
from prepcli.planning.map_file import MapLine, ParsedMapRow, TensorMap
from prepcli.planning.tensor_match import TensorInfo
from trainer.models.axis_map import (
    AxisMap,
    ParsedAxisMap,
    Sizes,
    TensorDim,
    bind_row,
    number_tensors,
)
from trainer.models.boxes import strides
from trainer.models.row_text import ParsedTensor

# Rows that name one tensor. Each pair of them is compared.
MAX_ROWS_PER_TENSOR = 1_024
# Names of all rows, on both sides. A mixture of experts has 10^5.
MAX_NAMES = 1 << 20
# Indices of a dim that are listed to compare two rows.
MAX_LISTED_INDICES = 1 << 20
# A problem names at most this many tensors.
MAX_LISTED = 4
Side = Literal["target", "source"]


@dataclass(frozen=True, slots=True)
class MapRow:
    """A row with the sizes of its atoms.

    Each side is an axis map with one leaf dim per atom, so that both sides have the same leaf dims.

    Attributes:
        line: Number of its line in the file.
        target: The tensor of the model.
        source: The tensor of the checkpoint.
    """

    line: int
    target: AxisMap
    source: AxisMap

    @property
    def reversed(self) -> MapRow:
        """The row from the model to the checkpoint."""
        return MapRow(self.line, self.source, self.target)

    def side(self, side: Side) -> AxisMap:
        """Return one side."""
        return self.target if side == "target" else self.source

    def pairs(self) -> Iterator[tuple[str, str, dict[str, int]]]:
        """Yield the target, the source and the indices of the atoms in their names, for each pair of tensors."""
        for target_name, target_indices in self.target.tensors():
            rest = [f for f in self.source.stacked_factors if f.atom not in target_indices]
            for index in itertools.product(*(range(factor.extent) for factor in rest)):
                indices = {**target_indices, **{f.atom: i for f, i in zip(rest, index)}}
                yield target_name, self.source.tensor_name(indices), indices

    @property
    def is_copy(self) -> bool:
        """Whether the source has the whole target in the same order."""
        sides = (self.target, self.source)
        if {f.atom for f in self.target.stacked_factors} != {
            f.atom for f in self.source.stacked_factors
        }:
            return False
        for side in sides:
            for dim in side.source_dims:
                if dim.selected_extent != dim.extent or _fixed_count(dim):
                    return False
        dims = [[dim.factors for dim in side.source_dims] for side in sides]
        return dims[0] == dims[1]


def bind_map(
    tensor_map: TensorMap, sizes: Sizes, numbers: Mapping[str, Sequence[int]]
) -> tuple[list[MapRow], list[str]]:
    """Give the rows of a map their sizes.

    Args:
        tensor_map: The map.
        sizes: Size of each atom, and the indices of each index list.
        numbers: Atom -> number in the tensor names for each of its indices.

    Returns:
        The rows, and the problems of the other rows.
    """
    rows: list[MapRow] = []
    problems: list[str] = []
    for row in tensor_map.rows:
        try:
            rows.append(_bind_map_row(row, sizes, numbers))
        except PrepError as error:
            problems.append(f"line {row.line}: {error.why}")
    return rows, problems


def _bind_map_row(row: ParsedMapRow, sizes: Sizes, numbers: Mapping[str, Sequence[int]]) -> MapRow:
    atoms = row.target.free_atoms
    target = _parsed_axis_map(row.text, row.target, atoms)
    source = _parsed_axis_map(row.text, row.source, atoms)
    return MapRow(
        row.line,
        bind_row(number_tensors(target, numbers), sizes),
        bind_row(number_tensors(source, numbers), sizes),
    )


def _parsed_axis_map(row: str, tensor: ParsedTensor, atoms: Sequence[str]) -> ParsedAxisMap:
    leaf_dims = tuple((atom,) for atom in atoms)
    return ParsedAxisMap(row, leaf_dims, tensor.name_parts, tensor.dims)


class MapCoverage:
    """The tensors in the rows of a map, and the rows of each of them.

    Attributes:
        targets: Rows of each target, by name.
        sources: Rows of each tensor of the checkpoint, by name.
        problems: Reasons why the map does not fit the checkpoint.
    """

    def __init__(self, rows: Sequence[MapRow], tensors: Mapping[str, TensorInfo]) -> None:
        """Collect the tensors of the rows.

        Args:
            rows: The rows.
            tensors: The tensors of the checkpoint, by name.
        """
        self.targets: dict[str, list[MapRow]] = {}
        self.sources: dict[str, list[MapRow]] = {}
        self.problems: list[str] = []
        self._tensors = tensors
        self._num_names = 0
        for row in rows:
            self._add_row(row)

    def _add_row(self, row: MapRow) -> None:
        for side in (row.source, row.target):
            self._num_names += math.prod(factor.extent for factor in side.stacked_factors)
        if self._num_names > MAX_NAMES:
            why = f"up to this row, the map names {self._num_names:,} tensors"
            self.problems.append(f"line {row.line}: {why}, at most {MAX_NAMES:,} are supported")
            return
        missing: list[str] = []
        wrong: list[str] = []
        shape = row.source.source_shape
        for name, _ in row.source.tensors():
            tensor = self._tensors.get(name)
            self.sources.setdefault(name, []).append(row)
            if tensor is None:
                missing.append(name)
            elif tensor.shape != shape:
                wrong.append(f"{name} has shape {[*tensor.shape]}, the row {[*shape]}")
        for name, _ in row.target.tensors():
            self.targets.setdefault(name, []).append(row)
        if missing:
            verb = "does" if len(missing) == 1 else "do"
            self.problems.append(f"line {row.line}: {_listed(missing)} {verb} not exist")
        if wrong:
            self.problems.append(f"line {row.line}: {_listed(wrong)}")

    def check_elements(self) -> None:
        """Check that every element of each named tensor belongs to one row."""
        self._check_side("source", self.sources)
        self._check_side("target", self.targets)

    def _check_side(self, side: Side, rows_by_name: Mapping[str, Sequence[MapRow]]) -> None:
        """Add a problem for each set of rows that covers its tensors twice or in part."""
        # Tensors of different layers have the same rows, which are compared once.
        names_by_rows: dict[tuple[int, ...], list[str]] = {}
        for name, rows in rows_by_name.items():
            key = tuple(id(row) for row in rows)
            names_by_rows.setdefault(key, []).append(name)
        for names in names_by_rows.values():
            rows = rows_by_name[names[0]]
            problem = _coverage_problem([row.side(side) for row in rows])
            if problem:
                lines = sorted({row.line for row in rows})
                numbers = join_names([str(line) for line in lines], max_names=MAX_LISTED)
                label = "lines" if len(lines) > 1 else "line"
                self.problems.append(f"{label} {numbers}: {_listed(names)} {problem}")

    def incomplete_targets(self) -> set[str]:
        """Return the names of the targets that the rows do not fill, or fill twice."""
        incomplete: set[str] = set()
        for name, rows in self.targets.items():
            if _coverage_problem([row.target for row in rows]):
                incomplete.add(name)
        return incomplete

    def check_unused(self, drops: Sequence[MapLine]) -> dict[str, MapLine]:
        """Check that each tensor of the checkpoint is named by a row or dropped.

        Returns:
            The `drop` line of each dropped tensor, by name.
        """
        dropped: dict[str, MapLine] = {}
        unused: list[str] = []
        effective: set[MapLine] = set()
        for name in self._tensors.keys() - self.sources.keys():
            drop = next((line for line in drops if fnmatchcase(name, line.value)), None)
            if drop is None:
                unused.append(name)
            else:
                dropped[name] = drop
                effective.add(drop)
        if unused:
            verb = "is" if len(unused) == 1 else "are"
            self.problems.append(f"{_listed(sorted(unused))} {verb} in no row and no `drop` line")
        for line in drops:
            if line not in effective:
                why = f"`drop {line.value:.60}` matches no tensor without a row"
                self.problems.append(f"line {line.line}: {why}")
        return dropped


def _listed(names: Sequence[str]) -> str:
    return join_names([*names], max_names=MAX_LISTED)


def _coverage_problem(sides: Sequence[AxisMap]) -> str:
    """Return why the rows of one tensor do not cover each element once, or ""."""
    shapes = {side.source_shape for side in sides}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        return f"has the shapes {[*first]} and {[*second]}"
    if len(sides) > MAX_ROWS_PER_TENSOR:
        return f"is named by {len(sides):,} rows, at most {MAX_ROWS_PER_TENSOR:,} are supported"
    for a, b in itertools.combinations(sides, 2):
        if not _are_disjoint(a, b):
            return "is covered twice"
    covered = sum(map(_element_count, sides))
    total = math.prod(sides[0].source_shape)
    if covered != total:
        return f"is covered in part: {covered:,} of {total:,} elements"
    return ""


def _are_disjoint(a: AxisMap, b: AxisMap) -> bool:
    """Return whether two rows use different elements of one tensor: different indices along one of its dims."""
    return any(map(_dims_are_disjoint, a.source_dims, b.source_dims))


def _dims_are_disjoint(a: TensorDim, b: TensorDim) -> bool:
    if a.start + a.selected_extent <= b.start or b.start + b.selected_extent <= a.start:
        return True
    if a == b:
        return False
    if max(a.selected_extent, b.selected_extent) > MAX_LISTED_INDICES:
        return False
    return _dim_indices(a).isdisjoint(_dim_indices(b))


@lru_cache(maxsize=256)
def _dim_indices(dim: TensorDim) -> frozenset[int]:
    """Return the indices of a tensor's dim in a row."""
    indices = [dim.start]
    steps = strides([factor.extent for factor in dim.factors])
    for factor, step in zip(dim.factors, steps):
        choices = range(factor.extent) if factor.fixed is None else (factor.fixed,)
        offsets = [choice * step for choice in choices]
        indices = list(map(sum, itertools.product(indices, offsets)))
    return frozenset(indices)


def _element_count(side: AxisMap) -> int:
    """Return the number of a tensor's elements in a row."""
    count = 1
    for dim in side.source_dims:
        for factor in dim.factors:
            if factor.fixed is None:
                count *= factor.extent
    return count


def _fixed_count(dim: TensorDim) -> int:
    return sum(factor.fixed is not None for factor in dim.factors)
