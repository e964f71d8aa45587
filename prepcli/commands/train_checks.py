"""Checks of `prep train` before it reads data: memory of the devices, and disk space of the run."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prepcli.commands.machine import cgroup_memory_limit, system_memory
from prepcli.console.formatting import format_bytes
from prepcli.console.ui import Ui, format_table
from prepcli.errors import PrepError
from prepcli.formats.run_steps import saved_steps
from trainer.models.chunk_sizes import chunk_length
from trainer.models.memory_estimate import STATE_COPIES, MemoryEstimate, estimate_memory
from trainer.models.memory_inputs import FLOAT32, MemoryInputs
from trainer.models.param_tree import ParamLeaf
from trainer.recipe import Recipe

if TYPE_CHECKING:
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ModelSpec

MAX_STATE_RATIO = 1.2  # runs whose parameters and moments exceed this multiple of a device's memory fail


def check_machine(
    recipe: Recipe, model: ModelSpec, sharding: ShardingContext, folder: Path, *, ui: Ui, is_dry_run: bool
) -> dict[str, Any]:
    """Check memory and disk for a run, print warnings, and print the memory estimate if it is a dry run.

    Args:
        recipe: The recipe of the run.
        model: The model to train.
        sharding: Mesh and devices.
        folder: Folder of the run.
        ui: Prints notes and warnings.
        is_dry_run: Whether to print the estimate.

    Returns:
        The memory estimate for the JSON object.

    Raises:
        PrepError: The run cannot work on this machine.
    """
    from trainer.training.preflight import context_warnings, memory_run

    assert sharding.device_mesh is not None
    devices = list(sharding.device_mesh.local_devices)
    run = memory_run(recipe, model, sharding, widens_bfloat16=devices[0].platform == "cpu")
    estimated, available = estimate_memory(run), device_memory_nbytes(devices, host_memory())
    if is_dry_run:
        ui.note(memory_table(run, estimated, available))
    for warning in filter(None, [*context_warnings(recipe, model), memory_warning(run, estimated, available)]):
        ui.warn(warning)
    if not saved_steps(folder):
        check_disk(folder, checkpoint_nbytes(recipe, model.leaves))
    return memory_fields(estimated, available)


def device_memory_nbytes(devices: Sequence[Any], host: Mapping[str, int | None]) -> int | None:
    """Return the memory that one device has for a run; None if it is unknown.

    Args:
        devices: Devices of the mesh that belong to this process.
        host: `available` memory of this machine and the `limit` of this process, both shared by its CPU devices.
    """
    stats = devices[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return int(limit)
    if devices[0].platform != "cpu":
        return None
    known = [nbytes for nbytes in host.values() if nbytes]
    return min(known) // len(devices) if known else None


def host_memory() -> dict[str, int | None]:
    """Return the free memory of this machine, and the limit of this process."""
    return {"available": system_memory().get("available"), "limit": cgroup_memory_limit()}


def memory_table(run: MemoryInputs, estimated: MemoryEstimate, available_nbytes: int | None) -> str:
    """Return the estimate of one device's memory as a table."""
    length, source_length = run.local_length(run.seq_length), run.local_length(run.source_length)
    tile = run.score_tile(length, max(length, source_length))
    shape = [run.local_batch_size, run.local_extent("heads"), *tile]
    chunk = chunk_length(run.head_chunk_size, length)
    sizes = {
        "parameters": estimated.parameters,
        "moments": estimated.moments,
        "gradients and updates": estimated.gradients,
        f"saved by {len(run.arch_config.sliding_windows)} layers (remat {run.remat_policy})": estimated.saved,
        "one layer at work": estimated.layer,
        f"  of it scores {shape}": estimated.scores,
        f"head and loss, {chunk} tokens": estimated.head,
        "peak": estimated.peak,
    }
    rows = [(name, format_bytes(nbytes)) for name, nbytes in sizes.items()]
    rows.append(("available", format_bytes(available_nbytes) if available_nbytes else "unknown"))
    return format_table(rows, ["memory of one device, estimated", ""], right_aligned=[""])


def memory_fields(estimated: MemoryEstimate, available_nbytes: int | None) -> dict[str, Any]:
    """Return the estimate in bytes, for the JSON object."""
    names = ("parameters", "moments", "gradients", "saved", "layer", "scores", "head", "peak")
    fits = None if available_nbytes is None else estimated.peak <= available_nbytes
    return {name: getattr(estimated, name) for name in names} | {"available": available_nbytes, "fits": fits}


def memory_warning(run: MemoryInputs, estimated: MemoryEstimate, available_nbytes: int | None) -> str:
    """Return a warning if a step is estimated not to fit; empty if it fits or the memory is unknown.

    Args:
        run: Inputs of the estimate.
        estimated: The estimate.
        available_nbytes: Memory of one device, None if unknown.

    Raises:
        PrepError: Parameters and moments alone exceed the memory by MAX_STATE_RATIO.
    """
    if available_nbytes is None or estimated.peak <= available_nbytes:
        return ""
    available_text, hint = f"{format_bytes(available_nbytes)} are available", _memory_hints(run)
    if estimated.state > MAX_STATE_RATIO * available_nbytes:
        what = f"parameters and moments need {format_bytes(estimated.state)} on each device"
        raise PrepError(what, available_text, "more fsdp or mp in `mesh`, or larger devices")
    return f"a step needs about {format_bytes(estimated.peak)} on each device, {available_text}: {hint}"


def _memory_hints(run: MemoryInputs) -> str:
    """Return the settings that reduce memory, the cheapest first."""
    hints = [] if run.remat_policy == "nothing_saveable" else ['`model.remat_policy = "nothing_saveable"`']
    hints += [] if run.attention_tile else ['`model.attention_kernel = "blockwise"`']
    hints += ["more `batch.accumulate`"] if run.local_batch_size > 1 else []
    return ", ".join([*hints, "a shorter `data.seq_length`", "more mp, fsdp or sp in `mesh`"])


def checkpoint_nbytes(recipe: Recipe, leaves: Mapping[str, ParamLeaf]) -> int:
    """Return the size of one checkpoint: float32 parameters, and two moments of each if they are saved."""
    count = sum(math.prod(leaf.shape) for leaf in leaves.values())
    return FLOAT32 * count * (STATE_COPIES if recipe.checkpoint.optimizer_state else 1)


def check_disk(folder: Path, needed_nbytes: int) -> None:
    """Check a new run's folder: it needs write permission and room for one checkpoint.

    Raises:
        PrepError: It is not writable, or the disk is too full.
    """
    parent = _nearest_existing_folder(folder)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PrepError(f"cannot write to {parent}", f"the run's folder is {folder}", "`--out` in a writable folder")
    free_nbytes = shutil.disk_usage(parent).free
    if needed_nbytes > free_nbytes:
        why = f"one takes {format_bytes(needed_nbytes)}, its disk has {format_bytes(free_nbytes)} free"
        raise PrepError(f"not enough room for a checkpoint in {folder}", why, "`--out` on another disk")


def disk_warnings(folder: Path, recipe: Recipe, leaves: Mapping[str, ParamLeaf], steps_left: int) -> Iterator[str]:
    """Yield a warning if the kept checkpoints, and the one being written, exceed the free disk space."""
    one_nbytes = checkpoint_nbytes(recipe, leaves)
    every, keep = recipe.checkpoint.every, recipe.checkpoint.keep
    saves = -(-steps_left // every) if every else min(steps_left, 1)
    num_checkpoints = _max_checkpoints(saves, keep)
    free_nbytes = shutil.disk_usage(_nearest_existing_folder(folder)).free
    if num_checkpoints * one_nbytes > free_nbytes:
        sizes = f"{num_checkpoints:,} checkpoints of {format_bytes(one_nbytes)}"
        yield f"{folder} will hold {sizes}, its disk has {format_bytes(free_nbytes)} free: a smaller `checkpoint.keep`"


def _max_checkpoints(saves: int, keep: int | Literal["all"]) -> int:
    """Return the most checkpoints that exist at once: the kept ones, and a new one before an old one is removed."""
    return saves if keep == "all" else min(saves, keep + 1)


def _nearest_existing_folder(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
