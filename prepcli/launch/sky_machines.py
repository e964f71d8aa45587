"""The accelerators of a SkyPilot job. The functions do no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from prepcli.core.errors import Option, text, usage_error
from prepcli.launch.command import LaunchedCommand
from prepcli.launch.hardware import GKE, Hardware, Training, plain_hardware, tpu_vm_hardware
from prepcli.launch.options import SkyOptions
from prepcli.launch.tpu import RUNTIME_VERSIONS

# Prefix of TPUs in SkyPilot's names.
TPU = "tpu-"
# `H100`, `H100:8`, `tpu-v5p-16`. SkyPilot also accepts fractions, which no process of prep can use.
_NAME = re.compile(r"([^\s:]+)(?::([1-9][0-9]{0,5}))?")
# Kubernetes names its TPUs `tpu-v5p-slice`, with a count.
_TPU_VM = re.compile(r"tpu-([^-]+-[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyAccelerator:
    """The accelerators of a node.

    Attributes:
        name: Name in SkyPilot, e.g. `H100` or `tpu-v5p-16`.
        count: Number per node. A slice of TPU VMs is one.
        tpu_type: Type of a slice of TPU VMs, e.g. `v5p-16`. Empty for other accelerators.
    """

    name: str
    count: int
    tpu_type: str = ""

    @property
    def runtime_version(self) -> str | None:
        """Software of a TPU VM, or None. SkyPilot's default is wrong for v5e and old for v2 to v4."""
        return RUNTIME_VERSIONS.get(self.tpu_type.partition("-")[0])


def sky_accelerator(options: SkyOptions) -> SkyAccelerator | None:
    """Return the accelerators of a node, or None without `--accelerator`.

    Raises:
        UsageError: SkyPilot would refuse the name or the number, or take another one.
    """
    devices = options["devices_per_node"]
    if not options["accelerator"]:
        if devices:
            what = text("{} is missing", Option("accelerator"))
            why = text("{} counts accelerators", Option("devices_per_node", devices))
            raise usage_error(what, why, text("{}", Option("accelerator", "H100")))
        return None
    match = _NAME.fullmatch(options["accelerator"])
    if match is None:
        what = text("{} is invalid", Option("accelerator", options["accelerator"]))
        hint = text("{}", Option("accelerator", "H100:8"))
        raise usage_error(what, "the form is NAME or NAME:N", hint)
    name, count = match.groups()
    if name.lower().startswith(TPU):
        # SkyPilot accepts capitals, and does not see that the slice has several hosts.
        name = name.lower()
    vm = _TPU_VM.fullmatch(name)
    if devices:
        _check_one_number(name, count, devices, is_slice=vm is not None)
    if vm is None:
        # Without a number SkyPilot takes one.
        return SkyAccelerator(name=name, count=devices or int(count or 1))
    if count not in (None, "1"):
        what = text("{} is invalid", Option("accelerator", options["accelerator"]))
        hint = text("{}", Option("accelerator", name))
        raise usage_error(what, "a job has one slice, with all of its hosts", hint)
    return SkyAccelerator(name=name, count=1, tpu_type=vm[1])


def _check_one_number(name: str, count: str | None, devices: int, *, is_slice: bool) -> None:
    """Raise UsageError if `--devices-per-node` is not the only number of accelerators.

    Args:
        name: The accelerator.
        count: Number after the name, or None.
        devices: Value of `--devices-per-node`.
        is_slice: Whether the name has the size of a TPU slice.
    """
    option = Option("devices_per_node", devices)
    if is_slice:
        what = text("{} has no effect on {}", option, name)
        why = "the number in the name of a TPU is its size"
        raise usage_error(what, why, text("remove {}", option))
    if count:
        what = text("{} excludes {}", Option("accelerator", f"{name}:{count}"), option)
        raise usage_error(what, f"`:{count}` is the number", text("remove {}", option))


def sky_hardware(
    options: SkyOptions, command: LaunchedCommand, training: Training | None
) -> Hardware:
    """Return the nodes and devices of a job.

    Args:
        options: Options of the job.
        command: The command.
        training: Requirements of the command, for the hints. None if it computes on no mesh.

    Raises:
        UsageError: The accelerator is invalid, or SkyPilot cannot start this number of slices.
    """
    nodes = options["nodes"]
    accelerator = sky_accelerator(options)
    if accelerator is None:
        return plain_hardware(nodes, None)
    num_devices = None if training is None else training.num_devices
    if not accelerator.tpu_type:
        hardware = plain_hardware(nodes, accelerator.count)
        return replace(
            hardware, fitting_options=_fitting_gpus(accelerator.name, num_devices, nodes)
        )
    hardware = tpu_vm_hardware(accelerator.tpu_type, num_devices, prefix=TPU)
    if hardware is None:
        return plain_hardware(nodes, None)
    if nodes == 1:
        return hardware
    if hardware.nodes > 1 or command.has_mesh:
        what = text("{} is not supported with {}", Option("nodes", nodes), accelerator.name)
        hint = text("{}: the slice has all of its hosts", Option("nodes", 1))
        if command.has_mesh:
            hint = text("{}, or use {}, which starts several slices", Option("nodes", 1), GKE)
        raise usage_error(what, "prep starts one slice of TPUs with SkyPilot", hint)
    return plain_hardware(nodes, None)


def _fitting_gpus(name: str, num_devices: int | None, nodes: int) -> str:
    """Return the option for nodes with a number of devices in all. Empty if the nodes do not divide it."""
    if not num_devices or num_devices % nodes:
        return ""
    return text("{}", Option("accelerator", f"{name}:{num_devices // nodes}"))
