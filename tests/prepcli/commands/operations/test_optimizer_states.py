"""The state of every optimizer moves with its parameters: to other meshes, and between stacked and single layers."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from prepcli.restore.item_reader import open_reader
from tests.helpers.optimizers import KEYS, make_optimizer
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GPT2,
    GPT_NEO,
    LLAMA,
    make_checkpoint,
    same_bits,
)
from tests.helpers.training_states import (
    TrainingState,
    read_leaves,
    reshard_and_back,
    same_state,
    save_steps,
)
from trainer.nn.model_spec import ForwardConfig, model_from_manifest
from trainer.training.optimizers import Optimizer
from trainer.training.step import StepSetup, leaf_name, state_shapes

BASES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_neo": GPT_NEO,
    "llama": LLAMA,
    "mixtral": FAMILY_CONFIGS["mixtral"],
}
FREEZE = {"freeze": ("re:attn\\.[qk]", "embed.tokens"), "ema": 0.9, "moment_dtype": "bfloat16"}
CASES = [(base, name, keys) for base in BASES for name in KEYS for keys in ({}, FREEZE)]
DEFAULT_CASES = [("gpt2", "adafactor", FREEZE)]


def make_run(base: str, optimizer: Optimizer) -> TrainingState:
    """Write an init and a run whose step has the leaves of an optimizer with random values, and return the state."""
    make_checkpoint(Path("m"), BASES[base], hidden_size=64, num_heads=4, num_attention_heads=4)
    run_ok("save-init", "./m", "--pad-vocab", "8", "--mesh", "1,2,1")
    with open_reader(Path("m-init")) as reader:
        setup = StepSetup(model_from_manifest(reader.manifest), ForwardConfig(), optimizer)
    rng = np.random.default_rng(0)
    state = {
        leaf_name(path): np.asarray(100 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state_shapes(setup))[0]
    }
    save_steps(Path("run"), Path("m-init"), {4: state}, mesh="1,1,4")
    return state


def read_state(path: str) -> TrainingState:
    with open_reader(Path(path)) as reader:
        return read_leaves(reader)


@pytest.mark.parametrize(("base", "name", "keys"), slow_except(CASES, DEFAULT_CASES))
def test_reshard_keeps_every_optimizer(
    tmp_path: Path, monkeypatch, base: str, name: str, keys: dict[str, Any]
):
    """Reshard to other meshes, without stacking, with layers on either axis, and back."""
    monkeypatch.chdir(tmp_path)
    state = make_run(base, make_optimizer(name, **keys))
    reshard_and_back()
    assert same_state(read_state("r3"), state)
    apart = read_state("r1")
    for leaf, values in state.items():
        before, found, after = leaf.partition(".layers.")
        if found:
            assert all(
                same_bits(apart[f"{before}.layers.{i}.{after}"], value)
                for i, value in enumerate(values)
            )
        else:
            assert same_bits(apart[leaf], values)


def test_statistics_have_a_chunk_per_layer(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run("llama", make_optimizer("adafactor"))
    run_ok("reshard", "run", "--mesh", "1,2,4", "--out", "moved")
    with open_reader(Path("moved")) as reader:
        leaves, slots = reader.manifest["leaves"], reader.manifest["slots"]
    chunks = {name: (leaf["shape"], leaf["chunk"]) for name, leaf in leaves.items()}
    assert chunks["opt_state.rms.v_row.layers.mlp.up.weight"] == ([3, 48, 1], [1, 48, 1])
    assert chunks["opt_state.rms.v_col.layers.mlp.up.weight"] == ([3, 1, 64], [1, 1, 64])
    assert slots["opt_state.rms.v_row"]["/layers.2.mlp.up.weight"]["shape"] == [48, 1]
    assert "opt_state.momentum.ema" in slots, "a complete slot has the names of the model's tensors"
    assert "model.layers.2.mlp.up_proj.weight" in slots["opt_state.momentum.ema"]
