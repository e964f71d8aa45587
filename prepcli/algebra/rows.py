"""The text of axis maps, and a check of their coverage: each element of a tensor is in one row of a map.

`axis_map` explains the notation.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from prepcli.algebra.axis_map import (
    AxisMap,
    NamePattern,
    ParsedAxisMap,
    RowScale,
    SourceDim,
    TensorDim,
    Term,
    row_error,
)
from prepcli.algebra.boxes import strides

# Rows that name one tensor. Each pair of them is compared.
MAX_ROWS_PER_TENSOR = 1_024
# Pairs of rows of all tensors of a map, 3 to 10 us each.
MAX_ROW_PAIRS = 1 << 21
# Indices of dims of all tensors of a map, about 60 bytes each. Rows with the same parts of a dim need none.
MAX_LISTED_INDICES = 1 << 19


# A command parses the rows of its family several times. The cache is bounded, because other rows are made for the
# tensors of one checkpoint.
@lru_cache(maxsize=4096)
def parse_row(text: str) -> ParsedAxisMap:
    """Parse `leaf dims <- name: tensor dims`."""
    if text.count("<-") != 1 or ":" not in text.partition("<-")[2]:
        raise row_error(text, "it is not of the form `leaf dims <- name: tensor dims`")
    left, right = text.split("<-")
    scale: RowScale | None = None
    # E.g. `w: heads head_dim / sqrt(head_dim)`
    match = re.search(r" [/*+] .*$", right)
    if match is not None:
        right = right[: match.start()]
    tensor = parse_tensor(text, right)
    leaf_dims: list[tuple[str, ...]] = []
    for item in _split_dims(text, left):
        # A dim written as `1` has no atoms. Its extent is the empty product, 1.
        atoms = tuple(word for word in item.strip("()").split() if word != "1")
        leaf_dims.append(atoms)
    for atom in itertools.chain.from_iterable(leaf_dims):
        if not atom.isidentifier():
            raise row_error(text, f"`{atom}` is not a valid atom name")
    if match is not None:
        scale = _parse_scale(text, match[0].strip())
    row = ParsedAxisMap(text, tuple(leaf_dims), tensor.name_parts, tensor.dims, scale)
    _check_atoms(row)
    return row


@dataclass(frozen=True, slots=True)
class ParsedTensor:
    """The text `name: dims` of a tensor, parsed.

    Attributes:
        name_parts: Pieces of the name, and the patterns in braces between them.
        dims: Dims of the tensor.
    """

    name_parts: tuple[str | NamePattern, ...]
    dims: tuple[SourceDim, ...]

    @property
    def free_atoms(self) -> tuple[str, ...]:
        """Atoms without a fixed index, in the name and in the selected part of each dim."""
        atoms: list[str] = []
        for part in self.name_parts:
            if isinstance(part, NamePattern):
                atoms += _unfixed_atoms(part.terms)
        for dim in self.dims:
            atoms += _unfixed_atoms(dim.parts[dim.selected])
        return tuple(atoms)


def parse_tensor(row: str, tensor: str) -> ParsedTensor:
    """Parse `name: dims`, the right side of a row."""
    if ":" not in tensor:
        raise row_error(row, f"`{tensor.strip()}` is not of the form `name: dims`")
    name, dims = tensor.rsplit(":", 1)
    return ParsedTensor(
        _parse_name(row, name.strip()),
        tuple(_parse_source_dim(row, dim) for dim in _split_dims(row, dims)),
    )


def _parse_scale(text: str, scale: str) -> RowScale:
    """Parse the scale of a row."""
    if match := re.fullmatch(r"/ sqrt\((\w+)\)", scale):
        return RowScale(match[1])
    if match := re.fullmatch(r"\* (float32|bfloat16)\(sqrt\((\w+)\)\)", scale):
        return RowScale(match[2], power=-1, root_dtype=match[1])
    if match := re.fullmatch(r"\+ (\d+)", scale):
        return RowScale(offset=int(match[1]))
    forms = "`/ sqrt(atom)`, `* float32(sqrt(atom))` or `+ 1`"
    raise row_error(text, f"its scale `{scale}` is not of the form {forms}")


def _split_dims(text: str, dims: str) -> list[str]:
    """Split dims at spaces outside of parentheses."""
    # E.g. `heads (a b) 1` -> "heads", "(a b)" and "1". The pattern skips a lone parenthesis, so the items
    # then lack a character of the text.
    items = re.findall(r"\([^()]*\)|[^\s()]+", dims)
    if re.sub(r"\s", "", "".join(items)) != re.sub(r"\s", "", dims):
        raise row_error(text, "its parentheses do not match")
    return items


def _parse_source_dim(text: str, item: str) -> SourceDim:
    """Parse one dim of the tensor."""
    # E.g. `(>a b | c b)` has the parts `>a b` and `c b`. The first one is marked.
    parts = [part.strip() for part in item.strip("()").split("|")]
    marked = [i for i, part in enumerate(parts) if part.startswith(">")]
    # One part needs no mark, several need exactly one.
    if len(marked) != (len(parts) > 1):
        raise row_error(text, "exactly one of several parts of a dim must be marked with `>`")
    if len(parts) > 1 and not all(part.strip("> ") for part in parts):
        raise row_error(text, "a part of a dim is empty")
    terms = tuple(_parse_terms(text, part.lstrip(">")) for part in parts)
    return SourceDim(terms, selected=marked[0] if marked else 0)


def _parse_terms(text: str, words: str) -> tuple[Term, ...]:
    """Parse atoms, each with its index if it has one, e.g. `heads gate=0`."""
    terms = []
    for word in words.split():
        atom, equals, index = word.partition("=")
        if word == "1":
            continue
        if not atom.isidentifier() or (equals and not index.isdecimal()):
            raise row_error(
                text, f"`{word}` is neither an atom (an axis name such as `heads`) nor `atom=index`"
            )
        terms.append(Term(atom, int(index) if equals else None))
    return tuple(terms)


def _parse_name(text: str, name: str) -> tuple[str | NamePattern, ...]:
    """Parse the tensor name into plain text and patterns in braces."""
    # Plain text is at even positions, the content of braces at odd ones.
    pieces = re.split(r"{([^{}]*)}", name)
    if any(re.search(r"[{}\s]", piece) for piece in pieces[::2]) or not name:
        raise row_error(text, "its tensor name is empty, has a space, or braces that do not match")
    parts: list[str | NamePattern] = []
    for position, piece in enumerate(pieces):
        if position % 2 == 0:
            parts += [piece] if piece else []
            continue
        # The content of one pair of braces, e.g. `layers` or `layers@moe_layers`.
        atoms, _, names = piece.partition(" of ")
        atoms, _, index_list = atoms.partition("@")
        terms = _parse_terms(text, atoms)
        pattern = NamePattern(terms, index_list.strip(), words=tuple(names.split()))
        if not terms:
            raise row_error(text, f"`{{{piece}}}` has no atom")
        is_one_free_atom = len(terms) == 1 and terms[0].fixed is None
        if pattern.has_own_size and not is_one_free_atom:
            raise row_error(text, f"`{{{piece}}}`: `@` and `of` follow one atom without an index")
        parts.append(pattern)
    return tuple(parts)


def _check_atoms(row: ParsedAxisMap) -> None:
    """Raise PrepError unless each atom appears once on each side.

    Terms with a fixed index (`gate=0`) do not count. An atom in braces (`{layers}`) may be missing in the leaf.
    """
    leaf_atoms = [*itertools.chain.from_iterable(row.leaf_dims)]
    name_atoms: list[str] = []
    for part in row.name_parts:
        if isinstance(part, NamePattern):
            name_atoms += _unfixed_atoms(part.terms)
    dim_atoms: list[str] = []
    for dim in row.source_dims:
        dim_atoms += _unfixed_atoms(dim.parts[dim.selected])
    source_atoms = name_atoms + dim_atoms
    for atoms in (leaf_atoms, source_atoms):
        if repeated := {a for a in atoms if atoms.count(a) > 1}:
            raise row_error(row.text, f"`{min(repeated)}` appears twice on one side")
    if unmatched := set(leaf_atoms) ^ set(source_atoms) - (set(name_atoms) - set(leaf_atoms)):
        raise row_error(row.text, f"`{min(unmatched)}` appears on one side only")


def _unfixed_atoms(terms: Iterable[Term]) -> list[str]:
    return [term.atom for term in terms if term.fixed is None]


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
        """Return why the rows of one tensor do not cover each element once, or ""."""
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
        covered = sum(math.prod(map(_index_count, side.source_dims)) for side in sides)
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
