"""The machine, the data and the versions of a run, as its folder keeps them for `prep report`."""

from __future__ import annotations

import json
import math
import platform
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from prepcli.commands.env import package_versions
from prepcli.commands.train_files import write_run_file
from prepcli.commands.train_run import Run
from prepcli.inspection.run_record import ENVIRONMENT_FILE

if TYPE_CHECKING:
    from trainer.models.param_tree import ParamLeaf


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
