"""The mesh of a run as jax sees it: how parameters lie on it, and where activations are told to lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from trainer.models import mesh as meshes
from trainer.models.errors import PrepError
from trainer.models.mesh import DEFAULT_RULES, RESIDUAL_SEQ_CHOICES, Mesh, Rules, Spec, partition_spec
from trainer.models.param_tree import ParamLeaf

# Activations by logical dim. The residual stream between blocks is split along tokens over mp, where attention and
# feed-forward are split along heads and hidden units: saved layer inputs are what fills memory at long contexts.
ACTIVATION_RULES: Rules = {
    "batch": (("dp", "fsdp"),),
    "residual_seq": RESIDUAL_SEQ_CHOICES,
    "seq": ((),),
    "embed": ((),),
}


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: functions of it are compiled once
class ShardingContext:
    """A mesh of devices with the rules of a run; without a mesh everything is on one device."""

    mesh: Mesh | None = None
    rules: Rules = field(default_factory=lambda: DEFAULT_RULES)
    device_mesh: jax.sharding.Mesh | None = None

    def param_sharding(self, leaf: ParamLeaf) -> NamedSharding | None:
        """Where a parameter lies; a usage PrepError where the mesh does not divide it."""
        return self._to_named_sharding(self.param_spec(leaf))

    def param_spec(self, leaf: ParamLeaf) -> Spec | None:
        """How the mesh splits a parameter."""
        return None if self.mesh is None else partition_spec(leaf.dims, leaf.shape, self.mesh, self.rules)

    def replicated_sharding(self) -> NamedSharding | None:
        """Whole on every device."""
        return None if self.device_mesh is None else NamedSharding(self.device_mesh, PartitionSpec())

    def activation_sharding(self, shape: tuple[int, ...], *dims: str) -> NamedSharding | None:
        """Where an activation with these logical dims lies."""
        if self.mesh is None:
            return None
        return self._to_named_sharding(
            partition_spec([(name,) for name in dims], shape, self.mesh, {**self.rules, **ACTIVATION_RULES})
        )

    def constrain(self, x: jax.Array, *dims: str) -> jax.Array:
        """Tell the compiler where an activation with these logical dims lies."""
        sharding = self.activation_sharding(x.shape, *dims)
        return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)

    def num_shards(self, dim: str, extent: int) -> int:
        """Into how many parts a dim of activations is split."""
        if self.mesh is None:
            return 1
        return partition_spec([(dim,)], (extent,), self.mesh, {**self.rules, **ACTIVATION_RULES}).shards_per_dim[0]

    @property
    def data_parallel_size(self) -> int:
        """Parts of a batch: over how many groups of devices its sequences are dealt out."""
        return 1 if self.mesh is None else self.mesh.size("dp") * self.mesh.size("fsdp")

    def _to_named_sharding(self, spec: Spec | None) -> NamedSharding | None:
        return (
            None
            if spec is None or self.device_mesh is None
            else NamedSharding(self.device_mesh, jax_partition_spec(spec))
        )


def jax_partition_spec(spec: Spec) -> PartitionSpec:
    """A Spec as jax spells it."""
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in spec.mesh_axes))


def make_sharding_context(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> ShardingContext:
    """The mesh on this machine's devices; a usage PrepError where their number is another. PrepError without any."""
    devices = _jax_devices()
    hosts, kind = jax.process_count(), devices[0].device_kind
    where = f"{hosts} host{'s' if hosts > 1 else ''} with {len(devices) // hosts} x {kind}"
    if devices[0].platform == "cpu":
        where += "; a CPU can stand in for several: JAX_NUM_CPU_DEVICES=8"
    full = meshes.resolve_mesh(mesh, len(devices), where)
    return ShardingContext(full, rules, _make_device_mesh(full))


def _jax_devices() -> list[Any]:
    try:
        return jax.devices()
    except RuntimeError as error:
        hint = "`JAX_PLATFORMS=cpu` takes the CPU, `JAX_PLATFORMS=''` what is there"
        raise PrepError("jax finds no devices", str(error).partition("\n")[0], hint) from error


TRAINING_MEMORY_HINT = (
    'more `batch.accumulate`, `model.remat_policy = "nothing_saveable"`, or more fsdp or mp in `mesh`'
)


@contextmanager
def catch_out_of_memory(hint: str = TRAINING_MEMORY_HINT) -> Iterator[None]:
    """Within, PrepError where the devices have too little memory for what is asked of them."""
    try:
        yield
    except MemoryError as error:
        raise PrepError("there is too little memory", str(error) or "the system has no more", hint) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise PrepError("the devices have too little memory", str(error).partition("\n")[0], hint) from error


def sharding_without_devices(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> ShardingContext:
    """The mesh without devices: specs can be asked for, nothing can be placed."""
    return ShardingContext(mesh, rules, None)


def _make_device_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(mesh.names)
    if mesh.plain_order:
        return jax.sharding.Mesh(np.array(jax.devices()).reshape(mesh.sizes), mesh.names, axis_types=kinds)
    return jax.make_mesh(mesh.sizes, mesh.names, axis_types=kinds)


def param_nbytes_per_device(leaves: Mapping[str, ParamLeaf], sharding: ShardingContext, itemsize: int = 4) -> int:
    """Bytes of all leaves that one device holds."""
    total = 0
    for leaf in leaves.values():
        found = sharding.param_spec(leaf)
        total += math.prod(leaf.shape) * itemsize // (math.prod(found.shards_per_dim) if found else 1)
    return total
