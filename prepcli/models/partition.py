"""The shards of leaves and activations on a mesh, and the chunks of stored leaves. Pure.

In all functions, `dims` are the named axes (atoms) of each dim of a leaf, and `shape` is the shape of the leaf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prepcli.algebra.axis_map import dim_name
from prepcli.algebra.boxes import Box, Range, strides
from prepcli.algebra.grids import loop_sums
from prepcli.core.errors import Command, Key, Option, PrepError, text, usage_error
from prepcli.models.mesh import Mesh, MeshAxes, format_sizes
from prepcli.models.rules import (
    ACTIVATION_PREFIX,
    EXPERT_DIMS,
    STACKED_DIMS,
    VERBATIM_EXPERTS,
    WHOLE,
    AxisChoices,
    DimRules,
    LeafDims,
    LeafRule,
    Rules,
    activation_rules,
    find_leaf_rule,
    format_choices,
    format_rule,
    unsplit_if_indivisible,
)


@dataclass(frozen=True, slots=True)
class Fallback:
    """A dim with another split than the first choice of its rule."""

    dim: str  # Logical name of the dim.
    extent: int  # Its extent.
    requested: MeshAxes  # Mesh axes of the first choice.
    applied: MeshAxes  # Mesh axes that split it. () if it is not split.
    why: str  # The reason.

    def __str__(self) -> str:
        result = f"is split over {' x '.join(self.applied)}" if self.applied else "stays whole"
        return f"{self.dim} {self.extent} {result}, not split over {' x '.join(self.requested)}: {self.why}"


@dataclass(frozen=True, slots=True)
class Spec:
    """The sharding of a leaf."""

    dim_names: tuple[str, ...]  # Logical name of each dim.
    mesh_axes: tuple[MeshAxes, ...]  # Mesh axes, of a size above 1, that split each dim.
    shards_per_dim: tuple[int, ...]  # Number of shards of each dim.
    # Dims that are not split as the first choice of their rule says, with the reason.
    fallbacks: tuple[Fallback, ...] = ()

    def without_axes(self, axes: Collection[int]) -> Spec:
        """Return the sharding of a leaf with extent 1 along `axes`. These dims are not split."""
        if not axes:
            return self
        dim_names = list(self.dim_names)
        mesh_axes = list(self.mesh_axes)
        shards_per_dim = list(self.shards_per_dim)
        for axis in axes:
            dim_names[axis] = ""
            mesh_axes[axis] = ()
            shards_per_dim[axis] = 1
        return Spec(tuple(dim_names), tuple(mesh_axes), tuple(shards_per_dim), self.fallbacks)

    def __str__(self) -> str:
        texts = (
            f"({', '.join(axes)})" if len(axes) > 1 else "".join(axes) or "None"
            for axes in self.mesh_axes
        )
        return f"P({', '.join(texts)})"


@dataclass(frozen=True, slots=True)
class _SplitDim:
    """A dim of an array, and the mesh axes that may split it."""

    name: str
    extent: int
    choices: AxisChoices


# Dim and mesh axes that do not divide it -> hint of the error.
_Hint = Callable[[_SplitDim, MeshAxes], str]


def leaf_spec(
    path: str | None,
    dims: LeafDims,
    shape: Sequence[int],
    *,
    mesh: Mesh,
    rules: Rules,
    checkpoint: str = "CHECKPOINT",
) -> Spec:
    """Return the sharding of a parameter or of its moments.

    State that belongs to no parameter has no path and no rules. `checkpoint` is the checkpoint as the user typed it,
    for the hint of an error, or empty for one that `prep pad-vocab` does not pad.

    Raises:
        UsageError: No choice of a dim's rule divides its extent, or the leaf's rule is for another
            number of dims.
    """
    rule = None if path is None else find_leaf_rule(rules, path)
    if path is not None and rule is not None:
        choices = rule.choices_of_leaf(path, dims)
        hint = partial(_leaf_hint, rule=rule)
    elif path is not None and rules.by_size:
        choices = _split_largest_dims(dims, shape, mesh)
        hint = partial(_param_hint, mesh=mesh, checkpoint=checkpoint)
    else:
        hint = partial(_param_hint, mesh=mesh, checkpoint=checkpoint)
        return _spec_by_dim(_dim_names(dims), shape, mesh, rules=rules.params, hint=hint)
    split_dims = [_SplitDim(*dim) for dim in zip(_dim_names(dims), shape, choices, strict=True)]
    return _assign_axes(split_dims, range(len(dims)), mesh, hint=hint)


def may_split_dims(path: str, dims: LeafDims, *, axes: MeshAxes, rules: Rules) -> list[bool]:
    """Return for each dim of a parameter whether the rules split it over one of some mesh axes on any mesh.

    Raises:
        UsageError: The parameter's rule is for another number of dims.
    """
    names = _dim_names(dims)
    if rule := find_leaf_rule(rules, path):
        choices = rule.choices_of_leaf(path, dims)
    elif rules.by_size:
        return [name not in STACKED_DIMS for name in names]
    else:
        choices = [rules.params.get(name, WHOLE) for name in names]
    is_split: list[bool] = []
    for dim_choices in choices:
        possible_axes = itertools.chain.from_iterable(dim_choices)
        is_split.append(not {*axes}.isdisjoint(possible_axes))
    return is_split


def _split_largest_dims(dims: LeafDims, shape: Sequence[int], mesh: Mesh) -> list[AxisChoices]:
    """Return the choices of each dim: mp splits the largest dim that it divides, fsdp the largest other one.

    Stacked layers and experts are not split, and neither are leaves with a single other dim, such
    as scales. Verbatim experts are split over fsdp if it divides their number: thousands of them in
    parts of a few kilobytes would have more chunks than an index holds.
    """
    choices: list[AxisChoices] = [WHOLE] * len(dims)
    names = _dim_names(dims)
    unstacked = [i for i, name in enumerate(names) if name not in STACKED_DIMS]
    if VERBATIM_EXPERTS in names and len(unstacked) > 1 and mesh.size("fsdp") > 1:
        experts = names.index(VERBATIM_EXPERTS)
        if shape[experts] % mesh.size("fsdp") == 0:
            choices[experts] = (("fsdp",),)
    by_size = sorted(unstacked, key=lambda i: -shape[i])
    # E.g. [4096, 11008] on fsdp 4 and mp 2: mp splits 11008, the largest, and fsdp splits 4096.
    for axis in ("mp", "fsdp") if len(unstacked) > 1 else ():
        divided = (i for i in by_size if choices[i] == WHOLE and shape[i] % mesh.size(axis) == 0)
        if mesh.size(axis) == 1 or ((axis,),) in choices:
            continue
        if (largest := next(divided, None)) is not None:
            choices[largest] = ((axis,),)
    return choices


def activation_spec(shape: Sequence[int], dims: Sequence[str], mesh: Mesh, rules: Rules) -> Spec:
    """Return the sharding of an activation, given the logical dim of each axis.

    Raises:
        UsageError: No choice of a dim's rule divides its extent.
    """
    return _spec_by_dim(
        dims, shape, mesh, rules=activation_rules(rules), hint=partial(_activation_hint, mesh=mesh)
    )


def num_batch_shards(mesh: Mesh | None, rules: Rules) -> int:
    """Return the number of shards of a batch along its rows."""
    if mesh:
        return _num_shards(mesh, activation_rules(rules)["batch"][0])
    return 1


def num_sequence_shards(mesh: Mesh | None, rules: Rules) -> int:
    """Return the number of shards of a sequence along its tokens, or 1 if the rules do not split it over sp."""
    axes = activation_rules(rules)["seq"][0]
    if mesh and "sp" in axes:
        return _num_shards(mesh, axes)
    return 1


def computed_spec(
    dims: LeafDims, shape: Sequence[int], *, stored: Spec, mesh: Mesh, rules: Rules
) -> Spec:
    """Return the sharding that the computation gives a parameter.

    Activations are split by the rules of dims, and XLA multiplies them with weights that are split
    alike. A parameter whose own rule (`stored`) splits a dim over other mesh axes is therefore
    resharded by the rules of its dims.
    """
    by_dim = partition_spec(dims, shape, mesh, unsplit_if_indivisible(rules.params))
    # The stored split is kept if each dim is split over a subset of the axes of its rule.
    is_part = all(
        {*axes} <= {*dim_axes} for axes, dim_axes in zip(stored.mesh_axes, by_dim.mesh_axes)
    )
    if is_part:
        return stored
    return by_dim


def vocab_multiple(leaves: Mapping[str, LeafDims], mesh: Mesh | None, rules: Rules) -> int:
    """Return the multiple of rows to which a vocabulary has to be padded for a mesh.

    `leaves` has the dims of each parameter, by dotted path. The first choice of each vocabulary dim counts.
    """
    if mesh is None:
        return 1
    counts: list[int] = []
    for path, dims in leaves.items():
        rule = find_leaf_rule(rules, path)
        choices = rule.choices_of_leaf(path, dims) if rule else [rules.params["vocab"]] * len(dims)
        counts += [
            _num_shards(mesh, dim[0])
            for name, dim in zip(_dim_names(dims), choices)
            if name == "vocab"
        ]
    # Embedding and head may be split over different axes, and one padded size has to suit both: 4 and 6
    # shards need a multiple of 12.
    return math.lcm(*counts)


def partition_spec(
    dims: LeafDims,
    shape: Sequence[int],
    mesh: Mesh,
    rules: DimRules,
    checkpoint: str = "CHECKPOINT",
) -> Spec:
    """Return the sharding of a leaf by its logical dims.

    A mesh axis splits at most one dim of a leaf: the dim whose rule comes first. Matrices with the
    same dims in another order, such as q and o, are therefore split alike. Dims without a rule are
    not split. `checkpoint` is the checkpoint as the user typed it, for the hint of an error.

    Raises:
        UsageError: No choice of a dim's rule divides its extent.
    """
    hint = partial(_param_hint, mesh=mesh, checkpoint=checkpoint)
    return _spec_by_dim(_dim_names(dims), shape, mesh, rules=rules, hint=hint)


def _spec_by_dim(
    names: Sequence[str], shape: Sequence[int], mesh: Mesh, *, rules: DimRules, hint: _Hint
) -> Spec:
    """Assign mesh axes to the dims of an array in the order of the rules."""
    positions = {name: i for i, name in enumerate(rules)}
    # Rules are in order of priority. The order of the dims in the leaf does not matter, so that q
    # [heads, head_dim, embed] and o [embed, heads, head_dim] get the same axes. Dims without a rule
    # come last.
    ranks = [positions.get(name, len(positions)) for name in names]
    order = sorted(range(len(names)), key=ranks.__getitem__)
    dims = [
        _SplitDim(name, extent, rules.get(name, WHOLE))
        for name, extent in zip(names, shape, strict=True)
    ]
    return _assign_axes(dims, order, mesh, hint=hint)


def _assign_axes(
    dims: Sequence[_SplitDim], order: Iterable[int], mesh: Mesh, *, hint: _Hint
) -> Spec:
    """Assign mesh axes to the dims of an array in a given order of dim indices."""
    # Mesh axis -> the dim that it splits.
    used: dict[str, str] = {}
    chosen: dict[int, tuple[MeshAxes, Fallback | None]] = {}
    for i in order:
        chosen[i] = _choose_axes(dims[i], mesh, used, hint=hint)
        used |= dict.fromkeys(chosen[i][0], dims[i].name)
    mesh_axes = tuple(chosen[i][0] for i in range(len(dims)))
    return Spec(
        dim_names=tuple(dim.name for dim in dims),
        mesh_axes=mesh_axes,
        shards_per_dim=tuple(_num_shards(mesh, axes) for axes in mesh_axes),
        fallbacks=tuple(fallback for _, fallback in chosen.values() if fallback),
    )


def _choose_axes(
    dim: _SplitDim, mesh: Mesh, used: Mapping[str, str], *, hint: _Hint
) -> tuple[MeshAxes, Fallback | None]:
    """Return the axes that split a dim, and the fallback if they are not the rule's first choice.

    They are the first choice that divides the extent, without axes that split other dims. A choice
    is skipped if all its axes are used.
    """
    reasons: list[str] = []
    undivided: MeshAxes = ()
    for choice in dim.choices:
        wanted = tuple(axis for axis in choice if mesh.size(axis) > 1)
        free = tuple(axis for axis in wanted if axis not in used)
        reasons += [f"{axis} splits {used[axis]}" for axis in wanted if axis in used]
        remainder = dim.extent % _num_shards(mesh, free)
        # `not wanted`: all axes of the choice have size 1, or the choice is (), so it splits
        # nothing.
        if not remainder and (free or not wanted):
            return free, Fallback(
                dim.name, dim.extent, dim.choices[0], free, reasons[0]
            ) if reasons else None
        if remainder:
            reasons.append(f"{dim.extent} mod {_num_shards(mesh, free)} = {remainder}")
            undivided = undivided or free
    # An extent that no choice divides is an error. A dim that only lost its axes to other dims is
    # not.
    if undivided:
        raise _indivisible_error(dim, undivided, mesh, hint(dim, undivided))
    return (), Fallback(dim.name, dim.extent, dim.choices[0], (), reasons[0])


def _dim_names(dims: LeafDims) -> tuple[str, ...]:
    return tuple(map(dim_name, dims))


def _num_shards(mesh: Mesh, axes: MeshAxes) -> int:
    return math.prod(map(mesh.size, axes))


def _indivisible_error(dim: _SplitDim, axes: MeshAxes, mesh: Mesh, hint: str) -> PrepError:
    parts = _num_shards(mesh, axes)
    name = "vocabulary" if dim.name == "vocab" else dim.name
    what = f"{name} {dim.extent} cannot be split over {format_sizes(mesh, axes)}"
    return usage_error(what, f"{dim.extent} mod {parts} = {dim.extent % parts}", hint)


def _param_hint(dim: _SplitDim, axes: MeshAxes, *, mesh: Mesh, checkpoint: str) -> str:
    """Return how to avoid an uneven split of a parameter's dim."""
    if dim.name == "vocab":
        parts = _num_shards(mesh, axes)
        # Round up to a multiple, e.g. 50257 rows in 4 parts -> 50260.
        padded = -(-dim.extent // parts) * parts
        if not checkpoint:
            option = Option("pad_vocab", "auto")
            rule = format_rule(dim.name, (axes, ()))
            return text(
                "{} of {}, or {}", option, Command("save-init"), _whole_hint(dim, rule, "it")
            )
        command = Command("pad-vocab", checkpoint, Option("multiple", parts))
        return text("{} (to {}), or {}", command, padded, Option("pad_vocab", "auto"))
    rule = format_rule(dim.name, (axes, ()))
    return _whole_hint(dim, rule, dim.name)


def _activation_hint(dim: _SplitDim, axes: MeshAxes, *, mesh: Mesh) -> str:
    """Return how to avoid an uneven split of an activation's dim."""
    if dim.name == "batch":
        return f"a batch size that is a multiple of {_num_shards(mesh, axes)}"
    rule = f"{ACTIVATION_PREFIX}{format_rule(dim.name, (axes, ()))}"
    return _whole_hint(dim, rule, f"{dim.name} of activations")


def _whole_hint(dim: _SplitDim, rule: str, name: str) -> str:
    """Return the hint for another mesh, or for a rule that keeps the dim whole."""
    return text(
        "a mesh that divides {}, or {} (in recipes {}) to keep {} whole",
        dim.extent,
        Option("rules", rule),
        Key("rules"),
        name,
    )


def _leaf_hint(dim: _SplitDim, axes: MeshAxes, *, rule: LeafRule) -> str:
    choices = format_choices((axes, ()))
    return f"a mesh that divides {dim.extent}, or `{choices}` for {dim.name} in `{rule}`"


def shard_shape(spec: Spec, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one shard of a leaf."""
    return tuple(extent // parts for extent, parts in zip(shape, spec.shards_per_dim, strict=True))


def device_boxes(spec: Spec, mesh: Mesh, shape: Sequence[int]) -> list[Box]:
    """Return the box of a leaf that each device holds, in device order."""
    if not shape:
        return [()] * mesh.n_devices
    ranges_per_dim: list[list[Range]] = []
    for axes, extent in zip(spec.mesh_axes, shard_shape(spec, shape)):
        # The number of a shard has the mesh axes of the dim as digits, major first: fsdp 1 of 4 and mp 2 of 8 is
        # 1 * 8 + 2 = 10.
        steps = dict(zip(axes, strides([mesh.size(axis) for axis in axes])))
        # Devices are in row-major order of the mesh.
        shards = loop_sums([(mesh.size(axis), steps.get(axis, 0)) for axis in mesh.names], 0)
        ranges_per_dim.append([(shard * extent, (shard + 1) * extent) for shard in shards])
    return list(zip(*ranges_per_dim))


def num_replicas(spec: Spec, mesh: Mesh) -> int:
    """Return the number of devices that hold each shard of a leaf."""
    return mesh.n_devices // math.prod(spec.shards_per_dim)


# The shapes of the chunks of stored leaves, and the bytes that each host of a mesh reads of them.


@dataclass(frozen=True, slots=True)
class HostReads:
    """Bytes of a leaf for one host."""

    needed_bytes: int  # Bytes of the distinct shards of its devices.
    read_bytes: int  # Bytes of the chunks with elements of these shards.


def reads_per_host(
    shape: Sequence[int],
    chunk: Sequence[int],
    *,
    itemsize: int,
    spec: Spec,
    mesh: Mesh,
    devices_per_host: int,
) -> list[HostReads]:
    """Return the bytes of a leaf that each host needs and reads, in the order of the devices.

    Consecutive devices share a host. Chunks at the edge of the leaf have their full size. The time grows with the
    number of devices, not with the number of chunks.
    """
    boxes = device_boxes(spec, mesh, shape)
    box_bytes = math.prod(shard_shape(spec, shape)) * itemsize
    chunk_bytes = math.prod(chunk) * itemsize
    reads = []
    for first in range(0, len(boxes), devices_per_host):
        host_boxes = set(boxes[first : first + devices_per_host])
        # Two shards may need the same chunk. The union counts it once per host.
        chunk_boxes: set[Box] = set()
        for box in host_boxes:
            # E.g. [3, 9) with chunks of 4 overlaps the chunks [0, 3).
            edges = zip(box, chunk)
            chunk_boxes.add(tuple((low // n, -(-high // n)) for (low, high), n in edges))
        reads.append(
            HostReads(len(host_boxes) * box_bytes, _union_volume(chunk_boxes) * chunk_bytes)
        )
    return reads


def _union_volume(boxes: Collection[Box]) -> int:
    """Return the number of grid cells in the union of the boxes."""
    # All edges of the boxes cut each axis into intervals. A box covers whole cells of this irregular
    # grid, e.g. [0, 4) and [2, 6) have the edges 0, 2, 4, 6 and cover cells {0, 1} and {1, 2}.
    edges = [sorted(set(itertools.chain.from_iterable(column))) for column in zip(*boxes)]
    edge_indices = [dict(zip(line, itertools.count())) for line in edges]
    covered: set[tuple[int, ...]] = set()
    for box in boxes:
        ranges = (
            range(indices[low], indices[high]) for indices, (low, high) in zip(edge_indices, box)
        )
        covered.update(itertools.product(*ranges))
    volume = 0
    for cell in covered:
        volume += math.prod(line[i + 1] - line[i] for line, i in zip(edges, cell))
    return volume


def read_amplification(leaves: Iterable[Sequence[HostReads]]) -> float:
    """Return the bytes read per byte needed, over all leaves, of the host with the highest ratio."""
    # `leaves` has one entry per leaf with one item per host. `zip` groups the items by host.
    ratios: list[float] = []
    for host in zip(*leaves, strict=True):
        read_bytes = sum(reads.read_bytes for reads in host)
        ratios.append(read_bytes / sum(reads.needed_bytes for reads in host))
    return max(ratios)


# Largest chunk of a leaf that is written without a mesh.
UNSHARDED_CHUNK_BYTES = 4 << 20
# Leaves below this size per layer have one chunk per layer even on a mesh, e.g. norms and biases.
MIN_SPLIT_NBYTES = 1 << 20


def chunk_shape(
    dims: LeafDims,
    shape: Sequence[int],
    *,
    spec: Spec | None,
    itemsize: int,
    min_split_bytes: int = MIN_SPLIT_NBYTES,
    stacked_dims: Collection[str] = STACKED_DIMS,
) -> tuple[int, ...]:
    """Return the chunk shape of a stored leaf. It divides the shape of the leaf.

    With a mesh (`spec`) a chunk is a shard, so that each host reads only its own bytes. Without a mesh it is
    a run of consecutive elements of at most UNSHARDED_CHUNK_BYTES. A leaf below `min_split_bytes` per layer is not
    split. Chunks have extent 1 along `stacked_dims`, the logical dims with one source tensor per index.
    """
    one_layer = tuple(
        1 if {*dim[:1]} & {*stacked_dims} else extent
        for dim, extent in zip(dims, shape, strict=True)
    )
    if spec is None:
        return _contiguous_chunk(one_layer, UNSHARDED_CHUNK_BYTES // itemsize)
    if math.prod(one_layer) * itemsize < min_split_bytes:
        return one_layer
    return tuple(map(min, one_layer, shard_shape(spec, shape)))


def join_experts(
    chunk: Sequence[int],
    dims: LeafDims,
    shape: Sequence[int],
    *,
    spec: Spec | None,
    itemsize: int,
) -> tuple[int, ...]:
    """Return the result of `chunk_shape` with several experts, of at most UNSHARDED_CHUNK_BYTES.

    The experts of a chunk are in one shard.

    >>> dims = [("layers",), ("experts",), ("embed",)]
    >>> join_experts((1, 1, 1 << 18), dims, (2, 12, 1 << 18), spec=None, itemsize=4)
    (1, 4, 262144)
    """
    joined = [*chunk]
    for axis, dim in enumerate(dims):
        if {*dim[:1]}.isdisjoint(EXPERT_DIMS):
            continue
        extent = shape[axis]
        if spec is not None:
            extent //= spec.shards_per_dim[axis]
        nbytes = math.prod(joined) * itemsize
        joined[axis] *= _largest_divisor(extent // chunk[axis], UNSHARDED_CHUNK_BYTES // nbytes)
    return tuple(joined)


def _contiguous_chunk(shape: Sequence[int], n_elements: int) -> tuple[int, ...]:
    """Return the largest chunk of consecutive elements: whole inner dims, a divisor of the next dim, then ones."""
    chunk: list[int] = []
    remaining = n_elements
    for extent in reversed(shape):
        length = _largest_divisor(extent, remaining)
        chunk.append(length)
        # Once a dim is cut, outer dims have extent 1. Otherwise the elements are not consecutive.
        remaining = remaining // length if length == extent else 1
    return tuple(reversed(chunk))


def _largest_divisor(extent: int, limit: int) -> int:
    """Return the largest divisor of `extent` up to `limit`."""
    small_divisors = [i for i in range(1, math.isqrt(extent) + 1) if extent % i == 0]
    # Each divisor up to the square root has a partner above it, e.g. 3 and 4 for 12.
    divisors = [*small_divisors, *(extent // i for i in small_divisors)]
    return max(divisor for divisor in divisors if divisor <= max(limit, 1))
