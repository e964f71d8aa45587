"""Write the relations of two checkpoints as rows of a map, one for all layers and experts if their numbers allow it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prepcli.core.errors import PrepError
from prepcli.inspection.tensor_relations import Relation, dim_sizes
from prepcli.models.verbatim import split_numbers
from prepcli.planning.map_file import compute_size, parse_map
from prepcli.planning.map_rows import bind_map

# Numbers at one place in the names of several tensors.
Column = tuple[int, ...]


@dataclass(slots=True)
class RowWriter:
    """The rows of a map.

    Attributes:
        sizes: Size of each atom, or the numbers of an index list, as text.
    """

    sizes: dict[str, str] = field(default_factory=dict)
    _index_lists: dict[str, str] = field(default_factory=dict)

    def rows(self, relations: Sequence[Relation]) -> Iterator[str]:
        """Yield a row for the tensors whose names differ in their numbers only, or a row for each of them."""
        groups: dict[object, list[Relation]] = defaultdict(list)
        for relation in relations:
            patterns = (split_numbers(relation.member)[0], split_numbers(relation.container)[0])
            groups[patterns, replace(relation, member="", container="", index=0)].append(relation)
        for group in groups.values():
            row = self._row(group)
            if row is not None:
                yield row
            else:
                yield from filter(None, (self._row([relation]) for relation in group))

    def _row(self, group: Sequence[Relation]) -> str | None:
        """Return the row of relations. None if the row would relate other tensors."""
        first = group[0]
        members = [relation.member for relation in group]
        containers = [relation.container for relation in group]
        indices = tuple(relation.index for relation in group)
        sizes = {atom: str(size) for atom, size in dim_sizes(first.dims[1]).items()}
        atoms = self._number_atoms([*_columns(members), *_columns(containers)], sizes)
        index = ""
        if first.count == 1:
            index = "1"
        elif len({*indices}) > 1:
            index = next((atoms[column] for column in atoms if _ranks(column) == indices), "")
            index = index.partition("@")[0]
        elif first.count:
            index = f"f{first.count}={first.index}"
            sizes[f"f{first.count}"] = str(first.count)
        sides: list[str] = []
        for names, dims in ((members, first.dims[0]), (containers, f"{index} {first.dims[1]}")):
            sides.append(f"{_numbered_name(names, atoms)}: {dims.strip()}".strip())
        if first.is_target_stacked:
            sides.reverse()
        text = " <- ".join(sides)
        if len(group) > 1 and not _relates(text, sizes, index, group):
            return None
        self.sizes |= sizes
        return text

    def _number_atoms(self, columns: Iterable[Column], sizes: dict[str, str]) -> dict[Column, str]:
        """Return the atom of each column of different numbers, with its index list if they are not 0, 1, 2, ..."""
        atoms: dict[Column, str] = {}
        for column in dict.fromkeys(columns):
            numbers = sorted({*column})
            if len(numbers) == 1:
                continue
            atom = f"n{len(numbers)}"
            repetition = sum(name.partition("_")[0] == atom for name in sizes)
            if repetition:
                atom += f"_{repetition + 1}"
            sizes[atom] = str(len(numbers))
            atoms[column] = atom
            if numbers != [*range(len(numbers))]:
                text = ",".join(map(str, numbers))
                name = self._index_lists.setdefault(text, f"numbers{len(self._index_lists) + 1}")
                sizes[name] = text
                atoms[column] = f"{atom}@{name}"
        return atoms


def _columns(names: Sequence[str]) -> Iterator[Column]:
    return zip(*(split_numbers(name)[1] for name in names))


def _ranks(column: Column) -> tuple[int, ...]:
    """Return the position of each number among the different ones, e.g. (4, 7, 4) -> (0, 1, 0)."""
    ranks = {number: rank for rank, number in enumerate(sorted({*column}))}
    return tuple(ranks[number] for number in column)


def _numbered_name(names: Sequence[str], atoms: Mapping[Column, str]) -> str:
    """Return the name of the tensors in a row, with an atom for each number that differs."""
    if len(names) == 1:
        return names[0]
    pieces, _ = split_numbers(names[0])
    text = pieces[0]
    for column, piece in zip(_columns(names), pieces[1:]):
        text += f"{{{atoms[column]}}}" if column in atoms else str(column[0])
        text += piece
    return text


def _relates(text: str, sizes: Mapping[str, str], index: str, group: Sequence[Relation]) -> bool:
    """Return whether a row relates the tensors of a group, and no other ones."""
    lines = [f"size {atom} = {size}" for atom, size in sizes.items()]
    try:
        parsed = parse_map("suggestion", "\n".join([*lines, text]))
        values = {atom: compute_size(size, {}) for atom, size in sizes.items()}
    except (PrepError, ValueError):
        # An atom has two places on one side, or a line is too long.
        return False
    rows, _ = bind_map(parsed, values, {})
    if not rows or rows[0].num_pairs != len(group):
        return False
    related: set[tuple[tuple[str, str], int]] = set()
    for target, source, atoms in rows[0].pairs():
        related.add(((target, source), atoms.get(index, group[0].index)))
    # An atom with fewer indices than the stack would give it another shape.
    has_all_indices = len({relation.index for relation in group}) in (1, max(1, group[0].count))
    return has_all_indices and related == {(relation.names, relation.index) for relation in group}
