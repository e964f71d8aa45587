"""Relate the tensors of two checkpoints by the digests of their values.

A tensor of one checkpoint, the container, has the values of a tensor of the other one, the member, or of a stack of
members along its first dim. Values are compared as they are stored, and then transposed.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice

from prepcli.core.errors import PrepError
from prepcli.core.observer import Observer
from prepcli.engine.casts import parse_stream_digest
from prepcli.models.parameters import MAX_AXIS_SIZE
from prepcli.planning.map_file import parse_map
from prepcli.planning.map_rows import MapRow, bind_map
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import ITEM_BITS, cast_dtype
from prepcli.restore.digest_checks import num_rows, row_stream, stream_digests
from prepcli.sources.mapped import map_tensors
from prepcli.sources.source import Source, SourceTensor

# A longer first dim is no stack of layers or experts.
MAX_STACK = 1024
# Views in memory (each has about 3 KB), and views in all. A map has as many pairs of tensors at most.
MAX_BATCH = 4096
MAX_VIEWS = 1 << 20
# Shapes with one number of elements that a tensor is compared with. A model has fewer.
MAX_SHAPES = 8
# Names to list for a target with the values of several tensors.
MAX_CANDIDATES = 6
# The names and dims of two tensors fit into a line of a map.
MAX_NAME_CHARS = 700
MAX_DIMS_CHARS = 250
# Names with other characters have no place in a row.
INVALID_CHARS = frozenset("{}:#<>|()")

Shape = tuple[int, ...]
# Dtype, shape and digest of values.
ValueKey = tuple[str, Shape, str]


@dataclass(frozen=True, slots=True)
class Relation:
    """A tensor with the values of another one, or of an index of its first dim.

    Attributes:
        container: Name of the other tensor.
        member_shape: Shape of the tensor.
        dims: Dims of the tensor and of the container, without the first dim of a stack, as text.
        count: Extent of the first dim of a stack, else 0.
        is_target_stacked: Whether the container is in the target. Otherwise the tensor is.
        member: Name of the tensor. Empty until the values are compared.
        index: Its index in the stack.
    """

    container: str
    member_shape: Shape
    dims: tuple[str, str]
    count: int
    is_target_stacked: bool
    member: str = ""
    index: int = 0

    @property
    def names(self) -> tuple[str, str]:
        """Names of the target and of the source."""
        if self.is_target_stacked:
            return self.container, self.member
        return self.member, self.container


class TensorTree:
    """The tensors of a checkpoint that a row can name, and the values of those without a relation."""

    def __init__(
        self, source: Source, memory_nbytes: int, observer: Observer, cast_to: str = ""
    ) -> None:
        """Read all tensors once.

        Args:
            source: The checkpoint.
            memory_nbytes: Memory limit.
            observer: Receives the bytes read.
            cast_to: Dtype of compared float values. "" compares them in their own dtype.
        """
        self.source = source
        self.cast_to = cast_to
        self._memory_nbytes = memory_nbytes
        self._observer = observer
        self.tensors: dict[str, SourceTensor] = {}
        self.keys: dict[str, ValueKey] = {}
        for tensor in source.tensors:
            name = source.names.stored_name(tensor.name)
            is_named = not INVALID_CHARS & {*name} and not any(map(str.isspace, name))
            if is_named and 0 < len(name) <= MAX_NAME_CHARS:
                self.tensors[name] = tensor
        compared = {name: tensor for name, tensor in self.tensors.items() if _is_compared(tensor)}
        digests = self.digests(compared.values(), is_checked=True)
        for (name, tensor), digest in zip(compared.items(), digests):
            self.keys[name] = (cast_dtype(tensor.dtype, cast_to), tensor.shape, digest)

    def digests(self, tensors: Iterable[SourceTensor], *, is_checked: bool = False) -> list[str]:
        """Return the digest of the values of each tensor, read within the memory limit."""
        streams: list[Stream] = []
        for tensor in tensors:
            stream = row_stream(tensor, (0, num_rows(tensor)))
            dtype = cast_dtype(tensor.dtype, self.cast_to)
            streams.append(stream if dtype == tensor.dtype else replace(stream, cast_to=dtype))
        texts = stream_digests(
            self.source,
            streams,
            self._memory_nbytes,
            progress=self._observer.progress(),
            task=f"compare {self.source.display_name}",
            is_checked=is_checked,
        )
        return [parse_stream_digest(text).written for text in texts]


def _is_compared(tensor: SourceTensor) -> bool:
    """Return whether the bytes of a tensor are those of its values. All empty tensors have the same bytes."""
    return ITEM_BITS[tensor.dtype] >= 8 and tensor.nbytes > 0


@dataclass(slots=True)
class Relations:
    """The relations of the tensors of two trees.

    Attributes:
        first: The tree to map.
        target: The tree of the targets.
        items: The relations. A related tensor has all its values in them.
        ambiguous: Target with values that occur several times -> at most MAX_CANDIDATES tensors with its values.
        candidates: All tensors with the values of such targets.
    """

    first: TensorTree
    target: TensorTree
    items: list[Relation] = field(default_factory=list)
    ambiguous: dict[str, list[str]] = field(default_factory=dict)
    candidates: set[str] = field(default_factory=set)
    _num_views: int = 0

    def find(self) -> None:
        """Relate each tensor to the only one with its values, or to the one that has its name too."""
        for name, (dtype, shape, digest) in self.first.keys.items():
            if self.target.keys.get(name) == (dtype, shape, digest):
                key = (dtype, shape, f"{digest} {name}")
                self.first.keys[name] = self.target.keys[name] = key
        for is_stacked in (False, True):
            for is_transposed in (False, True):
                self._relate(self.first, self.target, is_stacked, is_transposed)
                if is_stacked:
                    self._relate(self.target, self.first, is_stacked, is_transposed)

    def _relate(
        self, containers: TensorTree, members: TensorTree, is_stacked: bool, is_transposed: bool
    ) -> None:
        """Relate containers of one tree to members of the other one."""
        is_target_stacked = containers is self.target
        names: dict[ValueKey, list[str]] = defaultdict(list)
        for name, key in members.keys.items():
            # A row can only copy a tensor in several parts.
            if not is_target_stacked or len(members.tensors[name].placement) == 1:
                names[key].append(name)
        complete: list[tuple[Relation, list[ValueKey]]] = []
        claims: Counter[object] = Counter()
        attempts = _attempts(containers, members, is_stacked, is_transposed, is_target_stacked)
        for attempt, keys in self._compare(containers, attempts, is_stacked or is_transposed):
            if all(key in names for key in keys):
                complete.append((attempt, keys))
                claims.update([attempt.container, *keys])
        ambiguous: dict[ValueKey, list[str]] = defaultdict(list)
        for attempt, keys in complete:
            container = attempt.container
            containers.keys.pop(container, None)
            if claims[container] > 1 or any(claims[key] + len(names[key]) > 2 for key in keys):
                for key in keys:
                    ambiguous[key].append(container)
                continue
            for index, key in enumerate(keys):
                (member,) = names[key]
                del members.keys[member]
                self.items.append(replace(attempt, member=member, index=index))
        for key, equal in ambiguous.items():
            for name in names[key]:
                members.keys.pop(name, None)
            sources, targets = equal, names[key]
            if is_target_stacked:
                sources, targets = targets, sources
            self.candidates.update(sources)
            for target in targets:
                listed = [*self.ambiguous.get(target, ()), *sources[:MAX_CANDIDATES]]
                self.ambiguous[target] = list(dict.fromkeys(listed))[:MAX_CANDIDATES]

    def _compare(
        self, tree: TensorTree, attempts: Iterable[Relation], is_read: bool
    ) -> Iterator[tuple[Relation, list[ValueKey]]]:
        """Yield each attempt with the values of its container in the shape of the members."""
        batch: list[tuple[Relation, list[SourceTensor]]] = []
        num_read = self._num_views
        for attempt in attempts:
            self._num_views += max(1, attempt.count)
            if self._num_views > MAX_VIEWS:
                break
            try:
                views = map_tensors(
                    _view_rows(attempt.dims, attempt.count),
                    {"s": tree.tensors[attempt.container]},
                    None,
                )
            except PrepError:
                # It is stored in several parts.
                continue
            if not is_read:
                dtype, _, digest = tree.keys[attempt.container]
                yield attempt, [(dtype, attempt.member_shape, digest)]
                continue
            batch.append((attempt, sorted(views, key=lambda view: int(view.name))))
            if self._num_views - num_read >= MAX_BATCH:
                yield from _read_batch(tree, batch)
                batch = []
                num_read = self._num_views
        yield from _read_batch(tree, batch)


def _read_batch(
    tree: TensorTree, batch: Sequence[tuple[Relation, Sequence[SourceTensor]]]
) -> Iterator[tuple[Relation, list[ValueKey]]]:
    digests = iter(tree.digests(view for _, views in batch for view in views))
    for attempt, views in batch:
        dtype = tree.keys[attempt.container][0]
        yield attempt, [(dtype, attempt.member_shape, next(digests)) for _ in views]


@lru_cache(maxsize=256)
def _view_rows(dims: tuple[str, str], count: int) -> Sequence[MapRow]:
    """Return the row of a map from a container `s` to its members `0`, `1`, ..."""
    row = f"0: {dims[0]} <- s: {dims[1]}"
    if count:
        row = f"{{n}}: {dims[0]} <- s: n {dims[1]}"
    rows, _ = bind_map(parse_map("view", row), {**dim_sizes(dims[1]), "n": count}, {})
    return rows


def dim_sizes(dims: str) -> dict[str, int]:
    """Return the size of each atom in the text of dims, e.g. `d32 (d8 d4)` -> 32, 8 and 4."""
    return {atom: int(size) for atom, size in re.findall(r"(d(\d+)(?:_\d+)?)", dims)}


def _attempts(
    containers: TensorTree,
    members: TensorTree,
    is_stacked: bool,
    is_transposed: bool,
    is_target_stacked: bool,
) -> Iterator[Relation]:
    """Yield the containers of which the other tree has enough members of a fitting shape."""
    shapes: dict[tuple[str, int], Counter[Shape]] = defaultdict(Counter)
    for dtype, shape, _ in members.keys.values():
        shapes[dtype, math.prod(shape)][shape] += 1
    for name, (dtype, shape, _) in containers.keys.items():
        count = 0
        block = shape
        if is_stacked:
            if not shape or shape[0] > MAX_STACK:
                continue
            count = shape[0]
            block = shape[1:]
        fitting = shapes.get((dtype, math.prod(block)), Counter())
        for member_shape, num_members in islice(fitting.items(), MAX_SHAPES):
            dims = row_dims(member_shape, block, is_transposed)
            if dims is not None and num_members >= count:
                yield Relation(name, member_shape, dims, count, is_target_stacked)


@lru_cache(maxsize=1 << 16)
def row_dims(member: Shape, container: Shape, is_transposed: bool) -> tuple[str, str] | None:
    """Return the dims of two tensors with equal or transposed values. None if they have no common axes.

    A dim of one of them may be divided in the other one. The last two dims of the shorter shape are transposed.

    >>> row_dims((32, 6), (6, 8, 4), True)
    ('(d8 d4) d6', 'd6 d8 d4')
    """
    short, long = sorted((member, container), key=len)
    if max(long, default=1) > MAX_AXIS_SIZE:
        return None
    if not is_transposed:
        merged = _merged_dims(long, short)
    elif len(short) < 2 or 1 in short[-2:]:
        # The values have the same order as the transposed ones.
        return None
    else:
        merged = _merged_dims(long, (*short[:-2], short[-1], short[-2]))
        if merged is not None:
            merged[-2:] = merged[:-3:-1]
    if merged is None:
        return None
    atoms: list[str] = []
    for axis, extent in enumerate(long):
        repetition = long[:axis].count(extent)
        atoms.append(f"d{extent}_{repetition + 1}" if repetition else f"d{extent}")
    texts: list[str] = []
    for dims in (merged, [[axis] for axis in range(len(long))]):
        words: list[str] = []
        for axes in dims:
            names = [atoms[axis] for axis in axes if long[axis] > 1]
            words.append(f"({' '.join(names)})" if len(names) > 1 else "".join(names) or "1")
        texts.append(" ".join(words))
    if max(map(len, texts)) > MAX_DIMS_CHARS:
        return None
    if len(member) > len(container):
        texts.reverse()
    return texts[0], texts[1]


def _merged_dims(extents: Shape, merged: Shape) -> list[list[int]] | None:
    """Return the dims that form each merged dim, e.g. (8, 4, 6) and (32, 6) -> [[0, 1], [2]]."""
    groups: list[list[int]] = []
    axis = 0
    for extent in merged:
        start = axis
        while axis < len(extents) and math.prod(extents[start:axis]) < extent:
            axis += 1
        if math.prod(extents[start:axis]) != extent:
            return None
        groups.append([*range(start, axis)])
    return groups if math.prod(extents[axis:]) == 1 else None
