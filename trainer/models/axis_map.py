"""Axis maps: a parameter as one row of text, its dims in the tree and in the source tensors spelled in the same atoms.

    layers heads head_dim embed <- h.{layers}.attn.q_proj.weight: (heads head_dim) embed

An *atom* is a named axis with an extent. On either side a dim is one atom, several merged `(a b)`, or `1`. On the right
`{a}` chooses the tensor, `a=i` holds an atom at one index, and `(>a b | c b)` takes one of unequal parts of a dim.
`{a b=1}` merges and holds atoms inside a name; `{a@list}` counts through a list of indices that the sizes name.
An atom in braces that is absent from the left stands for one leaf per index. Pure.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.models.errors import PrepError

AtomDims = tuple[tuple[str, ...], ...]
Sizes = Mapping[str, int | Sequence[int]]


@dataclass(frozen=True, slots=True)
class Term:
    """An atom in a merged dim or in braces; `held` at one index, or free (None)."""

    atom: str
    fixed: int | None = None


@dataclass(frozen=True, slots=True)
class SourceDim:
    """A dim of the source tensor: one part, or several one after another of which `taken` is this row's."""

    parts: tuple[tuple[Term, ...], ...]
    selected: int = 0


@dataclass(frozen=True, slots=True)
class NamePattern:
    """`{…}` in a tensor's name: merged terms, counted through the index list called `among` where that is given."""

    terms: tuple[Term, ...]
    index_list: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A parsed row; it has no sizes yet."""

    text: str
    leaf_dims: AtomDims
    name_parts: tuple[str | NamePattern, ...]
    source_dims: tuple[SourceDim, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """An atom of a tensor's dim, outermost first; `held` at an index or free (None)."""

    atom: str
    extent: int
    fixed: int | None = None


@dataclass(frozen=True, slots=True)
class TensorDim:
    """A dim of the source tensor: `extent` elements, of which the row has those from `start`, spread over `factors`."""

    extent: int
    start: int
    factors: tuple[Factor, ...]

    @property
    def selected_extent(self) -> int:
        """Elements from `start` over which the factors count, held ones included."""
        return math.prod(f.extent for f in self.factors)


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """Braces in a tensor's name: the merged index of `factors`, looked up in `numbers` where those are given."""

    factors: tuple[Factor, ...]
    listed_indices: tuple[int, ...] = ()

    def resolve(self, atom_indices: Mapping[str, int]) -> int:
        index = 0
        for factor in self.factors:
            index = index * factor.extent + (atom_indices[factor.atom] if factor.fixed is None else factor.fixed)
        return self.listed_indices[index] if self.listed_indices else index


@dataclass(frozen=True, slots=True)
class AxisMap:
    """A row with extents: which element of which tensor is which element of the leaf."""

    text: str
    leaf_dims: tuple[tuple[Factor, ...], ...]  # extents as in the tree, hence padded
    name_parts: tuple[str | TensorIndex, ...]
    source_dims: tuple[TensorDim, ...]  # extents as in the tensor

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(f.extent for f in dim) for dim in self.leaf_dims)

    @property
    def source_shape(self) -> tuple[int, ...]:
        return tuple(dim.extent for dim in self.source_dims)

    @property
    def stacked_factors(self) -> tuple[Factor, ...]:
        """The free atoms in braces: they choose the tensor."""
        choices = [part for part in self.name_parts if isinstance(part, TensorIndex)]
        return tuple(f for choice in choices for f in choice.factors if f.fixed is None)

    @property
    def unscanned_factors(self) -> tuple[Factor, ...]:
        """Stacked atoms that the leaf lacks: each index of them is a leaf of its own."""
        inside = {f.atom for dim in self.leaf_dims for f in dim}
        return tuple(f for f in self.stacked_factors if f.atom not in inside)

    def tensors(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Name of every source tensor, with the index of each stacked atom that the name stands for."""
        for index in itertools.product(*(range(f.extent) for f in self.stacked_factors)):
            at = {f.atom: i for f, i in zip(self.stacked_factors, index)}
            yield self.tensor_name(at), at

    def tensor_name(self, atom_indices: Mapping[str, int]) -> str:
        """The tensor that holds the stacked atoms at these indices."""
        return "".join(part if isinstance(part, str) else str(part.resolve(atom_indices)) for part in self.name_parts)


def parse_row(text: str) -> Row:
    """Parse `leaf dims <- name: tensor dims`; PrepError names the row and what is wrong with it."""
    if text.count("<-") != 1 or ":" not in text.partition("<-")[2]:
        raise _row_error(text, "it is not of the form `leaf dims <- name: tensor dims`")
    left, right = text.split("<-")
    name, dims = right.rsplit(":", 1)
    row = Row(
        text,
        _parse_leaf_dims(text, left),
        _parse_name(text, name.strip()),
        tuple(_parse_source_dim(text, d) for d in _split_dims(text, dims)),
    )
    _check_atoms(row)
    return row


def bind_row(row: Row, sizes: Sizes, padded: Mapping[str, int] | None = None) -> AxisMap:
    """Give a row its extents. `sizes`: atom -> extent, or name of an index list -> indices; `padded`: atom -> extent
    in the tree where that is larger. PrepError names an atom without a size, or with one that does not fit."""
    extent = _SizeLookup(row.text, sizes)
    wider = {
        a: extent.padded_extent(a, padded or {}) for dim in row.leaf_dims for a in dim if not _uses_index_list(row, a)
    }
    name = tuple(part if isinstance(part, str) else _tensor_index(part, extent) for part in row.name_parts)
    listed = {
        f.atom: f.extent for part in name if isinstance(part, TensorIndex) and part.listed_indices for f in part.factors
    }
    return AxisMap(
        row.text,
        tuple(tuple(Factor(a, (wider | listed)[a]) for a in dim) for dim in row.leaf_dims),
        name,
        tuple(_tensor_dim(dim, extent) for dim in row.source_dims),
    )


@dataclass(frozen=True, slots=True)
class _SizeLookup:
    row: str
    sizes: Sizes

    def extent(self, atom: str) -> int:
        size = self.sizes.get(atom)
        if not isinstance(size, int):
            raise _row_error(self.row, f"there is no size for the atom `{atom}`")
        return size

    def padded_extent(self, atom: str, padded: Mapping[str, int]) -> int:
        size = self.extent(atom)
        if padded.get(atom, size) < size:
            raise _row_error(self.row, f"`{atom}` would be padded from {size} to {padded[atom]}")
        return padded.get(atom, size)

    def index_list(self, name: str) -> tuple[int, ...]:
        numbers = self.sizes.get(name)
        if numbers is None or isinstance(numbers, int):
            raise _row_error(self.row, f"there is no index list called `{name}`")
        return tuple(numbers)

    def factors(self, terms: Iterable[Term]) -> tuple[Factor, ...]:
        found = tuple(Factor(t.atom, self.extent(t.atom), t.fixed) for t in terms)
        for factor in found:
            if factor.fixed is not None and factor.fixed >= factor.extent:
                raise _row_error(self.row, f"`{factor.atom}={factor.fixed}` is outside its extent {factor.extent}")
        return found


def _uses_index_list(row: Row, atom: str) -> bool:
    return any(isinstance(p, NamePattern) and p.index_list and atom == p.terms[0].atom for p in row.name_parts)


def _tensor_index(hole: NamePattern, extent: _SizeLookup) -> TensorIndex:
    if not hole.index_list:
        return TensorIndex(extent.factors(hole.terms))
    numbers = extent.index_list(hole.index_list)
    return TensorIndex((Factor(hole.terms[0].atom, len(numbers)),), numbers)


def _tensor_dim(dim: SourceDim, extent: _SizeLookup) -> TensorDim:
    parts = [extent.factors(terms) for terms in dim.parts]
    lengths = [math.prod(f.extent for f in part) for part in parts]
    return TensorDim(sum(lengths), sum(lengths[: dim.selected]), parts[dim.selected])


def _parse_leaf_dims(text: str, dims: str) -> AtomDims:
    found = tuple(tuple(a for a in item.strip("()").split() if a != "1") for item in _split_dims(text, dims))
    for atom in (a for dim in found for a in dim):
        if not atom.isidentifier():
            raise _row_error(text, f"`{atom}` is not the name of an atom")
    return found


def _split_dims(text: str, dims: str) -> list[str]:
    items = re.findall(r"\([^()]*\)|[^\s()]+", dims)
    if re.sub(r"\s", "", "".join(items)) != re.sub(r"\s", "", dims):
        raise _row_error(text, "its parentheses do not match")
    return items


def _parse_source_dim(text: str, item: str) -> SourceDim:
    parts = [part.strip() for part in item.strip("()").split("|")]
    marked = [i for i, part in enumerate(parts) if part.startswith(">")]
    if len(marked) != (len(parts) > 1):
        raise _row_error(text, "of several parts of a dim exactly one is marked with `>`")
    if len(parts) > 1 and not all(part.strip("> ") for part in parts):
        raise _row_error(text, "a part of a dim is empty")
    return SourceDim(tuple(_parse_terms(text, part.lstrip(">")) for part in parts), marked[0] if marked else 0)


def _parse_terms(text: str, words: str) -> tuple[Term, ...]:
    found = []
    for word in words.split():
        atom, equals, index = word.partition("=")
        if word == "1":
            continue
        if not atom.isidentifier() or (equals and not index.isdecimal()):
            raise _row_error(text, f"`{word}` is neither an atom nor `atom=index`")
        found.append(Term(atom, int(index) if equals else None))
    return tuple(found)


def _parse_name(text: str, name: str) -> tuple[str | NamePattern, ...]:
    pieces = re.split(r"{([^{}]*)}", name)
    if any(re.search(r"[{}\s]", piece) for piece in pieces[::2]) or not name:
        raise _row_error(text, "its tensor's name is empty, has a space, or braces that do not match")
    return tuple(p if i % 2 == 0 else _parse_name_pattern(text, p) for i, p in enumerate(pieces) if p or i % 2)


def _parse_name_pattern(text: str, inside: str) -> NamePattern:
    words, _, among = inside.partition("@")
    hole = NamePattern(_parse_terms(text, words), among.strip())
    if not hole.terms or (hole.index_list and (len(hole.terms) != 1 or hole.terms[0].fixed is not None)):
        raise _row_error(text, f"`{{{inside}}}` names no atom, or counts several through one list")
    return hole


def _check_atoms(row: Row) -> None:
    """Every atom once on each side, and the same ones; those in braces may be absent from the leaf."""
    leaf = [a for dim in row.leaf_dims for a in dim]
    braces = [t.atom for part in row.name_parts if isinstance(part, NamePattern) for t in part.terms if t.fixed is None]
    inside = [t.atom for dim in row.source_dims for t in dim.parts[dim.selected] if t.fixed is None]
    right = braces + inside
    for side in (leaf, right):
        if twice := {a for a in side if side.count(a) > 1}:
            raise _row_error(row.text, f"`{min(twice)}` stands twice on one side")
    if lost := set(leaf) ^ set(right) - (set(braces) - set(leaf)):
        raise _row_error(row.text, f"`{min(lost)}` stands on one side only")


def _row_error(row: str, why: str) -> PrepError:
    return PrepError(f"the row `{row.strip()}` is not a mapping", why)
