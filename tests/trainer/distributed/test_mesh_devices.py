"""The kind of the devices of a run, from the attributes of JAX devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.models.attention_kernels import DeviceKind
from prepcli.models.mesh import parse_mesh
from trainer.distributed.sharding import (
    ShardingContext,
    device_kind,
    kind_of_device,
    make_sharding_context,
)


def device(platform: str, version: str = "", **attributes: Any) -> Any:
    """Return an object with the attributes of a JAX device."""
    return SimpleNamespace(
        platform=platform, client=SimpleNamespace(platform_version=version), **attributes
    )


@pytest.mark.parametrize(
    ("jax_device", "kind"),
    [
        (device("cpu"), DeviceKind("cpu")),
        (device("tpu"), DeviceKind("tpu")),
        (
            device("gpu", "PJRT C API\ncuda 12090", compute_capability="9.0"),
            DeviceKind("cuda", (9, 0)),
        ),
        (
            device("gpu", "PJRT C API\ncuda 12090", compute_capability="12.1"),
            DeviceKind("cuda", (12, 1)),
        ),
        (device("gpu", "PJRT C API\ncuda 12090"), DeviceKind("cuda")),
        (device("gpu", "PJRT C API\nrocm 60300", compute_capability="gfx90a"), DeviceKind("rocm")),
    ],
)
def test_kind_follows_platform_and_capability(jax_device: Any, kind: DeviceKind):
    assert kind_of_device(jax_device) == kind


def test_device_kind_returns_the_kind_of_the_mesh_devices():
    assert device_kind(ShardingContext()) == DeviceKind("cpu")
    assert device_kind(make_sharding_context(parse_mesh("1,8,1"))) == DeviceKind("cpu")
