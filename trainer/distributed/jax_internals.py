"""The questions about JAX's state that only its private modules answer, one function each.

JAX has no public function that says whether devices are in use without starting them, whether this
is a TPU virtual machine, or what the client of `jax.distributed` is. The names below exist in jax
0.10.0 to 0.10.2. `pyproject.toml` admits no newer minor release, because JAX may move private names
in any of them. `trainer.distributed.runtime_errors` has the hook into jaxlib.
"""

from __future__ import annotations

from typing import Any

from jax._src import cloud_tpu_init, distributed, xla_bridge


def backends_are_initialized() -> bool:
    """Return whether JAX has started its devices. `jax.devices()` would start them."""
    return xla_bridge.backends_are_initialized()


def runs_on_tpu_vm() -> bool:
    """Return whether this machine is a TPU virtual machine, as JAX found when it was imported."""
    return cloud_tpu_init.running_in_cloud_tpu_vm


def distributed_state() -> Any:
    """Return the connection of `jax.distributed`: `client`, `process_id` and `num_processes`.

    The client is the key-value store of the coordination service. It is None before
    `jax.distributed.initialize`.
    """
    return distributed.global_state
