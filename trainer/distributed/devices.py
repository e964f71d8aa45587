"""The devices of this process, and devices to compile for that this machine does not have."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import jax
from jax._src import cloud_tpu_init, distributed, xla_bridge
from jax.experimental import topologies

from prepcli.core.errors import PrepError, usage_error

# The questions about JAX's state that only its private modules answer, one function each. The names exist in jax 0.10.0
# to 0.10.2. `pyproject.toml` admits no newer minor release, because JAX may move private names in any of them.


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


# The devices of JAX, or one error that says why there are none.

PLATFORMS_VARIABLE = "JAX_PLATFORMS"
NO_DEVICES = "JAX found no devices"
PLATFORM_HINT = (
    f"`{PLATFORMS_VARIABLE}=cpu` selects the CPU, `{PLATFORMS_VARIABLE}=''` any available platform"
)


def all_devices() -> list[Any]:
    """Return the devices of all processes.

    Raises:
        PrepError: JAX finds none, e.g. because `JAX_PLATFORMS` names a missing platform.
    """
    return _devices_or_error(jax.devices)


def local_devices() -> list[Any]:
    """Return the devices of this process.

    Raises:
        PrepError: JAX finds none.
    """
    return _devices_or_error(jax.local_devices)


def _devices_or_error(list_devices: Callable[[], list[Any]]) -> list[Any]:
    """Return the devices of a function of jax. Raise PrepError if there are none."""
    # JAX 0.10 asserts that some backend has an error to report, which fails for `cuda` without its plugin.
    try:
        return list_devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get(PLATFORMS_VARIABLE, "")
        why = str(error).partition("\n")[0]
        if not why and platforms:
            why = f"{PLATFORMS_VARIABLE}={platforms} names a platform that is not installed"
        raise PrepError(NO_DEVICES, why or "it says no more", PLATFORM_HINT) from error


# Devices to compile for that this machine does not have.

# The two cores of a v4 chip are one device with its whole memory, as on a TPU VM. libtpu would describe two devices.
_CHIP_CONFIGS = {"v4": {"chip_config_name": "megacore"}}
# libtpu assumes hosts with four chips, so a single chip has to be described.
_ONE_CHIP = "1x1"


def libtpu_version() -> str:
    """Return the version of libtpu, or `unknown` for one that no package installed."""
    try:
        return version("libtpu")
    except PackageNotFoundError:
        return "unknown"


def tpu_devices(topology: str, num_slices: int = 1) -> list[Any]:
    """Return the devices of a TPU topology. No TPU is needed: libtpu describes them and compiles for them.

    Args:
        topology: A TPU generation and its chips per dimension, such as `v5p:8x8x4`.
        num_slices: Number of slices of that topology.

    Raises:
        PrepError: libtpu is not installed.
        UsageError: There is no such topology.
    """
    if find_spec("libtpu") is None:
        what = f"no compiler for the TPU topology {topology!r:.60}"
        raise PrepError(
            what, "libtpu is not installed", "`pip install 'prepcli[tpu]'`; it needs no TPU"
        )
    try:
        name, _, shape = topology.partition(":")
        options: dict[str, Any] = {"num_slices": num_slices, **_CHIP_CONFIGS.get(name, {})}
        if shape == _ONE_CHIP:
            options["chips_per_host_bounds"] = [1, 1, 1]
        return list(
            topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices
        )
    except jax.errors.JaxRuntimeError as error:
        why = str(error).partition("\n")[0]
        raise usage_error(
            f"unknown TPU topology {topology!r:.60}", why, "for example `v5p:8x8x4`"
        ) from error
