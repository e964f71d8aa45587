"""Check a command against the devices of a job. The functions do no I/O.

A job with a wrong mesh would wait in a queue and fail after all hosts have connected. It is refused before anything is
allocated.

Generations of TPUs are data from their vendor. A slice of v5e or v6e is a rectangle of at most one pod. A slice of v4,
v5p or tpu7x is a box A x B x C with A <= B <= C. With more than 64 chips, each side is a multiple of 4. Of several
boxes with the same number of chips, Google Cloud names the one closest to a cube.

Sources: Cloud TPU docs, "TPU v2", "TPU v3", "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x":
    supported configurations (https://docs.cloud.google.com/tpu/docs/v5p and its sibling pages).
    GKE docs, "Plan TPUs in GKE": labels of nodes, and chips of a machine type.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from prepcli.core.errors import (
    Command,
    Key,
    Option,
    PrepError,
    Text,
    join_texts,
    text,
    usage_error,
)
from prepcli.launch.job import LaunchedCommand
from prepcli.models.mesh import (
    DCN_KEY,
    MESH_KEY,
    Mesh,
    SliceCounts,
    check_slices,
    num_slices,
    resolve_mesh,
)

# Largest v5e or v6e slice with one host.
_MAX_HOST_CHIPS = 8
GKE = Command("launch", "gke")
# Digits of the number in the name of an accelerator type.
MAX_DIGITS = 6
_RECTANGLES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_BOXES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"),
    *("8x16x16", "16x16x16"),
)
_V2_SLICES = ("2x2", "4x4", "8x8", "8x16", "16x16")
_V3_SLICES = ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32")
_UBUNTU = "tpu-ubuntu2204-base"
# Larger boxes consist of cubes of 4 x 4 x 4 chips.
_CUBE_SIDE = 4
# Chips of each machine of a slice with several hosts.
HOST_CHIPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Requirements of a training on its hardware.

    Attributes:
        mesh: The mesh. One axis may be open.
        slices: Number of slices along each axis.
        mesh_origin: Option or recipe key of the mesh.
        num_processes: Number of processes in the recipe. None means one per node of the job.
        local_devices: Number of devices per process. None means all devices of its node.
    """

    mesh: Mesh
    slices: SliceCounts
    mesh_origin: Option | Key = MESH_KEY
    num_processes: int | None = None
    local_devices: int | None = None

    @property
    def num_devices(self) -> int | None:
        """Number of devices of the mesh. None if an axis has size -1."""
        return None if -1 in self.mesh.sizes else self.mesh.n_devices

    @property
    def devices_per_slice(self) -> int | None:
        """Number of devices of each slice. None if an axis of the mesh has size -1."""
        return None if self.num_devices is None else self.num_devices // num_slices(self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The devices of a job with one process per node.

    Attributes:
        name: The hardware as the user named it.
        nodes: Number of nodes.
        node_devices: Number of devices in JAX of each node, or None if it is unknown.
        max_slices: Largest possible number of slices. None means no limit.
        fitting_options: Command-line options for hardware of the mesh's size, for a hint. Empty if there are none.
        one_node_hint: Hint to use one node.
    """

    name: str
    nodes: int
    node_devices: int | None = None
    max_slices: int | None = None
    fitting_options: str = ""
    one_node_hint: Text | str = ""


def check_hardware(
    command: LaunchedCommand, training: Training | None, hardware: Hardware | None
) -> None:
    """Check a command against the hardware of its job.

    Args:
        command: The command.
        training: Its required mesh, processes and devices. None if it computes on no mesh.
        hardware: Nodes and devices of the job. None if they are unknown.

    Raises:
        UsageError: Each process would do the whole work, or the mesh, the slices or the processes do not fit.
    """
    if hardware is None:
        return
    nodes = hardware.nodes
    if nodes > 1 and not (command.has_mesh or command.has_shares):
        why = f"each of the {nodes} processes would repeat the whole work"
        what = f"`prep {command.name}` runs in one process"
        raise usage_error(what, why, hardware.one_node_hint)
    if training is None:
        return
    if training.num_processes not in (None, nodes):
        what = text("{} is {}", Key("cluster.n_processes"), training.num_processes)
        why = f"{hardware.name} has {nodes} {'process' if nodes == 1 else 'processes'}"
        hint = f"remove the key, or `-- --set cluster.n_processes={nodes}`"
        raise usage_error(what, why, hint)
    slices = num_slices(training.slices)
    if hardware.max_slices is not None and slices > hardware.max_slices:
        limit = hardware.max_slices
        why = f"{hardware.name} is {limit} {'slice' if limit == 1 else 'slices'}"
        hint = text("use {}, which starts several slices, or remove the key from the recipe", GKE)
        raise usage_error(f"`{DCN_KEY}` has {slices} slices", why, hint)
    if nodes > 1 and nodes % slices:
        # The next multiple of the slices, e.g. 7 nodes in 2 slices: 8.
        hint = text("{}", Option("nodes", -(-nodes // slices) * slices))
        why = f"{hardware.name}: a node would be in two slices"
        raise usage_error(f"`{DCN_KEY}` has {slices} slices", why, hint)
    if hardware.node_devices is not None:
        _check_mesh(training, hardware, nodes * (training.local_devices or hardware.node_devices))


def _check_mesh(training: Training, hardware: Hardware, num_devices: int) -> None:
    try:
        mesh = resolve_mesh(training.mesh, num_devices, hardware.name, origin=training.mesh_origin)
    except PrepError as error:
        mesh_hint = error.hint
        if training.mesh_origin == MESH_KEY:
            # `--set` is an option of `prep train`, not of `prep launch`.
            mesh_hint = f"`-- --set mesh=1,{num_devices},1`"
        hints = [hint for hint in (hardware.fitting_options, mesh_hint) if hint]
        raise usage_error(error.what, error.why, join_texts(", or ", hints)) from None
    check_slices(mesh, training.slices)


def plain_hardware(
    nodes: int, node_devices: int | None, *, option: str = "nodes", fitting_options: str = ""
) -> Hardware:
    """Return the hardware of nodes with a number of devices each, or None if it is unknown.

    `option` sets the number of nodes.
    """
    name = f"{nodes} {'node' if nodes == 1 else 'nodes'}"
    if node_devices is not None:
        name = f"{nodes} x {node_devices}"
    return Hardware(
        name=name,
        nodes=nodes,
        node_devices=node_devices,
        fitting_options=fitting_options,
        one_node_hint=text("{}", Option(option, 1)),
    )


def tpu_vm_hardware(
    accelerator: str, num_devices: int | None, *, prefix: str = ""
) -> Hardware | None:
    """Return the hardware of an accelerator type of TPU VMs, such as `v5p-256`.

    Args:
        accelerator: The type.
        num_devices: Required number of devices, for the hints. None if it is unknown.
        prefix: Text before the type in the option of the engine, for errors.

    Returns:
        The hardware, or None if the generation is unknown.

    Raises:
        UsageError: The generation has no TPU VMs, or no slice of this size.
    """
    generation_name, _, number = accelerator.partition("-")
    if generation_name in TPU_GENERATIONS and not TPU_GENERATIONS[generation_name].type_prefix:
        label = Option("accelerator", TPU_GENERATIONS[generation_name].gke_label)
        what = text("{}: no TPU VMs", Option("accelerator", f"{prefix}{accelerator}"))
        hint = text("{}", Command("launch", "gke", label))
        raise usage_error(what, f"only GKE has {generation_name}", hint)
    generations = {
        known.type_prefix: known for known in TPU_GENERATIONS.values() if known.type_prefix
    }
    if generation_name not in generations:
        return None
    generation = generations[generation_name]
    # The limit of digits bounds the conversion of text from the user. 0 is no size of a slice.
    number_of_type = int(number) if number.isdecimal() and len(number) <= MAX_DIGITS else 0
    chips, rest = divmod(number_of_type, generation.type_units)
    if rest or not generation.has_size(chips):
        types = [num_chips(shape) * generation.type_units for shape in generation.slices]
        hints: list[str] = []
        for size in nearest_sizes(number_of_type, types):
            hints.append(text("{}", Option("accelerator", f"{prefix}{generation_name}-{size}")))
        what = text("{} is invalid", Option("accelerator", f"{prefix}{accelerator}"))
        why = f"no slice of {generation.name} has this size"
        raise usage_error(what, why, join_texts(" or ", hints))
    has_large_hosts = not generation.has_3d_slices and generation.devices_per_chip == 1
    max_chips = _MAX_HOST_CHIPS if has_large_hosts else HOST_CHIPS
    hosts = 1 if chips <= max_chips else chips // HOST_CHIPS
    fitting_options = ""
    fitting_chips = number_of_chips(generation, num_devices)
    if fitting_chips is not None and generation.has_size(fitting_chips):
        fitting_type = f"{generation.type_prefix}-{fitting_chips * generation.type_units}"
        fitting_options = text("{}", Option("accelerator", f"{prefix}{fitting_type}"))
    return Hardware(
        name=f"{prefix}{accelerator} with {chips} chips",
        nodes=hosts,
        # v5p-256 counts cores: 256 / 2 = 128 chips on 32 hosts, each with 4 devices of one chip.
        node_devices=chips * generation.devices_per_chip // hosts,
        max_slices=1,
        fitting_options=fitting_options,
        # The nodes are the hosts of the slice.
        one_node_hint=text("remove {}", Option("accelerator")),
    )


def number_of_chips(generation: TpuGeneration, num_devices: int | None) -> int | None:
    """Return the number of chips with a number of devices. None if only a part of a chip would be used."""
    if num_devices is None or num_devices % generation.devices_per_chip:
        return None
    return num_devices // generation.devices_per_chip


@dataclass(frozen=True, slots=True)
class TpuGeneration:
    """A generation of TPUs.

    Attributes:
        name: Name in `--devices` and in the topologies of libtpu.
        jax_kind: `device_kind` of its devices in JAX.
        slices: The most common slices, by ascending number of chips.
        devices_per_chip: Devices in JAX of each chip.
        gke_label: Value of the node label `cloud.google.com/gke-tpu-accelerator`. Empty if GKE
            does not have the generation.
        type_prefix: Prefix of accelerator types of TPU VMs, such as `v5litepod`. Empty if only GKE
            has the generation.
        type_units: Units per chip in the number of an accelerator type: 2 if it counts cores, 1 if
            it counts chips.
        runtime_version: Software of TPU VMs.
    """

    name: str
    jax_kind: str
    slices: tuple[str, ...]
    devices_per_chip: int = 1
    gke_label: str = ""
    type_prefix: str = ""
    type_units: int = 1
    runtime_version: str = ""

    @property
    def has_3d_slices(self) -> bool:
        """Whether slices have three dimensions."""
        return self.slices[0].count("x") == 2

    @property
    def max_chips(self) -> int:
        """Number of chips of the largest slice."""
        return num_chips(self.slices[-1])

    def has_slice(self, shape: str) -> bool:
        """Return whether there is a slice of this shape, such as `4x4x8`."""
        if shape in self.slices:
            return True
        if not self.has_3d_slices or not re.fullmatch(
            r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){2}", shape
        ):
            return False
        sides = [int(side) for side in shape.split("x")]
        are_cubes = all(side % _CUBE_SIDE == 0 for side in sides)
        return are_cubes and sides == sorted(sides) and math.prod(sides) <= self.max_chips

    def has_size(self, chips: int) -> bool:
        """Return whether there is a slice with a number of chips."""
        if chips in map(num_chips, self.slices):
            return True
        # E.g. 192 chips are the box 4x4x12, three cubes in a row, which no list contains.
        return self.has_3d_slices and chips % _CUBE_SIDE**3 == 0 and 0 < chips <= self.max_chips

    def node_sizes(self, shape: str) -> tuple[int, ...]:
        """Return how many chips a node of the slice may have, the most common number first."""
        chips = num_chips(shape)
        if chips <= HOST_CHIPS:
            return (chips,)
        if shape == "2x4":
            # v5e and v6e have machines with eight chips, and slices of two machines with four.
            return (HOST_CHIPS, chips)
        return (HOST_CHIPS,)


_GENERATIONS = (
    TpuGeneration(
        "v2", "TPU v2", _V2_SLICES, 2, type_prefix="v2", type_units=2, runtime_version=_UBUNTU
    ),
    TpuGeneration(
        "v3", "TPU v3", _V3_SLICES, 2, type_prefix="v3", type_units=2, runtime_version=_UBUNTU
    ),
    TpuGeneration(
        "v4",
        "TPU v4",
        _BOXES,
        gke_label="tpu-v4-podslice",
        type_prefix="v4",
        type_units=2,
        runtime_version=_UBUNTU,
    ),
    TpuGeneration(
        "v5e",
        "TPU v5 lite",
        _RECTANGLES,
        gke_label="tpu-v5-lite-podslice",
        type_prefix="v5litepod",
        runtime_version="v2-alpha-tpuv5-lite",
    ),
    TpuGeneration(
        "v5p",
        "TPU v5",
        (*_BOXES, "16x16x24"),
        gke_label="tpu-v5p-slice",
        type_prefix="v5p",
        type_units=2,
        runtime_version="v2-alpha-tpuv5",
    ),
    TpuGeneration(
        "v6e",
        "TPU v6 lite",
        _RECTANGLES,
        gke_label="tpu-v6e-slice",
        type_prefix="v6e",
        runtime_version="v2-alpha-tpuv6e",
    ),
    # Each of the two chiplets of a chip is a separate device. Only GKE has this generation.
    TpuGeneration(
        "tpu7x", "TPU7x", (*_BOXES, "16x16x24", "16x24x24"), devices_per_chip=2, gke_label="tpu7x"
    ),
)
TPU_GENERATIONS = {generation.name: generation for generation in _GENERATIONS}
# Software of a TPU VM by the generation in the name of its accelerator type.
RUNTIME_VERSIONS = {
    generation.type_prefix: generation.runtime_version
    for generation in _GENERATIONS
    if generation.type_prefix
}


def num_chips(shape: str) -> int:
    """Return the number of chips of a slice, e.g. 128 for `4x4x8`."""
    return math.prod(int(side) for side in shape.split("x"))


def find_topology(kind: str, num_devices: int) -> str:
    """Return the topology of a generation with a number of devices, e.g. `v5p:4x8x8` for 256 of `v5p`.

    Raises:
        UsageError: No slice has this number of devices.
    """
    generation = TPU_GENERATIONS[kind]
    slices = {num_chips(shape) * generation.devices_per_chip: shape for shape in generation.slices}
    if num_devices not in slices:
        raise _size_error(generation, num_devices, sorted(slices))
    return f"{kind}:{slices[num_devices]}"


def _size_error(generation: TpuGeneration, num_devices: int, sizes: list[int]) -> PrepError:
    """Return the error for a number of devices that no slice has. It names the next smaller and larger slice."""
    if generation.devices_per_chip == 1:
        unit = "chips"
    else:
        unit = f"devices, {generation.devices_per_chip} per chip"
    what = f"no slice of {generation.name} has {num_devices:,} {unit}"
    why = f"slices have {', '.join(f'{size:,}' for size in sizes[:-1])} or {sizes[-1]:,} {unit.partition(',')[0]}"
    nearest = " or ".join(f"{size:,}" for size in nearest_sizes(num_devices, sizes))
    return usage_error(what, why, f"use a mesh of {nearest} devices")


def nearest_sizes(number: int, sizes: list[int]) -> list[int]:
    """Return the next smaller and the next larger of ascending sizes, e.g. [16, 32] for 24."""
    below = [size for size in sizes if size < number][-1:]
    above = [size for size in sizes if size > number][:1]
    return [*below, *above]
