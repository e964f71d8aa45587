"""Check a training against the devices of a job. The functions do no I/O.

A job with a wrong mesh would wait in a queue and fail after all hosts have connected. It is refused before anything is
allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.core.errors import Command, Key, Option, PrepError, join_texts, text, usage_error
from prepcli.core.suggest import did_you_mean
from prepcli.launch.options import GkeOptions
from prepcli.launch.tpu_topologies import (
    HOST_CHIPS,
    TPU_GENERATIONS,
    TpuGeneration,
    nearest_sizes,
    num_chips,
)
from prepcli.models.mesh import MESH_KEY, Mesh, resolve_mesh
from prepcli.models.slices import DCN_KEY, SliceCounts, check_slices, num_slices

# Largest v5e or v6e slice with one host.
_MAX_HOST_CHIPS = 8
GKE = Command("launch", "gke")
# Digits of the number in the name of an accelerator type.
MAX_DIGITS = 6


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
    """

    name: str
    nodes: int
    node_devices: int | None = None
    max_slices: int | None = None
    fitting_options: str = ""


def check_training(training: Training, hardware: Hardware) -> None:
    """Check a training against the hardware of a job.

    Raises:
        UsageError: The mesh, the slices or the processes do not fit the hardware.
    """
    _check_processes(training, hardware)
    _check_slices(training, hardware)
    if hardware.node_devices is not None:
        _check_mesh(training, hardware, training.local_devices or hardware.node_devices)


def _check_processes(training: Training, hardware: Hardware) -> None:
    nodes = hardware.nodes
    if training.num_processes not in (None, nodes):
        what = text("{} is {}", Key("cluster.n_processes"), training.num_processes)
        hint = f"remove the key, or `-- --set cluster.n_processes={nodes}`"
        raise usage_error(
            what, f"{hardware.name} has {_count_with_noun(nodes, 'process', 'processes')}", hint
        )


def _check_slices(training: Training, hardware: Hardware) -> None:
    count = num_slices(training.slices)
    if hardware.max_slices is not None and count > hardware.max_slices:
        why = f"{hardware.name} is {_count_with_noun(hardware.max_slices, 'slice', 'slices')}"
        hint = text("use {}, which starts several slices, or remove the key from the recipe", GKE)
        raise usage_error(f"`{DCN_KEY}` has {count} slices", why, hint)
    if hardware.nodes > 1 and hardware.nodes % count:
        # The next multiple of the slices, e.g. 7 nodes in 2 slices: 8.
        above = -(-hardware.nodes // count) * count
        why = f"{hardware.name}: a node would be in two slices"
        hint = text("{}", Option("nodes", above))
        raise usage_error(f"`{DCN_KEY}` has {count} slices", why, hint)


def _check_mesh(training: Training, hardware: Hardware, node_devices: int) -> None:
    num_devices = hardware.nodes * node_devices
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


def plain_hardware(nodes: int, node_devices: int | None) -> Hardware:
    """Return the hardware of nodes with a number of devices each, or None if it is unknown."""
    name = (
        _count_with_noun(nodes, "node", "nodes")
        if node_devices is None
        else f"{nodes} x {node_devices}"
    )
    return Hardware(name=name, nodes=nodes, node_devices=node_devices)


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
    hosts = 1 if _has_one_host(generation, chips) else chips // HOST_CHIPS
    return Hardware(
        name=f"{prefix}{accelerator} with {chips} chips",
        nodes=hosts,
        # v5p-256 counts cores: 256 / 2 = 128 chips on 32 hosts, each with 4 devices of one chip.
        node_devices=chips * generation.devices_per_chip // hosts,
        max_slices=1,
        fitting_options=_accelerator_option(generation, num_devices, prefix),
    )


def _has_one_host(generation: TpuGeneration, chips: int) -> bool:
    """Return whether a TPU VM with a number of chips is one machine."""
    has_large_hosts = not generation.has_3d_slices and generation.devices_per_chip == 1
    max_chips = _MAX_HOST_CHIPS if has_large_hosts else HOST_CHIPS
    return chips <= max_chips


def _accelerator_option(generation: TpuGeneration, num_devices: int | None, prefix: str) -> str:
    """Return the option for the accelerator type with a number of devices, or an empty text."""
    chips = _num_chips(generation, num_devices)
    if chips is None or not generation.has_size(chips):
        return ""
    accelerator = f"{prefix}{generation.type_prefix}-{chips * generation.type_units}"
    return text("{}", Option("accelerator", accelerator))


def gke_hardware(options: GkeOptions, training: Training) -> Hardware:
    """Return the hardware of a JobSet.

    Args:
        options: Options of the JobSet.
        training: The training, for the number of slices and the hints.

    Raises:
        UsageError: An option is missing, and the pods would get no devices, or the options contradict each other.
    """
    generation = _gke_generation(options["accelerator"])
    if generation is None:
        return _gpu_hardware(options, training)
    return _tpu_pod_hardware(options, generation, training)


def _gke_generation(label: str | None) -> TpuGeneration | None:
    """Return the generation of a node label, or None for GPUs."""
    labels = {known.gke_label: known for known in TPU_GENERATIONS.values() if known.gke_label}
    if label is not None and label.startswith("tpu") and label not in labels:
        example = Option("accelerator", next(iter(labels)))
        hint = did_you_mean(label, labels) or text("{}", example)
        raise usage_error(f"unknown TPU label `{label}`", f"known: {', '.join(labels)}", hint)
    return labels.get(label or "")


def _gpu_hardware(options: GkeOptions, training: Training) -> Hardware:
    if options["topology"]:
        topology = Option("topology")
        raise usage_error(
            text("{} is for TPUs only", topology),
            text("{} names no TPU", Option("accelerator", options["accelerator"])),
            text("remove {}", topology),
        )
    if options["devices_per_node"] is None:
        count, rest = divmod(training.num_devices or 0, options["nodes"])
        raise _missing_devices_error(count if count and not rest else 8)
    return plain_hardware(options["nodes"], options["devices_per_node"])


def _missing_devices_error(suggested: int) -> PrepError:
    why = "a pod gets the devices that it requests, and without a request it gets none"
    what = text("{} is missing", Option("devices_per_node"))
    return usage_error(what, why, text("{}", Option("devices_per_node", suggested)))


def _tpu_pod_hardware(
    options: GkeOptions, generation: TpuGeneration, training: Training
) -> Hardware:
    """Return the hardware of TPU slices with several nodes. Raise PrepError if the options contradict them."""
    slices = num_slices(training.slices)
    topology = options["topology"]
    fitting_topology = _fitting_topology(generation, training.devices_per_slice)
    if topology is None:
        why = "GKE finds the nodes of a slice by its topology"
        example = Option("topology", fitting_topology or generation.slices[-1])
        raise usage_error(text("{} is missing", Option("topology")), why, text("{}", example))
    if not generation.has_slice(topology):
        known = fitting_topology or ", ".join(generation.slices)
        what = text("{} is invalid", Option("topology", topology))
        hint = text("use {} with one of: {}", Option("topology"), known)
        if fitting_topology:
            hint = text("{}", Option("topology", fitting_topology))
        raise usage_error(what, f"no slice of {generation.name} has this topology", hint)
    sizes = generation.node_sizes(topology)
    if options["devices_per_node"] is None:
        raise _missing_devices_error(sizes[0])
    if options["devices_per_node"] not in sizes:
        what = text("{} is invalid", Option("devices_per_node", options["devices_per_node"]))
        why = (
            f"a node of a {generation.name} of {topology} has {' or '.join(map(str, sizes))} chips"
        )
        raise usage_error(what, why, text("{}", Option("devices_per_node", sizes[0])))
    # 2 slices of 4x4x8 with 4 chips per node: 2 * 128 / 4 = 64 nodes.
    nodes = slices * num_chips(topology) // options["devices_per_node"]
    if options["nodes"] != nodes:
        count = _count_with_noun(slices, "slice", "slices")
        why = f"{count} of {topology} with {options['devices_per_node']} chips per node"
        what = text("{} is invalid", Option("nodes", options["nodes"]))
        raise usage_error(what, f"{why}: {nodes} in all", text("{}", Option("nodes", nodes)))
    return Hardware(
        name=f"{_count_with_noun(slices, 'slice', 'slices')} of {generation.name}:{topology}",
        nodes=nodes,
        node_devices=options["devices_per_node"] * generation.devices_per_chip,
        fitting_options=_slice_options(generation, fitting_topology, slices),
    )


def _slice_options(generation: TpuGeneration, topology: str, slices: int) -> str:
    """Return the options for slices of a topology, for a hint. Empty without a topology."""
    if not topology:
        return ""
    nodes = slices * num_chips(topology) // generation.node_sizes(topology)[0]
    return text("{} and {}", Option("topology", topology), Option("nodes", nodes))


def _fitting_topology(generation: TpuGeneration, num_devices: int | None) -> str:
    """Return the topology of a slice with this number of devices, or an empty text if there is none."""
    chips = _num_chips(generation, num_devices)
    return next((shape for shape in generation.slices if num_chips(shape) == chips), "")


def _num_chips(generation: TpuGeneration, num_devices: int | None) -> int | None:
    """Return the number of chips with a number of devices. None if only a part of a chip would be used."""
    if num_devices is None or num_devices % generation.devices_per_chip:
        return None
    return num_devices // generation.devices_per_chip


def _count_with_noun(number: int, singular: str, plural: str) -> str:
    """Return a number with the noun in singular or plural, e.g. `1 host` or `2 hosts`."""
    return f"{number} {singular if number == 1 else plural}"
