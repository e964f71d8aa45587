"""The environment that decides how sums are rounded, and the warning about its changes."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import jax
import pytest

from prepcli.models.mesh import parse_mesh
from trainer.distributed.sharding import make_sharding_context
from trainer.run.resume import environment_warning
from trainer.run.summary import rounding_environment

BEFORE = {"device": "cpu", "jax": "0.10.2", "jaxlib": "0.10.2", "xla_flags": "", "cores": 2}


def test_environment_has_versions_flags_and_cores(monkeypatch: pytest.MonkeyPatch):
    # XLA reads its flags when the backend starts, which this call does.
    sharding = make_sharding_context(parse_mesh("1,1,1"), devices=jax.devices()[:1])
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_force_host_platform_device_count=8  --xla_a=2")
    assert rounding_environment(sharding) == {
        "device": "cpu",
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "xla_flags": "--xla_a=2 --xla_b=1",
        "cores": len(os.sched_getaffinity(0)),
    }


@pytest.mark.parametrize(
    ("before", "changes", "text"),
    [
        (BEFORE, {}, ""),
        (None, {}, ""),
        (BEFORE, {"jaxlib": "0.11"}, "jaxlib 0.10.2 -> 0.11"),
        (
            BEFORE,
            {"xla_flags": "--xla_a=1", "cores": 4},
            "XLA_FLAGS none -> --xla_a=1, cores 2 -> 4",
        ),
        (
            BEFORE,
            {"device": "NVIDIA H100", "cores": None},
            "device cpu -> NVIDIA H100, cores 2 -> none",
        ),
    ],
)
def test_warning_lists_changed_environment_values(before: Any, changes: dict[str, Any], text: str):
    warning = environment_warning(before, BEFORE | changes, step=7)
    assert warning == (f"results may differ in the last bits: since step 7, {text}" if text else "")
