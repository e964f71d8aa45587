"""The rows of a tensor map with sizes: which tensors they relate, and whether each element is used exactly once."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Literal

from prepcli.algebra.axis_map import (
    AxisMap,
    ParsedAxisMap,
    Sizes,
    TensorDim,
    bind_row,
    number_tensors,
)
from prepcli.algebra.row_coverage import RowCoverage
from prepcli.algebra.row_text import ParsedTensor
from prepcli.core.errors import PrepError
from prepcli.core.formatting import join_names
from prepcli.planning.map_file import MapLine, ParsedMapRow, TensorMap
from prepcli.planning.tensor_match import TensorInfo

# Pairs of a target and a source, in all rows. A mixture of experts has 10^5.
MAX_PAIRS = 1 << 20
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
    def num_pairs(self) -> int:
        """Number of pairs of a target and a source."""
        extents: dict[str, int] = {}
        for factor in (*self.target.stacked_factors, *self.source.stacked_factors):
            extents[factor.atom] = factor.extent
        return math.prod(extents.values())

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
        self._num_pairs = 0
        self._row_coverage = RowCoverage()
        for row in rows:
            self._add_row(row)

    def _add_row(self, row: MapRow) -> None:
        self._num_pairs += row.num_pairs
        if self._num_pairs > MAX_PAIRS:
            why = f"up to this row, the map has {self._num_pairs:,} pairs of tensors"
            self.problems.append(f"line {row.line}: {why}, at most {MAX_PAIRS:,} are supported")
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
            problem = self._row_coverage.problem([row.side(side) for row in rows])
            if problem:
                lines = sorted({row.line for row in rows})
                numbers = join_names([str(line) for line in lines], max_names=MAX_LISTED)
                label = "lines" if len(lines) > 1 else "line"
                self.problems.append(f"{label} {numbers}: {_listed(names)} {problem}")

    def incomplete_targets(self) -> set[str]:
        """Return the names of the targets that the rows do not fill, or fill twice."""
        incomplete: set[str] = set()
        for name, rows in self.targets.items():
            if self._row_coverage.problem([row.target for row in rows]):
                incomplete.add(name)
        return incomplete

    def check_unused(self, drops: Sequence[MapLine]) -> dict[str, MapLine]:
        """Check that each tensor of the checkpoint is named by a row or dropped.

        Returns:
            The `drop` line of each dropped tensor, by name.
        """
        dropped: dict[str, MapLine] = {}
        unused = sorted(self._tensors.keys() - self.sources.keys())
        ineffective: list[str] = []
        for line in drops:
            matches = re.compile(translate(line.value)).match
            kept = [name for name in unused if not matches(name)]
            if len(kept) == len(unused):
                why = f"`drop {line.value:.60}` matches no tensor without a row"
                ineffective.append(f"line {line.line}: {why}")
                continue
            dropped |= dict.fromkeys({*unused} - {*kept}, line)
            unused = kept
        if unused:
            verb = "is" if len(unused) == 1 else "are"
            self.problems.append(f"{_listed(unused)} {verb} in no row and no `drop` line")
        self.problems += ineffective
        return dropped


def _listed(names: Sequence[str]) -> str:
    return join_names([*names], max_names=MAX_LISTED)


def _fixed_count(dim: TensorDim) -> int:
    return sum(factor.fixed is not None for factor in dim.factors)
