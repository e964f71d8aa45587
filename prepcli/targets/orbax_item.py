"""Layout of an Orbax item: its leaves, their chunks for a mesh, and the location of each tensor."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.algebra.axis_map import AxisMap, ParsedAxisMap, bind_row
from prepcli.algebra.grids import ChunkGrid
from prepcli.core.errors import GET_AGAIN_HINT, Command, Option, PrepError, text
from prepcli.formats.manifest import STATE_ITEM
from prepcli.formats.ocdbt import MAX_ENTRIES
from prepcli.models.mesh import Mesh, parse_mesh
from prepcli.models.param_tree import reduced_axes
from prepcli.models.partition import (
    MIN_SPLIT_NBYTES,
    HostReads,
    Spec,
    chunk_shape,
    join_experts,
    leaf_spec,
    partition_spec,
    read_amplification,
    reads_per_host,
)
from prepcli.models.rules import LeafDims, Rules, merge_rules
from prepcli.models.verbatim import stacked_numbers
from prepcli.planning import coverage
from prepcli.planning.arrays import Array, MappedArray, identity_axis_map, whole_array
from prepcli.planning.chunk_placement import ChunkLayout, LeafPiece, place_chunk_files, place_chunks
from prepcli.planning.item_storage import (
    OCDBT,
    OCDBT_ZARR3,
    Compression,
    ItemStorage,
    recorded_storage,
)
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import OutputFile, OutputLeaf, Plan, SmallFile
from prepcli.planning.tensors import (
    FLOAT_DTYPES,
    ITEM_BITS,
    PARAMS,
    QUANTIZATION,
    TOWERS,
    LeafSpec,
    is_leaf_path,
    is_quantization_leaf,
    is_quantization_tensor,
    itemsize,
    split_name,
)
from prepcli.sources.foreign_trees import tensors_from_manifest
from prepcli.sources.source import Source, SourceTensor, source_rows
from prepcli.sources.state_rows import (
    StackedIndices,
    index_state_tensors,
    quantization_leaves,
    shape_in_leaf,
    state_axis_map,
)
from prepcli.sources.tensor_match import TensorNames
from prepcli.targets.planner import (
    NATIVE_TREE,
    Draft,
    Placed,
    make_plan,
    start_draft,
    with_source_state,
)
from prepcli.targets.safetensors_folder import resized_shape_and_nbytes


@dataclass(frozen=True, slots=True)
class Partitioning:
    """Partitioning of the leaves of an item.

    Attributes:
        mesh: Each chunk is one shard of this mesh. None for chunks of bounded size.
        rules: Partition rules.
        min_split_nbytes: A leaf with a smaller size per layer is one chunk per layer, on every
            mesh.
        has_joined_experts: Whether a chunk may have several experts. See `join_experts`.
    """

    mesh: Mesh | None
    rules: Rules
    min_split_nbytes: int = MIN_SPLIT_NBYTES
    has_joined_experts: bool = False


@dataclass(frozen=True, slots=True)
class _LeafLayout:
    """Dtype and chunk grid of a leaf, and its partition spec if there is a mesh."""

    dtype: str
    grid: ChunkGrid
    spec: Spec | None


@dataclass(frozen=True, slots=True)
class OrbaxLayout:
    """Layout of prep's own tree in an Orbax item.

    Attributes:
        partitioning: Mesh and rules of the chunks.
        rule_texts: The rules as text.
        scan: Whether the layers are stacked.
        scan_axis: Axis of the stacked layers.
        storage: Storage of the arrays.
        compression: Compression of the chunks, or None.
        is_training_step: Whether the item is a training step, with its optimizer state.
    """

    partitioning: Partitioning
    rule_texts: tuple[str, ...] = ()
    scan: bool = True
    scan_axis: int = 0
    storage: ItemStorage = OCDBT
    compression: Compression | None = None
    is_training_step: bool = False

    def rows(self, source: Source) -> dict[str, ParsedAxisMap]:
        """Return the rows of the parameters of a source, by path of their leaf."""
        return source_rows(source, self.scan, self.scan_axis)

    def place(self, draft: Draft) -> Placed:
        """Place the tensors of a draft in leaves, also its training state.

        The draft has the rows of this layout.

        Raises:
            PrepError: No tensor has elements, tensors of one leaf differ in dtype, or (code 2) the mesh does not divide
                a dim.
        """
        source = draft.source
        family = source.family
        sizes = family.sizes(source.config) | {"vocab": draft.vocabulary.stored_size}
        bound = {path: bind_row(row, sizes) for path, row in draft.rows.items()}
        tower_names = {tensor.name for tensor in source.tower_tensors}
        members: list[LeafMember] = []
        rows = draft.row_counts
        for tensor in draft.tensors:
            if tensor.name in tower_names and 0 not in tensor.shape:
                leaf = tower_leaf(tensor)
                shape, _ = resized_shape_and_nbytes(tensor, rows[tensor.name])
                members.append(LeafMember(tensor, leaf, identity_axis_map(leaf, shape), path=leaf))
        members += _leaf_members(draft, bound)
        # Compressed chunks are written from raw chunks in data files.
        storage = OCDBT if self.compression else self.storage
        placed = place_leaves(source, members, self.partitioning, storage=storage)
        # Tensors without elements have no leaf.
        unplaced = [name for name, uses in draft.match.uses.items() if not uses]
        for tensor in draft.state_tensors:
            if is_quantization_tensor(tensor.name) and not tensor.nbytes:
                unplaced.append(tensor.name)
        unplaced += [tensor.name for tensor in source.tower_tensors if not tensor.nbytes]
        return replace(
            placed,
            locations={**dict.fromkeys(unplaced, ()), **placed.locations},
            folder=STATE_ITEM if self.is_training_step else "",
            compression=self.compression,
            settings=self._settings(source),
        )

    def _settings(self, source: Source) -> Manifest:
        """Return the fields of the manifest about the layout."""
        mesh = self.partitioning.mesh
        settings = Manifest(
            kind="train" if self.is_training_step else "init",
            layout=NATIVE_TREE,
            mesh=str(mesh) if mesh else None,
            rules=self.rule_texts,
            scan=self.scan,
            scan_axis=self.scan_axis,
        )
        # The numbers in the names of stacked tensors.
        if source.family.is_verbatim:
            settings |= Manifest(stacked=stacked_numbers(source.family, self.scan))
        if self.compression:
            settings |= Manifest(compress=str(self.compression))
        if self.storage != OCDBT:
            settings |= Manifest(storage=self.storage.name)
        return settings


def find_fallbacks(placed: Placed) -> tuple[str, ...]:
    """Return a line for each dim split by a later choice of its rule, because the first one does not divide the dim."""
    lines: dict[str, None] = {}  # a dict keeps the order and drops repeated lines
    for spec in placed.specs.values():
        lines |= dict.fromkeys(map(str, spec.fallbacks))
    return tuple(lines)


def device_nbytes(placed: Placed) -> int:
    """Return the bytes of one device of the mesh."""
    total = 0
    for leaf in placed.leaves:
        # Exact: `leaf_spec` splits a dim only into equal parts.
        total += leaf.nbytes // math.prod(placed.specs[leaf.name].shards_per_dim)
    return total


def item_read_amplification(placed: Placed, mesh: Mesh, devices_per_host: int) -> float:
    """Return the bytes read per byte needed, on the worst host with `devices_per_host` devices."""
    # Leaves of equal geometry are computed once: a model without stacked layers has many.
    counts = Counter((leaf.grid, leaf.dtype, placed.specs[leaf.name]) for leaf in placed.leaves)
    leaf_reads: list[list[HostReads]] = []
    for (grid, dtype, spec), count in counts.items():
        reads = reads_per_host(
            grid.shape,
            grid.chunk_shape,
            itemsize=itemsize(dtype),
            spec=spec,
            mesh=mesh,
            devices_per_host=devices_per_host,
        )
        leaf_reads.append([HostReads(count * r.needed_bytes, count * r.read_bytes) for r in reads])
    return read_amplification(leaf_reads)


def place_leaves(
    source: Source,
    members: Iterable[LeafMember],
    partitioning: Partitioning,
    *,
    storage: ItemStorage = OCDBT,
) -> Placed:
    """Place tensors in the leaves of an item.

    Raises:
        PrepError: No tensor has elements, tensors of one leaf differ in dtype, or (code 2) the mesh does not divide a
            dim.
    """
    members = [*members]
    # The first tensor of each leaf sets the leaf's dtype.
    first_members: dict[str, LeafMember] = {}
    for member in members:
        first_members.setdefault(member.name, member)
    leaves = _leaf_layouts(source, first_members.values(), partitioning)
    pieces: list[tuple[str, LeafPiece]] = []
    for member in members:
        tensor = member.tensor
        name = member.name
        leaf = leaves[name]
        if leaf.dtype != tensor.dtype:
            raise _mixed_dtypes_error(source, name, first_members[name].tensor, tensor)
        # Only a contiguous tensor is copied in whole pages, for which source and output need equal page offsets.
        location = tensor.placement[0]
        source_offset = location.array.offset if location.is_contiguous else 0
        piece = LeafPiece(
            name,
            member.axis_map,
            member.stacked_indices,
            leaf.grid,
            leaf.dtype,
            source_offset,
        )
        pieces.append((tensor.name, piece))
    if not leaves:
        raise PrepError(
            f"{source.display_name} cannot be an Orbax checkpoint",
            "no tensor has elements",
            GET_AGAIN_HINT,
        )
    placing = place_chunk_files if storage.has_chunk_files else place_chunks
    layout = placing([piece for _, piece in pieces])
    locations: dict[str, tuple[MappedArray, ...]] = {}
    # `place_chunks` returns one location per piece in the same order. A tensor has one per leaf that uses it.
    for (name, _), location in zip(pieces, layout.locations):
        locations[name] = (*locations.get(name, ()), location)
    tower_leaves = {tower_leaf(tensor) for tensor in source.tower_tensors}
    output_leaves: list[OutputLeaf] = []
    for name, leaf in leaves.items():
        # In the flat trees of a verbatim family, of scales and of towers, the path below the first key is one key.
        is_flat = source.family.is_verbatim or is_quantization_leaf(name) or name in tower_leaves
        path = tuple(name.split(".", 1 if is_flat else -1))
        placed_chunks = tuple(layout.placed_chunks[name])
        output_leaves.append(OutputLeaf(path, leaf.dtype, leaf.grid, placed_chunks))
    return Placed(
        files=tuple(_data_files(layout, storage)),
        locations=locations,
        leaves=tuple(output_leaves),
        specs={name: leaf.spec for name, leaf in leaves.items() if leaf.spec},
    )


def tower_leaf(tensor: SourceTensor) -> str:
    """Return the leaf name for a tensor in a tower, i.e. in a vision or audio part."""
    _, name = split_name(tensor.name)
    return f"{TOWERS}.{name}"


def is_tower_leaf(name: str) -> bool:
    """Return whether a leaf belongs to a tower."""
    return name.startswith(f"{TOWERS}.")


def _mixed_dtypes_error(
    source: Source, leaf: str, first: SourceTensor, later: SourceTensor
) -> PrepError:
    """Return the error for tensors of different dtypes in one leaf. It names integers and booleans first."""
    reported = later
    other = first
    if first.dtype not in FLOAT_DTYPES and later.dtype in FLOAT_DTYPES:
        reported = first
        other = later
    display_name = source.names.display_name(reported.name)
    why = f"{display_name} is {reported.dtype}, {source.names.display_name(other.name)} is {other.dtype}"
    hint = text("{} writes one leaf per layer", Option("scan", False))
    if reported.dtype not in FLOAT_DTYPES:
        option = Option("stats", True)
        command = Command("inspect", source.display_name, display_name, option)
        hint = text(
            "parameters must be floating-point, and {} shows the values of this tensor", command
        )
    return PrepError(f"the leaf {leaf} would have two dtypes", why, hint)


@dataclass(frozen=True, slots=True)
class LeafMember:
    """A tensor as a part of its leaf. A leaf may stack the tensors of several layers or experts.

    Attributes:
        tensor: The tensor.
        name: Name of the leaf.
        axis_map: Maps elements of the leaf to elements of its tensors.
        stacked_indices: Name of each stacked dim of the leaf, with the index of the tensor in it.
        path: Path of the parameter of the leaf, or name of the leaf of a tower. None for other state,
            e.g. the step count.
        parameter_map: Axis map of the parameter. Only for leaves with some of its axes, e.g. factored moments.
    """

    tensor: SourceTensor
    name: str
    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    parameter_map: AxisMap | None = None


def _leaf_members(draft: Draft, bound: Mapping[str, AxisMap]) -> Iterator[LeafMember]:
    """Yield each tensor of the model and of its training state with its leaf.

    Moments use the axis maps of their parameters, other state is unchanged.
    """
    tensors = [(tensor, PARAMS, tensor.name) for tensor in draft.tensors]
    tensors += [(tensor, *split_name(tensor.name)) for tensor in draft.state_tensors]
    leaf_by_name: dict[str, tuple[str, AxisMap, StackedIndices]] = {}
    if any(slot != PARAMS and is_leaf_path(name) for _, slot, name in tensors):
        leaf_by_name = index_state_tensors(bound)
    scales = {name: tensor for tensor, slot, name in tensors if slot == QUANTIZATION}
    if scales:
        types = {name: (tensor.dtype, tensor.shape) for name, tensor in scales.items()}
        for name, leaf, axis_map, indices in quantization_leaves(types):
            yield LeafMember(scales[name], leaf, axis_map, indices)
    for tensor, slot, name in tensors:
        if slot == QUANTIZATION:
            continue
        # State outside of slots, e.g. the step count, belongs to no parameter and is one leaf as it is.
        if not slot:
            yield LeafMember(tensor, name, identity_axis_map(name, tensor.shape))
            continue
        if slot != PARAMS and is_leaf_path(name):
            path, parameter_map, indices = leaf_by_name[name]
            state_shape = shape_in_leaf(parameter_map, tensor.shape)
            axis_map = state_axis_map(path, parameter_map, state_shape)
            yield LeafMember(tensor, f"{slot}.{path}", axis_map, indices, path, parameter_map)
        for use in draft.match.uses.get(name, ()):
            leaf = f"{slot}.{use.path}"
            yield LeafMember(tensor, leaf, bound[use.parameter], use.stacked_indices, use.path)


def _leaf_layouts(
    source: Source, members: Collection[LeafMember], partitioning: Partitioning
) -> dict[str, _LeafLayout]:
    """Return the layout of each leaf, given its first tensor.

    Chunks have one expert, unless the index would have too many entries: 11 million for DeepSeek-V3 on mesh 1,64,4.
    """
    layouts = {member.name: _leaf_layout(source, member, partitioning) for member in members}
    num_chunks = sum(math.prod(layout.grid.chunk_counts) for layout in layouts.values())
    if num_chunks + len(layouts) <= MAX_ENTRIES or partitioning.has_joined_experts:
        return layouts
    return _leaf_layouts(source, members, replace(partitioning, has_joined_experts=True))


def _leaf_layout(source: Source, member: LeafMember, partitioning: Partitioning) -> _LeafLayout:
    """Return how a leaf is split into chunks, and its spec if there is a mesh."""
    axis_map = member.axis_map
    dtype = member.tensor.dtype
    if ITEM_BITS[dtype] % 8:
        raise PrepError(
            f"{source.names.display_name(member.tensor.name)} is {dtype}",
            "zarr does not support elements smaller than a byte",
            "use a checkpoint of the model in bfloat16",
        )
    spec = None
    if partitioning.mesh:
        # A leaf with some axes of a parameter is split like the parameter along these axes.
        parameter = member.parameter_map or axis_map
        # `prep pad-vocab` pads the parameters of a Hugging Face folder, and would lose a training state.
        is_paddable = bool(source.tensor_file_names) and not source.state_tensors
        spec = item_leaf_spec(
            member.name,
            member.path,
            _dim_names(parameter),
            parameter.leaf_shape,
            mesh=partitioning.mesh,
            rules=partitioning.rules,
            checkpoint=source.display_name if is_paddable else "",
        )
        if parameter is not axis_map:
            # E.g. a row mean [12, 1, 64] of a parameter [12, 32, 64]: axis 1 has extent 1 and stays whole,
            # the other axes are split as in the parameter.
            reduced = reduced_axes(axis_map.leaf_shape, parameter.leaf_shape)
            spec = spec.without_axes(reduced or ())
    chunk = chunk_shape(
        _dim_names(axis_map),
        axis_map.leaf_shape,
        spec=spec,
        itemsize=itemsize(dtype),
        min_split_bytes=partitioning.min_split_nbytes,
    )
    if partitioning.has_joined_experts:
        chunk = join_experts(
            chunk, _dim_names(axis_map), axis_map.leaf_shape, spec=spec, itemsize=itemsize(dtype)
        )
    # zarr has no chunk of extent 0: a leaf [0, 8] has chunks [1, 8].
    grid = ChunkGrid(axis_map.leaf_shape, tuple(max(1, length) for length in chunk))
    return _LeafLayout(dtype, grid, spec)


def item_leaf_spec(
    name: str,
    path: str | None,
    dims: LeafDims,
    shape: Sequence[int],
    *,
    mesh: Mesh,
    rules: Rules,
    checkpoint: str,
) -> Spec:
    """Return the sharding of a leaf of an item. Scales of quantised weights are whole on each device."""
    if is_quantization_leaf(name):
        # Every device may need all scales. They are small.
        return partition_spec(dims, shape, mesh, {}, checkpoint)
    if is_tower_leaf(name):
        # The dims of a tower have no names, so that no rule of a named dim applies.
        rules = replace(rules, by_size=True)
    return leaf_spec(path, dims, shape, mesh=mesh, rules=rules, checkpoint=checkpoint)


def _dim_names(axis_map: AxisMap) -> list[tuple[str, ...]]:
    """Return the names of the axes in each dim of a leaf, e.g. [("embed",), ("heads", "head_dim")]."""
    names: list[tuple[str, ...]] = []
    for dim in axis_map.leaf_dims:
        names.append(tuple(factor.atom for factor in dim))
    return names


def _data_files(layout: ChunkLayout, storage: ItemStorage) -> Iterator[OutputFile]:
    """Yield the files of chunks, by number. OCDBT names them by 32 hexadecimal digits."""
    paths: dict[int, str] = {}
    if storage.has_chunk_files:
        for leaf, boxes in layout.placed_chunks.items():
            for box in boxes:
                paths[box.chunks.file] = storage.chunk_path(leaf, box.first)
    for number, size in enumerate(layout.file_sizes):
        # Names are fixed, so that equal plans write equal bytes.
        name = hashlib.md5(f"prep data file {number}".encode(), usedforsecurity=False)
        yield OutputFile(paths.get(number, f"d/{name.hexdigest()}"), size)


# --- The plan of a saved training step


# Keys of config.json in different versions of transformers.
DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class StartModel:
    """The start model of a run without an Orbax checkpoint of prep, e.g. a Hugging Face folder.

    Attributes:
        manifest: Manifest for the model, as `prep save-init` would write it.
        small_files: Tokenizer and other files to copy to each step.
    """

    manifest: Manifest
    small_files: tuple[SmallFile, ...]


def plan_training_step(
    leaves: Mapping[str, LeafSpec],
    start_manifest: Manifest,
    *,
    request: str,
    slab_nbytes: int,
    min_split_nbytes: int = MIN_SPLIT_NBYTES,
) -> Plan:
    """Plan a save of leaves. File n of the plan's streams is leaf n, in C order.

    Raises:
        PrepError: The leaves differ from the start checkpoint's model.
    """
    source = _source_of_leaves(leaves, start_manifest)
    mesh = parse_mesh(start_manifest.mesh) if start_manifest.mesh else None
    layout = OrbaxLayout(
        Partitioning(mesh, merge_rules(start_manifest.rules), min_split_nbytes),
        scan=start_manifest.scan,
        scan_axis=start_manifest.scan_axis,
        is_training_step=True,
    )
    # The state has the padded vocabulary of the start already, so no row is filled.
    draft = with_source_state(start_draft(source, layout.rows(source)))
    name = str(start_manifest.name)
    plan = make_plan(draft, layout.place(draft), command="train", request=request, name=name)
    # A run that starts from a step of another run names the first model, and not that step.
    if start_manifest.kind == "train":
        name = start_manifest.source_name
    plan = replace(
        plan,
        source_name=name,
        small_files=(),
        dropped=(),
        checks=(),
        settings=_item_settings(source, start_manifest),
    )
    # Proves, without reading a tensor, that each byte of the state is written to exactly one place.
    coverage.check(plan, slab_nbytes)
    return plan


def _item_settings(source: Source, start_manifest: Manifest) -> Manifest:
    """Return the settings of the start checkpoint in the manifest of a step."""
    settings = Manifest(
        name=start_manifest.name,
        family=start_manifest.family,
        vocab=start_manifest.vocab,
        layout=start_manifest.layout,
        mesh=start_manifest.mesh,
        rules=start_manifest.rules,
        scan=start_manifest.scan,
        scan_axis=start_manifest.scan_axis,
        prefixed=source.names.is_prefixed,
        tied=start_manifest.tied,
    )
    if start_manifest.is_adapter:
        settings |= Manifest(lora=start_manifest.lora)
    elif start_manifest.towers is not None:
        settings |= Manifest(towers=start_manifest.towers)
    settings |= start_manifest.earlier_drops
    if start_manifest.get("origin"):
        settings |= Manifest(origin=start_manifest["origin"])
    if recorded_storage(start_manifest.storage) == OCDBT_ZARR3:
        settings |= Manifest(storage=OCDBT_ZARR3.name)
    return settings | Manifest(kind="train", config=source.config)


def _source_of_leaves(leaves: Mapping[str, LeafSpec], start_manifest: Manifest) -> Source:
    """Return the leaves as a source. File n of the source is leaf n."""
    # Conversions lay out items too, and need no adapters.
    from prepcli.models.manifest_family import manifest_family

    config = dict(start_manifest.config)
    dtypes = {leaf.dtype for name, leaf in leaves.items() if name.startswith(f"{PARAMS}.")}
    # config.json has room for one dtype. With several, the dtype of the start stays.
    if len(dtypes) == 1:
        (dtype,) = dtypes
        config |= {key: dtype for key in DTYPE_KEYS if key in config}
    # Names of adapters always have a prefix: PEFT's.
    is_prefixed = start_manifest.prefixed or start_manifest.is_adapter
    names = TensorNames(manifest_family(start_manifest | Manifest(config=config)), is_prefixed)
    stored_leaves: dict[str, Array] = {}
    for number, (name, leaf) in enumerate(leaves.items()):
        stored_leaves[name] = whole_array(name, leaf.dtype, leaf.shape, (number, 0))
    # Training has changed the values: the digests that the start's manifest records no longer apply.
    manifest = start_manifest | Manifest(config=config, tensors={}, slots={}, others={})
    tensors, state = tensors_from_manifest(stored_leaves, names, manifest, "the training state")
    return Source(
        str(start_manifest.name),
        Path(),
        names.family,
        config,
        names,
        tensors,
        (),
        (),
        (),
        None,
        state_tensors=state,
    )
