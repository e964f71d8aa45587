"""`prep map suggest`: propose the rows of a map between two checkpoints, from the values of their tensors."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Unpack

from prepcli.commands.operations.checkpoint_options import (
    CommonOptions,
    check_recorded_names,
    check_result_path,
    common_options,
    open_checkpoint,
    write_result,
)
from prepcli.commands.operations.inspection_options import SuggestMapOptions
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.results import MapSuggestion
from prepcli.core.errors import PrepError, UsageError, usage_error
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.engine.casts import value_operations
from prepcli.models.parameters import MAX_AXIS_SIZE
from prepcli.models.registry import FAMILIES
from prepcli.models.verbatim import dim_atoms, split_numbers
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import FLOAT_DTYPES, ITEM_BITS, cast_dtype
from prepcli.restore.digest_checks import num_rows, row_stream, stream_digests
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.mapped import map_tensors
from prepcli.sources.maps import (
    MAX_DROPS,
    MAX_LINE_CHARS,
    MAX_LINES,
    MAX_NBYTES,
    MapRow,
    bind_map,
    parse_map,
)
from prepcli.sources.source import Source, SourceTensor
from prepcli.stores.addresses import check_local_path

# A longer first dim is no stack of layers or experts.
MAX_STACK = 1024
# Views in memory (each has about 3 KB), and views in all. Large mixtures of experts have 10^5.
MAX_BATCH = 4096
MAX_VIEWS = 1 << 18
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
# Numbers at one place in the names of several tensors.
Column = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A tensor with the values of another one, or of an index of its first dim.

    Attributes:
        container: Name of the other tensor.
        member_shape: Shape of the tensor.
        dims: Dims of the tensor and of the container, without the first dim of a stack, as text.
        count: Extent of the first dim of a stack, else 0.
        member: Name of the tensor. Empty until the values are compared.
        index: Its index in the stack.
        is_target_stacked: Whether the container is in the target. Otherwise the tensor is.
    """

    container: str
    member_shape: Shape
    dims: tuple[str, str]
    count: int
    member: str = ""
    index: int = 0
    is_target_stacked: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """Names of the target and of the source."""
        if self.is_target_stacked:
            return self.container, self.member
        return self.member, self.container


class TensorTree:
    """The tensors of a checkpoint with a name for a row, and the values of the unrelated ones."""

    def __init__(
        self, source: Source, memory_nbytes: int, observer: Observer, cast_to: str = ""
    ) -> None:
        """Read all tensors once, within the memory limit. With `cast_to`, float values are compared in this dtype."""
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
        compared: dict[str, SourceTensor] = {}
        for name, tensor in self.tensors.items():
            # The bytes of smaller elements are not those of values. All empty tensors have the same bytes.
            if ITEM_BITS[tensor.dtype] >= 8 and tensor.nbytes > 0:
                compared[name] = tensor
        digests = self.digests(compared.values(), is_checked=True)
        for (name, tensor), digest in zip(compared.items(), digests):
            self.keys[name] = (cast_dtype(tensor.dtype, cast_to), tensor.shape, digest)

    def digests(
        self, tensors: Iterable[SourceTensor], *, is_checked: bool = False
    ) -> Iterator[str]:
        """Yield the digest of the values of each tensor, read within the memory limit."""
        remaining = iter(tensors)
        while batch := [*islice(remaining, MAX_BATCH)]:
            streams: list[Stream] = []
            for tensor in batch:
                stream = row_stream(tensor, (0, num_rows(tensor)))
                dtype = cast_dtype(tensor.dtype, self.cast_to)
                operations = value_operations(tensor.dtype, dtype)
                streams.append(replace(stream, operations=operations))
            digests = stream_digests(
                self.source,
                streams,
                self._memory_nbytes,
                progress=self._observer.progress(),
                task=f"compare {self.source.display_name}",
                is_checked=is_checked,
            )
            yield from (digest.written for digest in digests)


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
        """Relate each tensor to the only one with its values, or to the one with its name too."""
        for name, (dtype, shape, digest) in self.first.keys.items():
            if self.target.keys.get(name) == (dtype, shape, digest):
                key = (dtype, shape, f"{digest} {name}")
                self.first.keys[name] = self.target.keys[name] = key
        for is_stacked in (False, True):
            for is_transposed in (False, True):
                kinds = {"is_stacked": is_stacked, "is_transposed": is_transposed}
                self._relate(self.first, self.target, **kinds)
                if is_stacked:
                    self._relate(self.target, self.first, **kinds)

    def _relate(
        self, containers: TensorTree, members: TensorTree, *, is_stacked: bool, is_transposed: bool
    ) -> None:
        """Relate containers of one tree to members of the other one."""
        is_target_stacked = containers is self.target
        names: dict[ValueKey, list[str]] = defaultdict(list)
        for name, key in members.keys.items():
            # A row can only copy a tensor in several parts.
            if not is_target_stacked or len(members.tensors[name].placement) == 1:
                names[key].append(name)
        found = self._attempts(containers, members, is_stacked, is_transposed)
        attempts: list[Relation] = []
        if is_stacked or is_transposed:
            digests = iter([*containers.digests(_take_views(found, attempts))])
        else:
            attempts += [attempt for attempt, _ in found]
            digests = iter([containers.keys[attempt.container][2] for attempt in attempts])
        complete: list[tuple[Relation, list[ValueKey]]] = []
        claims: Counter[object] = Counter()
        for attempt in attempts:
            dtype = containers.keys[attempt.container][0]
            values = islice(digests, max(1, attempt.count))
            keys = [(dtype, attempt.member_shape, digest) for digest in values]
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
                relation = replace(attempt, member=member, index=index)
                self.items.append(replace(relation, is_target_stacked=is_target_stacked))
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

    def _attempts(
        self, tree: TensorTree, members: TensorTree, is_stacked: bool, is_transposed: bool
    ) -> Iterator[tuple[Relation, Sequence[SourceTensor]]]:
        """Yield each container with its views in a shape of which the other tree has enough members."""
        shapes: dict[tuple[str, int], Counter[Shape]] = defaultdict(Counter)
        for dtype, shape, _ in members.keys.values():
            shapes[dtype, math.prod(shape)][shape] += 1
        for name, (dtype, shape, _) in tree.keys.items():
            if is_stacked and (not shape or shape[0] > MAX_STACK):
                continue
            count = shape[0] if is_stacked else 0
            block = shape[1:] if is_stacked else shape
            fitting = shapes.get((dtype, math.prod(block)), Counter())
            for member_shape, num_members in islice(fitting.items(), MAX_SHAPES):
                dims = row_dims(member_shape, block, is_transposed=is_transposed)
                if dims is None or num_members < count:
                    continue
                self._num_views += max(1, count)
                if self._num_views > MAX_VIEWS:
                    return
                try:
                    views = map_tensors(_view_rows(dims, count), {"s": tree.tensors[name]}, None)
                except PrepError:
                    # It is stored in several parts.
                    continue
                ordered = sorted(views, key=lambda view: int(view.name))
                yield Relation(name, member_shape, dims, count), ordered


def _take_views(
    found: Iterable[tuple[Relation, Sequence[SourceTensor]]], attempts: list[Relation]
) -> Iterator[SourceTensor]:
    """Yield the views of each attempt, and add the attempt to the list. Few views are in memory at a time."""
    for attempt, views in found:
        attempts.append(attempt)
        yield from views


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


@lru_cache(maxsize=1 << 16)
def row_dims(member: Shape, container: Shape, *, is_transposed: bool) -> tuple[str, str] | None:
    """Return the dims of two tensors with equal or transposed values. None if they have no common axes.

    A dim of one of them may be divided in the other one. The last two dims of the shorter shape are transposed.

    >>> row_dims((32, 6), (6, 8, 4), is_transposed=True)
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
    atoms = dim_atoms(long)
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
            if row := self._row(group):
                yield row
            else:
                yield from (self._row([relation]) for relation in group)

    def _row(self, group: Sequence[Relation]) -> str:
        """Return the row of relations, or an empty text if a row would relate other tensors."""
        first = group[0]
        sizes = {atom: str(size) for atom, size in dim_sizes(first.dims[1]).items()}
        member_columns = _columns([relation.member for relation in group])
        container_columns = _columns([relation.container for relation in group])
        atoms = self._number_atoms([*member_columns, *container_columns], sizes)
        # The numbers that differ on both sides, with those of a dim
        stacked = [column for column in member_columns if column in atoms]
        others = [column for column in container_columns if column in atoms]
        indices = tuple(relation.index for relation in group)
        index = ""
        if first.count == 1:
            index = "1"
        elif len({*indices}) > 1:
            for column in stacked:
                # The position of each number among the different ones, e.g. (4, 7, 4) -> (0, 1, 0)
                numbers = sorted({*column})
                if not index and tuple(map(numbers.index, column)) == indices:
                    index = atoms[column].partition("@")[0]
                    others.append(column)
        elif first.count:
            index = f"f{first.count}={first.index}"
            sizes[f"f{first.count}"] = str(first.count)
        member = f"{_numbered_name(first.member, member_columns, atoms)}: {first.dims[0]}"
        dims = f"{index} {first.dims[1]}".strip()
        container = f"{_numbered_name(first.container, container_columns, atoms)}: {dims}"
        sides = [member.strip(), container.strip()]
        if first.is_target_stacked:
            sides.reverse()
        text = " <- ".join(sides)
        # A row relates all combinations of its numbers. Each of them is one relation of the group, and no atom has two
        # places on a side. An atom with fewer indices than the stack would give it another shape.
        is_exact = (
            bool(index) == bool(first.count)
            and len({*stacked}) == len(stacked)
            and sorted(stacked) == sorted(others)
            and math.prod(len({*column}) for column in stacked) == len(group)
            and len({*indices}) in (1, first.count)
        )
        lines = [text, *(f"size {atom} = {size}" for atom, size in sizes.items())]
        if not is_exact or max(map(len, lines)) > MAX_LINE_CHARS:
            return ""
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


def _columns(names: Sequence[str]) -> list[Column]:
    return [*zip(*(split_numbers(name)[1] for name in names))]


def _numbered_name(name: str, columns: Sequence[Column], atoms: Mapping[Column, str]) -> str:
    """Return the name of the tensors in a row, with an atom for each number that differs."""
    text, *pieces = split_numbers(name)[0]
    for column, piece in zip(columns, pieces):
        number = f"{{{atoms[column]}}}" if column in atoms else str(column[0])
        text += number + piece
    return text


MAP_SUFFIX = ".map"
# Comments of one kind in the file. A map has as many `drop` lines at most.
MAX_COMMENTS = MAX_DROPS
# The other lines are sizes and comments.
MAX_ROWS = MAX_LINES - 4 * MAX_COMMENTS


@public
def suggest_map(
    checkpoint: PathLike,
    target: PathLike,
    out: PathLike | None = None,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[SuggestMapOptions],
) -> MapSuggestion:
    """Propose the rows of a map from one checkpoint to another one with the same values.

    Tensors are compared by the digests of their values: whole, and stacked along the first dim, each also transposed.
    If all float tensors of the target have one dtype, values are cast to it first. Tensors with equal values have
    rows only if their names are equal too. Parts of fused tensors have no rows.

    Args:
        checkpoint: The checkpoint to map: folder, alias, hub id, or `gs://`/`s3://` URL.
        target: A checkpoint with the names and shapes to map to.
        out: The map. Default: the checkpoint's name and `.map`, in the working directory.
        progress: Receives the bytes read. Default: none. See `Progress`.
        **options: See `SuggestMapOptions`.

    Returns:
        The rows, and the tensors without one. True in a condition if no tensor is left.

    Raises:
        UsageError: An argument is invalid.
        OutputExistsError: The map exists with other content.
        PrepError: A checkpoint cannot be read, or no tensor of one has the values of the other one.
    """
    observer = observer_of(progress)
    check_local_path(None if out is None else Path(out))
    common = replace(common_options(checkpoint, None, options), quantized="stored")
    located, source = _open(common, observer)
    if not source.family.is_verbatim:
        why = f"its tensors already have the names of family {source.family.name}"
        hint = "name the checkpoint of the other trainer first"
        raise usage_error(f"{source.display_name} needs no map", why, hint)
    target_common = replace(common, checkpoint=str(target), revision=None, config=None)
    _, target_source = _open(target_common, observer)
    check_recorded_names([source.display_name, target_source.display_name])
    path = Path(out) if out is not None else Path(f"{Path(located.model_name).name}{MAP_SUFFIX}")
    check_result_path(path)
    # If all float tensors have one dtype, the values are compared in it.
    dtypes = {tensor.dtype for tensor in target_source.tensors if tensor.dtype in FLOAT_DTYPES}
    cast_to = dtypes.pop() if len(dtypes) == 1 else ""
    first = TensorTree(source, common.memory_nbytes, observer, cast_to=cast_to)
    relations = Relations(first, TensorTree(target_source, common.memory_nbytes, observer))
    relations.find()
    if not relations.items and not relations.ambiguous:
        what = f"no tensor of {source.display_name} has the values of {target_source.display_name}"
        raise PrepError(
            what, "tensors are compared by their values", "name two copies of one model"
        )
    writer = RowWriter()
    targets = {relation.names[0] for relation in relations.items}
    sources = {relation.names[1] for relation in relations.items}
    is_cast = any(cast_dtype(each.dtype, cast_to) != each.dtype for each in first.tensors.values())
    suggestion = MapSuggestion(
        path=path,
        rows=tuple(sorted(writer.rows(relations.items))),
        targets=len(targets),
        ambiguous={name: tuple(names) for name, names in sorted(relations.ambiguous.items())},
        unmatched=tuple(sorted(relations.target.tensors.keys() - targets)),
        unused=tuple(sorted(first.tensors.keys() - sources)),
        cast_to=cast_to if is_cast else "",
    )
    data = _map_text(suggestion, writer.sizes, relations).encode()
    if len(suggestion.rows) > MAX_ROWS or len(data) > MAX_NBYTES:
        raise PrepError(
            f"the map of {source.display_name} needs {len(suggestion.rows):,} rows",
            f"at most {MAX_ROWS:,} rows and {MAX_NBYTES >> 20} MiB are supported",
            "number the tensors of all layers alike in both checkpoints, e.g. `layers.7.w`",
        )
    write_result(path, data, options["overwrite"])
    return suggestion


def _open(common: CommonOptions, observer: Observer) -> tuple[LocatedCheckpoint, Source]:
    """Open a checkpoint with the names in its files."""
    try:
        return open_checkpoint(replace(common, verbatim=True), observer)
    except UsageError:
        # A converted checkpoint has no other names than those of its family. Other errors occur again.
        return open_checkpoint(replace(common, verbatim=None), observer)


def _map_text(suggestion: MapSuggestion, sizes: Mapping[str, str], relations: Relations) -> str:
    """Return the content of the map: sizes, rows, and a comment for each tensor without a row."""
    source = relations.first.source
    target = relations.target.source
    lines = [f"# From {source.display_name} to {target.display_name}."]
    if suggestion.cast_to:
        lines.append(f"# Values are equal after a cast: --dtype {suggestion.cast_to}.")
    family = target.config.get("model_type")
    has_names_of_family = bool(target.tensor_file_names) or not target.family.is_verbatim
    # A map with a family needs the config of the mapped checkpoint.
    if isinstance(family, str) and family in FAMILIES and source.config and has_names_of_family:
        lines.append(f"family {family}")
    lines += [f"size {atom} = {sizes[atom]}" for atom in sorted(sizes)]
    lines += ["", *suggestion.rows]
    ambiguous: list[str] = []
    for name, candidates in suggestion.ambiguous.items():
        why = f"its values occur several times, also in {', '.join(candidates)}"
        ambiguous.append(f"# {name} has no row: {why}")
    lines += _shorten(ambiguous)
    unmatched = [name for name in suggestion.unmatched if name not in suggestion.ambiguous]
    lines += _shorten([f"# no tensor has the values of {name}" for name in unmatched])
    unused = [name for name in suggestion.unused if name not in relations.candidates]
    lines += _shorten([f"# drop {name}" for name in unused])
    return "\n".join(lines) + "\n"


def _shorten(comments: Sequence[str]) -> list[str]:
    """Return the first comments, and the number of the others."""
    if len(comments) <= MAX_COMMENTS:
        return [*comments]
    return [*comments[:MAX_COMMENTS], f"# {len(comments) - MAX_COMMENTS:,} more"]
