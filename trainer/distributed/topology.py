"""Devices to compile for that this machine does not have, and the process in which JAX can describe them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from trainer.models.errors import PrepError, usage_error

# JAX reads these once per process. libtpu would otherwise look for a TPU host, and lock the machine's TPU.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
# The two cores of a v4 chip are one device with its whole memory, as on a TPU VM. libtpu would describe two devices.
_CHIP_CONFIGS = {"v4": {"chip_config_name": "megacore"}}
_ONE_CHIP = "1x1"  # libtpu assumes hosts with four chips


def tpu_devices(topology: str, num_slices: int = 1) -> list[Any]:
    """Return the devices of a TPU topology; libtpu describes them and compiles for them without a TPU.

    Args:
        topology: A TPU generation and its chips per dimension, such as `v5p:8x8x4`.
        num_slices: Number of slices of that topology.

    Raises:
        PrepError: libtpu is not installed.
        UsageError: There is no such topology.
    """
    if find_spec("libtpu") is None:
        what = f"no compiler for the TPU topology {topology!r:.60}"
        raise PrepError(what, "libtpu is not installed", "`pip install 'prepcli[tpu]'`; it needs no TPU")
    try:
        name, _, shape = topology.partition(":")
        options: dict[str, Any] = {"num_slices": num_slices, **_CHIP_CONFIGS.get(name, {})}
        if shape == _ONE_CHIP:
            options["chips_per_host_bounds"] = [1, 1, 1]
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        why = str(error).partition("\n")[0]
        raise usage_error(f"unknown TPU topology {topology!r:.60}", why, "for example `v5p:8x8x4`") from error


def run_compile_process(module: str, request: str, num_cpu_devices: int) -> str:
    """Run a module in a process whose JAX has simulated CPU devices only.

    Args:
        module: Module to run; it reads the request from stdin and writes its answer to stdout.
        request: Text of the request.
        num_cpu_devices: Number of CPU devices.

    Returns:
        The last line that the module writes.

    Raises:
        PrepError: The process failed.
    """
    environment = os.environ | _ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(num_cpu_devices)}
    command = [sys.executable, "-P", "-m", module]  # -P: no imports from the current folder
    process = subprocess.run(command, input=request, capture_output=True, text=True, env=environment)
    answer = process.stdout.splitlines()
    if process.returncode or not answer:
        last_line = (process.stderr.splitlines() or ["no message"])[-1]
        raise PrepError("the compilation failed", f"exit code {process.returncode}: {last_line:.300}")
    return answer[-1]
