"""Accelerators for which a training step can be planned, as data from their vendors.

Memory is in decimal gigabytes although some vendors mean binary ones: the runtime keeps the
difference for itself. Peaks are for dense bfloat16 matrix products. Bandwidths are in bytes
per second that one device sends.

Sources:
    TPU memory, memory bandwidth, peak and pod size: Cloud TPU docs, "TPU v4", "TPU v5e", "TPU v5p",
        "TPU v6e", "TPU7x" (https://docs.cloud.google.com/tpu/docs/v5p and its sibling pages). A
        chip of TPU7x is two devices. Each has half of its memory and bandwidths.
    TPU links along one axis of the torus, both directions, and data center network per chip: Austin
        et al., "How to Scale Your Model", chapter 2 (https://jax-ml.github.io/scaling-book/tpus).
        A TPU7x chip has links as fast as a v5p chip (Cloud TPU docs, "TPU7x").
    GPU memory, memory bandwidth, peak and NVLink (half of the published figure, for one direction):
        NVIDIA's data sheets of A100, H100 and H200, and of DGX B200 for one of its eight GPUs
        (https://www.nvidia.com/en-us/data-center).
    GPU network: the network cards of DGX A100 (200 Gb/s), DGX H100, H200 and B200 (400 Gb/s), one
    per GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.formatting import did_you_mean_start
from prepcli.models.attention_kernels import DeviceKind
from prepcli.models.mesh import MAX_DEVICES

GB = 10**9
TERA = 10**12
TPU = DeviceKind("tpu")
AMPERE, HOPPER, BLACKWELL = (DeviceKind("cuda", (major, 0)) for major in (8, 9, 10))


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of accelerator.

    Attributes:
        name: Name in `--devices`.
        device: Platform and compute capability, which decide on the attention kernel.
        memory_nbytes: Memory of one device.
        peak_flops: Dense bfloat16 operations per second.
        memory_bandwidth: Bytes per second between a device and its memory.
        link_bandwidth: Bytes per second that a device sends along one mesh axis within a domain.
        domain_size: Devices that links connect: the chips of a pod, or the GPUs of a node.
        network_bandwidth: Bytes per second that a device sends to other domains.
    """

    name: str
    device: DeviceKind
    memory_nbytes: int
    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    domain_size: int
    network_bandwidth: float

    def axis_bandwidth(self, size: int, stride: int) -> float:
        """Return the bytes per second that a device sends in a ring over a mesh axis.

        A ring inside one domain uses the links. A ring over several domains uses the network connections of all its
        devices in a domain.

        Args:
            size: Devices along the axis.
            stride: Distance of neighbours along the axis, in devices.
        """
        # E.g. nodes of 8 GPUs with a network card each, and an axis of 16 devices. With stride 1 a ring
        # has all 8 GPUs of a node, and their 8 // 1 = 8 cards. With stride 4 a ring has 2 GPUs of a
        # node, such as 0 and 4, and their 8 // 4 = 2 cards.
        if size * stride <= self.domain_size:
            return self.link_bandwidth
        return min(self.link_bandwidth, self.network_bandwidth * max(1, self.domain_size // stride))


_KINDS = (
    Accelerator("v4", TPU, 32 * GB, 275 * TERA, 1228 * GB, 90 * GB, 4096, 6.25 * GB),
    Accelerator("v5e", TPU, 16 * GB, 197 * TERA, 819 * GB, 90 * GB, 256, 3.125 * GB),
    Accelerator("v5p", TPU, 95 * GB, 459 * TERA, 2765 * GB, 180 * GB, 8960, 6.25 * GB),
    Accelerator("v6e", TPU, 32 * GB, 918 * TERA, 1640 * GB, 180 * GB, 256, 12.5 * GB),
    # A pod of 9,216 chips has 18,432 devices.
    Accelerator("tpu7x", TPU, 96 * GB, 1153.5 * TERA, 3690 * GB, 90 * GB, 18432, 6.25 * GB),
    Accelerator("A100-40", AMPERE, 40 * GB, 312 * TERA, 1555 * GB, 300 * GB, 8, 25 * GB),
    Accelerator("A100-80", AMPERE, 80 * GB, 312 * TERA, 2039 * GB, 300 * GB, 8, 25 * GB),
    Accelerator("H100", HOPPER, 80 * GB, 989 * TERA, 3350 * GB, 450 * GB, 8, 50 * GB),
    Accelerator("H200", HOPPER, 141 * GB, 989 * TERA, 4800 * GB, 450 * GB, 8, 50 * GB),
    Accelerator("B200", BLACKWELL, 180 * GB, 2250 * TERA, 8000 * GB, 900 * GB, 8, 50 * GB),
)
ACCELERATORS = {kind.name: kind for kind in _KINDS}
# `device_kind` of JAX -> name. PCIe and NVL cards are missing: they have other peaks.
JAX_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100-SXM4-40GB": "A100-40",
    "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}


def accelerator_of(device_kind: str) -> Accelerator | None:
    """Return the accelerator that JAX calls `device_kind`, or None if it is unknown."""
    name = JAX_KINDS.get(device_kind)
    if name:
        return ACCELERATORS[name]
    return None


def parse_devices(devices: str) -> tuple[Accelerator | None, int | None]:
    """Parse `KIND`, `KIND:NUMBER` or `NUMBER`, such as `v5p:256`.

    Returns:
        The kind and the number of devices, or None for the one that is not given.

    Raises:
        UsageError: The kind is unknown, or the number is not an integer from 1 to MAX_DEVICES.
    """
    option = Option("devices", f"{devices:.60}")
    is_number = devices.isdecimal()
    name, colon, number = ("", ":", devices) if is_number else devices.partition(":")
    kinds = {known.lower(): known for known in ACCELERATORS}
    if not is_number and name.lower() not in kinds:
        why = f"known: {', '.join(ACCELERATORS)}"
        hint = did_you_mean_start(name, ACCELERATORS)
        raise usage_error(text("{}: unknown kind `{:.60}`", option, name), why, hint)
    # `isdecimal` above accepts numbers of any length and digits of other scripts. `int` must get neither.
    if colon and not (re.fullmatch("[0-9]{1,7}", number) and 1 <= int(number) <= MAX_DEVICES):
        why = f"it takes KIND, KIND:NUMBER or NUMBER, at most {MAX_DEVICES:,} devices"
        hint = text("{}", Option("devices", "v5p:256"))
        raise usage_error(text("{} is invalid", option), why, hint)
    return None if is_number else ACCELERATORS[kinds[name.lower()]], int(number) if colon else None
