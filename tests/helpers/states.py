"""Training states for the tests: the parameters of an init as float32, random moments, and numbers of the run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.execution.run_folder import RunFolder
from prepcli.planning.boxes import whole
from prepcli.restore.item_reader import open_reader
from trainer.models.checkpoint_store import HostLeaf, Reader

State = dict[str, np.ndarray]
SLOTS = ("opt_state.adam.mu", "opt_state.adam.nu")


def read_all(reader: Reader, dtypes: Mapping[str, str] | None = None) -> State:
    """Every leaf, in its own dtype or another."""
    found: State = {}
    for name, leaf in reader.leaves.items():
        found[name] = np.empty(leaf.shape, (dtypes or {}).get(name, leaf.dtype))
        reader.read(name, {whole(leaf.shape): found[name]})
    return found


def params_of(start: Path) -> State:
    """The parameters of an init as they are trained."""
    with open_reader(start) as reader:
        return read_all(reader, dict.fromkeys(reader.leaves, "float32"))


def state_of(params: State, step: int, seed: int = 0) -> State:
    """A state with these parameters."""
    rng = np.random.default_rng((seed, step))
    state = dict(params)
    for slot in SLOTS:
        for name, value in params.items():
            state[name.replace("params", slot, 1)] = rng.standard_normal(value.shape, np.float32)
    return state | {
        "opt_state.adam.count": np.array(step, np.int32),
        "step": np.array(step, np.int32),
        "skipped": np.array(0, np.int32),
    }


def host_leaves(state: State) -> dict[str, HostLeaf]:
    """The leaves as a trainer hands them over."""
    return {name: HostLeaf(v.shape, v.dtype.name, partial(state.__getitem__, name)) for name, v in state.items()}


def save(run: Path, start: Path, steps: Mapping[int, State], **options: Any) -> None:
    """Save these steps as a run called `tuned` does."""
    with RunFolder(run, start, "tuned", **options) as store:
        for step, state in steps.items():
            store.save(step, host_leaves(state), {"recipe": f"steps = {step}"})


def same_state(a: State, b: State) -> bool:
    """Whether two states are equal, bit for bit."""
    return a.keys() == b.keys() and all(
        (a[n].dtype, a[n].shape, a[n].tobytes()) == (b[n].dtype, b[n].shape, b[n].tobytes()) for n in a
    )
