"""What `prep train` checks on this machine before it reads data: memory of the devices, and the run's disk."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prepcli.commands.machine import cgroup_limit, memory
from prepcli.console.formatting import bytes_text
from prepcli.console.ui import Ui, table
from prepcli.errors import PrepError
from prepcli.execution.run_folder import steps_of
from trainer.models.memory_estimate import FLOAT32, STATE_COPIES, Estimate, Run, estimate
from trainer.models.tree import Leaf
from trainer.recipe import Recipe

if TYPE_CHECKING:
    from trainer.distributed.sharding import Shards
    from trainer.nn.transformer import Model

HOPELESS = 1.2  # parameters and moments beyond this multiple of a device's memory: the run is refused


def check_machine(
    recipe: Recipe, model: Model, on: Shards, folder: Path, *, ui: Ui, is_dry_run: bool
) -> dict[str, Any]:
    """Check memory and disk for a run, warn of what is doubtful, and show the memory if it is a dry run.

    Returns:
        The memory estimate for the JSON object.

    Raises:
        PrepError: The run cannot work on this machine.
    """
    from trainer.training.preflight import context_doubts, memory_run

    assert on.devices is not None
    devices = list(on.devices.local_devices)
    run = memory_run(recipe, model, on, widens=devices[0].platform == "cpu")
    found, available = estimate(run), device_memory_nbytes(devices, host_memory())
    if is_dry_run:
        ui.note(memory_table(run, found, available))
    for doubt in filter(None, [*context_doubts(recipe, model), memory_doubt(run, found, available)]):
        ui.warn(doubt)
    if not steps_of(folder):
        check_disk(folder, checkpoint_nbytes(recipe, model.leaves))
    return memory_fields(found, available)


def device_memory_nbytes(devices: Sequence[Any], host: Mapping[str, int | None]) -> int | None:
    """Return the memory that one device has for a run; None where nobody says.

    Args:
        devices: Those of the mesh that belong to this process.
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
    """Return the memory of this machine that is free, and the limit of this process."""
    return {"available": memory().get("available"), "limit": cgroup_limit()}


def memory_table(run: Run, found: Estimate, available_nbytes: int | None) -> str:
    """Return the estimate of one device's memory, line by line."""
    shape = [run.local_sequences, run.local("heads"), run.length, max(run.length, run.source_length)]
    chunk = run.length if run.head_chunk == -1 else min(run.head_chunk, run.length)
    sizes = {
        "parameters": found.parameters,
        "moments": found.moments,
        "gradients and updates": found.gradients,
        f"saved by {len(run.traits.windows)} layers (remat {run.remat})": found.saved,
        "one layer at work": found.layer,
        f"  of it scores {shape}": found.scores,
        f"head and loss, {chunk} tokens": found.head,
        "peak": found.peak,
    }
    rows = [(name, bytes_text(nbytes)) for name, nbytes in sizes.items()]
    rows.append(("available", bytes_text(available_nbytes) if available_nbytes else "unknown"))
    return table(rows, ["memory of one device, estimated", ""], right=[""])


def memory_fields(found: Estimate, available_nbytes: int | None) -> dict[str, Any]:
    """Return the estimate for the JSON object, in bytes."""
    names = ("parameters", "moments", "gradients", "saved", "layer", "scores", "head", "peak")
    fits = None if available_nbytes is None else found.peak <= available_nbytes
    return {name: getattr(found, name) for name in names} | {"available": available_nbytes, "fits": fits}


def memory_doubt(run: Run, found: Estimate, available_nbytes: int | None) -> str:
    """Return a warning if a step is estimated not to fit; empty if it fits or nothing is known.

    Raises:
        PrepError: Parameters and moments alone exceed the memory by far.
    """
    if available_nbytes is None or found.peak <= available_nbytes:
        return ""
    has, hint = f"{bytes_text(available_nbytes)} are available", _levers(run)
    if found.state > HOPELESS * available_nbytes:
        what = f"parameters and moments need {bytes_text(found.state)} on each device"
        raise PrepError(what, has, "more fsdp or mp in `mesh`, or larger devices")
    return f"a step needs about {bytes_text(found.peak)} on each device, {has}: {hint}"


def _levers(run: Run) -> str:
    """What to change, the cheapest first."""
    levers = [] if run.remat == "nothing_saveable" else ['`model.remat_policy = "nothing_saveable"`']
    levers += ["more `batch.accumulate`"] if run.local_sequences > 1 else []
    return ", ".join([*levers, "a shorter `data.seq_length`", "more mp or fsdp in `mesh`"])


def checkpoint_nbytes(recipe: Recipe, leaves: Mapping[str, Leaf]) -> int:
    """Return the size of one checkpoint: float32 parameters, and two moments of each if they are kept."""
    count = sum(math.prod(leaf.shape) for leaf in leaves.values())
    return FLOAT32 * count * (STATE_COPIES if recipe.checkpoint.optimizer_state else 1)


def check_disk(folder: Path, needed_nbytes: int) -> None:
    """Check that a new run's folder can be written to and has room for one checkpoint.

    Raises:
        PrepError: It cannot, or has not.
    """
    parent = _existing(folder)
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PrepError(f"cannot write to {parent}", f"the run's folder is {folder}", "`--out` elsewhere")
    free_nbytes = shutil.disk_usage(parent).free
    if needed_nbytes > free_nbytes:
        why = f"one takes {bytes_text(needed_nbytes)}, its disk has {bytes_text(free_nbytes)} free"
        raise PrepError(f"not enough room for a checkpoint in {folder}", why, "`--out` on another disk")


def disk_doubts(folder: Path, recipe: Recipe, leaves: Mapping[str, Leaf], steps_left: int) -> Iterator[str]:
    """Yield a warning if the checkpoints that a run keeps, and the one being written, exceed the free disk."""
    each_nbytes = checkpoint_nbytes(recipe, leaves)
    every, keep = recipe.checkpoint.every, recipe.checkpoint.keep
    saves = -(-steps_left // every) if every else min(steps_left, 1)
    held = _held(saves, keep)
    free_nbytes = shutil.disk_usage(_existing(folder)).free
    if held * each_nbytes > free_nbytes:
        sizes = f"{held:,} checkpoints of {bytes_text(each_nbytes)}"
        yield f"{folder} will hold {sizes}, its disk has {bytes_text(free_nbytes)} free: a smaller `checkpoint.keep`"


def _held(saves: int, keep: int | Literal["all"]) -> int:
    """Checkpoints that exist at once: those that are kept, and a new one until an old one is removed."""
    return saves if keep == "all" else min(saves, keep + 1)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest folder above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
