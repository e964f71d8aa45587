"""Training states for the tests: the parameters of an init as float32, random moments, and numbers of the run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.execution.run_folder import RunFolder
from prepcli.planning.boxes import full_box
from prepcli.restore.item_reader import open_reader
from trainer.models.checkpoint_store import CheckpointReader, HostLeaf

TrainingState = dict[str, np.ndarray]
OPTIMIZER_SLOTS = ("opt_state.adam.mu", "opt_state.adam.nu")


def read_leaves(reader: CheckpointReader, dtypes: Mapping[str, str] | None = None) -> TrainingState:
    """Every leaf, in its own dtype or another."""
    found: TrainingState = {}
    for name, leaf in reader.leaves.items():
        found[name] = np.empty(leaf.shape, (dtypes or {}).get(name, leaf.dtype))
        reader.read(name, {full_box(leaf.shape): found[name]})
    return found


def read_params(start: Path) -> TrainingState:
    """The parameters of an init as they are trained."""
    with open_reader(start) as reader:
        return read_leaves(reader, dict.fromkeys(reader.leaves, "float32"))


def make_state(params: TrainingState, step: int, seed: int = 0) -> TrainingState:
    """A state with these parameters."""
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
    """The leaves as a trainer hands them over."""
    return {name: HostLeaf(v.shape, v.dtype.name, partial(state.__getitem__, name)) for name, v in state.items()}


def save_steps(run: Path, start: Path, steps: Mapping[int, TrainingState], **options: Any) -> None:
    """Save these steps as a run called `tuned` does."""
    with RunFolder(run, start, "tuned", **options) as store:
        for step, state in steps.items():
            store.save(step, host_leaves(state), {"recipe": f"steps = {step}"})


def same_state(a: TrainingState, b: TrainingState) -> bool:
    """Whether two states are equal, bit for bit."""
    return a.keys() == b.keys() and all(
        (a[n].dtype, a[n].shape, a[n].tobytes()) == (b[n].dtype, b[n].shape, b[n].tobytes()) for n in a
    )
