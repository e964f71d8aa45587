"""Partition rules, and the shards and chunks of leaves on a mesh. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer.models.errors import PrepError, usage_error
from trainer.models.mesh import Mesh, MeshAxes, check_axis_name, format_sizes, truncate
from trainer.models.suggest import did_you_mean

UNSHARDED_CHUNK_BYTES = 4 << 20  # largest chunk of a leaf that is written without a mesh


AxisChoices = tuple[MeshAxes, ...]  # mesh axes to try in order; () keeps the dim whole


# Logical dim -> choices. If two dims of a leaf want the same mesh axis, the dim with the earlier rule gets it.
Rules = Mapping[str, AxisChoices]


Box = tuple[tuple[int, int], ...]  # range of indices in each dim


LeafDims = Sequence[tuple[str, ...]]  # the atoms of each dim of a leaf; the first atom is the logical name of the dim


# The usual sharding of LLaMA: heads, mlp and vocab over mp, the other dim of each matrix over fsdp. Two decisions:
# - k and v are not split if their heads do not divide mp. Models with grouped-query attention have 8 or fewer, padding
#   of heads is not exact in general, and k and v are about 2 % of the parameters.
# - experts are not split, mp splits each expert: every routing then loads all devices equally, without all-to-all.
DEFAULT_RULES: Rules = {
    "vocab": (("mp",),),
    "experts": ((),),
    "heads": (("mp",),),
    "kv_heads": (("mp",), ()),
    "mlp": (("mp",),),
    "embed": (("fsdp",),),
    "word_embed": (("fsdp",), ()),  # embeddings narrower than the layers; not split in a leaf where `embed` is
    "layers": ((),),  # each step of a scan would gather a split stack
    "encoder_layers": ((),),
    "head_dim": ((),),
    "positions": ((),),
    "buckets": ((),),
    "norm": ((),),
}


# Mesh axes of activations by logical dim. sp splits the tokens of a row everywhere; attention passes keys and values
# from device to device. The residual stream between layers is split over mp along tokens as well, where attention and
# MLP are split along heads and hidden units: at long contexts most memory holds saved layer inputs.
ACTIVATION_RULES: Rules = {
    "batch": (("dp", "fsdp"),),
    "residual_seq": (("sp", "mp"), ("sp",)),
    "seq": (("sp",),),
    "embed": ((),),
}


def activation_rules(rules: Rules) -> Rules:
    """Return the rules of activations; the batch comes first, so that other dims never take its mesh axes.

    Args:
        rules: Rules of parameters, for dims that activations share with them, such as heads.
    """
    return {**ACTIVATION_RULES, **{dim: choices for dim, choices in rules.items() if dim not in ACTIVATION_RULES}}


def parse_rule(
    text: str, dims: Collection[str] = tuple(DEFAULT_RULES), *, origin: str = "--rule"
) -> tuple[str, AxisChoices]:
    """Parse a sharding rule: `embed=fsdp+sp`, or `kv_heads=mp|none` with several choices.

    Args:
        text: The rule.
        dims: Known logical dims.
        origin: Option or recipe key of the text, for the error.

    Returns:
        The logical dim and its choices of mesh axes.

    Raises:
        UsageError: The text is not a valid rule.
    """
    option = f"`{origin} {truncate(text)}`"
    dim, equals, right = (part.strip() for part in text.partition("="))
    if not equals or not right:
        example = f"{origin} 'kv_heads=mp|none'" if origin.startswith("-") else f'{origin} = ["kv_heads=mp|none"]'
        raise usage_error(f"{option} is invalid", "a rule is DIM=AXIS[+AXIS][|…|none]", f"`{example}`")
    if dim not in dims:
        raise usage_error(
            f"{option}: unknown dim `{truncate(dim)}`", f"the dims are {', '.join(dims)}", did_you_mean(dim, dims)
        )
    choices = tuple(_parse_choice(part.strip(), option) for part in right.split("|"))
    if () in choices[:-1]:
        why = "none always fits, so later choices are never used"
        raise usage_error(f"{option} has choices after none", why, "put none last")
    return dim, choices


def _parse_choice(text: str, option: str) -> MeshAxes:
    if text == "none":
        return ()
    axes = tuple(axis.strip() for axis in text.split("+"))
    for axis in axes:
        check_axis_name(axis, option)
    if len(set(axes)) < len(axes):
        raise usage_error(f"{option} names an axis twice", f"`{truncate(text)}`", "each axis at most once")
    return axes


def format_rule(dim: str, choices: AxisChoices) -> str:
    """Return a rule in the notation of `parse_rule`."""
    return f"{dim}={'|'.join('+'.join(axes) or 'none' for axes in choices)}"


def merge_rules(texts: Iterable[str], rules: Rules = DEFAULT_RULES, *, origin: str = "--rule") -> Rules:
    """Return rules with others in place of those for the same dims.

    Args:
        texts: Rules in the notation of `parse_rule`.
        rules: The rules for all other dims.
        origin: Option or recipe key of the texts, for the error.

    Raises:
        UsageError: A rule is invalid, or two rules are for the same dim.
    """
    overrides: dict[str, AxisChoices] = {}
    for dim, choices in (parse_rule(text, rules, origin=origin) for text in texts):
        if dim in overrides:
            both = f"`{format_rule(dim, overrides[dim])}` and `{format_rule(dim, choices)}`"
            raise usage_error(f"two rules for {dim}", both, f"join the choices of a rule by |: `{dim}=mp|none`")
        overrides[dim] = choices
    return {**rules, **overrides}


@dataclass(frozen=True, slots=True)
class Fallback:
    """A dim without the split of its rule's first choice.

    Attributes:
        dim: Logical name of the dim.
        extent: Its extent.
        requested: Mesh axes of the first choice.
        applied: Mesh axes that split it; () if it is not split.
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
        fallbacks: Dims without the split of their rule's first choice.
    """

    dim_names: tuple[str, ...]
    mesh_axes: tuple[MeshAxes, ...]
    shards_per_dim: tuple[int, ...]
    fallbacks: tuple[Fallback, ...] = ()

    def __str__(self) -> str:
        texts = (f"({', '.join(axes)})" if len(axes) > 1 else "".join(axes) or "None" for axes in self.mesh_axes)
        return f"P({', '.join(texts)})"


def partition_spec(
    dims: LeafDims, shape: Sequence[int], mesh: Mesh, rules: Rules, checkpoint: str = "CHECKPOINT"
) -> Spec:
    """Return the sharding of a leaf.

    A mesh axis splits at most one dim of a leaf: the dim whose rule comes first. Matrices with the same dims in another
    order, such as q and o, are therefore split alike. Dims without a rule are not split.

    Args:
        dims: Atoms of each dim of the leaf.
        shape: Shape of the leaf.
        mesh: Device mesh.
        rules: Logical dim -> choices of mesh axes.
        checkpoint: The checkpoint as the user typed it, for the hint of an error.

    Returns:
        The sharding.

    Raises:
        UsageError: No choice of a dim's rule divides its extent.
    """
    names = tuple(dim[0] if dim else "" for dim in dims)
    priority = {name: i for i, name in enumerate(rules)}
    used: dict[str, str] = {}  # mesh axis -> the dim that it splits
    chosen: dict[int, tuple[MeshAxes, Fallback | None]] = {}
    for i in sorted(range(len(names)), key=lambda i: priority.get(names[i], len(priority))):
        choices = rules.get(names[i], ((),))
        chosen[i] = _choose_axes(names[i], shape[i], choices, mesh, used, checkpoint)
        used |= dict.fromkeys(chosen[i][0], names[i])
    mesh_axes = tuple(chosen[i][0] for i in range(len(names)))
    return Spec(
        dim_names=names,
        mesh_axes=mesh_axes,
        shards_per_dim=tuple(_num_shards(mesh, axes) for axes in mesh_axes),
        fallbacks=tuple(fallback for _, fallback in chosen.values() if fallback),
    )


def _choose_axes(
    name: str, extent: int, choices: AxisChoices, mesh: Mesh, used: Mapping[str, str], checkpoint: str
) -> tuple[MeshAxes, Fallback | None]:
    """Return the axes that split a dim, and the fallback if they are not the rule's first choice.

    They are the first choice that divides the extent, without axes that split other dims. A choice whose axes are all
    used is skipped.
    """
    reasons: list[str] = []
    undivided: MeshAxes = ()
    for choice in choices:
        wanted = tuple(axis for axis in choice if mesh.size(axis) > 1)
        free = tuple(axis for axis in wanted if axis not in used)
        reasons += [f"{axis} splits {used[axis]}" for axis in wanted if axis in used]
        remainder = extent % _num_shards(mesh, free)
        if not remainder and (free or not wanted):
            return free, Fallback(name, extent, choices[0], free, reasons[0]) if reasons else None
        if remainder:
            reasons.append(f"{extent} mod {_num_shards(mesh, free)} = {remainder}")
            undivided = undivided or free
    if undivided:
        raise _indivisible_error(name, extent, undivided, mesh, checkpoint)
    return (), Fallback(name, extent, choices[0], (), reasons[0])


def _num_shards(mesh: Mesh, axes: MeshAxes) -> int:
    return math.prod(map(mesh.size, axes))


def _indivisible_error(name: str, extent: int, axes: MeshAxes, mesh: Mesh, checkpoint: str) -> PrepError:
    parts = _num_shards(mesh, axes)
    shown_name = "vocabulary" if name == "vocab" else name
    what = f"{shown_name} {extent} cannot be split over {format_sizes(mesh, axes)}"
    hint = f"a mesh that divides {extent}, or `--rule '{format_rule(name, (axes, ()))}'` to keep {name} whole"
    if name == "vocab":
        padded = -(-extent // parts) * parts
        hint = f"`prep pad-vocab {checkpoint} --multiple {parts}` (to {padded}), or `--pad-vocab auto`"
    return usage_error(what, f"{extent} mod {parts} = {extent % parts}", hint)


def shard_shape(spec: Spec, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one shard of a leaf."""
    return tuple(extent // parts for extent, parts in zip(shape, spec.shards_per_dim, strict=True))


def chunk_shape(
    dims: LeafDims,
    shape: Sequence[int],
    *,
    mesh: Mesh | None,
    rules: Rules,
    itemsize: int,
    min_split_bytes: int = 1 << 20,
    stacked_dims: Collection[str] = ("layers", "encoder_layers", "experts"),
) -> tuple[int, ...]:
    """Return the chunk shape of a stored leaf; it divides the shape of the leaf.

    With a mesh a chunk is a shard, so that each host reads only its own bytes. Without a mesh it is a run of
    consecutive elements of at most UNSHARDED_CHUNK_BYTES.

    Args:
        dims: Atoms of each dim of the leaf.
        shape: Shape of the leaf.
        mesh: Device mesh, or None.
        rules: Logical dim -> choices of mesh axes.
        itemsize: Bytes of an element.
        min_split_bytes: Size per layer below which a leaf is not split.
        stacked_dims: Logical dims with one source tensor per index; chunks have extent 1 there.

    Returns:
        The shape of a chunk.

    Raises:
        UsageError: The mesh does not divide the leaf.
    """
    one_layer = tuple(1 if {*dim[:1]} & {*stacked_dims} else extent for dim, extent in zip(dims, shape, strict=True))
    if mesh is None:
        return _contiguous_chunk(one_layer, UNSHARDED_CHUNK_BYTES // itemsize)
    shard = shard_shape(partition_spec(dims, shape, mesh, rules), shape)
    if math.prod(one_layer) * itemsize < min_split_bytes:
        return one_layer
    return tuple(map(min, one_layer, shard))


def _contiguous_chunk(shape: Sequence[int], n_elements: int) -> tuple[int, ...]:
    """Return the largest chunk of consecutive elements: whole inner dims, a divisor of the next dim, then ones."""
    chunk: list[int] = []
    remaining = n_elements
    for extent in reversed(shape):
        length = _largest_divisor(extent, remaining)
        chunk.append(length)
        remaining = remaining // length if length == extent else 1
    return tuple(reversed(chunk))


def _largest_divisor(extent: int, limit: int) -> int:
    small_divisors = [i for i in range(1, math.isqrt(extent) + 1) if extent % i == 0]
    return max(d for i in small_divisors for d in (i, extent // i) if d <= max(limit, 1))


def device_box(spec: Spec, mesh: Mesh, device: int, shape: Sequence[int]) -> Box:
    """Return the box of a leaf that a device of the mesh holds; raise IndexError if there is no such device."""
    if not 0 <= device < mesh.n_devices:
        raise IndexError(f"device {device} of {mesh.n_devices}")
    coordinates = dict(zip(mesh.names, _coordinates(device, mesh.sizes)))
    box = []
    for axes, extent in zip(spec.mesh_axes, shard_shape(spec, shape)):
        shard = 0
        for axis in axes:
            shard = shard * mesh.size(axis) + coordinates[axis]
        box.append((shard * extent, (shard + 1) * extent))
    return tuple(box)


def _coordinates(number: int, sizes: Sequence[int]) -> list[int]:
    """Return the row-major coordinates of a number in a grid."""
    coordinates = []
    for size in reversed(sizes):
        number, coordinate = divmod(number, size)
        coordinates.append(coordinate)
    return coordinates[::-1]


def device_boxes(spec: Spec, mesh: Mesh, shape: Sequence[int]) -> list[Box]:
    """Return the box of a leaf that each device holds, in device order."""
    return [device_box(spec, mesh, device, shape) for device in range(mesh.n_devices)]


def num_replicas(spec: Spec, mesh: Mesh) -> int:
    """Return the number of devices that hold each shard of a leaf."""
    return mesh.n_devices // math.prod(spec.shards_per_dim)
