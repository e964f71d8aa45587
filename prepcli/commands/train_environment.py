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
from typing import TYPE_CHECKING, Any

from prepcli.commands.env import package_versions
from prepcli.commands.train_files import write_run_file
from prepcli.commands.train_run import Run
from prepcli.inspection.run_record import ENVIRONMENT_FILE

if TYPE_CHECKING:
    from trainer.distributed.sharding import ShardingContext
    from trainer.models.param_tree import ParamLeaf

ENVIRONMENT_KEY = "environment"  # of a step's manifest: its values decide how sums are rounded, as recipe and mesh do
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"  # the number of devices is that of the mesh
NAME_BY_KEY = {"device": "device", "jax": "jax", "jaxlib": "jaxlib", "xla_flags": "XLA_FLAGS", "cores": "cores"}


def write_environment(run: Run) -> None:
    """Write the environment of the current start of a run; raise PrepError if it cannot be written."""
    write_run_file(run, ENVIRONMENT_FILE, json.dumps(environment_fields(run), indent=1) + "\n")


def environment_fields(run: Run) -> dict[str, Any]:
    """Return the environment of a run, for JSON."""
    job, sharding = run.job, run.job.setup.forward_config.sharding
    assert sharding.device_mesh is not None
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed_at": run.step,
        "steps": job.steps,
        "host": socket.gethostname(),
        "processes": run.group.count,
        "devices": sharding.device_mesh.size,
        "device_kind": sharding.device_mesh.devices.flat[0].device_kind,
        "mesh": str(sharding.mesh),
        "attention_kernel": run.kernel.name,
        "parameters": _num_elements(job.setup.model.leaves),
        "trained_parameters": _num_elements(job.setup.trained_leaves),
        "data": {
            "train_sequences": job.train.n_rows,
            "eval_sequences": job.evaluation.n_rows if job.evaluation else 0,
            "batch_sequences": job.order.batch_size,
            "tokens_per_step": job.tokens_per_step,
            "digest": job.manifest_fields["data"],
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
    return {
        "device": device.device_kind,
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
        "xla_flags": " ".join(sorted(flags)),
        **({"cores": len(os.sched_getaffinity(0))} if device.platform == "cpu" else {}),
    }


def environment_warning(before: object, now: Mapping[str, Any], *, step: int) -> str:
    """Return a warning about the differences between two environments; empty without a difference.

    Args:
        before: Environment in the manifest of a step; None in a step of an earlier prep.
        now: Environment of this process.
        step: The step.
    """
    if not isinstance(before, Mapping):
        return ""
    changes = [
        f"{name} {_text(before.get(key))} -> {_text(now.get(key))}"
        for key, name in NAME_BY_KEY.items()
        if before.get(key) != now.get(key)
    ]
    return f"results may differ in the last bits: since step {step}, {', '.join(changes)}" if changes else ""


def _text(value: object) -> str:
    return "none" if value in (None, "") else str(value)
