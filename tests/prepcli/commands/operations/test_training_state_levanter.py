"""Training moves between prep, Levanter and Tunix."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
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
from prepcli.commands.operations.training_state import read_training_state
from prepcli.models.module_order import optimizer_groups
from prepcli.planning.libraries import LEVANTER
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from tests.helpers.damage import flip_bit
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.levanter_trees import TREES, Leaves, read_levanter, write_levanter
from tests.helpers.other_trainers import (
    BATCH,
    HALF,
    ROUNDING,
    SEQ_LENGTH,
    SETTINGS,
    STEPS,
    VISIBLE,
    WARMUP,
    make_folder,
    relative_rate,
    token_ids,
    train,
    train_elsewhere,
)
from tests.helpers.run_cli import MonkeyPatch, error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, read_tensors
from tests.helpers.training_states import same_state, step_leaves

torch = lazy_module("torch")
EMA = 0.9
# Levanter decays neither norms nor embeddings.
RECIPE = (f"optimizer.ema={EMA}", "optimizer.clip_norm=1.0", "optimizer.decay_embeddings=false")
MODEL_ROOT = "model."
ADAM = "opt_state.inner_state.1."
AVERAGES = "model_averaging.model."


@pytest.fixture(scope="module")
def levanter_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train to the middle of the run, and export the state."""
    path = tmp_path_factory.mktemp("levanter")
    with contextlib.chdir(path):
        make_folder()
        train("half", *RECIPE, stop_after=HALF)
        for layout in ("levanter", "tunix"):
            run_ok("export", "half", "--training-state", "--layout", layout, "--out", layout)
    return path


@pytest.fixture
def levanter_folder(levanter_runs: Path, monkeypatch: MonkeyPatch) -> None:
    """Work in the folder of the trained runs."""
    monkeypatch.chdir(levanter_runs)


def leaves_below(leaves: Mapping[str, np.ndarray], root: str) -> Leaves:
    """Return the leaves below a root, by their names there."""
    return {n.removeprefix(root): leaf for n, leaf in leaves.items() if n.startswith(root)}


def moments_by_name(source: str) -> dict[str, dict[str, np.ndarray]]:
    """Export a training state for Trainer, and read both moments with PyTorch, by the name of the parameter."""
    run_ok("export", source, "--training-state", "--out", "for-trainer", "--overwrite")
    state = torch.load("for-trainer/optimizer.pt", weights_only=True)["state"]
    names = optimizer_groups("llama", read_tensors(Path("for-trainer"))).numbered
    moments: dict[str, dict[str, np.ndarray]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for number, name in enumerate(names):
        for entry, tensors in moments.items():
            tensors[name] = state[number][entry].numpy()
    return moments


def optax_paths(params: Mapping[str, np.ndarray], clip_norm: float) -> set[str]:
    """Return the paths of the leaves of the optimizer that `AdamConfig.build` makes in Levanter."""

    def make_optimizer(learning_rate: Any) -> optax.GradientTransformation:
        parts = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
        parts += [optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale(learning_rate)]
        return optax.chain(*parts)

    schedule = optax.constant_schedule(1e-3)
    zeros = {name: jnp.zeros(value.shape) for name, value in params.items()}
    state = optax.inject_hyperparams(make_optimizer)(learning_rate=schedule).init(zeros)
    paths = jax.tree_util.tree_leaves_with_path(state)
    return {"opt_state." + jax.tree_util.keystr(p, simple=True, separator=".") for p, _ in paths}


def test_moments_have_the_leaves_of_levanter(levanter_folder: None):
    leaves = read_levanter(Path("levanter"))
    moments = moments_by_name("half")
    for entry, slot in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
        expected = leaves_below(TREES["levanter"](moments[entry], LLAMA), MODEL_ROOT)
        assert same_state(leaves_below(leaves, f"{ADAM}{slot}."), expected)


def test_tree_of_the_optimizer_is_that_of_optax(levanter_folder: None):
    leaves = read_levanter(Path("levanter"))
    params = leaves_below(leaves, MODEL_ROOT)
    written = {path for path in leaves if path.startswith("opt_state.")}
    assert written == optax_paths(params, 1.0)
    others = leaves.keys() - written - {f"{MODEL_ROOT}{path}" for path in params}
    assert {path for path in others if not path.startswith(AVERAGES)} == {"step", "training_key"}


def test_tree_without_clipping_is_that_of_optax(levanter_folder: None):
    params = leaves_below(read_levanter(Path("levanter")), MODEL_ROOT)
    state = read_training_state(open_source(locate("half")))
    assert LEVANTER.state is not None
    assert LEVANTER.state.optax is not None
    optax = LEVANTER.state.optax.bind(replace(state, clip_norm=0.0))
    paths = [*optax.counters, *optax.constants]
    *moments, _ = optax.slots
    for prefix in moments:
        paths += [f"{prefix}{path}" for path in params]
    assert {path for path in paths if path.startswith("opt_state.")} == optax_paths(params, 0.0)


def test_counters_have_the_values_of_the_step(levanter_folder: None):
    leaves = read_levanter(Path("levanter"))
    counts = [path for path in leaves if path.endswith("count")]
    assert len(counts) == 3
    assert [int(leaves[path]) for path in (*counts, "step")] == [HALF] * 4
    assert leaves["training_key"].tolist() == jax.random.key_data(jax.random.key(0)).tolist()
    # The last step, counted from 0.
    assert json.loads(Path("levanter/metadata.json").read_text())["step"] == HALF - 1


def test_round_trip_changes_no_bit(levanter_folder: None):
    run_ok("verify", "levanter", f"half/{HALF}")
    words = ("--training-state", "--pad-vocab", "8", "--mesh", "1,2,4", "--out", "levanter-back")
    run_ok("save-init", "levanter", *words)
    assert same_state(step_leaves("levanter-back"), step_leaves(f"half/{HALF}"))


def test_verify_finds_a_changed_random_key(levanter_folder: None, capsys):
    """The leaf is no part of the training state in prep."""
    shutil.copytree("levanter", "changed")
    path = max(Path("changed/d").iterdir(), key=lambda path: path.stat().st_size)
    assert path.read_bytes()[-8:] == bytes(8)
    flip_bit(path, -1)
    assert "changed is damaged" in error_lines(capsys, "verify", "changed")[0]


def test_export_names_what_levanter_does_not_have(levanter_folder: None):
    record = json.loads(Path("levanter/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == ["random state", "settings of the optimizer"]


def write_state(folder: str, changes: Leaves, removed: str | None = None) -> None:
    """Write the exported state as Levanter saves it, with changed leaves, and without the leaves of a prefix."""
    leaves = read_levanter(Path("levanter")) | changes
    if removed is not None:
        leaves = {name: leaf for name, leaf in leaves.items() if not name.startswith(removed)}
    shutil.rmtree(folder, ignore_errors=True)
    write_levanter(Path(folder, "step-3"), leaves, HALF - 1)


def left_out(source: str, out: str) -> list[str]:
    """Convert a state of Levanter, and return the names of the parts without a counterpart."""
    run_ok("save-init", source, "--training-state", "--config", "tiny", "--out", out)
    return json.loads(Path(out, "prep-manifest.json").read_text())["training_state"]["left_out"]


def import_errors(capsys, source: str) -> list[str]:
    """Convert a state of Levanter that is invalid, and return the lines of the error."""
    capsys.readouterr()
    words = ("--training-state", "--config", "tiny", "--out", "never")
    return error_lines(capsys, "save-init", source, *words)


def test_import_names_what_prep_does_not_have(levanter_folder: None):
    """A run with `skip_bad_steps` has skipped two steps. MARS has a third slot of moments."""
    write_state("plain", {})
    assert left_out("plain", "plain-step") == ["training_key", "settings of the optimizer"]
    skipped = np.array(HALF + 2, np.int32)
    changes = {
        "opt_state.count": skipped,
        "opt_state.inner_state._skipstep_losses": np.zeros(4, np.float32),
        f"{ADAM}mog.lm_head.weight": np.zeros((131, 32), np.float32),
        f"{ADAM}nu.value_head.weight": np.zeros(3, np.float32),
        "model_averaging.tot_weight": np.array(1.0, np.float32),
        "step": skipped,
    }
    write_state("skipped", changes)
    unread = [
        "opt_state.inner_state.1.mog",
        "opt_state.inner_state._skipstep_losses",
        f"{ADAM}nu.value_head.weight",
        f"opt_state.count {HALF + 2}",
        "model_averaging",
        "training_key",
        "settings of the optimizer",
    ]
    assert left_out("skipped", "skipped-step") == unread
    run_ok("export", "skipped", "--training-state", "--config", "tiny", "--layout", "maxtext",
           "--out", "skipped-maxtext")  # fmt: skip
    record = json.loads(Path("skipped-maxtext/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == [*unread, "random state"]
    fields = json.loads(Path("skipped-step/prep-manifest.json").read_text())
    assert (fields["step"], fields["training_state"]["updates"]) == (HALF + 2, HALF)


@pytest.mark.parametrize(
    ("leaf", "value"), [("step", np.int32(-1)), ("opt_state.count", np.float32(np.nan))]
)
def test_invalid_counter_is_an_error(levanter_folder: None, capsys, leaf: str, value: np.generic):
    write_state("invalid", {leaf: np.asarray(value)})
    lines = import_errors(capsys, "invalid")
    assert lines[0] == "error: invalid is damaged"
    assert f"{leaf} is {value:g}" in lines[1]


def test_state_without_second_moments_is_an_error(levanter_folder: None, capsys):
    """Lion has first moments only."""
    write_state("incomplete", {}, f"{ADAM}nu.")
    assert f"no leaf is in {ADAM}nu" in " ".join(import_errors(capsys, "incomplete"))


def test_state_with_more_updates_than_steps_is_refused(levanter_folder: None, capsys):
    """The learning rates of prep and Adam's count would differ."""
    write_state("early", {"step": np.array(HALF - 1, np.int32)})
    lines = import_errors(capsys, "early")
    assert lines[0] == "error: early has more updates than steps"
    assert f"step {HALF - 1}, and its moments have {HALF} updates" in lines[1]


def test_model_without_moments_is_refused(levanter_folder: None, capsys):
    run_ok("export", "half", "--layout", "levanter", "--out", "no-state")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "no-state", "--training-state", "--out", "never")
    assert "no-state has no moments of AdamW" in lines[0]


def continue_in_levanter(exported: str, name: str, **changes: Any) -> dict[int, float]:
    """Take steps in Levanter from a checkpoint, save the run NAME, and return the losses."""
    request = {
        "config": "tiny/config.json",
        "exported": str(Path(exported).absolute()),
        "layout": "levanter",
        "content": "state",
        "ids": "steps.npy",
        "first": HALF + 1,
        "last": STEPS,
        "steps": STEPS,
        "optimizer": {
            "learning_rate": SETTINGS["lr"],
            "weight_decay": SETTINGS["weight_decay"],
            "beta1": SETTINGS["b1"],
            "beta2": SETTINGS["b2"],
            "epsilon": SETTINGS["eps"],
            "max_grad_norm": 1.0,
            "warmup": WARMUP,
            "lr_schedule": "linear",
            "min_lr_ratio": 0.0,
        },
        "ema": EMA,
    }
    return train_elsewhere("levanter", name, request | changes)


@pytest.mark.slow
@pytest.mark.skipif("PREP_LEVANTER_PYTHON" not in os.environ, reason="needs Levanter")
def test_levanter_and_prep_continue_each_other(levanter_folder: None):
    np.save("steps.npy", token_ids().reshape(STEPS, BATCH, SEQ_LENGTH))
    expected = train("full", *RECIPE)
    later = {step: expected[step] for step in range(HALF + 1, STEPS + 1)}
    losses = continue_in_levanter("levanter", "from-prep")
    assert losses == pytest.approx(later, abs=ROUNDING)
    fresh = continue_in_levanter("levanter", "fresh", content="state without moments")
    assert max(abs(fresh[step] - later[step]) for step in later) > VISIBLE
    run_ok("export", "tiny", "--layout", "levanter", "--out", "start")
    continue_in_levanter("start", "by-levanter", content="model", first=1, last=HALF)
    run_ok("save-init", "by-levanter", "--training-state", "--config", "tiny", "--pad-vocab", "8",
           "--mesh", "1,2,4", "--out", "from-levanter")  # fmt: skip
    continued = ("model.path=from-levanter", "data.tokenizer=tiny")
    losses = train("continued", *RECIPE, *continued, "model.training_state=true")
    assert losses == pytest.approx(later, abs=ROUNDING)
    # The averages moved, too.
    for name in ("full", "continued"):
        run_ok("export", name, "--ema", "--out", f"{name}-averages")
    averages = read_tensors(Path("full-averages"))
    for name, values in read_tensors(Path("continued-averages")).items():
        np.testing.assert_allclose(values, averages[name], atol=1e-5)


# Training moves between prep and Tunix: Orbax restores both items of a step, and Tunix itself continues it


STEP = Path("tunix", str(HALF))
# The rotary base of Tunix is fixed.
TUNIX_MODEL = LLAMA | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
}
# optax decays all parameters without a mask.
TUNIX_RECIPE = ('optimizer.decay_include=["re:."]',)


def restore_items(step: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Restore both items of a step with Orbax."""
    checkpointer = ocp.PyTreeCheckpointer()
    items = (step.absolute() / name for name in ("model_params", "optimizer_state"))
    params, state = map(checkpointer.restore, items)
    return params, state


def test_orbax_restores_the_state_of_optax(levanter_folder: None):
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


def test_counters_and_settings_have_the_values_of_the_run(levanter_folder: None):
    _, state = restore_items(STEP)
    optimizer = state["opt_state"]
    adam = optimizer["inner_state"]["0"]
    schedule = optimizer["hyperparams_states"]["learning_rate"]
    for entry in (state["step"], optimizer["count"], schedule["count"], adam["count"]):
        assert entry["value"] == HALF
    assert state["step"]["value"].dtype == np.uint32
    for name in ("b1", "b2", "eps", "weight_decay"):
        assert optimizer["hyperparams"][name]["value"] == np.float32(SETTINGS[name])


def test_moments_have_the_bits_of_the_run(levanter_folder: None):
    _, state = restore_items(STEP)
    leaves = step_leaves(f"half/{HALF}")
    for slot in ("mu", "nu"):
        moments = state["opt_state"]["inner_state"]["0"][slot]
        for layer in range(LLAMA["num_hidden_layers"]):
            up = moments["layers"][str(layer)]["mlp"]["up_proj"]["kernel"]["value"]
            stored = leaves[f"opt_state.adam.{slot}.layers.mlp.up.weight"][layer]
            assert np.array_equal(up, stored) or np.array_equal(up, stored.T)


def test_round_trip_with_tunix_changes_no_bit(levanter_folder: None):
    run_ok("verify", "tunix")
    words = ("--training-state", "--pad-vocab", "8", "--mesh", "1,2,4", "--out", "tunix-back")
    run_ok("save-init", "tunix", *words)
    leaves = step_leaves(f"half/{HALF}")
    kept = {name: leaf for name, leaf in leaves.items() if not name.startswith("opt_state.ema.")}
    assert kept.keys() < leaves.keys()
    assert same_state(step_leaves("tunix-back"), kept)
    # Both items are complete.
    assert prep.export("half", "tunix", training_state=True, layout="tunix").already_done


@pytest.mark.slow
def test_skipped_steps_move_in_both_directions(levanter_folder: None, capsys):
    """Tunix counts updates only, so the manifest has the number of the step."""
    run_ok("export", "half", "--training-state", "--out", "skipped-hf")
    # Without its manifest, the folder is one of Trainer, which counts skipped steps.
    Path("skipped-hf/prep-manifest.json").unlink()
    Path("skipped-hf/trainer_state.json").write_text(json.dumps({"global_step": HALF + 2}))
    assert main(["save-init", "skipped-hf", "--training-state", "--out", "trainer-step"]) == 0
    assert f"training state of step {HALF + 2} and update {HALF}" in capsys.readouterr().err
    words = ("--training-state", "--layout", "tunix", "--out", "skipped-out")
    run_ok("export", "trainer-step", *words)
    run_ok("verify", "skipped-out", "trainer-step")
    run_ok("save-init", "skipped-out", "--training-state", "--out", "skipped-back")
    assert same_state(step_leaves("skipped-back"), step_leaves("trainer-step"))


def test_half_of_a_step_is_damaged(levanter_folder: None, capsys):
    shutil.copytree("tunix", "one-item")
    shutil.rmtree(Path("one-item", str(HALF), "optimizer_state"))
    assert "one-item" in error_lines(capsys, "verify", "one-item")[0]


def test_changed_value_of_the_state_item_is_found(levanter_folder: None):
    shutil.copytree("tunix", "changed-item")
    _, state = restore_items(STEP)
    moment = state["opt_state"]["inner_state"]["0"]["mu"]["lm_head"]["w"]["value"].tobytes()
    data_files = Path("changed-item", str(HALF), "optimizer_state", "d").iterdir()
    path = max(data_files, key=lambda path: path.stat().st_size)
    flip_bit(path, path.read_bytes().index(moment))
    assert main(["verify", "changed-item"]) == 1


def test_parameters_alone_are_read_from_a_step(levanter_folder: None):
    shutil.copytree(STEP, "by-tunix/4", ignore=shutil.ignore_patterns("hf"))
    run_ok("save-init", "./by-tunix", "--config", "tiny", "--pad-vocab", "8", "--out", "parameters")
    state = step_leaves(f"half/{HALF}")
    params = {name: leaf for name, leaf in state.items() if name.startswith("params.")}
    assert same_state(step_leaves("parameters"), params)


def test_export_names_what_tunix_does_not_have(levanter_folder: None, capsys):
    record = json.loads(Path("tunix/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == [
        "opt_state.ema",
        "random state",
        "mask of weight decay",
        "clipping to the norm 1",
    ]
    assert main(["verify", "tunix", "half"]) == 0
    assert "opt_state.ema of half" in capsys.readouterr().err


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
def test_tunix_and_prep_continue_each_other():
    make_folder(TUNIX_MODEL)
    np.save("steps.npy", token_ids().reshape(STEPS, BATCH, SEQ_LENGTH))
    expected = train("full", *TUNIX_RECIPE)
    train("first", *TUNIX_RECIPE, stop_after=HALF)
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
    assert train("continued", *TUNIX_RECIPE, *continued) == pytest.approx(later, abs=ROUNDING)


@pytest.mark.parametrize(
    ("removed", "message"),
    slow_except(
        [
            # Lion has first moments only.
            (f"{ADAM}nu.", f"no leaf is in {ADAM}nu"),
            (f"{ADAM}nu.transformer.norm.weight", "has no opt_state.adam.nu of model.norm.weight"),
            (f"{AVERAGES}transformer.norm.weight", "has no opt_state.ema of model.norm.weight"),
        ],
        [(f"{ADAM}nu.", f"no leaf is in {ADAM}nu")],
    ),
)
def test_incomplete_state_is_an_error(levanter_folder: None, capsys, removed: str, message: str):
    write_state("incomplete", {}, removed)
    capsys.readouterr()
    lines = error_lines(
        capsys, "save-init", "incomplete", "--training-state", "--config", "tiny", "--out", "never"
    )
    assert message in " ".join(lines)
