"""Errors of JAX about its platforms, as one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

from prepcli.core.errors import PrepError
from prepcli.models.mesh import parse_mesh
from trainer.distributed.devices import PLATFORM_HINT, all_devices, local_devices
from trainer.distributed.sharding import (
    ShardingContext,
    device_kind,
    local_device_sharding,
    make_sharding_context,
)

USERS_OF_DEVICES: tuple[Callable[[], object], ...] = (
    all_devices,
    local_devices,
    local_device_sharding,
    lambda: device_kind(ShardingContext()),
    lambda: make_sharding_context(parse_mesh("1,1,1")),
)


@pytest.mark.parametrize("number", range(len(USERS_OF_DEVICES)))
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            RuntimeError("Unable to initialize backend 'foo': unknown\nmore"),
            "Unable to initialize backend 'foo': unknown",
        ),
        (AssertionError(), "JAX_PLATFORMS=cuda names a platform that is not installed"),
    ],
)
def test_missing_platform_raises_prep_error(
    monkeypatch: pytest.MonkeyPatch, number: int, error: Exception, why: str
) -> None:
    def fail(*_: Any) -> list[Any]:
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(PrepError) as caught:
        USERS_OF_DEVICES[number]()
    assert (caught.value.what, caught.value.why, caught.value.hint) == (
        "JAX found no devices",
        why,
        PLATFORM_HINT,
    )


def test_devices_match_jax() -> None:
    assert all_devices() == jax.devices()
    assert local_devices() == jax.local_devices()
