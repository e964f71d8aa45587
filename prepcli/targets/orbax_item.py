"""Layout of an Orbax item: its leaves, their chunks for a mesh, and the location of each tensor."""

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
from prepcli.planning.state_rows import index_state_tensors, is_path_name, shape_in_leaf, state_axis_map
from prepcli.planning.strided_copies import Region
from prepcli.planning.tensors import FLOAT_DTYPES, ITEM_BITS, itemsize
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.streams import TensorTarget, VocabResize, build_streams, output_rows
from trainer.models.axis_map import AxisMap, Row, bind_row
from trainer.models.chunk_shapes import MIN_SPLIT_NBYTES, chunk_shape
from trainer.models.host_reads import read_amplification, reads_per_host
from trainer.models.leaf_matrices import reduced_axes
from trainer.models.mesh import Mesh
from trainer.models.partition import Spec, leaf_spec
from trainer.models.rules import Rules


@dataclass(frozen=True, slots=True)
class OrbaxItemLayout:
    """Layout of an Orbax item.

    Attributes:
        leaves: The leaves, with their chunk grids and locations.
        files: The data files.
        regions: Regions of each tensor, by name.
        specs: Partition spec of each leaf, if there is a mesh.
        dtypes: Dtype of each tensor in the item.
    """

    leaves: tuple[OutputLeaf, ...]
    files: tuple[OutputFile, ...]
    regions: Mapping[str, tuple[Region, ...]]
    specs: Mapping[str, Spec]
    dtypes: Mapping[str, str]

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """A line for each dim partitioned by a later choice of its rule."""
        return tuple(dict.fromkeys(str(fallback) for spec in self.specs.values() for fallback in spec.fallbacks))

    def device_nbytes(self) -> int:
        """Return the bytes that one device of the mesh holds."""
        return sum(leaf.nbytes // math.prod(self.specs[leaf.name].shards_per_dim) for leaf in self.leaves)

    def read_amplification(self, mesh: Mesh, devices_per_host: int) -> float:
        """Return the bytes read per byte needed, on the worst host with `devices_per_host` devices."""
        return read_amplification(
            reads_per_host(
                leaf.grid.shape,
                leaf.grid.chunk_shape,
                itemsize=itemsize(leaf.dtype),
                spec=self.specs[leaf.name],
                mesh=mesh,
                devices_per_host=devices_per_host,
            )
            for leaf in self.leaves
        )


@dataclass(frozen=True, slots=True)
class Partitioning:
    """Partitioning of the leaves of an item.

    Attributes:
        mesh: Mesh whose shards are the chunks; None: chunks of bounded size.
        rules: Partition rules.
        min_split_nbytes: Size per layer below which a leaf is one chunk per layer, on every mesh.
    """

    mesh: Mesh | None
    rules: Rules
    min_split_nbytes: int = MIN_SPLIT_NBYTES


@dataclass(frozen=True, slots=True)
class _LeafLayout:
    """Dtype and chunk grid of a leaf, and its partition spec if there is a mesh."""

    dtype: str
    grid: ChunkGrid
    spec: Spec | None


def make_item(
    source: Source,
    accounting: Accounting,
    *,
    table: Mapping[str, Row],
    vocab_size: int,
    partitioning: Partitioning,
    dtype: str | None = None,
) -> OrbaxItemLayout:
    """Lay out the leaves of an item, including the leaves of a training state.

    Args:
        source: The opened source.
        accounting: The matches between tensors and axis-map rows.
        table: Rows of the model's leaves, by path.
        vocab_size: Vocabulary rows in the item.
        partitioning: Mesh and rules that determine the chunks.
        dtype: Dtype of the parameters; None keeps their dtypes.

    Returns:
        The layout of the item.

    Raises:
        PrepError: Tensors of one leaf differ in dtype, or (code 2) the mesh does not divide a dim.
    """
    leaves: dict[str, _LeafLayout] = {}
    first_tensors: dict[str, SourceTensor] = {}  # first tensor of each leaf, which sets its dtype
    pieces: list[tuple[str, LeafPiece]] = []
    source = replace(source, tensors=tuple(tensor.cast(dtype) for tensor in source.tensors))
    for use in _leaf_uses(source, accounting, table, vocab_size):
        tensor, name = use.tensor, use.name
        if name not in leaves:
            leaves[name], first_tensors[name] = _leaf_layout(source, use, partitioning), tensor
        leaf = leaves[name]
        if leaf.dtype != tensor.dtype:
            raise _mixed_dtypes_error(source, name, first_tensors[name], tensor)
        offset, item_nbytes = _source_offset(tensor), itemsize(leaf.dtype)
        piece = LeafPiece(name, use.axis_map, use.stacked_indices, leaf.grid, item_nbytes, offset)
        pieces.append((tensor.name, piece))
    layout = place_chunks(want for _, want in pieces)
    regions: dict[str, tuple[Region, ...]] = {}
    for (name, _), region in zip(pieces, layout.regions):
        regions[name] = (*regions.get(name, ()), region)
    specs = {name: leaf.spec for name, leaf in leaves.items() if leaf.spec}
    dtypes = {tensor.name: tensor.dtype for tensor in source.all_tensors}
    return OrbaxItemLayout(tuple(_leaves(layout, leaves)), _data_files(layout), regions, specs, dtypes)


def item_streams(
    source: Source, accounting: Accounting, *, item: OrbaxItemLayout, vocab_size: int, resize: VocabResize
) -> tuple[Stream, ...]:
    """Return the streams of all tensors to an item's leaves, and streams read only for equality checks."""
    sizes = output_rows(source.all_tensors, resize.tensors, vocab_size=vocab_size)
    targets = {name: TensorTarget(regions, sizes[name], item.dtypes[name]) for name, regions in item.regions.items()}
    return build_streams(source, targets, resize=resize, compared={check.name for check in accounting.checks})


def _mixed_dtypes_error(source: Source, leaf: str, first: SourceTensor, later: SourceTensor) -> PrepError:
    """Return the error for tensors that cannot share a leaf; a tensor of another kind than float is named first."""
    reported, other = (
        (first, later) if first.dtype not in FLOAT_DTYPES and later.dtype in FLOAT_DTYPES else (later, first)
    )
    display_name = source.names.display_name(reported.name)
    why = f"{display_name} is {reported.dtype}, {source.names.display_name(other.name)} is {other.dtype}"
    hint = "`--no-scan` writes one leaf per layer"
    if reported.dtype not in FLOAT_DTYPES:
        command = f"prep inspect {source.display_name} '{display_name}' --stats"
        hint = f"a parameter is floating-point: `{command}` shows its values"
    return PrepError(f"the leaf {leaf} would have two dtypes", why, hint)


@dataclass(frozen=True, slots=True)
class _LeafUse:
    """A tensor and its leaf.

    Attributes:
        tensor: The tensor.
        name: Name of the leaf.
        axis_map: Where each element of the leaf lies in its tensors.
        stacked_indices: Indices of the tensor in the stacked dims of the leaf.
        path: Path of the parameter of the leaf; None for state that belongs to no parameter.
        parameter_map: The axis map of the parameter, if the leaf lacks some of its axes.
    """

    tensor: SourceTensor
    name: str
    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    parameter_map: AxisMap | None = None


def _leaf_uses(source: Source, accounting: Accounting, table: Mapping[str, Row], vocab_size: int) -> Iterator[_LeafUse]:
    """Yield each tensor with its leaf. Moments use the axis-map rows of their parameters; other state is unchanged."""
    sizes = source.family.sizes(source.config) | {"vocab": vocab_size}
    bound = {path: bind_row(row, sizes) for path, row in table.items()}
    state = [(tensor, *split_name(tensor.name)) for tensor in source.state_tensors]
    leaf_by_name = index_state_tensors(bound) if any(is_path_name(name) for _, _, name in state) else {}
    for tensor, slot, name in (*((t, PARAMS, t.name) for t in source.tensors), *state):
        if not slot:
            yield _LeafUse(tensor, name, identity_axis_map(name, tensor.shape))
        elif is_path_name(name):
            path, row, indices = leaf_by_name[name]
            axis_map = state_axis_map(path, row, shape_in_leaf(row, tensor.shape))
            yield _LeafUse(tensor, f"{slot}.{path}", axis_map, indices, path, row)
        for use in accounting.uses.get(name, ()) if slot else ():
            yield _LeafUse(tensor, f"{slot}.{use.path}", bound[use.parameter], use.stacked_indices, use.path)


def _leaf_layout(source: Source, use: _LeafUse, partitioning: Partitioning) -> _LeafLayout:
    row, tensor, mesh = use.axis_map, use.tensor, partitioning.mesh
    if ITEM_BITS[tensor.dtype] % 8:
        why = "zarr does not support elements smaller than a byte"
        raise PrepError(f"{source.names.display_name(tensor.name)} is {tensor.dtype}", why)
    dims, shape, spec = [tuple(f.atom for f in dim) for dim in row.leaf_dims], row.leaf_shape, None
    if mesh:
        rules, checkpoint, parameter = partitioning.rules, source.display_name, use.parameter_map or row
        parameter_dims = [tuple(f.atom for f in dim) for dim in parameter.leaf_dims]
        spec = leaf_spec(
            use.path, parameter_dims, parameter.leaf_shape, mesh=mesh, rules=rules, checkpoint=checkpoint
        ).without_axes(reduced_axes(shape, parameter.leaf_shape) or ())
    item_nbytes, min_split_nbytes = itemsize(tensor.dtype), partitioning.min_split_nbytes
    chunk = chunk_shape(dims, shape, spec=spec, itemsize=item_nbytes, min_split_bytes=min_split_nbytes)
    chunk = tuple(max(1, n) for n in chunk)
    return _LeafLayout(tensor.dtype, ChunkGrid(shape, chunk), spec)


def _source_offset(tensor: SourceTensor) -> int:
    first = tensor.placement[0]
    return first.offset if isinstance(first, Contiguous) else 0


def _leaves(layout: ChunkLayout, leaves: Mapping[str, _LeafLayout]) -> Iterator[OutputLeaf]:
    for name, leaf in leaves.items():
        yield OutputLeaf(tuple(name.split(".")), leaf.dtype, leaf.grid, tuple(layout.placed_chunks[name]))


def _data_files(layout: ChunkLayout) -> tuple[OutputFile, ...]:
    """Return the data files. OCDBT names them by 32 hexadecimal digits, here derived from the file's number."""
    names = (hashlib.md5(f"prep data file {i}".encode(), usedforsecurity=False) for i in range(len(layout.file_sizes)))
    return tuple(OutputFile(f"d/{name.hexdigest()}", size) for name, size in zip(names, layout.file_sizes))
