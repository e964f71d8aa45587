"""Training states for tests: the parameters of an init in float32, random Adam moments, and step counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from prepcli.algebra.boxes import full_box
from prepcli.core.process_group import ProcessGroup
from prepcli.engine.blobs import HostLeaf
from prepcli.execution.checkpoint_manager import SINGLE, CheckpointManager, KeepRule
from prepcli.execution.training_folder import FolderStorage
from prepcli.execution.training_storage import RunStorage
from prepcli.planning.manifest_fields import Manifest
from prepcli.restore.item_reader import open_reader
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint
from trainer.distributed.leaf_slices import CheckpointReader
from trainer.run.storage import hold_run

TrainingState = dict[str, np.ndarray]
OPTIMIZER_SLOTS = ("opt_state.adam.mu", "opt_state.adam.nu")


def make_mesh_init(folder: Path, dtype: str) -> Path:
    """Make a model and its init for a mesh, with a padded vocabulary; return the path of the init."""
    make_checkpoint(folder / "m", GPT_NEO, dtype, hidden_size=64)
    run_ok(
        "save-init",
        str(folder / "m"),
        "--mesh",
        "1,2,4",
        "--pad-vocab",
        "8",
        "--out",
        str(folder / "m-init"),
    )
    return folder / "m-init"


def read_leaves(reader: CheckpointReader, dtypes: Mapping[str, str] | None = None) -> TrainingState:
    """Read every leaf in its own dtype, or in the dtype that `dtypes` has for it."""
    leaves: TrainingState = {}
    for name, leaf in reader.leaves.items():
        leaves[name] = np.empty(leaf.shape, (dtypes or {}).get(name, leaf.dtype))
        reader.read(name, {full_box(leaf.shape): leaves[name]})
    return leaves


def step_leaves(path: str) -> TrainingState:
    """Read every leaf of a step."""
    with open_reader(Path(path)) as reader:
        return read_leaves(reader)


def read_params(start: Path) -> TrainingState:
    """Read the parameters of an init in float32, as training uses them."""
    with open_reader(start) as reader:
        return read_leaves(reader, dict.fromkeys(reader.leaves, "float32"))


def make_state(params: TrainingState, step: int, seed: int = 0) -> TrainingState:
    """Return a training state with these parameters and random moments."""
    rng = np.random.default_rng((seed, step))
    state = dict(params)
    for slot in OPTIMIZER_SLOTS:
        for name, value in params.items():
            state[name.replace("params", slot, 1)] = rng.standard_normal(value.shape, np.float32)
    return state | {
        "opt_state.adam.count": np.array(step, np.int32),
        "step": np.array(step, np.int32),
        "skipped": np.array(0, np.int32),
    }


def host_leaves(state: TrainingState) -> dict[str, HostLeaf]:
    """Return the leaves of a state as a trainer passes them to a checkpoint store."""
    return {
        name: HostLeaf.whole(v.shape, v.dtype.name, fetch=partial(state.__getitem__, name))
        for name, v in state.items()
    }


def reshard_and_back() -> None:
    """Reshard `run` to other meshes, without stacking, with layers on either axis, and back to `r3`; verify each."""
    previous = "run"
    for number, options in enumerate(
        [
            ["--mesh", "1,4,2"],
            ["--mesh", "1,2,4", "--no-scan"],
            ["--scan", "--scan-axis", "1"],
            ["--scan-axis", "0"],
        ]
    ):
        run_ok("reshard", previous, *options, "--out", f"r{number}")
        previous = f"r{number}"
        run_ok("verify", previous)
        run_ok("verify", previous, "run/4")


@contextmanager
def open_manager(
    run: RunStorage | Path,
    start: Path,
    *,
    group: ProcessGroup = SINGLE,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Iterator[CheckpointManager]:
    """Lock a run named `tuned`, and open its checkpoints until the end of the block.

    Args:
        run: The run, or its folder.
        start: Checkpoint that the run starts from.
        group: Processes of the run.
        say: Prints a warning if the file system has no locks.
        **options: Further arguments of `CheckpointManager`.
    """
    storage = FolderStorage(run) if isinstance(run, Path) else run
    with (
        hold_run(storage, group, say),
        CheckpointManager(storage, start, name="tuned", group=group, **options) as store,
    ):
        yield store


def save_steps(
    run: Path,
    start: Path,
    steps: Mapping[int, TrainingState],
    *,
    keep: KeepRule | int | Literal["all"] = "all",
    **manifest_changes: Any,
) -> None:
    """Save these steps as checkpoints of a run named `tuned`.

    Args:
        run: Folder of the run.
        start: Checkpoint that the run starts from.
        steps: State of each step.
        keep: The steps to keep.
        **manifest_changes: Entries of the steps' manifests that replace the start's, such as `mesh`.
    """
    with open_manager(
        run, start, keep=keep, manifest_changes=Manifest(**manifest_changes)
    ) as store:
        for step, state in steps.items():
            store.save(step, host_leaves(state), {"recipe": f"steps = {step}"})


def same_state(a: TrainingState, b: TrainingState) -> bool:
    """Return whether two states are bit-identical."""
    return a.keys() == b.keys() and all(
        (a[n].dtype, a[n].shape, a[n].tobytes()) == (b[n].dtype, b[n].shape, b[n].tobytes())
        for n in a
    )
