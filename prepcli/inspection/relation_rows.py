"""Write the relations of two trees as rows of a map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from prepcli.inspection.tensor_selection import TensorSelection, select_tensor
from prepcli.inspection.tree_relations import Relation, TensorTree
from prepcli.inspection.value_sums import DimAlignment, align_dims, can_sum
from prepcli.models.verbatim import split_numbers
from prepcli.sources.source import SourceTensor

# Names with other characters have no place in a row.
INVALID_CHARS = frozenset("{}:#<>|()")


@dataclass(frozen=True, slots=True)
class SuggestedRow:
    """A row and the tensors of its targets.

    Attributes:
        text: The row.
        targets: Names of its targets.
        sources: Names of its tensors in the first tree.
    """

    text: str
    targets: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Template:
    """Names of both tensors of a row, with the atoms of their numbers.

    Attributes:
        member: Name of the member, with braces.
        container: Name of the container, with braces.
        index_atom: Atom of the index of a slice, or "" for a fixed index.
    """

    member: str
    container: str
    index_atom: str = ""


@dataclass(slots=True)
class RowWriter:
    """The rows of a map, with the sizes of their atoms.

    Attributes:
        first: The tree to map.
        second: The tree of the targets.
        sizes: Size of each atom, or the numbers of an index list as text.
    """

    first: TensorTree
    second: TensorTree
    sizes: dict[str, str] = field(default_factory=dict)

    def rows(self, relations: Sequence[Relation]) -> Iterator[SuggestedRow]:
        """Yield the rows of all relations, in the order of the targets' names."""
        groups: dict[object, list[Relation]] = defaultdict(list)
        for relation in relations:
            groups[self._group_key(relation)].append(relation)
        for group in groups.values():
            yield from self._group_rows(group)

    def _group_key(self, relation: Relation) -> object:
        """Return the equal properties of the relations of one row: all but the numbers and the index of the slice."""
        first, second = relation.container, relation.member
        if relation.is_reversed:
            first, second = second, first
        stack = relation.stack
        if stack is not None:
            stack = replace(stack, index=0, start=0)
        return (
            split_numbers(relation.member)[0],
            split_numbers(relation.container)[0],
            self.first.tensors[first].shape,
            self.second.tensors[second].shape,
            relation.selection,
            stack,
            relation.is_reversed,
        )

    def _group_rows(self, group: Sequence[Relation]) -> Iterator[SuggestedRow]:
        """Yield one row for tensors of one pattern if their numbers allow it. Otherwise yield a row for each."""
        row = self._row(group, stacks_index=True)
        if row is not None:
            yield row
            return
        by_index: dict[int, list[Relation]] = defaultdict(list)
        for relation in group:
            by_index[relation.stack.index if relation.stack else 0].append(relation)
        for part in by_index.values():
            row = self._row(part, stacks_index=False)
            if row is not None:
                yield row
                continue
            for relation in part:
                row = self._row([relation], stacks_index=False)
                if row is not None:
                    yield row

    def _row(self, group: Sequence[Relation], *, stacks_index: bool) -> SuggestedRow | None:
        """Return the row of tensors of one pattern. None if one row cannot describe them."""
        template = self._template(group, stacks_index=stacks_index)
        if template is None:
            return None
        relation = group[0]
        dims = self._dims(relation, template.index_atom)
        if dims is None:
            return None
        member = f"{template.member}: {dims[0]}"
        container = f"{template.container}: {dims[1]}"
        members = tuple(relation.member for relation in group)
        containers = tuple(dict.fromkeys(relation.container for relation in group))
        if relation.is_reversed:
            return SuggestedRow(f"{container} <- {member}", containers, members)
        return SuggestedRow(f"{member} <- {container}", members, containers)

    def _template(self, group: Sequence[Relation], *, stacks_index: bool) -> _Template | None:
        """Return the names of a row, with an atom for each number that differs between its tensors."""
        members = [split_numbers(relation.member) for relation in group]
        containers = [split_numbers(relation.container) for relation in group]
        member_columns = [*zip(*(numbers for _, numbers in members))]
        container_columns = [*zip(*(numbers for _, numbers in containers))]
        indices = tuple(r.stack.index if r.stack else 0 for r in group)
        atoms: dict[tuple[int, ...], str] = {}
        num_tensors = 1
        for column in dict.fromkeys(member_columns):
            if len({*column}) > 1:
                used = [atom.partition("@")[0] for atom in atoms.values()]
                atoms[column] = self._number_atom(sorted({*column}), used)
                num_tensors *= len({*column})
        if num_tensors != len(group):
            return None
        index_atom = ""
        unexplained = {column for column in container_columns if len({*column}) > 1} - atoms.keys()
        if stacks_index and len({*indices}) > 1:
            stack = group[0].stack
            index_atom = atoms.get(indices, "")
            is_whole = stack is not None and {*indices} == {*range(stack.extent)}
            if not index_atom or not is_whole:
                return None
        stacked = [column for column in atoms if column not in container_columns]
        if unexplained or any(column != indices or not index_atom for column in stacked):
            return None
        return _Template(
            _braced_name(members[0], member_columns, atoms),
            _braced_name(containers[0], container_columns, atoms),
            index_atom,
        )

    def _number_atom(self, numbers: Sequence[int], used: Sequence[str]) -> str:
        """Return the atom of the numbers in names, with its index list if they are not 0, 1, 2, ..."""
        atom = self._atom("n", len(numbers), used)
        if [*numbers] == [*range(len(numbers))]:
            return atom
        text = ",".join(map(str, numbers))
        for name, size in self.sizes.items():
            if size == text:
                return f"{atom}@{name}"
        name = f"numbers{sum(',' in size for size in self.sizes.values()) + 1}"
        self.sizes[name] = text
        return f"{atom}@{name}"

    def _atom(self, letter: str, extent: int, used: Sequence[str]) -> str:
        """Return an atom of this size without another use in the row, e.g. `d64` and then `d64_2`."""
        atom = f"{letter}{extent}"
        number = 1
        while atom in used:
            number += 1
            atom = f"{letter}{extent}_{number}"
        self.sizes[atom] = str(extent)
        return atom

    def _dims(self, relation: Relation, index_atom: str) -> tuple[str, str] | None:
        """Return the dims of the member and of the container, as text. None if their values do not agree."""
        trees = (self.second, self.first)
        if relation.is_reversed:
            trees = (self.first, self.second)
        member = trees[0].tensors[relation.member]
        container = trees[1].tensors[relation.container]
        block: SourceTensor | None = container
        selection = relation.selection
        for part in (relation.stack, selection):
            if part is not None and block is not None:
                block = select_tensor(block, part)
        if block is None or not (can_sum(member) and can_sum(block)):
            return None
        alignment = align_dims(trees[0].sums_of(member).axes, trees[1].sums_of(block).axes)
        if alignment is None:
            return None
        if selection is not None and not selection.is_slice and selection.count:
            alignment = split_axis(alignment, selection.axis, selection.outer)
        names: list[str] = [index_atom] if index_atom else []
        atoms: list[str] = []
        for extent in alignment.extents:
            atoms.append(self._atom("d", extent, names))
            names.append(atoms[-1])
        member_dims = [[atoms[axis] for axis in dim] for dim in alignment.left]
        block_dims = [[atoms[axis] for axis in dim] for dim in alignment.right]
        container_dims = self._container_dims(block_dims, alignment, selection)
        if relation.stack is not None:
            index = index_atom or self._fixed(relation.stack)
            container_dims.insert(relation.stack.axis, index)
        return " ".join(map(_dim_text, member_dims)), " ".join(container_dims)

    def _container_dims(
        self,
        block_dims: list[list[str]],
        alignment: DimAlignment,
        selection: TensorSelection | None,
    ) -> list[str]:
        """Return the dims of a container or of its slice, with the selection along one of them."""
        texts = [_dim_text(dim) for dim in block_dims]
        if selection is None:
            return texts
        axis = selection.axis
        if selection.is_slice:
            texts.insert(axis, self._fixed(selection))
            return texts
        dim = block_dims[axis]
        if selection.count:
            num_outer = _num_outer(alignment, axis, selection.outer)
            words = [*dim[:num_outer], self._fixed(selection), *dim[num_outer:]]
            texts[axis] = f"({' '.join(words)})"
            return texts
        before = selection.start
        after = selection.extent - selection.start - selection.inner
        parts = [f">{' '.join(dim)}"]
        if before:
            parts.insert(0, self._atom("p", before, ()))
        if after:
            parts.append(self._atom("p", after, ()))
        texts[axis] = f"({' | '.join(parts)})"
        return texts

    def _fixed(self, selection: TensorSelection) -> str:
        return f"{self._atom('f', selection.count, ())}={selection.index}"


def _braced_name(
    name: tuple[tuple[str, ...], tuple[int, ...]],
    columns: Sequence[tuple[int, ...]],
    atoms: dict[tuple[int, ...], str],
) -> str:
    pieces, numbers = name
    text = pieces[0]
    for number, column, piece in zip(numbers, columns, pieces[1:]):
        atom = atoms.get(column)
        text += f"{{{atom}}}" if atom else str(number)
        text += piece
    return text


def _dim_text(atoms: Sequence[str]) -> str:
    if not atoms:
        return "1"
    if len(atoms) == 1:
        return atoms[0]
    return f"({' '.join(atoms)})"


def can_be_named(name: str) -> bool:
    """Return whether a row can have the name of a tensor."""
    return bool(name) and not INVALID_CHARS & {*name} and not any(map(str.isspace, name))


def split_axis(alignment: DimAlignment, dim: int, outer: int) -> DimAlignment:
    """Divide an axis of the right side so that the first axes of a dim have `outer` indices.

    >>> split_axis(DimAlignment((12,), ((0,),), ((0,),)), 0, 4)
    DimAlignment(extents=(4, 3), left=((0, 1),), right=((0, 1),))
    """
    extent = 1
    for axis in alignment.right[dim]:
        rest = outer // extent
        if rest == 1:
            return alignment
        size = alignment.extents[axis]
        if size > rest:
            return _divide(alignment, axis, rest)
        extent *= size
    return alignment


def _divide(alignment: DimAlignment, axis: int, outer: int) -> DimAlignment:
    """Divide an axis into two, on both sides."""
    extents = [*alignment.extents, alignment.extents[axis] // outer]
    extents[axis] = outer
    sides: list[tuple[tuple[int, ...], ...]] = []
    for side in (alignment.left, alignment.right):
        dims: list[tuple[int, ...]] = []
        for dim in side:
            position = dim.index(axis) + 1 if axis in dim else 0
            dims.append((*dim[:position], len(extents) - 1, *dim[position:]) if position else dim)
        sides.append(tuple(dims))
    return DimAlignment(tuple(extents), sides[0], sides[1])


def _num_outer(alignment: DimAlignment, dim: int, outer: int) -> int:
    """Return how many axes of a dim have `outer` indices together."""
    extent = 1
    for number, axis in enumerate(alignment.right[dim]):
        if extent == outer:
            return number
        extent *= alignment.extents[axis]
    return len(alignment.right[dim])
