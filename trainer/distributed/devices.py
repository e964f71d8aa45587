"""The devices of JAX, or one error that says why there are none."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

from prepcli.core.errors import PrepError

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
        raise PrepError(NO_DEVICES, _no_devices_reason(error), PLATFORM_HINT) from error


def _no_devices_reason(error: Exception) -> str:
    platforms = os.environ.get(PLATFORMS_VARIABLE, "")
    text = str(error).partition("\n")[0]
    if text:
        return text
    return (
        f"{PLATFORMS_VARIABLE}={platforms} names a platform that is not installed"
        if platforms
        else "it says no more"
    )
