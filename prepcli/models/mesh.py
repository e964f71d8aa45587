"""Device meshes as text: parse, resolve and format them. No I/O, no jax."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from prepcli.core.errors import NO_VALUE, Key, Option, Text, text, usage_error
from prepcli.core.formatting import did_you_mean

MESH_AXES = ("dp", "fsdp", "mp", "sp")
# Name of an axis in other systems -> its name here.
STANDARD_NAMES = {
    "tp": "mp", "tensor": "mp", "model": "mp", "data": "dp", "cp": "sp", "context": "sp", "seq": "sp",
}  # fmt: skip
# Above the size of any machine. Rejects typing errors early.
MAX_DEVICES = 1 << 20
# Longer texts are shortened in errors.
MAX_SHOWN_CHARS = 60
MESH_OPTION = Option("mesh")
MESH_KEY = Key("mesh", is_override=True)

MeshAxes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of devices, numbered row-major over its axes. `parse_mesh` makes it."""

    names: MeshAxes  # Axes, outermost first.
    # Size of each axis. One size may be -1 (all remaining devices). `resolve_mesh` replaces it.
    sizes: tuple[int, ...]
    # Whether the devices are in the order of the runtime instead of placed by topology.
    plain_order: bool = False

    def __str__(self) -> str:
        named = zip(self.names, self.sizes)
        texts = (
            str(size) if self.names == MESH_AXES[:3] else f"{name}:{size}" for name, size in named
        )
        return "!" * self.plain_order + ",".join(texts)

    def size(self, axis: str) -> int:
        """Return the size of an axis, or 1 if it is not in the mesh. Raise UsageError if the size is still -1."""
        size = dict(zip(self.names, self.sizes)).get(axis, 1)
        if size == -1:
            what = f"mesh {self} has no size for {axis}"
            raise usage_error(
                what, "the number of devices is not known here", f"give {axis} a number"
            )
        return size

    @property
    def n_devices(self) -> int:
        """Number of devices. Raise UsageError if the size of an axis is still -1."""
        return math.prod(map(self.size, self.names))


def parse_mesh(mesh_text: str, origin: Option | Key = MESH_OPTION) -> Mesh:
    """Parse `1,64,4` (dp,fsdp,mp) or named axes such as `dp:1,fsdp:-1,mp:4,sp:2`.

    Axes of size 1 do not affect the device order, so they are moved to their usual place (and sp is
    removed). All spellings of a mesh therefore give equal objects.

    Args:
        mesh_text: Sizes, in the order of the devices (outermost axis first). A leading `!` selects
            the plain order.
        origin: Option or recipe key of the text, for the error.

    Raises:
        UsageError: The text is not a valid mesh.
    """
    body = mesh_text.strip()
    entries = [entry.strip() for entry in body.removeprefix("!").split(",")]
    if entries == [""]:
        example = text("{}", replace(origin, value="1,64,4"))
        raise usage_error(
            text("{} is empty", replace(origin, value=NO_VALUE)),
            "it takes dp,fsdp,mp, or names",
            example,
        )
    # A long text is shortened for the errors.
    option = replace(origin, value=mesh_text)
    if len(mesh_text) > MAX_SHOWN_CHARS:
        option = replace(origin, value=truncate(mesh_text))
    sizes = _parse_named(entries, option) if ":" in body else _parse_positional(entries, option)
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        why = f"{' and '.join(open_axes)} cannot all take the remaining devices"
        what = text("{} has {} axes of -1", option, len(open_axes))
        raise usage_error(what, why, "use -1 at most once")
    # `abs`: one size may be -1, which turns the sign of the product.
    if (n_devices := abs(math.prod(sizes.values()))) > MAX_DEVICES:
        raise usage_error(
            text("{} has {:,} devices", option, n_devices),
            f"a mesh has at most {MAX_DEVICES:,}",
            "use smaller sizes",
        )
    return _normalize_mesh(sizes, body.startswith("!"))


def resolve_mesh(
    mesh: Mesh, n_devices: int, hardware: str = "", *, origin: Option | Key = MESH_KEY
) -> Mesh:
    """Replace the -1 of a mesh by the number of remaining devices.

    Args:
        mesh: The mesh.
        n_devices: Number of devices.
        hardware: Description of the devices (`1 host with 8 × H100`), for the error.
        origin: Option or recipe key of the mesh, for the error.

    Raises:
        UsageError: The sizes do not match the number of devices.
    """
    known_devices = math.prod(size for size in mesh.sizes if size != -1)
    hint = text("{}", replace(origin, value=f"1,{n_devices},1"))
    is_open = -1 in mesh.sizes
    if (
        n_devices < known_devices
        or n_devices % known_devices
        or (not is_open and n_devices != known_devices)
    ):
        needs = f"a multiple of {known_devices} devices" if is_open else f"{known_devices} devices"
        known_axes = [axis for axis, size in zip(mesh.names, mesh.sizes) if size != -1]
        arithmetic = f"{format_sizes(mesh, known_axes)} = {known_devices}"
        raise usage_error(
            f"mesh {mesh} needs {needs}, there are {n_devices}", hardware or arithmetic, hint
        )
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


def _parse_positional(entries: list[str], option: Option | Key | Text) -> dict[str, int]:
    """Parse three sizes without names, e.g. `1,64,4`."""
    if len(entries) == 3:
        return {
            axis: _parse_axis_size(axis, entry, option) for axis, entry in zip(MESH_AXES, entries)
        }
    template = {1: "1,{},1", 2: "{},{},1", 4: "dp:{},fsdp:{},mp:{},sp:{}"}.get(len(entries))
    are_sizes = (
        all(re.fullmatch(r"-1|[1-9][0-9]{0,6}", entry) for entry in entries)
        and entries.count("-1") < 2
    )
    if template and are_sizes:
        hint = f"did you mean `{template.format(*entries)}`?"
    else:
        hint = "three sizes, as in `1,64,4`"
    count = "1 axis" if len(entries) == 1 else f"{len(entries)} axes"
    raise usage_error(
        text("{} has {}", option, count),
        "it takes dp,fsdp,mp, or names: `fsdp:64,mp:4,sp:2`",
        hint,
    )


def _parse_named(entries: list[str], option: Option | Key | Text) -> dict[str, int]:
    """Parse sizes with names, e.g. `dp:1,fsdp:64`."""
    sizes: dict[str, int] = {}
    for entry in entries:
        axis, colon, number = (part.strip() for part in entry.partition(":"))
        if not colon:
            raise usage_error(
                text("{} mixes names and bare numbers", option),
                f"`{truncate(entry)}` has no name",
                "name every axis",
            )
        check_axis_name(axis, option)
        if axis in sizes:
            raise usage_error(
                text("{} names {} twice", option, axis),
                f"{sizes[axis]} and {truncate(number)}",
                "name each axis at most once",
            )
        sizes[axis] = _parse_axis_size(axis, number, option)
    return sizes


def _parse_axis_size(axis: str, size_text: str, option: Option | Key | Text) -> int:
    """Parse the size of an axis: a number of devices, or -1."""
    if size_text == "-1":
        return -1
    number = re.fullmatch(r"0*([1-9][0-9]*)", size_text)
    if not number:
        why = "a size is a number of devices, or -1 for all remaining devices"
        raise usage_error(
            text("{}: {} is `{}`", option, axis, truncate(size_text)),
            why,
            f"set {axis} to 1 if nothing is to be split over it",
        )
    # MAX_DEVICES has 7 digits. The limit keeps `int` away from texts of thousands of digits.
    if len(number[1]) > 7:
        raise usage_error(
            text("{}: {} is {}", option, axis, truncate(number[1])),
            f"a mesh has at most {MAX_DEVICES:,} devices",
            f"use a smaller {axis}",
        )
    return int(number[1])


def _normalize_mesh(sizes: Mapping[str, int], plain_order: bool) -> Mesh:
    """Add the absent axes with size 1, so that a mesh has one form."""
    names = [axis for axis, size in sizes.items() if size != 1]
    for i, axis in enumerate(MESH_AXES[:3]):
        if axis not in names:
            later = (
                names.index(later_axis) for later_axis in MESH_AXES[i + 1 :] if later_axis in names
            )
            # An axis of size 1 goes before the first axis that usually follows it: mp:4,fsdp:64 becomes
            # dp:1,mp:4,fsdp:64.
            names.insert(min(later, default=len(names)), axis)
    return Mesh(tuple(names), tuple(sizes.get(axis, 1) for axis in names), plain_order)


def check_axis_name(axis: str, option: Option | Key | Text) -> None:
    """Raise UsageError for an unknown mesh axis, with the standard name if there is one."""
    if axis not in MESH_AXES:
        if axis in STANDARD_NAMES:
            hint = f"did you mean `{STANDARD_NAMES[axis]}`?"
        else:
            hint = did_you_mean(axis, MESH_AXES)
        raise usage_error(
            text("{}: unknown mesh axis `{}`", option, truncate(axis)),
            f"the axes are {', '.join(MESH_AXES)}",
            hint,
        )


def truncate(text: str) -> str:
    """Shorten a text for an error message."""
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[:57]}..."


def format_sizes(mesh: Mesh, axes: Collection[str]) -> str:
    """Return the sizes of some axes as text, such as `fsdp 64 x mp 4`."""
    return " x ".join(
        f"{axis} {size}" for axis, size in zip(mesh.names, mesh.sizes) if axis in axes
    )


# Slices of a device mesh: groups of devices with a fast network, which a slower network connects. Pure, no jax.
#
# A slice is a TPU slice, or a group of GPU hosts on one fast network. An axis of 8 devices over 2
# slices has 4 devices in each slice.

DCN_KEY = "cluster.dcn_mesh"
# Number of slices along each axis of a mesh. An axis without an entry is in one slice.
SliceCounts = Mapping[str, int]
ONE_SLICE: SliceCounts = {}


def parse_slice_counts(counts_text: str | None) -> SliceCounts:
    """Parse the number of slices per mesh axis, such as `dp:2` or `2,1,1`.

    None stands for one slice. An axis in one slice has no entry in the result.

    Raises:
        UsageError: The text is invalid, or a number is -1.
    """
    if counts_text is None:
        return ONE_SLICE
    grid = parse_mesh(counts_text, Key(DCN_KEY))
    if -1 in grid.sizes:
        what = text("{} has a size of -1", Key(DCN_KEY, counts_text))
        why = "a number of slices cannot be derived from the devices"
        hint = text("{}", Key(DCN_KEY, "dp:2", is_override=True))
        raise usage_error(what, why, hint)
    return {axis: size for axis, size in zip(grid.names, grid.sizes) if size > 1}


def check_slices(mesh: Mesh, slices: SliceCounts) -> None:
    """Raise UsageError if a number of slices does not divide its axis of the mesh. Sizes of -1 are not checked."""
    sizes = dict(zip(mesh.names, mesh.sizes))
    for axis, count in slices.items():
        size = sizes.get(axis, 1)
        if size != -1 and size % count:
            if size > 1:
                why = f"{axis} of mesh {mesh} has {size} devices"
            else:
                why = f"mesh {mesh} does not split over {axis}"
            what = f"`{DCN_KEY}` divides {axis} among {count} slices"
            raise usage_error(what, why, f"use a number of slices that divides {axis}")


def num_slices(slices: SliceCounts) -> int:
    """Return the number of slices."""
    return math.prod(slices.values())
