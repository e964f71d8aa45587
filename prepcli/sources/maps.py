"""Tensor maps: the rows of a user, from the tensors of a checkpoint to the tensors of a model.

    # Comments are allowed on lines of their own, and after a space.
    family llama
    size half = 2
    size ffn = intermediate_size
    drop *.inv_freq
    model.embed_tokens.weight: vocab embed <- tok.w: vocab embed
    model.layers.{layers}.mlp.up_proj.weight: ffn embed <- h.{layers}.fused: (half=1 ffn) embed

A row has the target on its left and the tensor of the checkpoint on its right. Both are written as the right side of
a family's row (`prepcli.algebra.axis_map`): each may be stacked, transposed, merged or a part of a fused tensor.

- `family` names the family of the targets. They then have the names of its Hugging Face tensors, and its atoms have
  sizes. Without it, the targets are the tensors of a verbatim output.
- `size` gives an atom its size: a number, a key of config.json, or numbers and keys with `*` and `/` between them.
  Numbers with commas are an index list for `{atom@list}`.
- `drop` ignores the tensors of the checkpoint with names that match a pattern.

No I/O.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from typing import Literal

from prepcli.algebra.axis_map import (
    AxisMap,
    ParsedAxisMap,
    SizedAxis,
    Sizes,
    TensorDim,
    bind_row,
    number_tensors,
    row_error,
)
from prepcli.algebra.rows import ParsedTensor, RowCoverage, parse_tensor
from prepcli.core.errors import Command, PrepError, text
from prepcli.core.formatting import join_names
from prepcli.core.json_values import HFConfig
from prepcli.models.parameters import MAX_AXIS_SIZE
from prepcli.planning.arrays import Location, MappedArray
from prepcli.sources.tensor_match import TensorInfo

MAX_NBYTES = 4 << 20
MAX_LINES = 20_000
# Each pattern is compared with the names of all tensors.
MAX_DROPS = 1_000
# Longer lines are no rows of a model, and their patterns would take long to parse.
MAX_LINE_CHARS = 2_000
# A message lists at most this many problems.
MAX_PROBLEMS = 20
ARROW = "<-"
# Pairs of a target and a source, in all rows. A mixture of experts has 10^5.
MAX_PAIRS = 1 << 20
# A problem names at most this many tensors.
MAX_LISTED = 4
Side = Literal["target", "source"]
AxisFactors = tuple[SizedAxis, ...]
# Prefix of the axes of the stored leaf that are no dims of the stored tensor, e.g. its layers.
STORED_AXIS = "stored "


@dataclass(frozen=True, slots=True)
class ParsedMapRow:
    """A row of a map, before its atoms have sizes.

    Attributes:
        line: Number of its line, from 1.
        text: The row as written.
        target: The tensor of the model.
        source: The tensor of the checkpoint.
    """

    line: int
    text: str
    target: ParsedTensor
    source: ParsedTensor


@dataclass(frozen=True, slots=True)
class MapLine:
    """The value of a `size` or `drop` line."""

    line: int
    value: str


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A parsed map.

    Attributes:
        name: Name of the file in messages.
        content: Text of the file.
        family: Name of the family, or "".
        sizes: Text of the size of each atom.
        drops: Patterns of tensors to ignore.
        rows: The rows.
    """

    name: str
    content: str
    family: str = ""
    sizes: Mapping[str, MapLine] = field(default_factory=dict)
    drops: tuple[MapLine, ...] = ()
    rows: tuple[ParsedMapRow, ...] = ()


def parse_map(name: str, content: str) -> TensorMap:
    """Parse the text of a map."""
    lines = content.splitlines()
    if len(content) > MAX_NBYTES or len(lines) > MAX_LINES:
        why = f"a map has at most {MAX_LINES:,} lines and {MAX_NBYTES >> 20} MiB"
        raise map_error(name, [why])
    parser = _MapParser(name, content)
    for number, line in enumerate(lines, start=1):
        statement = re.sub(r"(^|\s)#.*", "", line).strip()
        if statement:
            parser.read(number, statement)
    if not parser.rows and not parser.problems:
        parser.problems.append(f"it has no row `target: dims {ARROW} tensor: dims`")
    if parser.problems:
        raise map_error(name, parser.problems)
    return TensorMap(
        name, content, parser.family, parser.sizes, tuple(parser.drops), tuple(parser.rows)
    )


def map_error(name: str, problems: list[str]) -> PrepError:
    """Return one error with all problems of a map."""
    shown = problems[:MAX_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(f"{len(problems) - len(shown):,} more")
    hint = text("{} explains the lines of a map", Command("docs", "map"))
    return PrepError(f"the map {name} is not valid", "; ".join(shown), hint)


class _MapParser:
    """The lines of a map that were read so far, and their problems."""

    def __init__(self, name: str, content: str) -> None:
        self.name = name
        self.content = content
        self.family = ""
        self.sizes: dict[str, MapLine] = {}
        self.drops: list[MapLine] = []
        self.rows: list[ParsedMapRow] = []
        self.problems: list[str] = []

    def read(self, line: int, statement: str) -> None:
        """Read a line without its comment."""
        try:
            if len(statement) > MAX_LINE_CHARS:
                raise row_error("", f"it has more than {MAX_LINE_CHARS:,} characters")
            keyword, _, value = statement.partition(" ")
            if ARROW in statement:
                if statement.count(ARROW) != 1:
                    raise row_error(statement, f"it has several `{ARROW}`")
                left, right = statement.split(ARROW)
                row = ParsedMapRow(
                    line, statement, parse_tensor(statement, left), parse_tensor(statement, right)
                )
                for tensor in (row.target, row.source):
                    atoms = tensor.free_atoms
                    repeated = {atom for atom in atoms if atoms.count(atom) > 1}
                    if repeated:
                        raise row_error(statement, f"`{min(repeated)}` appears twice on one side")
                unmatched = {*row.target.free_atoms} ^ {*row.source.free_atoms}
                if unmatched:
                    raise row_error(statement, f"`{min(unmatched)}` appears on one side only")
                self.rows.append(row)
            elif keyword == "family" and value:
                if self.family:
                    raise row_error(statement, "the family is named twice")
                self.family = value.strip()
            elif keyword == "size" and "=" in value:
                atom, _, size = value.partition("=")
                atom = atom.strip()
                if not atom.isidentifier():
                    raise row_error(value, f"`{atom:.60}` is not a valid atom name")
                if atom in self.sizes:
                    first = self.sizes[atom].line
                    raise row_error(
                        value, f"the atom `{atom}` has two sizes, the first one in line {first}"
                    )
                self.sizes[atom] = MapLine(line, size.strip())
            elif keyword == "drop" and value:
                if len(self.drops) == MAX_DROPS:
                    raise row_error(statement, f"a map has at most {MAX_DROPS:,} `drop` lines")
                self.drops.append(MapLine(line, value.strip()))
            else:
                why = f"`{statement:.60}` is no row, and no `family`, `size` or `drop` line"
                raise row_error(statement, why)
        except PrepError as error:
            self.problems.append(f"line {line}: {error.why}")


def compute_size(value: str, config: HFConfig) -> int | tuple[int, ...]:
    """Return the value of a `size` line: a size, or an index list.

    >>> compute_size("hidden_size / heads", {"hidden_size": 64, "heads": 4}), compute_size("3,5", {})
    (16, (3, 5))
    """
    if "," in value:
        numbers = [number.strip() for number in value.split(",")]
        if not all(number.isdecimal() and len(number) < 10 for number in numbers):
            raise ValueError(f"`{value:.60}` is not a list of numbers")
        return tuple(map(int, numbers))
    words = re.split(r"\s*([*/])\s*", value)
    size = _term_size(words[0], config)
    for operator, word in zip(words[1::2], words[2::2]):
        factor = _term_size(word, config)
        if operator == "*":
            size *= factor
        elif size % factor:
            raise ValueError(f"{size} is not divisible by {factor}")
        else:
            size //= factor
        _check_size(size, value)
    return size


def _term_size(word: str, config: HFConfig) -> int:
    """Return a number, or the number at a dotted key of the config."""
    if word.isdecimal() and len(word) < 20:
        return _check_size(int(word), word)
    value: object = config
    for key in word.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        raise ValueError(f"config.json has no `{word:.60}`")
    return _check_size(value, word)


def _check_size(value: object, word: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_AXIS_SIZE:
        raise ValueError(f"`{word:.60}` is {value!r:.40}, not a number from 1 to {MAX_AXIS_SIZE:,}")
    return value


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
                has_fixed = any(factor.fixed is not None for factor in dim.factors)
                if dim.selected_extent != dim.extent or has_fixed:
                    return False
        dims = [[dim.factors for dim in side.source_dims] for side in sides]
        return dims[0] == dims[1]


def bind_map(
    tensor_map: TensorMap, sizes: Sizes, numbers: Mapping[str, Sequence[int]]
) -> tuple[list[MapRow], list[str]]:
    """Give the rows of a map their sizes.

    Returns:
        The rows, and the problems of the other rows.
    """
    rows: list[MapRow] = []
    problems: list[str] = []
    for row in tensor_map.rows:
        try:
            atoms = row.target.free_atoms
            target = _parsed_axis_map(row.text, row.target, atoms)
            source = _parsed_axis_map(row.text, row.source, atoms)
            rows.append(
                MapRow(
                    row.line,
                    bind_row(number_tensors(target, numbers), sizes),
                    bind_row(number_tensors(source, numbers), sizes),
                )
            )
        except PrepError as error:
            problems.append(f"line {row.line}: {error.why}")
    return rows, problems


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
        """Collect the tensors of the rows."""
        self.targets: dict[str, list[MapRow]] = {}
        self.sources: dict[str, list[MapRow]] = {}
        self.problems: list[str] = []
        self._tensors = tensors
        self._num_pairs = 0
        self._row_coverage = RowCoverage()
        for row in rows:
            self._num_pairs += row.num_pairs
            if self._num_pairs > MAX_PAIRS:
                why = f"up to this row, the map has {self._num_pairs:,} pairs of tensors"
                self.problems.append(f"line {row.line}: {why}, at most {MAX_PAIRS:,} are supported")
                continue
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


def compose_location(
    row: MapRow, indices: Mapping[str, int], stored: Location
) -> MappedArray | None:
    """Return where a target of a map is stored, given the location of one of its sources.

    A target [ffn, embed] from a source `embed (half=1 ffn)` is a leaf of the dims of the source. Its axes have the
    order of the source, and `half` is fixed.
    """
    dims: list[AxisFactors] = []
    fixed: dict[str, int] = {}
    for dim in row.source.source_dims:
        factors: list[SizedAxis] = []
        for factor in dim.factors:
            name = factor.atom
            if factor.fixed is not None:
                # A fixed axis gets a name of its own: its index is known.
                name = f"{factor.atom}={factor.fixed}"
                fixed[name] = factor.fixed
            factors.append(SizedAxis(name, factor.extent))
        dims.append(tuple(factors))
    starts = [dim.start for dim in row.source.source_dims]
    if stored.axis_map is not None:
        order = _dims_of_leaf(stored)
        if order is None:
            return None
        dims = [dims[dim] if isinstance(dim, int) else dim for dim in order]
        starts = [starts[dim] if isinstance(dim, int) else 0 for dim in order]
        for atom, index in stored.stacked_indices:
            fixed[STORED_AXIS + atom] = index
    target_dims: list[TensorDim] = []
    for dim in row.target.source_dims:
        # Axes in the name of the source are fixed: one source has one index of them.
        factors = []
        for factor in dim.factors:
            if factor.fixed is None and factor.atom in indices:
                factor = replace(factor, fixed=indices[factor.atom])
            factors.append(factor)
        target_dims.append(replace(dim, factors=tuple(factors)))
    axis_map = AxisMap(row.target.text, tuple(dims), (row.target.text,), tuple(target_dims))
    return MappedArray(
        axis_map,
        (*indices.items(), *fixed.items()),
        stored.array,
        tuple(starts) if any(starts) else None,
    )


def _dims_of_leaf(stored: MappedArray) -> list[int | AxisFactors] | None:
    """Return the dim of the tensor for each dim of its leaf, or the stacked axes of the leaf dim.

    None if a dim of the tensor is only a part of the leaf dim, or several of them.
    """
    if stored.starts is not None:
        return None
    positions: dict[str, int] = {}
    for position, dim in enumerate(stored.axis_map.source_dims):
        if len(dim.factors) != 1 or dim.start or dim.factors[0].extent != dim.extent:
            return None
        positions[dim.factors[0].atom] = position
    order: list[int | AxisFactors] = []
    for axes in stored.axis_map.leaf_dims:
        if any(axis.atom in positions for axis in axes):
            if len(axes) != 1:
                return None
            order.append(positions[axes[0].atom])
        else:
            order.append(tuple(replace(axis, atom=STORED_AXIS + axis.atom) for axis in axes))
    return order
