"""The machine, the data and the versions of a run, as its folder and its steps record them."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Final

from prepcli.core.json_values import JsonObject
from prepcli.engine.machine import package_versions
from trainer.run.run import PreparedRun
from trainer.run.run_record import ENVIRONMENT_FILE
from trainer.run.storage import write_run_file

if TYPE_CHECKING:
    from prepcli.models.param_tree import ParamLeaf
    from trainer.distributed.sharding import ShardingContext

# Key of a step's manifest. Its values decide how sums are rounded, as the recipe and the mesh do.
ENVIRONMENT_KEY: Final = "environment"
# Left out of the recorded flags: the mesh has the number of devices already.
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
NAME_BY_KEY = {
    "device": "device",
    "jax": "jax",
    "jaxlib": "jaxlib",
    "xla_flags": "XLA_FLAGS",
    "cores": "cores",
}


def write_environment(prepared: PreparedRun) -> None:
    """Write the environment of the current start of a run.

    Raise PrepError if it cannot be written.
    """
    text = json.dumps(environment_fields(prepared), indent=1) + "\n"
    write_run_file(prepared.run, ENVIRONMENT_FILE, text)


def environment_fields(prepared: PreparedRun) -> JsonObject:
    """Return the environment of a run, for JSON."""
    loop = prepared.loop
    sharding = loop.setup.forward_config.sharding
    assert sharding.device_mesh is not None
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed_at": prepared.step,
        "steps": loop.steps,
        "host": socket.gethostname(),
        "processes": prepared.run.group.count,
        "devices": sharding.device_mesh.size,
        "device_kind": sharding.device_mesh.devices.flat[0].device_kind,
        "mesh": str(sharding.mesh),
        "attention_kernel": prepared.kernel.name,
        "parameters": _num_elements(loop.setup.model.leaves),
        "trained_parameters": _num_elements(loop.setup.trained_leaves),
        "data": {
            "train_sequences": loop.train.n_rows,
            "eval_sequences": loop.evaluation.n_rows if loop.evaluation else 0,
            "batch_sequences": loop.order.batch_size,
            "tokens_per_step": loop.tokens_per_step,
            "digest": loop.manifest_fields.data,
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name, version in package_versions().items() if version},
    }


def _num_elements(leaves: Mapping[str, ParamLeaf]) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaves.values())


def rounding_environment(sharding: ShardingContext) -> dict[str, str | int]:
    """Return the kind of device, the versions of JAX, XLA's flags and, for CPUs, the cores of this process."""
    from trainer.distributed.exact_backend import xla_flags

    assert sharding.device_mesh is not None
    device = sharding.device_mesh.devices.flat[0]
    flags = [flag for flag in xla_flags().split() if not flag.startswith(DEVICE_COUNT_FLAG)]
    environment: dict[str, str | int] = {
        "device": device.device_kind,
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
        "xla_flags": " ".join(sorted(flags)),
    }
    if device.platform == "cpu":
        # XLA splits a CPU's matrix products among the cores, and the split changes the order of its sums.
        environment["cores"] = len(os.sched_getaffinity(0))
    return environment


def environment_warning(
    before: Mapping[str, object] | None, now: Mapping[str, object], *, step: int
) -> str:
    """Return a warning about the differences between two environments.

    Empty without a difference.

    Args:
        before: Environment in the manifest of a step. None in a step of an earlier prep.
        now: Environment of this process.
        step: The step.
    """
    if before is None:
        return ""
    changes: list[str] = []
    for key, name in NAME_BY_KEY.items():
        if before.get(key) != now.get(key):
            changes.append(f"{name} {_value_text(before.get(key))} -> {_value_text(now.get(key))}")
    if not changes:
        return ""
    return f"results may differ in the last bits: since step {step}, {', '.join(changes)}"


def _value_text(value: object) -> str:
    if value in (None, ""):
        return "none"
    return str(value)
