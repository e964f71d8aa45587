"""The shards of leaves and activations on a mesh. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prepcli.algebra.axis_map import dim_name
from prepcli.algebra.boxes import Box
from prepcli.core.errors import Command, Key, Option, PrepError, text, usage_error
from prepcli.models.mesh import Mesh, MeshAxes, format_sizes
from prepcli.models.rules import (
    ACTIVATION_PREFIX,
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
    """A dim with another split than the first choice of its rule.

    Attributes:
        dim: Logical name of the dim.
        extent: Its extent.
        requested: Mesh axes of the first choice.
        applied: Mesh axes that split it. () if it is not split.
        why: The reason.
    """

    dim: str
    extent: int
    requested: MeshAxes
    applied: MeshAxes
    why: str

    def __str__(self) -> str:
        result = f"is split over {' x '.join(self.applied)}" if self.applied else "stays whole"
        return f"{self.dim} {self.extent} {result}, not split over {' x '.join(self.requested)}: {self.why}"


@dataclass(frozen=True, slots=True)
class Spec:
    """The sharding of a leaf.

    Attributes:
        dim_names: Logical name of each dim.
        mesh_axes: Mesh axes, of a size above 1, that split each dim.
        shards_per_dim: Number of shards of each dim.
        fallbacks: Dims that are not split as the first choice of their rule says, with the reason.
    """

    dim_names: tuple[str, ...]
    mesh_axes: tuple[MeshAxes, ...]
    shards_per_dim: tuple[int, ...]
    fallbacks: tuple[Fallback, ...] = ()

    def without_axes(self, axes: Collection[int]) -> Spec:
        """Return the sharding of a leaf with extent 1 along `axes`. These dims are not split."""
        if not axes:
            return self
        is_kept = [axis not in axes for axis in range(len(self.dim_names))]
        return Spec(
            tuple(name if kept else "" for name, kept in zip(self.dim_names, is_kept)),
            tuple(names if kept else () for names, kept in zip(self.mesh_axes, is_kept)),
            tuple(shards if kept else 1 for shards, kept in zip(self.shards_per_dim, is_kept)),
            self.fallbacks,
        )

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

    Args:
        path: Dotted path of the parameter, or None for state that belongs to no parameter. Its
            dims have no rules.
        dims: Named axes (atoms) of each dim of the leaf.
        shape: Shape of the leaf.
        mesh: Device mesh.
        rules: Partition rules.
        checkpoint: The checkpoint as the user typed it, for the hint of an error. Empty for one that
            `prep pad-vocab` does not pad.

    Returns:
        The sharding.

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

    Args:
        path: Dotted path of the parameter.
        dims: Named axes (atoms) of each dim.
        axes: The mesh axes.
        rules: Partition rules.

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
    alike. A parameter whose own rule splits a dim over other mesh axes is therefore resharded by
    the rules of its dims.

    Args:
        dims: Named axes (atoms) of each dim of the parameter.
        shape: Shape of the parameter.
        stored: The sharding of the parameter by its own rule.
        mesh: Device mesh.
        rules: Partition rules.
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

    Args:
        leaves: Dims of each parameter, by dotted path.
        mesh: Device mesh, or None.
        rules: Partition rules. The first choice of each vocabulary dim counts.
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
    not split.

    Args:
        dims: Named axes (atoms) of each dim of the leaf.
        shape: Shape of the leaf.
        mesh: Device mesh.
        rules: Logical dim -> choices of mesh axes.
        checkpoint: The checkpoint as the user typed it, for the hint of an error.

    Returns:
        The sharding.

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


def device_box(spec: Spec, mesh: Mesh, device: int, shape: Sequence[int]) -> Box:
    """Return the box of a leaf that a device of the mesh holds. Raise IndexError if there is no such device."""
    if not 0 <= device < mesh.n_devices:
        raise IndexError(f"device {device} of {mesh.n_devices}")
    # Devices are in row-major order of the mesh.
    coordinates: dict[str, int] = {}
    for axis, size in zip(reversed(mesh.names), reversed(mesh.sizes)):
        device, coordinates[axis] = divmod(device, size)
    box = []
    for axes, extent in zip(spec.mesh_axes, shard_shape(spec, shape)):
        shard = 0
        # Mixed-radix number of the axes, major first: fsdp 1 of 4 and mp 2 of 8 -> 1 * 8 + 2 = 10.
        for axis in axes:
            shard = shard * mesh.size(axis) + coordinates[axis]
        box.append((shard * extent, (shard + 1) * extent))
    return tuple(box)


def device_boxes(spec: Spec, mesh: Mesh, shape: Sequence[int]) -> list[Box]:
    """Return the box of a leaf that each device holds, in device order."""
    return [device_box(spec, mesh, device, shape) for device in range(mesh.n_devices)]


def num_replicas(spec: Spec, mesh: Mesh) -> int:
    """Return the number of devices that hold each shard of a leaf."""
    return mesh.n_devices // math.prod(spec.shards_per_dim)
