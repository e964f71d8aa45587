"""The memory and the disk of the machine, compared with what a run needs."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.core.errors import Key, Option, PrepError, text
from prepcli.core.formatting import count_text, format_bytes
from prepcli.core.intervals import EventSteps, is_due, num_due
from prepcli.core.json_values import HFConfig
from prepcli.core.observer import Observer
from prepcli.engine.budget import cgroup_memory_limit, system_memory
from prepcli.models.attention_kernels import ANY_ACCELERATOR, CPU
from prepcli.models.param_tree import ParamLeaf
from prepcli.planning.tensors import itemsize
from trainer.planning.model_shapes import PlannedModel, model_of_config, model_of_manifest
from trainer.planning.step_inputs import context_warnings, state_leaves
from trainer.planning.training_plan import (
    TrainingPlan,
    memory_fields,
    memory_table,
    plan_training,
    with_overrides,
)
from trainer.recipe import Recipe
from trainer.run.run import Run

if TYPE_CHECKING:
    from trainer.distributed.sharding import ShardingContext


def check_machine(
    run: Run, manifest: Mapping[str, Any], sharding: ShardingContext, *, kernel: str
) -> dict[str, int | None]:
    """Check memory and disk for a run, print warnings, and print the memory estimate of a dry run.

    Args:
        run: The run. Process 0 checks the disk.
        manifest: Manifest of the model to train, with the changes of the recipe.
        sharding: Mesh and devices.
        kernel: Name of the attention kernel.

    Returns:
        The memory estimate for the result.

    Raises:
        PrepError: The run cannot work on this machine.
    """
    observer = run.observer
    recipe = with_overrides(run.recipe, {"model.attention_kernel": kernel})
    model = model_of_manifest(manifest)
    plan, available = plan_run(recipe, model, sharding, num_processes=run.processes_per_host)
    if run.options.dry_run:
        available_text = "unknown"
        if available:
            available_text = format_bytes(available)
        observer.note(memory_table(plan.inputs, plan.memory, available_text))
    if run.is_process_0:
        for warning in context_warnings(recipe, plan.inputs):
            observer.warn(warning)
    check_memory(plan, available_nbytes=available, observer=observer, force=run.options.force)
    if run.is_process_0 and run.storage.is_on_disk and not run.storage.steps():
        check_disk(run.folder, checkpoint_nbytes(recipe, plan.inputs.saved_leaves))
    return memory_fields(plan.memory, available)


def check_config(config: HFConfig, *, run: Run, sharding: ShardingContext) -> None:
    """Check, before the tensors of a model are matched, that a step of it fits into memory. See `check_memory`.

    Args:
        config: config.json of the model, with the recipe's rotary embedding.
        run: The run.
        sharding: Mesh and rules of the recipe.
    """
    model = model_of_config(config)
    plan, available = plan_run(run.recipe, model, sharding, num_processes=run.processes_per_host)
    check_memory(plan, available_nbytes=available, observer=run.observer, force=run.options.force)


def plan_run(
    recipe: Recipe, model: PlannedModel, sharding: ShardingContext, *, num_processes: int
) -> tuple[TrainingPlan, int | None]:
    """Plan a training step on the devices of a run. Return the plan and the memory of one device.

    The memory is None if it is unknown.

    Args:
        recipe: The recipe of the run.
        model: The model to train.
        sharding: Mesh and devices.
        num_processes: Processes of the run on this host, which share its memory.
    """
    assert sharding.device_mesh is not None
    devices = list(sharding.device_mesh.local_devices)
    # The recipe of `check_machine` names the kernel of the run. `check_config` is called before the choice: a kernel
    # made for one accelerator may fail its numeric check, and the kernel that replaces it needs more memory. The plan
    # then assumes a kernel that runs on every accelerator.
    device = CPU if devices[0].platform == CPU.platform else ANY_ACCELERATOR
    plan = plan_training(
        with_overrides(recipe, {"mesh": str(sharding.mesh)}), model, sharding.rules, device=device
    )
    return plan, device_memory_nbytes(devices, host_memory(), num_processes=num_processes)


def check_memory(
    plan: TrainingPlan,
    *,
    available_nbytes: int | None,
    observer: Observer,
    force: bool,
) -> None:
    """Check that the estimated peak of a step is within the memory of a device.

    Args:
        plan: The plan of a step.
        available_nbytes: Memory of one device. None if unknown.
        observer: Receives the warning.
        force: Whether a too large estimate is a warning instead of an error.

    Raises:
        PrepError: The estimate exceeds the memory.
    """
    if available_nbytes is None or plan.memory.peak <= available_nbytes:
        return
    what = f"a step needs about {format_bytes(plan.memory.peak)} on each device"
    why = f"{format_bytes(available_nbytes)} are available"
    hint = text("use more or larger devices, or a shorter {}", Key("data.seq_length"))
    if not force:
        raise PrepError(
            what, why, text("{}; {} starts the run all the same", hint, Option("force", True))
        )
    observer.warn(text("{}, {}: {}", what, why, hint))


def device_memory_nbytes(
    devices: Sequence[Any], host: Mapping[str, int | None], *, num_processes: int = 1
) -> int | None:
    """Return the memory that one device has for a run.

    None if it is unknown.

    Args:
        devices: Devices of the mesh that belong to this process.
        host: `available` memory of this machine and the `limit` of this process, both shared by its
            CPU devices.
        num_processes: Processes of the run on this machine, with as many devices each.
    """
    # Accelerators report the memory that XLA may allocate. CPU devices have no statistics.
    stats = devices[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return int(limit)
    if devices[0].platform != "cpu":
        return None
    known = [nbytes for nbytes in host.values() if nbytes]
    if not known:
        return None
    # XLA's CPU devices are threads of one process: all of them share the memory of the host.
    return min(known) // (len(devices) * num_processes)


def host_memory() -> dict[str, int | None]:
    """Return the free memory of this machine, and the limit of this process."""
    return {"available": system_memory().get("available"), "limit": cgroup_memory_limit()}


def checkpoint_nbytes(recipe: Recipe, leaves: Mapping[str, ParamLeaf]) -> int:
    """Return the size of one checkpoint: parameters, and the optimizer state if it is saved."""
    params_nbytes = _params_nbytes(recipe, leaves)
    if not recipe.checkpoint.optimizer_state:
        return params_nbytes
    return params_nbytes + sum(leaf.nbytes for leaf in state_leaves(recipe.optimizer, leaves))


def _params_nbytes(recipe: Recipe, leaves: Mapping[str, ParamLeaf]) -> int:
    """Return the size of the parameters in a checkpoint. An export has the same dtype."""
    dtype = recipe.checkpoint.dtype or recipe.model.param_dtype
    return itemsize(dtype) * sum(math.prod(leaf.shape) for leaf in leaves.values())


def check_disk(folder: Path, needed_nbytes: int) -> None:
    """Check a new run's folder: it needs write permission and room for one checkpoint.

    Raises:
        PrepError: It is not writable, or the disk is too full.
    """
    parent = _nearest_existing_folder(folder)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PrepError(
            f"cannot write to {parent}",
            f"the run's folder is {folder}",
            text("use {} with a writable folder", Option("out")),
        )
    free_nbytes = shutil.disk_usage(parent).free
    if needed_nbytes > free_nbytes:
        why = f"one takes {format_bytes(needed_nbytes)}, its disk has {format_bytes(free_nbytes)} free"
        raise PrepError(
            f"not enough room for a checkpoint in {folder}",
            why,
            text("use {} with a path on another disk", Option("out")),
        )


def disk_warnings(
    folder: Path,
    recipe: Recipe,
    leaves: Mapping[str, ParamLeaf],
    *,
    first_step: int,
    save_steps: EventSteps,
) -> Iterator[str]:
    """Yield a warning if the kept checkpoints, the one being written, and exports exceed the free disk space.

    Args:
        folder: Folder of the run.
        recipe: The recipe.
        leaves: Parameters in its checkpoints, by path.
        first_step: The next step.
        save_steps: Steps that are saved.
    """
    steps = range(first_step, save_steps.last + 1)
    if not steps:
        return
    table = recipe.checkpoint
    saves = save_steps.count_from(first_step)
    num_checkpoints = saves
    if table.keep != "all":
        # The kept ones, and a new one before an old one is removed
        num_checkpoints = min(saves, table.keep + 1) + num_due(steps, table.milestones)
    if table.best is not None:
        num_checkpoints += 1
    num_exports = num_due(steps, table.export_every)
    if table.push is not None and not is_due(save_steps.last, table.export_every):
        num_exports += 1
    checkpoint_size, export_size = checkpoint_nbytes(recipe, leaves), _params_nbytes(recipe, leaves)
    free_nbytes = shutil.disk_usage(_nearest_existing_folder(folder)).free
    if num_checkpoints * checkpoint_size + num_exports * export_size > free_nbytes:
        sizes = f"{count_text(num_checkpoints, 'checkpoint')} of {format_bytes(checkpoint_size)}"
        if num_exports:
            sizes += f" and {count_text(num_exports, 'export')} of {format_bytes(export_size)}"
        free = format_bytes(free_nbytes)
        yield f"{folder} will hold {sizes}, its disk has {free} free: a smaller `checkpoint.keep`"


def _nearest_existing_folder(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
