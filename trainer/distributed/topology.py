"""Devices to compile for that this machine does not have."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from prepcli.core.errors import PrepError, usage_error

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
