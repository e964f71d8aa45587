"""`checkpoint.storage`: the steps of a run as arrays of zarr 3, which Orbax and all commands read."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.helpers.run_cli import run_ok
from tests.helpers.train_runs import set_keys

SETTINGS = ("mesh=1,2,4", "checkpoint.every=1", "checkpoint.keep='all'", "data.holdout=0")


def train(run: str, *settings: str) -> None:
    words = set_keys(*SETTINGS, *settings)
    run_ok("train", "recipe.toml", "--out", run, *words)


def uses_zarr3(step: Path) -> bool:
    return json.loads((step / "state/_METADATA").read_text())["use_zarr3"]


def restored(step: Path) -> list[np.ndarray]:
    """Restore the state of a step with Orbax."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.restore((step / "state").absolute())
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_run_changes_the_storage_of_its_steps_when_it_resumes(work_dir: Path):
    train("plain", "train.steps=3")
    train("run", "train.steps=1")
    train("run", "train.steps=3", "checkpoint.storage=zarr3")
    assert [uses_zarr3(Path("run") / step) for step in "123"] == [False, True, True]
    expected = restored(Path("plain/3"))
    actual = restored(Path("run/3"))
    assert len(expected) == len(actual)
    assert all(np.array_equal(a, b) for a, b in zip(actual, expected))
    run_ok("verify", "run")
    run_ok("export", "run", "--out", "hf")
    run_ok("reshard", "run", "--params-only", "--out", "init")
    run_ok("verify", "init", "hf")
