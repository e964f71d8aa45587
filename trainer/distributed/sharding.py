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
from trainer.models.mesh import DEFAULT_RULES, RESIDUAL_SEQ, Mesh, Rules, Spec, spec
from trainer.models.tree import Leaf

# Activations by logical dim. The residual stream between blocks is split along tokens over mp, where attention and
# feed-forward are split along heads and hidden units: saved layer inputs are what fills memory at long contexts.
ACTIVATION_RULES: Rules = {
    "batch": (("dp", "fsdp"),),
    "residual_seq": RESIDUAL_SEQ,
    "seq": ((),),
    "embed": ((),),
}


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: functions of it are compiled once
class Shards:
    """A mesh of devices with the rules of a run; without a mesh everything is on one device."""

    mesh: Mesh | None = None
    rules: Rules = field(default_factory=lambda: DEFAULT_RULES)
    devices: jax.sharding.Mesh | None = None

    def of(self, leaf: Leaf) -> NamedSharding | None:
        """Where a parameter lies; a usage PrepError where the mesh does not divide it."""
        return self._sharding(self.spec_of(leaf))

    def spec_of(self, leaf: Leaf) -> Spec | None:
        """How the mesh splits a parameter."""
        return None if self.mesh is None else spec(leaf.dims, leaf.shape, self.mesh, self.rules)

    def replicated(self) -> NamedSharding | None:
        """Whole on every device."""
        return None if self.devices is None else NamedSharding(self.devices, PartitionSpec())

    def activation(self, shape: tuple[int, ...], *names: str) -> NamedSharding | None:
        """Where an activation with these logical dims lies."""
        if self.mesh is None:
            return None
        return self._sharding(spec([(name,) for name in names], shape, self.mesh, {**self.rules, **ACTIVATION_RULES}))

    def constrain(self, x: jax.Array, *names: str) -> jax.Array:
        """Tell the compiler where an activation with these logical dims lies."""
        sharding = self.activation(x.shape, *names)
        return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)

    def parts(self, name: str, extent: int) -> int:
        """Into how many parts a dim of activations is split."""
        if self.mesh is None:
            return 1
        return spec([(name,)], (extent,), self.mesh, {**self.rules, **ACTIVATION_RULES}).parts[0]

    @property
    def replicas(self) -> int:
        """Parts of a batch: over how many groups of devices its sequences are dealt out."""
        return 1 if self.mesh is None else self.mesh.size("dp") * self.mesh.size("fsdp")

    def _sharding(self, found: Spec | None) -> NamedSharding | None:
        return None if found is None or self.devices is None else NamedSharding(self.devices, partition(found))


def partition(found: Spec) -> PartitionSpec:
    """A Spec as jax spells it."""
    return PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in found.axes))


def shards(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Shards:
    """The mesh on this machine's devices; a usage PrepError where their number is another. PrepError without any."""
    devices = _all_devices()
    hosts, kind = jax.process_count(), devices[0].device_kind
    where = f"{hosts} host{'s' if hosts > 1 else ''} with {len(devices) // hosts} x {kind}"
    if devices[0].platform == "cpu":
        where += "; a CPU can stand in for several: JAX_NUM_CPU_DEVICES=8"
    full = meshes.resolve(mesh, len(devices), where)
    return Shards(full, rules, _devices(full))


def _all_devices() -> list[Any]:
    try:
        return jax.devices()
    except RuntimeError as error:
        hint = "`JAX_PLATFORMS=cpu` takes the CPU, `JAX_PLATFORMS=''` what is there"
        raise PrepError("jax finds no devices", str(error).partition("\n")[0], hint) from error


FOR_TRAINING = 'more `batch.accumulate`, `model.remat_policy = "nothing_saveable"`, or more fsdp or mp in `mesh`'


@contextmanager
def enough_memory(hint: str = FOR_TRAINING) -> Iterator[None]:
    """Within, PrepError where the devices have too little memory for what is asked of them."""
    try:
        yield
    except MemoryError as error:
        raise PrepError("there is too little memory", str(error) or "the system has no more", hint) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise PrepError("the devices have too little memory", str(error).partition("\n")[0], hint) from error


def abstract(mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Shards:
    """The mesh without devices: specs can be asked for, nothing can be placed."""
    return Shards(mesh, rules, None)


def _devices(mesh: Mesh) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(mesh.names)
    if mesh.plain_order:
        return jax.sharding.Mesh(np.array(jax.devices()).reshape(mesh.sizes), mesh.names, axis_types=kinds)
    return jax.make_mesh(mesh.sizes, mesh.names, axis_types=kinds)


def device_nbytes(leaves: Mapping[str, Leaf], on: Shards, itemsize: int = 4) -> int:
    """Bytes of all leaves that one device holds."""
    total = 0
    for leaf in leaves.values():
        found = on.spec_of(leaf)
        total += math.prod(leaf.shape) * itemsize // (math.prod(found.parts) if found else 1)
    return total
