"""Axis maps: the place of each element of a parameter in the source tensors, as one row of text.

    layers heads head_dim embed <- h.{layers}.qk: (>heads head_dim | kv_heads head_dim) embed

The left side lists the dims of the leaf in the parameter tree. The right side gives the tensor's
name and its dims. The words for them, each with its place in this example:

- atom: a named axis, e.g. `embed`. Its size is not in the text.
- dim: one atom, several merged atoms `(a b)`, or `1`. The leaf has four dims, the tensor has two.
- part: a section of a dim of the tensor. The first dim of `qk` has two parts, one after another: the
  queries `heads head_dim`, and the keys `kv_heads head_dim`. `>` marks the part with this leaf.
- braces: the number in a tensor's name. The tensor `h.0.qk` has the first layer.
- term: an atom on the right side, in a part or in braces.

In braces, and in the terms:

- `{a}`: the index of `a` is the number in the name.
- `{a b=1}`: the number is the merged index of two atoms. A term `b=1` fixes its atom at one index.
- `{a@list}`: `a` counts through the index list `list` of the sizes.
- `{a of k v}`: the name has the words `k` and `v` in place of numbers. The size of `a` is their count.

If an atom in braces is missing on the left side, there is one leaf per index of it.

A row of another library's tree may end with a change of values, `RowScale`:

- `/ sqrt(a)`: the leaf has the values of the tensor divided by the square root of the size of `a`.
- `* float32(sqrt(a))`: the values are multiplied by the root, rounded to a dtype.
- `+ 1`: 1 is added to the values.

No I/O, no jax.

`rows.parse_row` makes a `ParsedAxisMap` of the text, without sizes. `bind_row` adds the sizes. Two layers,
four heads, two heads of keys, and three elements per head:

>>> from prepcli.algebra.rows import parse_row
>>> text = "layers heads head_dim embed <- h.{layers}.qk: (>heads head_dim | kv_heads head_dim) embed"
>>> sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 3, "embed": 5}
>>> axis_map = bind_row(parse_row(text), sizes)
>>> axis_map.leaf_shape, axis_map.source_shape
((2, 4, 3, 5), (18, 5))

A merged dim is in row-major order of its atoms. The element [1, 2, 0, 4] of the leaf has the index 1
along `layers`, so it is in `h.1.qk`. Its row there is 2 * 3 + 0 = 6, because the queries start at row
0. Its column is 4. The keys are rows 12 to 18, and belong to another leaf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prepcli.core.errors import Command, PrepError, text

# The atoms of each dim.
AtomDims = tuple[tuple[str, ...], ...]
# Named axis (atom) -> extent, or name of an index list -> indices.
Sizes = Mapping[str, int | Sequence[int]]
# Names of the axes (atoms) that stack layers. All but ENCODER_LAYERS are also the part of a leaf's
# path that contains the layers, as in `layers.attention.q`.
# The layers of the model, or of the decoder if there is an encoder.
LAYERS = "layers"
# The layers of the encoder.
ENCODER_LAYERS = "encoder_layers"
# The two kinds of layers in a model with both dense and MoE layers.
DENSE_LAYERS = "dense_layers"
SPARSE_LAYERS = "sparse_layers"
# The two kinds of layers in a model with both attention layers and recurrent layers.
ATTENTION_LAYERS = "attention_layers"
MIXER_LAYERS = "mixer_layers"
# Layers with a sliding window and with full attention, if their heads differ. Layers that attend to the keys and
# values of an earlier layer have no weights for their own.
SLIDING_LAYERS = "sliding_layers"
FULL_LAYERS = "full_layers"
REUSING_SLIDING_LAYERS = "reusing_sliding_layers"
REUSING_FULL_LAYERS = "reusing_full_layers"
# The two kinds of layers in a model with MLPs of two widths.
NARROW_LAYERS = "narrow_layers"
WIDE_LAYERS = "wide_layers"
# Layers with and without a bias after attention.
BIASED_LAYERS = "biased_layers"
UNBIASED_LAYERS = "unbiased_layers"
# All layers, in tensors outside of layers: their inputs from tokens.
INPUT_LAYERS = "input_layers"
# Placeholder in the path of a leaf. See `AxisMap.leaf_path`.
LAYER_NUMBER = "layer_number"
# Axes that stack only the layers of one kind.
GROUP_ATOMS = (
    *(DENSE_LAYERS, SPARSE_LAYERS, ATTENTION_LAYERS, MIXER_LAYERS),
    *(SLIDING_LAYERS, FULL_LAYERS, REUSING_SLIDING_LAYERS, REUSING_FULL_LAYERS),
    *(NARROW_LAYERS, WIDE_LAYERS, BIASED_LAYERS, UNBIASED_LAYERS),
)
# All axes that stack layers. A leaf has at most one of them.
LAYER_ATOMS = (LAYERS, ENCODER_LAYERS, *GROUP_ATOMS)
# Dims of several atoms with another logical name than the first atom. The heads of CodeGen are in equal shards.
MERGED_DIM_NAMES: Mapping[tuple[str, ...], str] = {("head_shards", "shard_heads"): "heads"}


def dim_name(dim: Sequence[str]) -> str:
    """Return the logical name of a dim of a leaf: its first atom, or "" if it has none.

    >>> dim_name(["embed"]), dim_name(["head_shards", "shard_heads"]), dim_name([])
    ('embed', 'heads', '')
    """
    first = dim[0] if dim else ""
    return MERGED_DIM_NAMES.get(tuple(dim), first)


def stack_axis(dims: Sequence[tuple[str, ...]]) -> int | None:
    """Return the axis of the stacked layers in a leaf, or None."""
    for axis, dim in enumerate(dims):
        if len(dim) == 1 and dim[0] in LAYER_ATOMS:
            return axis
    return None


def escape_path(path: str) -> str:
    """Return a path as a template of `str.format`. The paths of a family's rows are such templates.

    >>> escape_path("{a}.b").format()
    '{a}.b'
    """
    return path.replace("{", "{{").replace("}", "}}")


@dataclass(frozen=True, slots=True)
class Term:
    """A named axis (atom) as written on the right side, with its fixed index, if any.

    Attributes:
        atom: Name of the axis.
        fixed: The only index used, e.g. 1 for `half=1`. None if all indices are used.
    """

    atom: str
    fixed: int | None = None


@dataclass(frozen=True, slots=True)
class SourceDim:
    """A parsed dim of a source tensor.

    The text `(>a b | c b)` has two parts, one after another: the merged axes a and b, then c and b. `>`
    selects the first one.

    Attributes:
        parts: The parts in order, each as a tuple of its merged axes.
        selected: Index of the part with the elements of the leaf.
    """

    parts: tuple[tuple[Term, ...], ...]
    selected: int = 0


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Parsed braces in a tensor name.

    Attributes:
        terms: Atoms of one merged index.
        index_list: Name of the list of the numbers in the tensor names, or "".
        numbers: The numbers in the tensor names, if the axis map has its own list. The sizes then
            have no entry for the atom.
        words: Words in place of numbers, likewise.
    """

    terms: tuple[Term, ...]
    index_list: str = ""
    numbers: tuple[int, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def has_own_size(self) -> bool:
        """Whether the size of the atom is the length of a list, and not in the sizes of the model."""
        return bool(self.index_list or self.numbers or self.words)


@dataclass(frozen=True, slots=True)
class RowScale:
    """Change of the values of a tensor in its leaf, written at the end of a row.

    Attributes:
        atom: Named axis with its size under the square root, or "" without a root.
        power: 1 for a division by the root, -1 for a multiplication.
        root_dtype: Dtype of the rounded root, or "".
        offset: Number to add to the values.
    """

    atom: str = ""
    power: int = 1
    root_dtype: str = ""
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ParsedAxisMap:
    """The axis map as written, before its axes have sizes. `scale` is None if the leaf has the tensor's own values."""

    text: str
    leaf_dims: AtomDims
    name_parts: tuple[str | NamePattern, ...]
    source_dims: tuple[SourceDim, ...]
    scale: RowScale | None = None


@dataclass(frozen=True, slots=True)
class SizedAxis:
    """A named axis and its size.

    Attributes:
        atom: Name of the axis.
        extent: Its size.
        fixed: The only index used, or None for all indices.
    """

    atom: str
    extent: int
    fixed: int | None = None


@dataclass(frozen=True, slots=True)
class TensorDim:
    """A dim of a source tensor and its part in the axis map.

    For `(>a b | c b)` with a = 2, b = 3, c = 4 the extent is 6 + 12 = 18. The first part starts at
    0 and the second one at 6.

    Attributes:
        extent: Elements of the whole dim.
        start: First element of the part.
        factors: Axes of the merged index of the elements, outermost first.
    """

    extent: int
    start: int
    factors: tuple[SizedAxis, ...]

    @property
    def selected_extent(self) -> int:
        """Number of elements of the part. A fixed axis counts with its whole size."""
        return math.prod([factor.extent for factor in self.factors])


@dataclass(frozen=True, slots=True)
class TensorIndex:
    """Number in a tensor's name, computed from atoms (named axes) in braces.

    E.g. the braces of `h.{layers}.w`, or of `h.{layers half=1}.w`: a merged index of two atoms, with
    `half` fixed at 1.

    Attributes:
        factors: Atoms in the braces, outermost first. Their indices form one merged index.
        listed_indices: Number or word in the name for each merged index. Empty if the merged index
            is the number itself.
    """

    factors: tuple[SizedAxis, ...]
    listed_indices: tuple[int | str, ...] = ()

    def resolve(self, atom_indices: Mapping[str, int]) -> int | str:
        """Return the number or word in place of the braces in the name.

        >>> TensorIndex((SizedAxis("layers", 3), SizedAxis("half", 2, fixed=1))).resolve({"layers": 2})
        5
        """
        # Horner's rule for a row-major index: (i, j) in extents (m, n) is i * n + j.
        index = 0
        for factor in self.factors:
            if factor.fixed is None:
                axis_index = atom_indices[factor.atom]
            else:
                axis_index = factor.fixed
            index = index * factor.extent + axis_index
        if self.listed_indices:
            return self.listed_indices[index]
        return index


@dataclass(frozen=True, slots=True)
class AxisMap:
    """The correspondence between the elements of a leaf and the elements of source tensors.

    Attributes:
        text: The axis map as written, for errors.
        leaf_dims: Axes of each dim of the leaf, outermost first, with padding in their sizes.
        name_parts: Pieces of the tensor's name and the indices between them.
        source_dims: Dims of the tensor. Those of an output have its padding: the sizes of its axes have it.
    """

    text: str
    leaf_dims: tuple[tuple[SizedAxis, ...], ...]
    name_parts: tuple[str | TensorIndex, ...]
    source_dims: tuple[TensorDim, ...]

    @property
    def leaf_shape(self) -> tuple[int, ...]:
        """Shape of the leaf in the tree, padding included."""
        shape: list[int] = []
        for dim in self.leaf_dims:
            shape.append(math.prod([factor.extent for factor in dim]))
        return tuple(shape)

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of each source tensor."""
        return tuple(dim.extent for dim in self.source_dims)

    @property
    def stacked_factors(self) -> tuple[SizedAxis, ...]:
        """Axes in braces without a fixed index. Their indices select the tensor."""
        factors: list[SizedAxis] = []
        for part in self.name_parts:
            if isinstance(part, TensorIndex):
                factors += [f for f in part.factors if f.fixed is None]
        return tuple(factors)

    @property
    def unscanned_factors(self) -> tuple[SizedAxis, ...]:
        """Stacked axes outside the dims of the leaf. Each combination of their indices is a separate leaf."""
        leaf_atoms = {f.atom for f in itertools.chain.from_iterable(self.leaf_dims)}
        return tuple(f for f in self.stacked_factors if f.atom not in leaf_atoms)

    def tensors(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield the name of each source tensor with the index of each stacked axis."""
        atoms = [f.atom for f in self.stacked_factors]
        extents = [f.extent for f in self.stacked_factors]
        for indices in itertools.product(*map(range, extents)):
            atom_indices = dict(zip(atoms, indices))
            yield self.tensor_name(atom_indices), atom_indices

    def leaf_path(self, template: str, atom_indices: Mapping[str, int]) -> str:
        """Return the path of the leaf at these indices of the stacked axes.

        Args:
            template: Path with the index of a layer as `{layers}`, or its number in the model as `{layer_number}`.
                E.g. the first sparse layer has the index 0, and the number 1 after one dense layer.
            atom_indices: Index of each stacked axis.
        """
        if LAYER_NUMBER not in template:
            return template.format(**atom_indices)
        # The first number in the name of a tensor is that of its layer.
        layer = next(part for part in self.name_parts if isinstance(part, TensorIndex))
        return template.format(**atom_indices, **{LAYER_NUMBER: layer.resolve(atom_indices)})

    def tensor_name(self, atom_indices: Mapping[str, int]) -> str:
        """Return the name of the tensor at these indices of the stacked axes."""
        name = ""
        for part in self.name_parts:
            if isinstance(part, TensorIndex):
                name += str(part.resolve(atom_indices))
            else:
                name += part
        return name


def number_tensors(row: ParsedAxisMap, numbers: Mapping[str, Sequence[int]]) -> ParsedAxisMap:
    """Return an axis map with other numbers than the indices in its tensor names.

    Args:
        row: The axis map without sizes.
        numbers: Atom or index list -> number in the tensor names for each of its indices, e.g. the layers 3 and 4
            for the first two indices of `sparse_layers`.
    """
    parts: list[str | NamePattern] = []
    for part in row.name_parts:
        if isinstance(part, NamePattern):
            key = part.index_list or part.terms[0].atom
            if key in numbers:
                part = replace(part, numbers=tuple(numbers[key]))
        parts.append(part)
    return replace(row, name_parts=tuple(parts))


def bind_row(row: ParsedAxisMap, sizes: Sizes, padded: Mapping[str, int] | None = None) -> AxisMap:
    """Give the axes of an axis map their sizes.

    Args:
        row: The axis map without sizes.
        sizes: Size of each atom, and the indices of each index list, by name.
        padded: Size in the tree of each atom with padding, e.g. {"vocab": 50304}.

    Returns:
        The axis map with sizes.
    """
    padded = padded or {}
    name_parts: list[str | TensorIndex] = []
    leaf_extents: dict[str, int] = {}
    for part in row.name_parts:
        if isinstance(part, str):
            name_parts.append(part)
            continue
        index = _tensor_index(row.text, part, sizes)
        name_parts.append(index)
        # In `{a@list}`, `sizes` has no entry for the atom a. Its size is the length of the list.
        if part.has_own_size:
            leaf_extents |= {f.atom: f.extent for f in index.factors}
    leaf_dims: list[tuple[SizedAxis, ...]] = []
    for dim in row.leaf_dims:
        axes: list[SizedAxis] = []
        for atom in dim:
            if atom not in leaf_extents:
                (axis,) = _sized_axes(row.text, [Term(atom)], sizes)
                # Padding is only in the tree: the leaf has the padded extent, the tensor the extent of `sizes`.
                leaf_extents[atom] = padded.get(atom, axis.extent)
                if leaf_extents[atom] < axis.extent:
                    why = f"`{atom}` has size {axis.extent} and cannot be padded to {padded[atom]}, which is smaller"
                    raise row_error(row.text, why)
            axes.append(SizedAxis(atom, leaf_extents[atom]))
        leaf_dims.append(tuple(axes))
    source_dims: list[TensorDim] = []
    for source_dim in row.source_dims:
        parts = [_sized_axes(row.text, terms, sizes) for terms in source_dim.parts]
        lengths = [math.prod([factor.extent for factor in part]) for part in parts]
        selected = source_dim.selected
        source_dims.append(TensorDim(sum(lengths), sum(lengths[:selected]), parts[selected]))
    return AxisMap(row.text, tuple(leaf_dims), tuple(name_parts), tuple(source_dims))


def _sized_axes(row: str, terms: Iterable[Term], sizes: Sizes) -> tuple[SizedAxis, ...]:
    """Return each term of a row, an atom or one index of an atom, with its extent in the tensor."""
    axes: list[SizedAxis] = []
    for term in terms:
        extent = sizes.get(term.atom)
        if not isinstance(extent, int):
            raise row_error(row, f"the atom `{term.atom}` has no size")
        if term.fixed is not None and term.fixed >= extent:
            why = f"`{term.atom}={term.fixed}` is out of range: the size is {extent}"
            raise row_error(row, why)
        axes.append(SizedAxis(term.atom, extent, term.fixed))
    return tuple(axes)


def _tensor_index(row: str, pattern: NamePattern, sizes: Sizes) -> TensorIndex:
    """Return the values of a placeholder in tensor names, with the sizes of its atoms."""
    if not pattern.has_own_size:
        return TensorIndex(_sized_axes(row, pattern.terms, sizes))
    atom = pattern.terms[0].atom
    if pattern.words:
        return TensorIndex((SizedAxis(atom, len(pattern.words)),), pattern.words)
    if pattern.numbers == tuple(range(len(pattern.numbers))) and pattern.numbers:
        # The numbers are 0, 1, 2, ... and need no list. With a list, a plan would contain the number of every expert
        # for each tensor.
        return TensorIndex((SizedAxis(atom, len(pattern.numbers)),))
    indices = pattern.numbers
    if not indices:
        listed = sizes.get(pattern.index_list)
        if listed is None or isinstance(listed, int):
            why = f"the sizes of the model contain no index list `{pattern.index_list}`"
            raise row_error(row, why)
        indices = tuple(listed)
    return TensorIndex((SizedAxis(atom, len(indices)),), indices)


def row_error(row: str, why: str) -> PrepError:
    """Return the error of an invalid row."""
    hint = text("{} describes rows", Command("docs", "add-a-family"))
    return PrepError(f"invalid row `{row.strip()}`", why, hint)
