"""Device meshes as text, sharding rules, and the shard of a leaf that each device holds. No I/O, no jax."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer.models.errors import PrepError, usage_error

MESH_AXES = ("dp", "fsdp", "mp", "sp")
MAX_DEVICES = 1 << 20  # above the size of any machine; rejects typing errors early
UNSHARDED_CHUNK_BYTES = 4 << 20  # largest chunk of a leaf that is written without a mesh

MeshAxes = tuple[str, ...]
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
RESIDUAL_SEQ_CHOICES: AxisChoices = (("sp", "mp"), ())  # of the sequence dim of the residual stream


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of devices, numbered row-major over its axes. `parse_mesh` makes it.

    Attributes:
        names: Axes, outermost first.
        sizes: Size of each axis. One size may be -1, all remaining devices, until `resolve_mesh`.
        plain_order: Whether the devices are in the order of the runtime instead of placed by topology.
    """

    names: MeshAxes
    sizes: tuple[int, ...]
    plain_order: bool = False

    def __str__(self) -> str:
        named = zip(self.names, self.sizes)
        texts = (str(size) if self.names == MESH_AXES[:3] else f"{name}:{size}" for name, size in named)
        return "!" * self.plain_order + ",".join(texts)

    def size(self, axis: str) -> int:
        """Return the size of an axis: 1 if the mesh lacks it; raise PrepError (usage) if it is still -1."""
        size = dict(zip(self.names, self.sizes)).get(axis, 1)
        if size == -1:
            what = f"mesh {self} has no size for {axis}"
            raise usage_error(what, "the number of devices is not known here", f"give {axis} a number")
        return size

    @property
    def n_devices(self) -> int:
        """Number of devices. Raises PrepError (usage) if an axis is still -1."""
        return math.prod(map(self.size, self.names))


def parse_mesh(text: str, origin: str = "--mesh") -> Mesh:
    """Parse `1,64,4` (dp,fsdp,mp) or named axes such as `dp:1,fsdp:-1,mp:4,sp:2`.

    Axes of size 1 do not affect the device order, so they are moved to their usual place (and sp is removed). All
    spellings of a mesh therefore give equal objects.

    Args:
        text: Sizes, in the order of the devices (outermost axis first). A leading `!` selects the plain order.
        origin: Option or recipe key of the text, for the error.

    Returns:
        The mesh.

    Raises:
        PrepError: The text is not a valid mesh (usage).
    """
    body = text.strip()
    entries = [entry.strip() for entry in body.removeprefix("!").split(",")]
    option = f"`{origin} {_truncate(text)}`"
    if entries == [""]:
        raise usage_error(f"`{origin}` is empty", "it takes dp,fsdp,mp, or names", f"`{origin} 1,64,4`")
    sizes = _parse_named(entries, option) if ":" in body else _parse_positional(entries, option)
    _check_sizes(sizes, option)
    return _normalize_mesh(sizes, body.startswith("!"))


def resolve_mesh(mesh: Mesh, n_devices: int, hardware: str = "") -> Mesh:
    """Replace the -1 of a mesh by the number of remaining devices.

    Args:
        mesh: The mesh.
        n_devices: Number of devices.
        hardware: Description of the devices (`1 host with 8 × H100`), for the error.

    Returns:
        A mesh of `n_devices` devices.

    Raises:
        PrepError: The sizes do not match the number of devices (usage).
    """
    known_devices = math.prod(size for size in mesh.sizes if size != -1)
    hint = f"`--set mesh=1,{n_devices},1`"
    is_open = -1 in mesh.sizes
    if n_devices < known_devices or n_devices % known_devices or (not is_open and n_devices != known_devices):
        needs = f"a multiple of {known_devices} devices" if is_open else f"{known_devices} devices"
        known_axes = [axis for axis, size in zip(mesh.names, mesh.sizes) if size != -1]
        arithmetic = f"{_format_sizes(mesh, known_axes)} = {known_devices}"
        raise usage_error(f"mesh {mesh} needs {needs}, there are {n_devices}", hardware or arithmetic, hint)
    sizes = (n_devices // known_devices if size == -1 else size for size in mesh.sizes)
    return _normalize_mesh(dict(zip(mesh.names, sizes)), mesh.plain_order)


def folder_suffix(mesh: Mesh) -> str:
    """Return the mesh for the name of an output folder: `1x64x4`, `1x64x4-sp2`, or, in another order, `dp1-mp4-fsdp64`.

    Different meshes have different suffixes.
    """
    parts = [f"{name}{mesh.size(name)}" for name in mesh.names]
    if mesh.names[:3] == MESH_AXES[:3]:
        parts[:3] = ["x".join(map(str, mesh.sizes[:3]))]
    return "-".join(parts + ["plain"] * mesh.plain_order)


def _parse_positional(entries: list[str], option: str) -> dict[str, int]:
    if len(entries) == 3:
        return {axis: _parse_axis_size(axis, entry, option) for axis, entry in zip(MESH_AXES, entries)}
    template = {1: "1,{},1", 2: "{},{},1", 4: "dp:{},fsdp:{},mp:{},sp:{}"}.get(len(entries))
    are_sizes = all(re.fullmatch(r"-1|[1-9][0-9]{0,6}", entry) for entry in entries) and entries.count("-1") < 2
    hint = f"did you mean `{template.format(*entries)}`?" if template and are_sizes else "three sizes, as in `1,64,4`"
    count = "1 axis" if len(entries) == 1 else f"{len(entries)} axes"
    raise usage_error(f"{option} has {count}", "it takes dp,fsdp,mp, or names: `fsdp:64,mp:4,sp:2`", hint)


def _parse_named(entries: list[str], option: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for entry in entries:
        axis, colon, number = (part.strip() for part in entry.partition(":"))
        if not colon:
            raise usage_error(
                f"{option} mixes names and bare numbers", f"`{_truncate(entry)}` has no name", "name every axis"
            )
        _check_axis_name(axis, option)
        if axis in sizes:
            raise usage_error(
                f"{option} names {axis} twice", f"{sizes[axis]} and {_truncate(number)}", "each axis at most once"
            )
        sizes[axis] = _parse_axis_size(axis, number, option)
    return sizes


def _parse_axis_size(axis: str, text: str, option: str) -> int:
    if text == "-1":
        return -1
    number = re.fullmatch(r"0*([1-9][0-9]*)", text)
    if not number:
        why = "a size is a number of devices, or -1 for all remaining devices"
        raise usage_error(
            f"{option}: {axis} is `{_truncate(text)}`", why, f"{axis} 1 if nothing is to be split over it"
        )
    if len(number[1]) > 7:
        raise usage_error(f"{option}: {axis} is {_truncate(number[1])}", f"a mesh has at most {MAX_DEVICES:,} devices")
    return int(number[1])


def _check_sizes(sizes: Mapping[str, int], option: str) -> None:
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        why = f"{' and '.join(open_axes)} cannot all take the remaining devices"
        raise usage_error(f"{option} has {len(open_axes)} axes of -1", why, "-1 at most once")
    if (n_devices := abs(math.prod(sizes.values()))) > MAX_DEVICES:
        raise usage_error(f"{option} has {n_devices:,} devices", f"a mesh has at most {MAX_DEVICES:,}")


def _normalize_mesh(sizes: Mapping[str, int], plain_order: bool) -> Mesh:
    names = [axis for axis, size in sizes.items() if size != 1]
    for i, axis in enumerate(MESH_AXES[:3]):
        if axis not in names:
            later = (names.index(later_axis) for later_axis in MESH_AXES[i + 1 :] if later_axis in names)
            names.insert(min(later, default=len(names)), axis)
    return Mesh(tuple(names), tuple(sizes.get(axis, 1) for axis in names), plain_order)


def _check_axis_name(axis: str, option: str) -> None:
    standard_names = {"tp": "mp", "tensor": "mp", "model": "mp", "data": "dp", "cp": "sp", "context": "sp", "seq": "sp"}
    if axis not in MESH_AXES:
        hint = f"did you mean `{standard_names[axis]}`?" if axis in standard_names else _did_you_mean(axis, MESH_AXES)
        raise usage_error(
            f"{option}: unknown mesh axis `{_truncate(axis)}`", f"the axes are {', '.join(MESH_AXES)}", hint
        )


def _did_you_mean(word: str, candidates: Iterable[str]) -> str:
    matches = difflib.get_close_matches(word[:60], candidates, n=1)
    return f"did you mean `{matches[0]}`?" if matches else ""


def _truncate(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_rule(text: str, dims: Collection[str] = tuple(DEFAULT_RULES)) -> tuple[str, AxisChoices]:
    """Parse a sharding rule: `embed=fsdp+sp`, or `kv_heads=mp|none` with several choices.

    Args:
        text: The rule.
        dims: Known logical dims.

    Returns:
        The logical dim and its choices of mesh axes.

    Raises:
        PrepError: The text is not a valid rule (usage).
    """
    option = f"`--rule {_truncate(text)}`"
    dim, equals, right = (part.strip() for part in text.partition("="))
    if not equals or not right:
        raise usage_error(f"{option} is invalid", "a rule is DIM=AXIS[+AXIS][|…|none]", "`--rule 'kv_heads=mp|none'`")
    if dim not in dims:
        raise usage_error(
            f"{option}: unknown dim `{_truncate(dim)}`", f"the dims are {', '.join(dims)}", _did_you_mean(dim, dims)
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
        _check_axis_name(axis, option)
    if len(set(axes)) < len(axes):
        raise usage_error(f"{option} names an axis twice", f"`{_truncate(text)}`", "each axis at most once")
    return axes


def format_rule(dim: str, choices: AxisChoices) -> str:
    """Return a rule in the notation of `parse_rule`."""
    return f"{dim}={'|'.join('+'.join(axes) or 'none' for axes in choices)}"


def merge_rules(texts: Iterable[str], rules: Rules = DEFAULT_RULES) -> Rules:
    """Return `rules` with the `--rule` options in place of the rules for the same dims.

    Raises:
        PrepError: A rule is invalid, or two rules are for the same dim (usage).
    """
    overrides: dict[str, AxisChoices] = {}
    for dim, choices in (parse_rule(text, rules) for text in texts):
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
        PrepError: No choice of a dim's rule divides its extent (usage).
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


def _format_sizes(mesh: Mesh, axes: Collection[str]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in zip(mesh.names, mesh.sizes) if axis in axes)


def _indivisible_error(name: str, extent: int, axes: MeshAxes, mesh: Mesh, checkpoint: str) -> PrepError:
    parts = _num_shards(mesh, axes)
    shown_name = "vocabulary" if name == "vocab" else name
    what = f"{shown_name} {extent} cannot be split over {_format_sizes(mesh, axes)}"
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
        PrepError: The mesh does not divide the leaf (usage).
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
