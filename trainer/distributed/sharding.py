"""The device mesh of a run in JAX: devices in order, shardings of parameters and activations, the order of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from prepcli.core.errors import Key, Option, PrepError, text, usage_error
from prepcli.models import mesh as meshes
from prepcli.models.activation_memory import RING_BLOCKS, check_ring_blocks
from prepcli.models.attention_kernels import DeviceKind
from prepcli.models.mesh import (
    DCN_KEY,
    ONE_SLICE,
    Mesh,
    MeshAxes,
    SliceCounts,
    check_slices,
    num_slices,
)
from prepcli.models.param_tree import ParamLeaf
from prepcli.models.partition import (
    Spec,
    activation_spec,
    computed_spec,
    leaf_spec,
    may_split_dims,
    num_batch_shards,
    num_sequence_shards,
    partition_spec,
)
from prepcli.models.rules import DEFAULT_RULES, Rules, activation_rules, unsplit_if_indivisible
from trainer.distributed.devices import all_devices, local_devices


def arrange_devices(
    mesh: Mesh, devices: Sequence[Any], slices: SliceCounts = ONE_SLICE
) -> np.ndarray:
    """Arrange devices in the shape of a mesh.

    The devices of a slice are placed by its topology, or in plain order if the mesh asks for it. Along an axis of n
    devices over s slices, each run of n / s devices is in one slice.

    Args:
        mesh: The mesh, without an axis of size -1.
        devices: The devices, slice by slice.
        slices: Number of slices along each axis.

    Returns:
        Array of devices with the shape of the mesh.

    Raises:
        UsageError: The devices are not in that number of slices.
    """
    if not slices and (mesh.plain_order or devices[0].platform != "tpu"):
        # The runtime of GPUs counts each host as a slice. Only TPUs of several slices have no common topology.
        return _arrange_slice(mesh.sizes, devices, plain_order=mesh.plain_order)
    groups = _devices_by_slice(devices, num_slices(slices))
    outer = [slices.get(axis, 1) for axis in mesh.names]
    inner = [size // count for size, count in zip(mesh.sizes, outer)]
    grids = np.empty((len(groups), *inner), object)
    for number, group in enumerate(groups):
        grids[number] = _arrange_slice(inner, group, plain_order=mesh.plain_order)
    # Put each inner axis after its outer one: along an axis, a slice ends before the next begins.
    # E.g. the mesh dp 4, mp 2 over 2 slices along dp: [2, 1, 2, 2] -> [2, 2, 1, 2] -> [4, 2].
    axes: list[int] = []
    for axis in range(len(outer)):
        axes += [axis, len(outer) + axis]
    return grids.reshape(*outer, *inner).transpose(axes).reshape(mesh.sizes)


def _arrange_slice(
    shape: Sequence[int], devices: Sequence[Any], *, plain_order: bool
) -> np.ndarray:
    """Arrange the devices of one slice in a shape."""
    # `jax.make_mesh` (jax 0.10.2) splits a physical axis over several mesh axes on v5e alone. On a v6e of 16x16 it
    # therefore refuses 64,4. Shapes that need no split get the same order from both functions.
    #
    # The network of a slice is a torus, e.g. [16, 16]. Without a split each mesh axis is a product of
    # whole physical axes. The mesh 64,4 needs 64 = 16 * 4: one physical axis and a part of the other.
    if plain_order:
        return np.array(devices).reshape(shape)
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _devices_by_slice(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """Divide devices by their slice."""
    # The runtime of GPUs reports each host, or each group of hosts with NVLink, as a slice. A slice of the recipe may
    # consist of several of these. The devices are then divided in order, by whole hosts. Devices of a runtime with a
    # single slice are divided in the same way.
    by_index: dict[int, list[Any]] = {}
    for device in devices:
        by_index.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    sizes = {len(group) for group in by_index.values()}
    if len(by_index) == count and len(sizes) == 1:
        return [by_index[index] for index in sorted(by_index)]
    if len(by_index) == 1 or devices[0].platform != "tpu":
        return _devices_by_hosts(devices, count)
    what = f"`{DCN_KEY}` has {count} slice{'s' if count > 1 else ''}"
    hint = text("{}", Key(DCN_KEY, f"dp:{len(by_index)}", is_override=True))
    raise usage_error(what, f"the devices form {len(by_index)} slices", hint)


def _devices_by_hosts(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """Divide devices in order into groups of whole hosts, or the devices of one host into equal groups."""
    size = len(devices) // count
    groups = [list(devices[start : start + size]) for start in range(0, len(devices), size)]
    hosts: list[set[int]] = []
    for group in groups:
        hosts.append({device.process_index for device in group})
    num_hosts = len(set().union(*hosts))
    # The sum counts a host once per group, e.g. 4 for the groups {0, 1} and {1, 2} of 3 hosts. It
    # equals the number of hosts only if no host is in two groups.
    if num_hosts == 1 or sum(map(len, hosts)) == num_hosts:
        return groups
    what = f"`{DCN_KEY}` has {count} slices of {size} devices"
    raise usage_error(
        what, "a host would be in two slices", "use a number of slices that divides the hosts"
    )


# Name for an axis of an activation that no rule splits.
UNSPLIT = ""
TRAINING_MEMORY_HINT = (
    'more `batch.accumulate`, `model.remat_policy = "nothing_saveable"`, '
    "or more fsdp, mp or sp in `mesh`"
)

# JAX's name for host memory from which devices copy directly.
HOST_MEMORY = "pinned_host"


# Compared by identity, so that jit caches functions of it.
@dataclass(frozen=True, slots=True, eq=False)
class ShardingContext:
    """A device mesh with the sharding rules of a run."""

    mesh: Mesh | None = None  # The mesh as the recipe names it. None for one device.
    rules: Rules = DEFAULT_RULES  # Partition rules
    # The mesh on JAX devices. None if only specs are needed, or for one device.
    device_mesh: jax.sharding.Mesh | None = None

    def param_sharding(self, leaf: ParamLeaf) -> NamedSharding | None:
        """Return the sharding of a parameter. None if there are no devices.

        Raises:
            UsageError: The mesh does not divide the parameter.
        """
        return self._to_named_sharding(self.param_spec(leaf))

    def statistic_sharding(self, leaf: ParamLeaf, axes: Collection[int]) -> NamedSharding | None:
        """Return the sharding of a statistic of a parameter, e.g. a mean. It has extent 1 along `axes`."""
        spec = self.param_spec(leaf)
        return self._to_named_sharding(None if spec is None else spec.without_axes(axes))

    def param_spec(self, leaf: ParamLeaf) -> Spec | None:
        """Return the mesh axes that split each dim of a parameter. None if there is no mesh.

        Raises:
            UsageError: The mesh does not divide the parameter.
        """
        if self.mesh is None:
            return None
        return leaf_spec(leaf.path, leaf.dims, leaf.shape, mesh=self.mesh, rules=self.rules)

    def constrain_param(self, x: jax.Array, leaf: ParamLeaf) -> jax.Array:
        """Constrain a parameter to the sharding that the computation gives it.

        XLA (jax 0.10.2) computes wrong logits in a scan for weights with a dim split over the mesh axes of the other
        dim. The scan therefore starts with weights split like its activations.
        """
        if not (self.rules.leaves or self.rules.by_size):
            return x
        sharding = self._to_named_sharding(self._computed_spec(leaf))
        if sharding is None:
            return x
        return jax.lax.with_sharding_constraint(x, sharding)

    def computed_axes(self, leaf: ParamLeaf) -> tuple[MeshAxes, ...]:
        """Return the mesh axes that split each dim of a parameter in the computation."""
        spec = self._computed_spec(leaf)
        if spec is None:
            return ((),) * len(leaf.dims)
        return spec.mesh_axes

    def _computed_spec(self, leaf: ParamLeaf) -> Spec | None:
        """Return how a parameter is split while a layer computes. None without a mesh."""
        stored = self.param_spec(leaf)
        if self.mesh is None or stored is None:
            return None
        return computed_spec(leaf.dims, leaf.shape, stored=stored, mesh=self.mesh, rules=self.rules)

    def may_split_over_batch_axes(self, leaf: ParamLeaf) -> list[bool]:
        """Return for each dim of a parameter whether the rules split it, on any mesh, over axes that split a batch."""
        axes = activation_rules(self.rules)["batch"][0]
        return may_split_dims(leaf.path, leaf.dims, axes=axes, rules=self.rules)

    def replicated_sharding(self) -> NamedSharding | None:
        """Return the sharding of a replicated array. None if there are no devices."""
        if self.device_mesh is None:
            return None
        return NamedSharding(self.device_mesh, PartitionSpec())

    def activation_sharding(self, shape: tuple[int, ...], *dims: str) -> NamedSharding | None:
        """Return the sharding of an activation. None if there are no devices.

        Args:
            shape: Shape of the activation.
            *dims: The logical dim of each axis.

        Raises:
            UsageError: The mesh does not divide the activation.
        """
        if self.mesh is None:
            return None
        return self._to_named_sharding(activation_spec(shape, dims, self.mesh, self.rules))

    def constrain(self, x: jax.Array, *dims: str) -> jax.Array:
        """Constrain the sharding of an activation, given the logical dim of each axis."""
        sharding = self.activation_sharding(x.shape, *dims)
        if sharding is None:
            return x
        return jax.lax.with_sharding_constraint(x, sharding)

    def activation_axes(self, shape: tuple[int, ...], *dims: str) -> tuple[MeshAxes, ...]:
        """Return the mesh axes that split each axis of an activation, given the logical dim of each."""
        if self.mesh is None:
            return ((),) * len(dims)
        return activation_spec(shape, dims, self.mesh, self.rules).mesh_axes

    def weight_axes(self, shape: tuple[int, ...], *dims: str) -> tuple[MeshAxes, ...]:
        """Return the mesh axes that split each axis of a parameter.

        Only rules for dims apply, not rules for single leaves.
        """
        if self.mesh is None:
            return ((),) * len(dims)
        return partition_spec(
            [(dim,) for dim in dims], shape, self.mesh, unsplit_if_indivisible(self.rules.params)
        ).mesh_axes

    def num_shards(self, dim: str, extent: int) -> int:
        """Return the number of shards along a logical dim of activations."""
        if self.mesh is None:
            return 1
        shape = (self.data_parallel_size, extent)
        return activation_spec(shape, ("batch", dim), self.mesh, self.rules).shards_per_dim[1]

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return 1 if self.mesh is None else self.mesh.n_devices

    @property
    def has_other_processes(self) -> bool:
        """Whether the mesh has devices of several processes."""
        devices = [] if self.device_mesh is None else self.device_mesh.devices.flat
        return len({device.process_index for device in devices}) > 1

    @property
    def data_parallel_size(self) -> int:
        """Number of shards of a batch along its rows."""
        return num_batch_shards(self.mesh, self.rules)

    def check_host_memory(self) -> None:
        """Check that the devices can move arrays to host memory.

        A CPU device cannot, because its memory is host memory already.

        Raises:
            UsageError: They cannot.
        """
        assert self.device_mesh is not None
        device = self.device_mesh.local_devices[0]
        if device.platform == "cpu" or HOST_MEMORY not in {
            memory.kind for memory in device.addressable_memories()
        }:
            what = f"`model.offload` is not supported on {device.platform} devices"
            hint = text("{}", Key("model.offload", "none", is_override=True))
            raise usage_error(what, "they have no separate memory of the host", hint)

    @property
    def sequence_parallel_size(self) -> int:
        """Number of shards of a sequence along its tokens."""
        return num_sequence_shards(self.mesh, self.rules)

    def _to_named_sharding(self, spec: Spec | None) -> NamedSharding | None:
        """Convert a spec to a sharding on the devices. None if there are no devices."""
        if spec is None or self.device_mesh is None:
            return None
        return NamedSharding(self.device_mesh, jax_partition_spec(spec))


def jax_partition_spec(spec: Spec) -> PartitionSpec:
    """Convert a spec to JAX's PartitionSpec."""
    entries: list[str | tuple[str, ...] | None] = []
    for axes in spec.mesh_axes:
        if len(axes) > 1:
            entries.append(axes)
        elif axes:
            entries.append(axes[0])
        else:
            entries.append(None)
    return PartitionSpec(*entries)


def make_sharding_context(
    mesh: Mesh,
    rules: Rules = DEFAULT_RULES,
    *,
    devices: Sequence[Any] | None = None,
    slices: SliceCounts = ONE_SLICE,
    origin: Option | Key = meshes.MESH_KEY,
) -> ShardingContext:
    """Create the mesh on the devices of all processes, or on devices to compile for.

    Args:
        mesh: The mesh. One axis of size -1 takes the remaining devices.
        rules: Partition rules.
        devices: Devices of the mesh. None for all devices of JAX.
        slices: Number of slices along each axis of the mesh.
        origin: Option or recipe key of the mesh, for the error.

    Returns:
        The context with its device mesh.

    Raises:
        UsageError: The number of devices or of their slices does not fit the mesh.
        PrepError: JAX finds no devices.
    """
    devices = all_devices() if devices is None else devices
    hosts = len({device.process_index for device in devices})
    kind = devices[0].device_kind
    hardware = f"{hosts} host{'s' if hosts > 1 else ''} with {len(devices) // hosts} x {kind}"
    if devices[0].platform == "cpu":
        hardware += "; JAX_NUM_CPU_DEVICES=8 simulates 8 CPU devices"
    resolved = meshes.resolve_mesh(mesh, len(devices), hardware, origin=origin)
    check_slices(resolved, slices)
    grid = arrange_devices(resolved, devices, slices)
    axis_types = (AxisType.Auto,) * len(resolved.names)
    device_mesh = jax.sharding.Mesh(grid, resolved.names, axis_types=axis_types)
    return ShardingContext(mesh=resolved, rules=rules, device_mesh=device_mesh)


def local_device_sharding() -> SingleDeviceSharding:
    """Return the sharding of an array on one device, the first one of this process."""
    return SingleDeviceSharding(local_devices()[0])


@contextmanager
def catch_out_of_memory(hint: str = TRAINING_MEMORY_HINT) -> Iterator[None]:
    """Convert out-of-memory errors of host and devices into PrepErrors.

    Args:
        hint: Settings to change to save memory.

    Raises:
        PrepError: The work inside ran out of memory.
    """
    try:
        yield
    except MemoryError as error:
        raise PrepError(
            "out of host memory", str(error) or "the system has no free memory", hint
        ) from error
    except jax.errors.JaxRuntimeError as error:
        # jaxlib raises one exception type for all status codes. The code is in the message.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise PrepError("out of device memory", str(error).partition("\n")[0], hint) from error


def device_kind(sharding: ShardingContext) -> DeviceKind:
    """Return the kind of devices in a mesh. Without a mesh it is the kind of JAX's default device."""
    mesh = sharding.device_mesh
    return kind_of_device(local_devices()[0] if mesh is None else mesh.devices.flat[0])


def kind_of_device(device: Any) -> DeviceKind:
    """Return the kind of a JAX device. JAX calls all GPUs `gpu`."""
    if device.platform != "gpu":
        return DeviceKind(device.platform)
    if "cuda" not in device.client.platform_version:
        return DeviceKind("rocm")
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    is_known = major.isdecimal() and minor.isdecimal()
    return DeviceKind("cuda", (int(major), int(minor)) if is_known else None)


def peak_memory_nbytes(sharding: ShardingContext) -> int | None:
    """Return the highest memory in use on a device of this process since its start.

    None if the devices do not count it, as CPUs do not.
    """
    if sharding.device_mesh is None:
        return None
    stats = [device.memory_stats() or {} for device in sharding.device_mesh.local_devices]
    peaks = [
        int(device_stats["peak_bytes_in_use"])
        for device_stats in stats
        if "peak_bytes_in_use" in device_stats
    ]
    return max(peaks, default=None)


def zigzag_order(length: int, sharding: ShardingContext) -> np.ndarray:
    """Return the position of the token in each column of a row.

    Without a split of tokens the order is 0 to `length` - 1. Otherwise the row is cut into 2n equal
    blocks for n shards, and shard i holds blocks i and 2n - 1 - i (zigzag ring attention).

    Args:
        length: Tokens of a row.
        sharding: The device mesh.

    Returns:
        int32 [length].

    Raises:
        UsageError: The mesh does not divide the row into such blocks.
    """
    positions = np.arange(length, dtype=np.int32)
    num_shards = sharding.sequence_parallel_size
    if num_shards == 1:
        return positions
    check_ring_blocks(length, num_shards)
    # Under a causal mask block b sees b earlier blocks, so consecutive blocks would leave shard 0
    # almost idle. A pair (i, 2n - 1 - i) sees 2n - 1 earlier blocks for every i.
    # Example: 8 tokens on n = 2 shards are the blocks [0 1] [2 3] [4 5] [6 7]. Shard 0 holds blocks
    # 0 and 3, shard 1 holds blocks 1 and 2: the columns are 0 1 6 7 | 2 3 4 5.
    blocks = positions.reshape(RING_BLOCKS * num_shards, -1)
    first = blocks[:num_shards]
    last = blocks[num_shards:][::-1]
    return np.stack([first, last], axis=1).reshape(-1)


def order_tokens(x: Array, sharding: ShardingContext) -> Array:
    """Reorder an array [T, ...] of positions 0 to T - 1 to the order of columns."""
    if sharding.sequence_parallel_size == 1:
        return x
    return x[zigzag_order(len(x), sharding)]


def dim_axes(spec: PartitionSpec, ndim: int) -> list[MeshAxes]:
    """Return the mesh axes that split each dim of an array."""
    entries = (*spec, *(None,) * (ndim - len(spec)))
    axes: list[MeshAxes] = []
    for entry in entries:
        if entry is None:
            axes.append(())
        elif isinstance(entry, tuple):
            axes.append(entry)
        else:
            axes.append((entry,))
    return axes
