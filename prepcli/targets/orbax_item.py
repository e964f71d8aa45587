"""An Orbax checkpoint as an output: leaves, chunks for a mesh, and where each tensor goes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.errors import PrepError
from prepcli.planning.accounting import Accounting
from prepcli.planning.chunk_placement import ChunkLayout, LeafPiece, place_chunks
from prepcli.planning.grids import ChunkGrid
from prepcli.planning.plan import Contiguous, OutputFile, OutputLeaf, Stream
from prepcli.planning.state_names import PARAMS, identity_axis_map, split_name
from prepcli.planning.strided_copies import Region
from prepcli.planning.tensors import FLOAT_DTYPES, ITEM_BITS, itemsize
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.streams import TensorTarget, VocabResize, build_streams, output_rows
from trainer.models.axis_map import AxisMap, Row, bind_row
from trainer.models.host_reads import read_amplification, reads_per_host
from trainer.models.mesh import Mesh, Rules, Spec, chunk_shape, partition_spec


@dataclass(frozen=True, slots=True)
class OrbaxItemLayout:
    """The leaves, the data files, the regions of every tensor and its dtype there, and how a mesh splits each leaf,
    where there is one."""

    leaves: tuple[OutputLeaf, ...]
    files: tuple[OutputFile, ...]
    regions: Mapping[str, tuple[Region, ...]]
    specs: Mapping[str, Spec]
    dtypes: Mapping[str, str]

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """A line for each dim that is not split as its rule would have it first."""
        return tuple(dict.fromkeys(str(fallback) for found in self.specs.values() for fallback in found.fallbacks))

    def device_nbytes(self) -> int:
        """Bytes that one device of the mesh holds."""
        return sum(leaf.nbytes // math.prod(self.specs[leaf.name].shards_per_dim) for leaf in self.leaves)

    def read_amplification(self, mesh: Mesh, devices_per_host: int) -> float:
        """Bytes that a host of so many devices reads for each that it needs, on the worst host."""
        return read_amplification(
            reads_per_host(
                x.grid.shape, x.grid.chunk_shape, itemsize(x.dtype), self.specs[x.name], mesh, devices_per_host
            )
            for x in self.leaves
        )


@dataclass(frozen=True, slots=True)
class Partitioning:
    """For which mesh chunks are made (None: for none in particular), by which rules."""

    mesh: Mesh | None
    rules: Rules


@dataclass(frozen=True, slots=True)
class _LeafLayout:
    """How a leaf is stored, and how the mesh splits it, where there is one."""

    dtype: str
    grid: ChunkGrid
    spec: Spec | None


def make_item(
    source: Source,
    accounting: Accounting,
    table: Mapping[str, Row],
    vocab_size: int,
    partitioning: Partitioning,
    dtype: str | None = None,
) -> OrbaxItemLayout:
    """Lay out the leaves of `table` with `vocab` rows of vocabulary, and those of a training state alike; parameters
    in `dtype` where that is asked for.

    PrepError for dtypes that do not fit together, usage for a dim that the mesh does not divide.
    """
    leaves: dict[str, _LeafLayout] = {}
    firsts: dict[str, SourceTensor] = {}  # the tensor that set a leaf's dtype
    wants: list[tuple[str, LeafPiece]] = []
    source = replace(source, tensors=tuple(tensor.cast(dtype) for tensor in source.tensors))
    for tensor, name, row, at in _leaf_uses(source, accounting, table, vocab_size):
        if name not in leaves:
            leaves[name], firsts[name] = _leaf_layout(source, row, tensor, partitioning), tensor
        leaf = leaves[name]
        if leaf.dtype != tensor.dtype:
            raise _mixed_dtypes_error(source, name, firsts[name], tensor)
        wants.append((tensor.name, LeafPiece(name, row, at, leaf.grid, itemsize(leaf.dtype), _source_offset(tensor))))
    layout = place_chunks(want for _, want in wants)
    regions: dict[str, tuple[Region, ...]] = {}
    for (name, _), region in zip(wants, layout.regions):
        regions[name] = (*regions.get(name, ()), region)
    specs = {name: leaf.spec for name, leaf in leaves.items() if leaf.spec}
    dtypes = {tensor.name: tensor.dtype for tensor in source.all_tensors}
    return OrbaxItemLayout(tuple(_leaves(layout, leaves)), _data_files(layout), regions, specs, dtypes)


def item_streams(
    source: Source, accounting: Accounting, item: OrbaxItemLayout, vocab_size: int, resize: VocabResize
) -> tuple[Stream, ...]:
    """Every tensor into the leaves of an item that `make_item` laid out; those that have to be equal are read too."""
    sizes = output_rows(source.all_tensors, resize.tensors, vocab_size)
    targets = {name: TensorTarget(regions, sizes[name], item.dtypes[name]) for name, regions in item.regions.items()}
    return build_streams(source, targets, resize, {check.name for check in accounting.checks})


def _mixed_dtypes_error(source: Source, leaf: str, first: SourceTensor, later: SourceTensor) -> PrepError:
    """The error of tensors that cannot share a leaf; one that is not floating-point is named first."""
    odd, other = (first, later) if first.dtype not in FLOAT_DTYPES and later.dtype in FLOAT_DTYPES else (later, first)
    shown = source.names.display_name(odd.name)
    why = f"{shown} is {odd.dtype}, {source.names.display_name(other.name)} is {other.dtype}"
    hint = "`--no-scan` keeps layers apart"
    if odd.dtype not in FLOAT_DTYPES:
        hint = f"a parameter is floating-point: `prep inspect {source.display_name} '{shown}' --stats` shows its values"
    return PrepError(f"the leaf {leaf} would have two dtypes", why, hint)


_LeafUse = tuple[SourceTensor, str, AxisMap, tuple[tuple[str, int], ...]]  # with the leaf that has it, and by which row


def _leaf_uses(source: Source, accounting: Accounting, table: Mapping[str, Row], vocab_size: int) -> Iterator[_LeafUse]:
    """Which leaf has which tensor: moments by the rows of their parameters, what stands alone as it is."""
    sizes = source.family.sizes(source.config) | {"vocab": vocab_size}
    bound = {path: bind_row(row, sizes) for path, row in table.items()}
    state = [(tensor, *split_name(tensor.name)) for tensor in source.state_tensors]
    for tensor, slot, name in (*((t, PARAMS, t.name) for t in source.tensors), *state):
        if not slot:
            yield tensor, name, identity_axis_map(name, tensor.shape), ()
        for use in accounting.uses.get(name, ()) if slot else ():
            yield tensor, f"{slot}.{use.path}", bound[use.parameter], use.stacked_indices


def _leaf_layout(source: Source, row: AxisMap, tensor: SourceTensor, partitioning: Partitioning) -> _LeafLayout:
    if ITEM_BITS[tensor.dtype] % 8:
        why = "its elements are smaller than a byte, which zarr does not store"
        raise PrepError(f"{source.names.display_name(tensor.name)} is {tensor.dtype}", why)
    dims, shape, mesh = [tuple(f.atom for f in dim) for dim in row.leaf_dims], row.leaf_shape, partitioning.mesh
    chosen = partition_spec(dims, shape, mesh, partitioning.rules, source.display_name) if mesh else None
    chunk = tuple(max(1, n) for n in chunk_shape(dims, shape, mesh, partitioning.rules, itemsize(tensor.dtype)))
    return _LeafLayout(tensor.dtype, ChunkGrid(shape, chunk), chosen)


def _source_offset(tensor: SourceTensor) -> int:
    first = tensor.placement[0]
    return first.offset if isinstance(first, Contiguous) else 0


def _leaves(layout: ChunkLayout, leaves: Mapping[str, _LeafLayout]) -> Iterator[OutputLeaf]:
    for name, leaf in leaves.items():
        yield OutputLeaf(tuple(name.split(".")), leaf.dtype, leaf.grid, tuple(layout.placed_chunks[name]))


def _data_files(layout: ChunkLayout) -> tuple[OutputFile, ...]:
    """Data files as OCDBT names them: 32 hexadecimal digits, here a function of the file's number."""
    names = (hashlib.md5(f"prep data file {i}".encode(), usedforsecurity=False) for i in range(len(layout.file_sizes)))
    return tuple(OutputFile(f"d/{name.hexdigest()}", size) for name, size in zip(names, layout.file_sizes))
