"""Training moves between prep and Tunix: Orbax restores both items of a step, and Tunix itself continues it.

`PREP_TUNIX_PYTHON` names a Python with Tunix 0.1.7.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.restore.item_reader import open_reader
from tests.helpers.object_server import use_objects
from tests.helpers.other_trainers import (
    BATCH,
    HALF,
    ROUNDING,
    SEQ_LENGTH,
    SETTINGS,
    STEPS,
    VISIBLE,
    make_folder,
    relative_rate,
    token_ids,
    train,
    train_elsewhere,
)
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.tiny_checkpoints import LLAMA
from tests.helpers.training_states import read_leaves, same_state

STEP = Path("out", str(HALF))
# The rotary base of Tunix is fixed.
MODEL = LLAMA | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
}
# optax decays all parameters without a mask.
RECIPE = ('optimizer.decay_include=["re:."]',)
# Settings without a counterpart in Tunix.
OTHER_SETTINGS = ("optimizer.ema=0.9", "optimizer.clip_norm=0.5")


@pytest.fixture(autouse=True)
def own_folder() -> None:
    """Stay in the folder of the module's fixture."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[None]:
    """Train to the middle of the run, and export the state."""
    path = tmp_path_factory.mktemp("tunix")
    with contextlib.chdir(path):
        make_folder(MODEL)
        train("half", *RECIPE, *OTHER_SETTINGS, stop_after=HALF)
        run_ok("export", "half", "--training-state", "--layout", "tunix", "--out", "out")
        yield


def restore_items(step: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restore both items of a step with Orbax."""
    checkpointer = ocp.PyTreeCheckpointer()
    items = (step.absolute() / name for name in ("model_params", "optimizer_state"))
    params, state = map(checkpointer.restore, items)
    return params, state


def test_orbax_restores_the_state_of_optax(folder: None):
    """The tree is that of the optimizer in Tunix, in an `nnx.State`."""
    params, state = restore_items(STEP)
    optimizer = optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(
        learning_rate=optax.constant_schedule(1e-3)
    )
    expected: set[str] = {"step.value"}
    for path, _ in jax.tree_util.tree_leaves_with_path(optimizer.init(params)):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        expected.add(f"opt_state.{name.removesuffix('.value')}.value")
    written: set[str] = set()
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        written.add(jax.tree_util.keystr(path, simple=True, separator="."))
    assert written == expected


def test_counters_and_settings_have_the_values_of_the_run(folder: None):
    _, state = restore_items(STEP)
    optimizer = state["opt_state"]
    adam = optimizer["inner_state"]["0"]
    schedule = optimizer["hyperparams_states"]["learning_rate"]
    for entry in (state["step"], optimizer["count"], schedule["count"], adam["count"]):
        assert entry["value"] == HALF
    assert state["step"]["value"].dtype == np.uint32
    for name in ("b1", "b2", "eps", "weight_decay"):
        assert optimizer["hyperparams"][name]["value"] == np.float32(SETTINGS[name])


def test_moments_have_the_bits_of_the_run(folder: None):
    _, state = restore_items(STEP)
    with open_reader(Path("half", str(HALF))) as reader:
        leaves = read_leaves(reader)
    for slot in ("mu", "nu"):
        moments = state["opt_state"]["inner_state"]["0"][slot]
        for layer in range(LLAMA["num_hidden_layers"]):
            up = moments["layers"][str(layer)]["mlp"]["up_proj"]["kernel"]["value"]
            stored = leaves[f"opt_state.adam.{slot}.layers.mlp.up.weight"][layer]
            assert np.array_equal(up, stored) or np.array_equal(up, stored.T)


def test_round_trip_changes_no_bit(folder: None):
    run_ok("verify", "out")
    run_ok("save-init", "out", "--training-state", "--pad-vocab", "8",
           "--mesh", "1,2,4", "--out", "back")  # fmt: skip
    with open_reader(Path("back")) as moved, open_reader(Path("half", str(HALF))) as original:
        leaves = read_leaves(original)
        kept = {n: leaf for n, leaf in leaves.items() if not n.startswith("opt_state.ema.")}
        assert kept.keys() < leaves.keys()
        assert same_state(read_leaves(moved), kept)
    assert prep.export(
        "half", "out", training_state=True, layout="tunix"
    ).already_done  # both items are complete


def test_skipped_steps_move_in_both_directions(folder: None, capsys):
    """Tunix counts updates only, so the manifest has the number of the step."""
    run_ok("export", "half", "--training-state", "--out", "skipped")
    # Without its manifest, the folder is one of Trainer, which counts skipped steps.
    Path("skipped/prep-manifest.json").unlink()
    Path("skipped/trainer_state.json").write_text(json.dumps({"global_step": HALF + 2}))
    assert main(["save-init", "skipped", "--training-state", "--out", "skipped-step"]) == 0
    assert f"training state of step {HALF + 2} and update {HALF}" in capsys.readouterr().err
    run_ok(
        "export", "skipped-step", "--training-state", "--layout", "tunix", "--out", "skipped-out"
    )
    run_ok("verify", "skipped-out", "skipped-step")
    run_ok("save-init", "skipped-out", "--training-state", "--out", "skipped-back")
    with open_reader(Path("skipped-back")) as moved, open_reader(Path("skipped-step")) as original:
        assert same_state(read_leaves(moved), read_leaves(original))


def test_half_of_a_step_is_damaged(folder: None, capsys):
    shutil.copytree("out", "one-item")
    shutil.rmtree(Path("one-item", str(HALF), "optimizer_state"))
    assert "one-item" in error_lines(capsys, "verify", "one-item")[0]


def test_changed_value_of_the_state_item_is_found(folder: None):
    shutil.copytree("out", "changed")
    _, state = restore_items(STEP)
    moment = state["opt_state"]["inner_state"]["0"]["mu"]["lm_head"]["w"]["value"].tobytes()
    data_files = Path("changed", str(HALF), "optimizer_state", "d").iterdir()
    path = max(data_files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[content.index(moment)] ^= 1
    path.write_bytes(content)
    assert main(["verify", "changed"]) == 1


def test_parameters_alone_are_read_from_a_step(folder: None):
    shutil.copytree(STEP, "by-tunix/4", ignore=shutil.ignore_patterns("hf"))
    run_ok("save-init", "./by-tunix", "--config", "tiny", "--pad-vocab", "8", "--out", "parameters")
    with open_reader(Path("parameters")) as moved, open_reader(Path("half", str(HALF))) as original:
        state = read_leaves(original)
        params = {name: leaf for name, leaf in state.items() if name.startswith("params.")}
        assert same_state(read_leaves(moved), params)


def test_two_items_are_written_to_a_bucket(folder: None, monkeypatch, tmp_path: Path):
    with use_objects(monkeypatch) as store:
        run_ok(
            "export", "half", "--training-state", "--layout", "tunix", "--out", "gs://bucket/out"
        )
        for name, content in store.objects.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    step = next(tmp_path.rglob(f"out/{HALF}"))
    for ours, theirs in zip(restore_items(step), restore_items(STEP), strict=True):
        assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))


def test_export_names_what_tunix_does_not_have(folder: None, capsys):
    record = json.loads(Path("out/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == [
        "opt_state.ema",
        "random state",
        "mask of weight decay",
        "clipping to the norm 0.5",
    ]
    assert main(["verify", "out", "half"]) == 0
    assert "opt_state.ema of half" in capsys.readouterr().err


def test_import_names_what_prep_does_not_have(folder: None):
    """A run with `gradient_accumulation_steps` has `optax.MultiSteps` around the optimizer."""
    params, state = restore_items(STEP)
    inner = state["opt_state"]["inner_state"]
    zeros = jax.tree.map(np.zeros_like, params)
    accumulated = {
        "mini_step": {"value": np.array(1, np.int32)},
        "gradient_step": {"value": np.array(HALF, np.int32)},
        "inner_opt_state": inner,
        "acc_grads": zeros,
    }
    batches = {"value": np.array(2 * HALF + 1, np.uint32)}
    checkpointer = ocp.PyTreeCheckpointer()
    step = Path("accumulated", str(HALF)).absolute()
    checkpointer.save(step / "model_params", params)
    state = {"opt_state": accumulated, "step": batches, "rng": np.zeros(2, np.uint32)}
    checkpointer.save(step / "optimizer_state", state)
    run_ok("save-init", "./accumulated", "--training-state", "--config", "tiny", "--drop", "rng",
           "--out", "step")  # fmt: skip
    fields = json.loads(Path("step/prep-manifest.json").read_text())
    assert (fields["step"], fields["training_state"]["updates"]) == (HALF, HALF)
    assert fields["training_state"]["left_out"] == [
        "opt_state.acc_grads",
        "opt_state.mini_step",
        "settings of the optimizer",
    ]


def continue_in_tunix(exported: str, name: str, **changes: Any) -> dict[int, float]:
    """Take steps in Tunix from a step, save the folder NAME, and return the losses."""
    request = {
        "config": "tiny/config.json",
        "exported": str(Path(exported).absolute()),
        "content": "state",
        "ids": "steps.npy",
        "first": HALF + 1,
        "last": STEPS,
        "rates": [SETTINGS["lr"] * relative_rate(step) for step in range(STEPS + 1)],
        "adam": {key: SETTINGS[key] for key in ("b1", "b2", "eps", "weight_decay")},
    }
    return train_elsewhere("tunix", name, request | changes)


@pytest.mark.slow
@pytest.mark.skipif("PREP_TUNIX_PYTHON" not in os.environ, reason="needs Tunix")
def test_tunix_and_prep_continue_each_other(folder: None):
    np.save("steps.npy", token_ids().reshape(STEPS, BATCH, SEQ_LENGTH))
    expected = train("full", *RECIPE)
    train("first", *RECIPE, stop_after=HALF)
    run_ok("export", "first", "--training-state", "--layout", "tunix", "--out", "first-out")
    later = {step: expected[step] for step in range(HALF + 1, STEPS + 1)}
    losses = continue_in_tunix("first-out", "from-prep")
    assert losses == pytest.approx(later, abs=ROUNDING)
    fresh = continue_in_tunix("first-out", "fresh", content="state without moments")
    assert max(abs(fresh[step] - later[step]) for step in later) > VISIBLE
    run_ok("export", "tiny", "--layout", "tunix", "--out", "start")
    continue_in_tunix("start", "trained", content="model", first=1, last=HALF)
    run_ok("save-init", "./trained", "--training-state", "--config", "tiny", "--pad-vocab", "8",
           "--mesh", "1,2,4", "--out", "from-tunix")  # fmt: skip
    continued = ("model.path=from-tunix", "data.tokenizer=tiny", "model.training_state=true")
    assert train("continued", *RECIPE, *continued) == pytest.approx(later, abs=ROUNDING)
