"""The processes of `prep train`: their connection, and the comparison of what all of them must share."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from prepcli.console.ui import Ui
from prepcli.engine.digest import digest
from trainer.models.process_address import process_address
from trainer.recipe import Recipe
from trainer.recipe.formatting import to_toml
from trainer.recipe.tables import is_path, keys_of, value_of

if TYPE_CHECKING:
    from trainer.distributed.process_group import ProcessGroup

COMPARED_PACKAGES = ("prepcli", "jax", "jaxlib", "numpy")
SHARED_CLUSTER_KEYS = ("cluster.dcn_mesh",)  # the other keys of `cluster` may differ between processes
CHECKPOINT_CONTENTS = ("config", "tensors", "slots", "others", "step")  # keys of a manifest
START_HINT = "start every process with the same prep, recipe and options"
FILES_HINT = "every process must read the same files, for example from a shared file system"


@dataclass(frozen=True, slots=True)
class JobContext:
    """The processes of a run, what this one prints to, and a function that sets its phase, such as `load`."""

    group: ProcessGroup
    ui: Ui
    enter_phase: Callable[[str], None]


def connect_processes(recipe: Recipe) -> ProcessGroup:
    """Connect the processes of a run.

    Raises:
        PrepError: A process did not start in time.
    """
    from trainer.distributed.start import request_local_devices, start_processes

    if recipe.cluster.n_local_devices is not None:
        request_local_devices(recipe.cluster.n_local_devices)
    cluster, address = recipe.cluster, process_address(recipe.cluster.process_settings, os.environ)
    return start_processes(
        address
        and replace(address, job=address.job or f"recipe {recipe.name}", settings_digest=_settings_digest(recipe)),
        start_timeout_s=cluster.start_timeout,
        heartbeat_timeout_s=cluster.heartbeat_timeout,
    )


def compare_settings(group: ProcessGroup, recipe: Recipe, options: Mapping[str, object], ui: Ui) -> None:
    """Compare the versions, recipes and options of all processes.

    Args:
        group: Processes of the run.
        recipe: Recipe of this process.
        options: Options that all processes must share, by name.
        ui: Receives a warning about clocks that differ.

    Raises:
        PrepError: The processes differ.
    """
    from trainer.distributed.agreement import check_agreement

    facts = _versions() | _recipe_values(recipe) | {name: str(value) for name, value in options.items()}
    check_agreement(group, facts, hint=START_HINT, warn=ui.warn)


def compare_start(
    group: ProcessGroup, manifest: Mapping[str, Any], *, step: int, data_identity: str, kernel: str
) -> None:
    """Compare the start checkpoint and the data of all processes, before the first step.

    Args:
        group: Processes of the run.
        manifest: Manifest of the start checkpoint, with the digests of its tensors.
        step: Step to resume from; 0 for a new run.
        data_identity: Digest of the tokens.
        kernel: Attention kernel, which each process checks on its own devices.

    Raises:
        PrepError: Processes read different checkpoints or data.
    """
    from trainer.distributed.agreement import check_agreement

    contents = {key: manifest[key] for key in CHECKPOINT_CONTENTS if key in manifest}
    checkpoint = digest(json.dumps(contents, sort_keys=True).encode())
    facts = {
        "last step": str(step),
        "start checkpoint": checkpoint,
        "data": data_identity,
        "attention kernel": kernel,
    }
    check_agreement(group, facts, hint=FILES_HINT)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in COMPARED_PACKAGES}}


def _recipe_values(recipe: Recipe) -> dict[str, str]:
    """Return the values of the recipe's keys, without paths, whose contents are compared instead."""
    return {key: to_toml(value_of(recipe, key)) for key in keys_of(recipe) if _is_shared(key)}


def _settings_digest(recipe: Recipe) -> str:
    return digest(json.dumps(_recipe_values(recipe), sort_keys=True).encode())


def _is_shared(key: str) -> bool:
    return not is_path(key) and (not key.startswith("cluster.") or key in SHARED_CLUSTER_KEYS)
