"""An Orbax checkpoint as an output: leaves, chunks for a mesh, and where each tensor goes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.errors import PrepError
from prepcli.planning.accounting import Account
from prepcli.planning.grids import Grid
from prepcli.planning.moves import Region
from prepcli.planning.placing import Layout, Want, place
from prepcli.planning.plan import Flat, Leaf, OutFile, Stream
from prepcli.planning.slots import PARAMS, alone, parted
from prepcli.planning.tensors import FLOATS, ITEM_BITS, itemsize
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.streams import Cut, Target, rows_of, streams
from trainer.models.axis_map import AxisMap, Row, bind
from trainer.models.host_reads import amplification, reads_per_host
from trainer.models.mesh import Mesh, Rules, Spec, chunk_shape, spec


@dataclass(frozen=True, slots=True)
class Item:
    """The leaves, the data files, the regions of every tensor and its dtype there, and how a mesh splits each leaf,
    where there is one."""

    leaves: tuple[Leaf, ...]
    files: tuple[OutFile, ...]
    regions: Mapping[str, tuple[Region, ...]]
    specs: Mapping[str, Spec]
    dtypes: Mapping[str, str]

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """A line for each dim that is not split as its rule would have it first."""
        return tuple(dict.fromkeys(str(fallback) for found in self.specs.values() for fallback in found.fallbacks))

    def device_nbytes(self) -> int:
        """Bytes that one device of the mesh holds."""
        return sum(leaf.nbytes // math.prod(self.specs[leaf.name].parts) for leaf in self.leaves)

    def host_reads(self, mesh: Mesh, devices: int) -> float:
        """Bytes that a host of so many devices reads for each that it needs, on the worst host."""
        return amplification(
            reads_per_host(x.grid.shape, x.grid.chunk, itemsize(x.dtype), self.specs[x.name], mesh, devices)
            for x in self.leaves
        )


@dataclass(frozen=True, slots=True)
class Split:
    """For which mesh chunks are made (None: for none in particular), by which rules."""

    mesh: Mesh | None
    rules: Rules


@dataclass(frozen=True, slots=True)
class _Stored:
    """How a leaf is stored, and how the mesh splits it, where there is one."""

    dtype: str
    grid: Grid
    spec: Spec | None


def make_item(
    source: Source, counted: Account, table: Mapping[str, Row], vocab: int, split: Split, dtype: str | None = None
) -> Item:
    """Lay out the leaves of `table` with `vocab` rows of vocabulary, and those of a training state alike; parameters
    in `dtype` where that is asked for.

    PrepError for dtypes that do not fit together, usage for a dim that the mesh does not divide.
    """
    leaves: dict[str, _Stored] = {}
    firsts: dict[str, SourceTensor] = {}  # the tensor that set a leaf's dtype
    wants: list[tuple[str, Want]] = []
    source = replace(source, tensors=tuple(tensor.cast(dtype) for tensor in source.tensors))
    for tensor, name, row, at in _uses(source, counted, table, vocab):
        if name not in leaves:
            leaves[name], firsts[name] = _stored(source, row, tensor, split), tensor
        leaf = leaves[name]
        if leaf.dtype != tensor.dtype:
            raise _two_dtypes(source, name, firsts[name], tensor)
        wants.append((tensor.name, Want(name, row, at, leaf.grid, itemsize(leaf.dtype), _offset(tensor))))
    layout = place(want for _, want in wants)
    regions: dict[str, tuple[Region, ...]] = {}
    for (name, _), region in zip(wants, layout.regions):
        regions[name] = (*regions.get(name, ()), region)
    specs = {name: leaf.spec for name, leaf in leaves.items() if leaf.spec}
    dtypes = {tensor.name: tensor.dtype for tensor in source.everything}
    return Item(tuple(_leaves(layout, leaves)), _files(layout), regions, specs, dtypes)


def item_streams(source: Source, counted: Account, item: Item, vocab: int, cut: Cut) -> tuple[Stream, ...]:
    """Every tensor into the leaves of an item that `make_item` laid out; those that have to be equal are read too."""
    sizes = rows_of(source.everything, cut.tensors, vocab)
    targets = {name: Target(regions, sizes[name], item.dtypes[name]) for name, regions in item.regions.items()}
    return streams(source, targets, cut, {check.name for check in counted.checks})


def _two_dtypes(source: Source, leaf: str, first: SourceTensor, later: SourceTensor) -> PrepError:
    """The error of tensors that cannot share a leaf; one that is not floating-point is named first."""
    odd, other = (first, later) if first.dtype not in FLOATS and later.dtype in FLOATS else (later, first)
    shown = source.names.shown(odd.name)
    why = f"{shown} is {odd.dtype}, {source.names.shown(other.name)} is {other.dtype}"
    hint = "`--no-scan` keeps layers apart"
    if odd.dtype not in FLOATS:
        hint = f"a parameter is floating-point: `prep inspect {source.name} '{shown}' --stats` shows its values"
    return PrepError(f"the leaf {leaf} would have two dtypes", why, hint)


_Use = tuple[SourceTensor, str, AxisMap, tuple[tuple[str, int], ...]]  # with the leaf that has it, and by which row


def _uses(source: Source, counted: Account, table: Mapping[str, Row], vocab: int) -> Iterator[_Use]:
    """Which leaf has which tensor: moments by the rows of their parameters, what stands alone as it is."""
    sizes = source.family.sizes(source.config) | {"vocab": vocab}
    bound = {path: bind(row, sizes) for path, row in table.items()}
    state = [(tensor, *parted(tensor.name)) for tensor in source.state]
    for tensor, slot, name in (*((t, PARAMS, t.name) for t in source.tensors), *state):
        if not slot:
            yield tensor, name, alone(name, tensor.shape), ()
        for use in counted.uses.get(name, ()) if slot else ():
            yield tensor, f"{slot}.{use.path}", bound[use.parameter], use.at


def _stored(source: Source, row: AxisMap, tensor: SourceTensor, split: Split) -> _Stored:
    if ITEM_BITS[tensor.dtype] % 8:
        why = "its elements are smaller than a byte, which zarr does not store"
        raise PrepError(f"{source.names.shown(tensor.name)} is {tensor.dtype}", why)
    dims, shape, mesh = [tuple(f.atom for f in dim) for dim in row.leaf], row.leaf_shape, split.mesh
    chosen = spec(dims, shape, mesh, split.rules, source.name) if mesh else None
    chunk = tuple(max(1, n) for n in chunk_shape(dims, shape, mesh, split.rules, itemsize(tensor.dtype)))
    return _Stored(tensor.dtype, Grid(shape, chunk), chosen)


def _offset(tensor: SourceTensor) -> int:
    first = tensor.side[0]
    return first.offset if isinstance(first, Flat) else 0


def _leaves(layout: Layout, leaves: Mapping[str, _Stored]) -> Iterator[Leaf]:
    for name, leaf in leaves.items():
        yield Leaf(tuple(name.split(".")), leaf.dtype, leaf.grid, tuple(layout.placed[name]))


def _files(layout: Layout) -> tuple[OutFile, ...]:
    """Data files as OCDBT names them: 32 hexadecimal digits, here a function of the file's number."""
    names = (hashlib.md5(f"prep data file {i}".encode(), usedforsecurity=False) for i in range(len(layout.sizes)))
    return tuple(OutFile(f"d/{name.hexdigest()}", size) for name, size in zip(names, layout.sizes))
