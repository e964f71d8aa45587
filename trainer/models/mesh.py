"""Device meshes as text, logical dims -> mesh axes, and which box of a leaf a device holds. Pure."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainer.models.errors import PrepError, usage_error

MESH_AXES = ("dp", "fsdp", "mp", "sp")
MAX_DEVICES = 1 << 20  # far above any machine; keeps a typing error from becoming a plan of a billion boxes
UNSHARDED_CHUNK_BYTES = 4 << 20  # the chunk of a leaf that is written for no mesh in particular

MeshAxes = tuple[str, ...]
AxisChoices = tuple[MeshAxes, ...]  # mesh axes to try in order; () keeps the dim whole
Rules = Mapping[
    str, AxisChoices
]  # by logical dim; where two dims of a leaf want one mesh axis, the earlier entry has it
Box = tuple[tuple[int, int], ...]  # a range per dim
LeafDims = Sequence[tuple[str, ...]]  # the atoms of each dim of a leaf; the first one is its logical name

# LLaMA's usual split (heads, mlp and vocabulary over mp, the other side of each matrix over fsdp), and two decisions:
# - k and v stay whole where their heads do not divide: grouped-query models have 8 or fewer, so mp 16 would be out of
#   reach for them, padding heads is not exact in general, and k and v are some 2 % of such a model.
# - experts stay whole and mp splits within each: any routing then loads all devices alike, and no token moves.
DEFAULT_RULES: Rules = {
    "vocab": (("mp",),),
    "experts": ((),),
    "heads": (("mp",),),
    "kv_heads": (("mp",), ()),
    "mlp": (("mp",),),
    "embed": (("fsdp",),),
    "word_embed": (("fsdp",), ()),  # embeddings that are narrower than the layers; beside `embed` it stays whole
    "layers": ((),),  # a split stack would be gathered again at each step of the scan
    "encoder_layers": ((),),
    "head_dim": ((),),
    "positions": ((),),
    "buckets": ((),),
    "norm": ((),),
}
RESIDUAL_SEQ_CHOICES: AxisChoices = (
    ("sp", "mp"),
    (),
)  # of the residual stream's tokens, see `sharding.ACTIVATION_RULES`


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of devices, numbered row-major over its axes (outermost first). Made by `parse`.

    One size may be -1, what is left of the devices, until `resolve`. `plain_order` takes the devices as the runtime
    lists them, where otherwise they are placed by topology.
    """

    names: MeshAxes
    sizes: tuple[int, ...]
    plain_order: bool = False

    def __str__(self) -> str:
        named = zip(self.names, self.sizes)
        texts = (str(size) if self.names == MESH_AXES[:3] else f"{name}:{size}" for name, size in named)
        return "!" * self.plain_order + ",".join(texts)

    def size(self, axis: str) -> int:
        """Devices along an axis, 1 for one that the mesh lacks; an axis that is still -1 is a usage error."""
        size = dict(zip(self.names, self.sizes)).get(axis, 1)
        if size == -1:
            raise usage_error(
                f"mesh {self} leaves {axis} open", "the devices are not known here", f"give {axis} a number"
            )
        return size

    @property
    def n_devices(self) -> int:
        """All devices of the mesh; an axis that is still -1 is a usage error."""
        return math.prod(map(self.size, self.names))


def parse_mesh(text: str, origin: str = "--mesh") -> Mesh:
    """Read `1,64,4` (dp,fsdp,mp) or `dp:1,fsdp:-1,mp:4,sp:2` (written order = device order); `!` first: plain order.

    Spellings of one mesh give equal objects: an axis of 1 has no place in the device order, so it goes to its usual
    one (sp: away). Raises only PrepError (usage); `origin` is the flag or recipe key that the message names.
    """
    body = text.strip()
    entries = [entry.strip() for entry in body.removeprefix("!").split(",")]
    shown = f"`{origin} {_truncate(text)}`"
    if entries == [""]:
        raise usage_error(f"`{origin}` is empty", "it takes dp,fsdp,mp, or names", f"`{origin} 1,64,4`")
    sizes = _parse_named(entries, shown) if ":" in body else _parse_positional(entries, shown)
    _check_sizes(sizes, shown)
    return _normalize_mesh(sizes, body.startswith("!"))


def resolve_mesh(mesh: Mesh, n_devices: int, hardware: str = "") -> Mesh:
    """The mesh with its -1 filled in so that it has `n_devices`; a usage error where it cannot.

    `where` says what the devices are (`1 host with 8 × H100`), for the message.
    """
    fixed = math.prod(size for size in mesh.sizes if size != -1)
    hint = f"`--set mesh=1,{n_devices},1`"
    still_open = -1 in mesh.sizes
    if n_devices < fixed or n_devices % fixed or (not still_open and n_devices != fixed):
        needs = f"a multiple of {fixed} devices" if still_open else f"{fixed} devices"
        known = [axis for axis, size in zip(mesh.names, mesh.sizes) if size != -1]
        arithmetic = f"{_format_sizes(mesh, known)} = {fixed}"
        raise usage_error(f"mesh {mesh} needs {needs}, there are {n_devices}", hardware or arithmetic, hint)
    filled = (n_devices // fixed if size == -1 else size for size in mesh.sizes)
    return _normalize_mesh(dict(zip(mesh.names, filled)), mesh.plain_order)


def folder_suffix(mesh: Mesh) -> str:
    """The mesh in the name of an output: `1x64x4`, `1x64x4-sp2`, in another order `dp1-mp4-fsdp64`; one name a mesh."""
    parts = [f"{name}{mesh.size(name)}" for name in mesh.names]
    if mesh.names[:3] == MESH_AXES[:3]:
        parts[:3] = ["x".join(map(str, mesh.sizes[:3]))]
    return "-".join(parts + ["plain"] * mesh.plain_order)


def _parse_positional(entries: list[str], shown: str) -> dict[str, int]:
    if len(entries) == 3:
        return {axis: _parse_axis_size(axis, entry, shown) for axis, entry in zip(MESH_AXES, entries)}
    nearest = {1: "1,{},1", 2: "{},{},1", 4: "dp:{},fsdp:{},mp:{},sp:{}"}.get(len(entries))
    numbers = all(re.fullmatch(r"-1|[1-9][0-9]{0,6}", entry) for entry in entries) and entries.count("-1") < 2
    guess = f"did you mean `{nearest.format(*entries)}`?" if nearest and numbers else "three numbers, as in `1,64,4`"
    count = "1 axis" if len(entries) == 1 else f"{len(entries)} axes"
    raise usage_error(f"{shown} has {count}", "it takes dp,fsdp,mp, or names: `fsdp:64,mp:4,sp:2`", guess)


def _parse_named(entries: list[str], shown: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for entry in entries:
        axis, colon, number = (part.strip() for part in entry.partition(":"))
        if not colon:
            raise usage_error(
                f"{shown} mixes names and bare numbers", f"`{_truncate(entry)}` has no name", "name every axis"
            )
        _check_axis_name(axis, shown)
        if axis in sizes:
            raise usage_error(
                f"{shown} names {axis} twice", f"{sizes[axis]} and {_truncate(number)}", "each axis at most once"
            )
        sizes[axis] = _parse_axis_size(axis, number, shown)
    return sizes


def _parse_axis_size(axis: str, text: str, shown: str) -> int:
    if text == "-1":
        return -1
    number = re.fullmatch(r"0*([1-9][0-9]*)", text)
    if not number:
        takes = "an axis is a number of devices, or -1 for what is left of them"
        raise usage_error(f"{shown}: {axis} is `{_truncate(text)}`", takes, f"{axis} 1 where nothing is to be split")
    if len(number[1]) > 7:
        raise usage_error(f"{shown}: {axis} is {_truncate(number[1])}", f"a mesh has at most {MAX_DEVICES:,} devices")
    return int(number[1])


def _check_sizes(sizes: Mapping[str, int], shown: str) -> None:
    still_open = [axis for axis, size in sizes.items() if size == -1]
    if len(still_open) > 1:
        why = f"{' and '.join(still_open)} cannot both be what is left of the devices"
        raise usage_error(f"{shown} has {len(still_open)} axes of -1", why, "-1 at most once")
    if (n_devices := abs(math.prod(sizes.values()))) > MAX_DEVICES:
        raise usage_error(f"{shown} has {n_devices:,} devices", f"a mesh has at most {MAX_DEVICES:,}")


def _normalize_mesh(sizes: Mapping[str, int], plain_order: bool) -> Mesh:
    names = [axis for axis, size in sizes.items() if size != 1]
    for i, axis in enumerate(MESH_AXES[:3]):
        if axis not in names:
            later = (names.index(other) for other in MESH_AXES[i + 1 :] if other in names)
            names.insert(min(later, default=len(names)), axis)
    return Mesh(tuple(names), tuple(sizes.get(axis, 1) for axis in names), plain_order)


def _check_axis_name(axis: str, shown: str) -> None:
    elsewhere = {"tp": "mp", "tensor": "mp", "model": "mp", "data": "dp", "cp": "sp", "context": "sp", "seq": "sp"}
    if axis not in MESH_AXES:
        hint = f"did you mean `{elsewhere[axis]}`?" if axis in elsewhere else _did_you_mean(axis, MESH_AXES)
        raise usage_error(f"{shown} has no mesh axis `{_truncate(axis)}`", f"the axes are {', '.join(MESH_AXES)}", hint)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    return "".join(f"did you mean `{near}`?" for near in difflib.get_close_matches(word[:60], known, n=1))


def _truncate(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_rule(text: str, dims: Collection[str] = tuple(DEFAULT_RULES)) -> tuple[str, AxisChoices]:
    """Read `embed=fsdp+sp` or `kv_heads=mp|none`: a logical dim (one of `dims`) and its choices of mesh axes.

    Raises only PrepError (usage).
    """
    shown = f"`--rule {_truncate(text)}`"
    dim, equals, right = (part.strip() for part in text.partition("="))
    if not equals or not right:
        raise usage_error(f"{shown} is not a rule", "it takes DIM=AXIS[+AXIS][|…|none]", "`--rule 'kv_heads=mp|none'`")
    if dim not in dims:
        raise usage_error(
            f"{shown}: no dim is called `{_truncate(dim)}`", f"the dims are {', '.join(dims)}", _did_you_mean(dim, dims)
        )
    choices = tuple(_parse_choice(part.strip(), shown) for part in right.split("|"))
    if () in choices[:-1]:
        raise usage_error(
            f"{shown} goes on after none", "none always fits: nothing after it is tried", "none comes last"
        )
    return dim, choices


def _parse_choice(text: str, shown: str) -> MeshAxes:
    if text == "none":
        return ()
    axes = tuple(axis.strip() for axis in text.split("+"))
    for axis in axes:
        _check_axis_name(axis, shown)
    if len(set(axes)) < len(axes):
        raise usage_error(f"{shown} names an axis twice", f"`{_truncate(text)}`", "each axis at most once")
    return axes


def format_rule(dim: str, choices: AxisChoices) -> str:
    """The rule as `parse_rule` reads it."""
    return f"{dim}={'|'.join('+'.join(axes) or 'none' for axes in choices)}"


def merge_rules(texts: Iterable[str], rules: Rules = DEFAULT_RULES) -> Rules:
    """`rules` with those of `--rule` texts in their places; two for one dim are a usage error."""
    given: dict[str, AxisChoices] = {}
    for dim, choices in (parse_rule(text, rules) for text in texts):
        if dim in given:
            both = f"`{format_rule(dim, given[dim])}` and `{format_rule(dim, choices)}`"
            raise usage_error(f"two rules for {dim}", both, f"choices of one rule are joined by |: `{dim}=mp|none`")
        given[dim] = choices
    return {**rules, **given}


@dataclass(frozen=True, slots=True)
class Fallback:
    """A dim that is not split as its rule would have it first, and why; a plan prints each."""

    dim: str
    extent: int
    requested: MeshAxes
    applied: MeshAxes
    why: str

    def __str__(self) -> str:
        got = f"is split over {' x '.join(self.applied)}" if self.applied else "stays whole"
        return f"{self.dim} {self.extent} {got}, not split over {' x '.join(self.requested)}: {self.why}"


@dataclass(frozen=True, slots=True)
class Spec:
    """How a leaf is split: of each dim the logical name, the mesh axes (of more than 1) that cut it, and the parts."""

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
    """How `mesh` splits a leaf by `rules`; a dim without a rule stays whole.

    A mesh axis cuts at most one dim of a leaf: the one whose rule comes first, so that q and o, with the same dims in
    another order, are cut alike. A dim that its rule's choices do not divide is a usage error that names it;
    `checkpoint` is what the user called the model.
    """
    names = tuple(dim[0] if dim else "" for dim in dims)
    rank = {name: i for i, name in enumerate(rules)}
    used: dict[str, str] = {}
    cuts: dict[int, tuple[MeshAxes, Fallback | None]] = {}
    for i in sorted(range(len(names)), key=lambda i: rank.get(names[i], len(rank))):
        choices = rules.get(names[i], ((),))
        cuts[i] = _choose_axes(names[i], shape[i], choices, mesh, used, checkpoint)
        used |= dict.fromkeys(cuts[i][0], names[i])
    axes = tuple(cuts[i][0] for i in range(len(names)))
    fallbacks = tuple(fallback for _, fallback in cuts.values() if fallback)
    return Spec(names, axes, tuple(_num_shards(mesh, each) for each in axes), fallbacks)


def _choose_axes(
    name: str, extent: int, choices: AxisChoices, mesh: Mesh, used: Mapping[str, str], checkpoint: str
) -> tuple[MeshAxes, Fallback | None]:
    """The first choice that divides, less the axes that other dims have; a choice with none left is passed over."""
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
    called = "vocabulary" if name == "vocab" else name
    what = f"{called} {extent} cannot be split over {_format_sizes(mesh, axes)}"
    hint = f"a mesh that divides {extent}, or `--rule '{format_rule(name, (axes, ()))}'` to keep {name} whole"
    if name == "vocab":
        padded = -(-extent // parts) * parts
        hint = f"`prep pad-vocab {checkpoint} --multiple {parts}` (to {padded}), or `--pad-vocab auto`"
    return usage_error(what, f"{extent} mod {parts} = {extent % parts}", hint)


def shard_shape(spec: Spec, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what one device holds."""
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
    """The chunk that a leaf is stored in; it divides the leaf, and is 1 in `stacked` dims (each index is a tensor).

    On a mesh: the shard, so that each host reads just its own bytes; but a leaf of fewer than `whole_below` bytes a
    layer is not cut, as pieces of some bytes help nobody. For no mesh: a run of consecutive elements of at most 4 MiB.
    """
    one_layer = tuple(1 if {*dim[:1]} & {*stacked_dims} else extent for dim, extent in zip(dims, shape, strict=True))
    if mesh is None:
        return _contiguous_chunk(one_layer, UNSHARDED_CHUNK_BYTES // itemsize)
    shard = shard_shape(partition_spec(dims, shape, mesh, rules), shape)
    if math.prod(one_layer) * itemsize < min_split_bytes:
        return one_layer
    return tuple(map(min, one_layer, shard))


def _contiguous_chunk(shape: Sequence[int], n_elements: int) -> tuple[int, ...]:
    """As many of the innermost dims as fit whole, then the largest part of the next that divides it, then ones."""
    run: list[int] = []
    room = n_elements
    for extent in reversed(shape):
        part = _largest_divisor(extent, room)
        run.append(part)
        room = room // part if part == extent else 1
    return tuple(reversed(run))


def _largest_divisor(extent: int, limit: int) -> int:
    small = [i for i in range(1, math.isqrt(extent) + 1) if extent % i == 0]
    return max(d for i in small for d in (i, extent // i) if d <= max(limit, 1))


def device_box(spec: Spec, mesh: Mesh, device: int, shape: Sequence[int]) -> Box:
    """What device number `device` of the mesh holds of a leaf; IndexError where there is no such device."""
    if not 0 <= device < mesh.n_devices:
        raise IndexError(f"device {device} of {mesh.n_devices}")
    at = dict(zip(mesh.names, _coordinates(device, mesh.sizes)))
    box = []
    for axes, extent in zip(spec.mesh_axes, shard_shape(spec, shape)):
        part = 0
        for axis in axes:
            part = part * mesh.size(axis) + at[axis]
        box.append((part * extent, (part + 1) * extent))
    return tuple(box)


def _coordinates(number: int, sizes: Sequence[int]) -> list[int]:
    """Row-major coordinates of a number in a grid."""
    digits = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        digits.append(digit)
    return digits[::-1]


def device_boxes(spec: Spec, mesh: Mesh, shape: Sequence[int]) -> list[Box]:
    """What each device holds, in device order."""
    return [device_box(spec, mesh, device, shape) for device in range(mesh.n_devices)]


def num_replicas(spec: Spec, mesh: Mesh) -> int:
    """How many devices hold each box of a leaf."""
    return mesh.n_devices // math.prod(spec.shards_per_dim)
