"""Find which tensors of two trees have the same values: whole tensors, slices of stacks, and parts of fused tensors."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prepcli.engine.files import RunReader
from prepcli.inspection.tensor_selection import TensorSelection, select_tensor
from prepcli.inspection.value_sums import Sums, ValueSums, can_sum, sum_values
from prepcli.models.verbatim import split_numbers
from prepcli.planning.tensors import cast_dtype
from prepcli.sources.source import SourceTensor

# Stacked axes are shorter: layers, experts, and the two halves of a fused tensor.
MAX_SLICES = 512
# Sums to keep for slices, of both trees. Each has 8 bytes.
MAX_KEPT_SUMS = 16 << 20
# Parts in the middle of a dim: e.g. three of queries, keys and values.
MAX_INTERLEAVED = 8
# Pairs of tensors that are searched for parts. Each search reads both tensors.
MAX_PART_SEARCHES = 2_000

# Names with equal values to list for each tensor.
MAX_CANDIDATES = 6

# Dtype, number of elements, sum.
ValueKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Relation:
    """A tensor with the values of another tensor, or of a selection of it.

    Attributes:
        member: Name of the tensor.
        container: Name of the other tensor.
        selection: The selection. None for the whole tensor, or the whole slice.
        is_reversed: Whether the member is in the first tree. Otherwise it is in the second one.
        stack: The slice of the container that the selection is of. None if it is of the whole container.
    """

    member: str
    container: str
    selection: TensorSelection | None = None
    is_reversed: bool = False
    stack: TensorSelection | None = None


@dataclass(slots=True)
class TensorTree:
    """The tensors of a checkpoint, and the sums of their values.

    Attributes:
        tensors: The tensors, by name.
        files: Reader of their files.
        cast_to: Dtype of float values in comparisons. "" compares them in their own dtype.
        sums: Sums of each readable tensor. Long dims have none.
    """

    tensors: Mapping[str, SourceTensor]
    files: RunReader
    cast_to: str = ""
    sums: dict[str, ValueSums] = field(default_factory=dict)

    def read_sums(self, on_read: Callable[[int], object]) -> None:
        """Read all tensors once. `on_read` receives the bytes of each."""
        kept = 0
        for name, tensor in self.tensors.items():
            if not can_sum(tensor):
                continue
            sums = self.sums_of(tensor)
            on_read(tensor.nbytes)
            axes: list[Sums] = []
            for axis in sums.axes:
                keeps_axis = 1 < len(axis) <= MAX_SLICES and kept < MAX_KEPT_SUMS
                axes.append(axis if keeps_axis else axis[:0])
                kept += len(axes[-1])
            self.sums[name] = ValueSums(sums.total, tuple(axes))

    def key(self, name: str) -> ValueKey:
        """Return what tensors with the same values have in common."""
        tensor = self.tensors[name]
        return self.compared_dtype(tensor), math.prod(tensor.shape), self.sums[name].total

    def compared_dtype(self, tensor: SourceTensor) -> str:
        """Return the dtype of the compared values of a tensor."""
        return cast_dtype(tensor.dtype, self.cast_to)

    def sums_of(self, tensor: SourceTensor) -> ValueSums:
        """Read the sums along all dims of a tensor, or of a part of one."""
        return sum_values(self.files, tensor, self.compared_dtype(tensor))


@dataclass(slots=True)
class Relations:
    """The relations of two trees.

    Attributes:
        items: The relations.
        ambiguous: Names of the first tree with equal values, by name of the second tree. The first one has the
            relation. At most MAX_CANDIDATES are listed.
    """

    items: list[Relation] = field(default_factory=list)
    ambiguous: dict[str, list[str]] = field(default_factory=dict)


def find_relations(first: TensorTree, second: TensorTree) -> Relations:
    """Relate the tensors of two trees by their values, and equal values by their names.

    Args:
        first: The tree to map.
        second: The tree of the targets.
    """
    relations = Relations()
    _relate_whole_tensors(first, second, relations)
    # A slice of a stacked tensor is found by its sum. Only what is left is searched for parts of fused tensors.
    for find_members in (_slices, _parts):
        for members, containers, is_reversed in ((second, first, False), (first, second, True)):
            member_names = _unrelated(members, relations, is_second=not is_reversed)
            container_names = _unrelated(containers, relations, is_second=is_reversed)
            relations.items += find_members(
                members, containers, member_names, container_names, is_reversed
            )
    return relations


def _unrelated(tree: TensorTree, relations: Relations, *, is_second: bool) -> list[str]:
    """Return the names of the tensors of a tree without a relation."""
    related: set[str] = set()
    for relation in relations.items:
        is_member_side = relation.is_reversed != is_second
        related.add(relation.member if is_member_side else relation.container)
    return [name for name in tree.sums if name not in related]


def _relate_whole_tensors(first: TensorTree, second: TensorTree, relations: Relations) -> None:
    """Relate tensors with equal sums of all values. Each tensor is used once."""
    names_by_key: dict[ValueKey, list[str]] = defaultdict(list)
    for name in first.sums:
        names_by_key[first.key(name)].append(name)
    targets_by_key: dict[ValueKey, list[str]] = defaultdict(list)
    for name in second.sums:
        targets_by_key[second.key(name)].append(name)
    for key, targets in targets_by_key.items():
        names = names_by_key.get(key, [])
        for target, name in _pair_by_name(targets, names):
            relations.items.append(Relation(target, name))
            if len(names) > 1 or len(targets) > 1:
                relations.ambiguous[target] = _candidates_of(name, names)


def _candidates_of(name: str, names: Sequence[str]) -> list[str]:
    """Return a name, and the first other ones. A model may have 10^5 tensors of zeros."""
    return [name, *(other for other in names[:MAX_CANDIDATES] if other != name)][:MAX_CANDIDATES]


def _pair_by_name(targets: Sequence[str], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield pairs of tensors with equal values: first those with equal numbers, by the words that they share."""
    if len(targets) == len(names) == 1:
        yield targets[0], names[0]
        return
    remaining: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in sorted(names):
        remaining[split_numbers(name)[1]].append(name)
    unpaired: list[str] = []
    for target in sorted(targets):
        candidates = remaining[split_numbers(target)[1]]
        if not candidates:
            unpaired.append(target)
            continue
        best = max(candidates, key=lambda name: name_similarity(target, name))
        candidates.remove(best)
        yield target, best
    rest = [name for candidates in remaining.values() for name in candidates]
    yield from zip(unpaired, rest)


def name_similarity(a: str, b: str) -> float:
    """Return the share of common words of two names.

    >>> name_similarity("mlp.0.up_proj", "h.0.mlp.up")
    0.5
    """
    words = [{*re.findall(r"[A-Za-z]+", name.lower())} for name in (a, b)]
    union = words[0] | words[1]
    if not union:
        return 0.0
    return len(words[0] & words[1]) / len(union)


def _slices(
    member_tree: TensorTree,
    container_tree: TensorTree,
    members: Sequence[str],
    containers: Sequence[str],
    is_reversed: bool,
) -> Iterator[Relation]:
    """Yield the tensors with the values of one index of another tensor's dim."""
    slices: dict[ValueKey, list[tuple[str, int, int]]] = defaultdict(list)
    for name in containers:
        tensor = container_tree.tensors[name]
        size = math.prod(tensor.shape)
        for axis, sums in enumerate(container_tree.sums[name].axes):
            for index, total in enumerate(sums.tolist()):
                key = (container_tree.compared_dtype(tensor), size // len(sums), total)
                slices[key].append((name, axis, index))
    used: set[tuple[str, int, int]] = set()
    for name in members:
        numbers = split_numbers(name)[1]
        best: tuple[str, int, int] | None = None
        best_score = -1.0
        for place in slices.get(member_tree.key(name), ()):
            # Many vectors have an element with the value of a scalar. Only a stack of scalars has it at this index.
            is_element = len(container_tree.tensors[place[0]].shape) == 1
            if is_element and place[2] not in numbers:
                continue
            score = name_similarity(name, place[0]) + (place[2] in numbers)
            if place not in used and score > best_score:
                best = place
                best_score = score
        if best is None:
            continue
        used.add(best)
        container, axis, index = best
        extent = container_tree.tensors[container].shape[axis]
        yield Relation(
            name, container, None, is_reversed, TensorSelection.of_index(axis, index, extent)
        )


def _parts(
    member_tree: TensorTree,
    container_tree: TensorTree,
    members: Sequence[str],
    containers: Sequence[str],
    is_reversed: bool,
) -> Iterator[Relation]:
    """Yield the tensors with the values of a part of another tensor's dim.

    One tensor of each pattern is searched. The others of the pattern are in the parts of the tensors with their
    numbers, which is checked later.
    """
    containers_by_numbers: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in containers:
        containers_by_numbers[split_numbers(name)[1]].append(name)
    members_by_pattern: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in members:
        members_by_pattern[split_numbers(name)[0]].append(name)
    searches = 0
    for names in members_by_pattern.values():
        for container, stack in _candidates(container_tree, containers_by_numbers, names):
            searches += 1
            if searches > MAX_PART_SEARCHES:
                return
            block: SourceTensor | None = container_tree.tensors[container]
            if stack is not None:
                block = select_tensor(container_tree.tensors[container], stack)
            if block is None:
                continue
            selection = _find_part(member_tree, container_tree, names[0], block)
            if selection is None:
                continue
            yield from _siblings(container_tree, names, container, stack, selection, is_reversed)
            break


def _candidates(
    tree: TensorTree, names_by_numbers: Mapping[tuple[int, ...], list[str]], members: Sequence[str]
) -> Iterator[tuple[str, TensorSelection | None]]:
    """Yield the tensors that may contain the first member: those with its numbers, and slices of stacks."""
    all_numbers = [split_numbers(name)[1] for name in members]
    for name in names_by_numbers.get(all_numbers[0], ()):
        yield name, None
    if {*all_numbers} != {(index,) for index in range(len(members))}:
        return
    for name in names_by_numbers.get((), ()):
        for axis, extent in enumerate(tree.tensors[name].shape):
            if extent == len(members):
                yield name, TensorSelection.of_index(axis, all_numbers[0][0], extent)


def _siblings(
    tree: TensorTree,
    members: Sequence[str],
    container: str,
    stack: TensorSelection | None,
    selection: TensorSelection,
    is_reversed: bool,
) -> Iterator[Relation]:
    """Yield the relations of all members of a pattern, given the one of the first member."""
    pattern = split_numbers(container)[0]
    for name in members:
        numbers = split_numbers(name)[1]
        if stack is not None:
            own_stack = TensorSelection.of_index(stack.axis, numbers[0], stack.extent)
            yield Relation(name, container, selection, is_reversed, own_stack)
            continue
        sibling = _with_numbers(pattern, numbers)
        if sibling in tree.tensors:
            yield Relation(name, sibling, selection, is_reversed)


def _with_numbers(pieces: Sequence[str], numbers: Sequence[int]) -> str:
    """Return a name with other numbers, e.g. (`h.`, `.w`) and (3,) -> `h.3.w`."""
    name = pieces[0]
    for number, piece in zip(numbers, pieces[1:]):
        name += f"{number}{piece}"
    return name


def _find_part(
    member_tree: TensorTree, container_tree: TensorTree, member: str, large: SourceTensor
) -> TensorSelection | None:
    """Return the selection of a larger tensor with the values of a member, if there is one."""
    small = member_tree.tensors[member]
    size = math.prod(small.shape)
    large_size = math.prod(large.shape)
    if member_tree.compared_dtype(small) != container_tree.compared_dtype(large):
        return None
    if size >= large_size:
        return None
    total = np.uint64(member_tree.sums[member].total)
    for axis, sums in enumerate(container_tree.sums_of(large).axes):
        length, rest = divmod(size * len(sums), large_size)
        if rest or not length:
            continue
        selection = _find_run(sums, axis, length, total) or _find_stride(sums, axis, length, total)
        if selection is not None:
            return selection
    return None


def _find_run(sums: Sums, axis: int, length: int, total: np.uint64) -> TensorSelection | None:
    """Return the run of `length` indices with this sum."""
    extent = len(sums)
    ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sums, dtype=np.uint64)])
    starts = np.flatnonzero(ends[length:] - ends[:-length] == total)
    if not len(starts):
        return None
    start = int(starts[0])
    if start % length == 0 and extent % length == 0:
        return TensorSelection(axis, 1, extent // length, start // length, length, start, extent)
    return TensorSelection(axis, 1, 0, 0, length, start, extent)


def _find_stride(sums: Sums, axis: int, length: int, total: np.uint64) -> TensorSelection | None:
    """Return the index of a dim `(outer count inner)` with this sum, e.g. one of queries, keys and values per head."""
    extent = len(sums)
    count, rest = divmod(extent, length)
    if rest or count > MAX_INTERLEAVED:
        return None
    for inner in range(1, length):
        if length % inner:
            continue
        parts = sums.reshape(length // inner, count, inner).sum(axis=(0, 2), dtype=np.uint64)
        matches = np.flatnonzero(parts == total)
        if len(matches):
            index = int(matches[0])
            return TensorSelection(axis, length // inner, count, index, inner, 0, extent)
    return None
