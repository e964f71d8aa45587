"""Axis maps: where each element of a parameter lies in the source tensors, as one row of text per parameter.

    layers heads head_dim embed <- h.{layers}.attn.q_proj.weight: (heads head_dim) embed

The left side lists the dims of the leaf in the parameter tree; the right side gives the tensor's name and its dims.
An *atom* is a named axis with an extent. A dim on either side is one atom, several merged atoms `(a b)`, or `1`.

On the right side:

- `{a}` in a name: the index of `a` selects the tensor.
- `{a b=1}` in a name: the merged index of several atoms, some of them fixed.
- `{a@list}` in a name: `a` counts through the index list `list` of the sizes.
- `a=i`: fixes an atom at one index.
- `(>a b | c b)`: a dim of unequal parts, one after another; `>` marks the part of this row.

If the left side lacks an atom in braces, there is one leaf per index of it. No I/O, no jax.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.models.errors import PrepError

AtomDims = tuple[tuple[str, ...], ...]  # the atoms of each dim
Sizes = Mapping[str, int | Sequence[int]]  # atom -> extent, or name of an index list -> indices
LAYERS = "layers"  # path part and atom of the layers (of the decoder, if the model has an encoder)
ENCODER_LAYERS = "encoder_layers"  # atom of the encoder's layers
LAYER_ATOMS = (LAYERS, ENCODER_LAYERS)  # atoms that count layers; a leaf has at most one of them


def stack_axis(dims: Sequence[tuple[str, ...]]) -> int | None:
    """Return the axis of a leaf that stacks layers, or None."""
    return next((axis for axis, dim in enumerate(dims) if len(dim) == 1 and dim[0] in LAYER_ATOMS), None)


@dataclass(frozen=True, slots=True)
class Term:
    """An atom in a merged dim or in braces: `fixed` at one index, or free (None)."""

    atom: str
    fixed: int | None = None


@dataclass(frozen=True, slots=True)
class SourceDim:
    """A parsed dim of a source tensor: the merged terms of its consecutive parts; the row maps only part `selected`."""

    parts: tuple[tuple[Term, ...], ...]
    selected: int = 0


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Parsed braces in a tensor name: the terms that form one merged index, and the name of an index list (or "")."""

    terms: tuple[Term, ...]
    index_list: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A parsed row without extents."""

    text: str
    leaf_dims: AtomDims
    name_parts: tuple[str | NamePattern, ...]
    source_dims: tuple[SourceDim, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """An atom of a dim with its extent: `fixed` at one index, or free (None). The outermost factor comes first."""

    atom: str
    extent: int
    fixed: int | None = None


@dataclass(frozen=True, slots=True)
class TensorDim:
    """A dim of a source tensor with `extent` elements; the row maps those from `start` on, shaped as `factors`."""

    extent: int
    start: int
    factors: tuple[Factor, ...]

    @property
    def selected_extent(self) -> int:
        """Number of elements from `start` on, over all factors, fixed ones included."""
        return math.prod(f.extent for f in self.factors)


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """Braces in a tensor name, with the extents of their atoms.

    Attributes:
        factors: Atoms in the braces, outermost first. Their indices form one merged index.
        listed_indices: Number in the name for each merged index; empty if the merged index itself is the number.
    """

    factors: tuple[Factor, ...]
    listed_indices: tuple[int, ...] = ()

    def resolve(self, atom_indices: Mapping[str, int]) -> int:
        """Return the number that replaces the braces, given the index of each free atom."""
        index = 0
        for factor in self.factors:
            index = index * factor.extent + (atom_indices[factor.atom] if factor.fixed is None else factor.fixed)
        return self.listed_indices[index] if self.listed_indices else index


@dataclass(frozen=True, slots=True)
class AxisMap:
    """A row with extents: the correspondence between elements of a leaf and elements of source tensors."""

    text: str
    leaf_dims: tuple[tuple[Factor, ...], ...]  # extents in the tree, padding included
    name_parts: tuple[str | TensorIndex, ...]
    source_dims: tuple[TensorDim, ...]  # extents in the tensor, without padding

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """Shape of the leaf in the tree, padding included."""
        return tuple(math.prod(f.extent for f in dim) for dim in self.leaf_dims)

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of each source tensor."""
        return tuple(dim.extent for dim in self.source_dims)

    @property
    def stacked_factors(self) -> tuple[Factor, ...]:
        """Free atoms in braces; their indices select the tensor."""
        tensor_indices = [part for part in self.name_parts if isinstance(part, TensorIndex)]
        return tuple(f for tensor_index in tensor_indices for f in tensor_index.factors if f.fixed is None)

    @property
    def unscanned_factors(self) -> tuple[Factor, ...]:
        """Stacked atoms without a dim of the leaf; each of their indices has a leaf of its own."""
        leaf_atoms = {f.atom for dim in self.leaf_dims for f in dim}
        return tuple(f for f in self.stacked_factors if f.atom not in leaf_atoms)

    def tensors(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield the name of each source tensor with the index of each stacked atom."""
        for indices in itertools.product(*(range(f.extent) for f in self.stacked_factors)):
            atom_indices = {f.atom: i for f, i in zip(self.stacked_factors, indices)}
            yield self.tensor_name(atom_indices), atom_indices

    def tensor_name(self, atom_indices: Mapping[str, int]) -> str:
        """Return the name of the tensor at these indices of the stacked atoms."""
        return "".join(part if isinstance(part, str) else str(part.resolve(atom_indices)) for part in self.name_parts)


def parse_row(text: str) -> Row:
    """Parse `leaf dims <- name: tensor dims`.

    Args:
        text: A row in the notation of this module.

    Returns:
        The row, without extents.

    Raises:
        PrepError: The row is malformed; the error quotes the row and the reason.
    """
    if text.count("<-") != 1 or ":" not in text.partition("<-")[2]:
        raise _row_error(text, "it is not of the form `leaf dims <- name: tensor dims`")
    left, right = text.split("<-")
    name, dims = right.rsplit(":", 1)
    row = Row(
        text=text,
        leaf_dims=_parse_leaf_dims(text, left),
        name_parts=_parse_name(text, name.strip()),
        source_dims=tuple(_parse_source_dim(text, d) for d in _split_dims(text, dims)),
    )
    _check_atoms(row)
    return row


def bind_row(row: Row, sizes: Sizes, padded: Mapping[str, int] | None = None) -> AxisMap:
    """Combine a row with the extents of its atoms.

    Args:
        row: A parsed row.
        sizes: Atom -> extent, and name of an index list -> indices.
        padded: Atom -> extent in the tree, for atoms with padding.

    Returns:
        The row with extents.

    Raises:
        PrepError: An atom has no size, its padded size is smaller than its size, or a fixed index is out of range.
    """
    lookup = _SizeLookup(row.text, sizes)
    leaf_extents = {
        a: lookup.padded_extent(a, padded or {}) for dim in row.leaf_dims for a in dim if not _uses_index_list(row, a)
    }
    name_parts = tuple(part if isinstance(part, str) else _tensor_index(part, lookup) for part in row.name_parts)
    leaf_extents |= {
        f.atom: f.extent
        for part in name_parts
        if isinstance(part, TensorIndex) and part.listed_indices
        for f in part.factors
    }
    return AxisMap(
        text=row.text,
        leaf_dims=tuple(tuple(Factor(a, leaf_extents[a]) for a in dim) for dim in row.leaf_dims),
        name_parts=name_parts,
        source_dims=tuple(_tensor_dim(dim, lookup) for dim in row.source_dims),
    )


@dataclass(frozen=True, slots=True)
class _SizeLookup:
    """The sizes for one row, with errors that quote the row."""

    row: str
    sizes: Sizes

    def extent(self, atom: str) -> int:
        """Return the extent of an atom in the tensor."""
        size = self.sizes.get(atom)
        if not isinstance(size, int):
            raise _row_error(self.row, f"the atom `{atom}` has no size")
        return size

    def padded_extent(self, atom: str, padded: Mapping[str, int]) -> int:
        """Return the extent of an atom in the tree."""
        size = self.extent(atom)
        if padded.get(atom, size) < size:
            why = f"`{atom}` has size {size} and cannot be padded to {padded[atom]}, which is smaller"
            raise _row_error(self.row, why)
        return padded.get(atom, size)

    def index_list(self, name: str) -> tuple[int, ...]:
        """Return the index list of this name."""
        indices = self.sizes.get(name)
        if indices is None or isinstance(indices, int):
            raise _row_error(self.row, f"the sizes have no index list `{name}`")
        return tuple(indices)

    def factors(self, terms: Iterable[Term]) -> tuple[Factor, ...]:
        """Return the terms with their extents."""
        factors = tuple(Factor(t.atom, self.extent(t.atom), t.fixed) for t in terms)
        for factor in factors:
            if factor.fixed is not None and factor.fixed >= factor.extent:
                raise _row_error(
                    self.row, f"`{factor.atom}={factor.fixed}` is out of range: the size is {factor.extent}"
                )
        return factors


def _uses_index_list(row: Row, atom: str) -> bool:
    return any(isinstance(p, NamePattern) and p.index_list and atom == p.terms[0].atom for p in row.name_parts)


def _tensor_index(pattern: NamePattern, lookup: _SizeLookup) -> TensorIndex:
    if not pattern.index_list:
        return TensorIndex(lookup.factors(pattern.terms))
    indices = lookup.index_list(pattern.index_list)
    return TensorIndex((Factor(pattern.terms[0].atom, len(indices)),), indices)


def _tensor_dim(dim: SourceDim, lookup: _SizeLookup) -> TensorDim:
    parts = [lookup.factors(terms) for terms in dim.parts]
    lengths = [math.prod(f.extent for f in part) for part in parts]
    return TensorDim(extent=sum(lengths), start=sum(lengths[: dim.selected]), factors=parts[dim.selected])


def _parse_leaf_dims(text: str, dims: str) -> AtomDims:
    leaf_dims = tuple(tuple(a for a in item.strip("()").split() if a != "1") for item in _split_dims(text, dims))
    for atom in (a for dim in leaf_dims for a in dim):
        if not atom.isidentifier():
            raise _row_error(text, f"`{atom}` is not a valid atom name")
    return leaf_dims


def _split_dims(text: str, dims: str) -> list[str]:
    items = re.findall(r"\([^()]*\)|[^\s()]+", dims)
    if re.sub(r"\s", "", "".join(items)) != re.sub(r"\s", "", dims):
        raise _row_error(text, "its parentheses do not match")
    return items


def _parse_source_dim(text: str, item: str) -> SourceDim:
    parts = [part.strip() for part in item.strip("()").split("|")]
    marked = [i for i, part in enumerate(parts) if part.startswith(">")]
    if len(marked) != (len(parts) > 1):
        raise _row_error(text, "exactly one of several parts of a dim must be marked with `>`")
    if len(parts) > 1 and not all(part.strip("> ") for part in parts):
        raise _row_error(text, "a part of a dim is empty")
    return SourceDim(tuple(_parse_terms(text, part.lstrip(">")) for part in parts), marked[0] if marked else 0)


def _parse_terms(text: str, words: str) -> tuple[Term, ...]:
    terms = []
    for word in words.split():
        atom, equals, index = word.partition("=")
        if word == "1":
            continue
        if not atom.isidentifier() or (equals and not index.isdecimal()):
            raise _row_error(text, f"`{word}` is neither an atom nor `atom=index`")
        terms.append(Term(atom, int(index) if equals else None))
    return tuple(terms)


def _parse_name(text: str, name: str) -> tuple[str | NamePattern, ...]:
    pieces = re.split(r"{([^{}]*)}", name)  # plain text at even positions, the content of braces at odd ones
    if any(re.search(r"[{}\s]", piece) for piece in pieces[::2]) or not name:
        raise _row_error(text, "its tensor name is empty, has a space, or braces that do not match")
    return tuple(p if i % 2 == 0 else _parse_name_pattern(text, p) for i, p in enumerate(pieces) if p or i % 2)


def _parse_name_pattern(text: str, content: str) -> NamePattern:
    words, _, index_list = content.partition("@")
    pattern = NamePattern(_parse_terms(text, words), index_list.strip())
    if not pattern.terms or (pattern.index_list and (len(pattern.terms) != 1 or pattern.terms[0].fixed is not None)):
        raise _row_error(text, f"`{{{content}}}` has no atom, or an index list for anything but one free atom")
    return pattern


def _check_atoms(row: Row) -> None:
    """Raise PrepError unless both sides have the same free atoms, once each; the leaf may lack atoms in braces."""
    leaf_atoms = [a for dim in row.leaf_dims for a in dim]
    name_atoms = [
        t.atom for part in row.name_parts if isinstance(part, NamePattern) for t in part.terms if t.fixed is None
    ]
    dim_atoms = [t.atom for dim in row.source_dims for t in dim.parts[dim.selected] if t.fixed is None]
    source_atoms = name_atoms + dim_atoms
    for atoms in (leaf_atoms, source_atoms):
        if repeated := {a for a in atoms if atoms.count(a) > 1}:
            raise _row_error(row.text, f"`{min(repeated)}` appears twice on one side")
    if unmatched := set(leaf_atoms) ^ set(source_atoms) - (set(name_atoms) - set(leaf_atoms)):
        raise _row_error(row.text, f"`{min(unmatched)}` appears on one side only")


def _row_error(row: str, why: str) -> PrepError:
    return PrepError(f"invalid row `{row.strip()}`", why)
