"""Training moves between prep and MaxText: Orbax restores the state of optax, and MaxText itself continues it.

`PREP_MAXTEXT_PYTHON` names a Python with MaxText 0.2.5.
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
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from tests.helpers.lazy_modules import lazy_module
from tests.helpers.other_trainers import (
    BATCH,
    HALF,
    SEQ_LENGTH,
    SETTINGS,
    STEPS,
    make_folder,
    relative_rate,
    token_ids,
    train,
    train_elsewhere,
)
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, LLAMA

torch = lazy_module("torch")

LAYOUTS = ("maxtext", "maxtext-unscanned")
# MaxText does not scale the queries of Qwen3, so that its steps are those of prep.
QWEN3 = FAMILY_CONFIGS["qwen3"] | {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
# optax in MaxText decays all parameters, and prep no norms.
NO_DECAY = "optimizer.weight_decay=0.0"


@pytest.fixture(autouse=True)
def own_folder() -> None:
    """Stay in the folder of the module's fixture."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[None]:
    """Train a LLaMA with heads of 16 elements to the middle of the run. MaxText divides its queries by 4."""
    path = tmp_path_factory.mktemp("maxtext")
    with contextlib.chdir(path):
        make_folder(LLAMA | {"num_attention_heads": 4, "hidden_size": 64})
        train("half", stop_after=HALF)
        for layout in LAYOUTS:
            run_ok("export", "half", "--training-state", "--layout", layout, "--out", layout)
        yield


def restore_optax(item: Path) -> tuple[dict[str, Any], Any]:
    """Restore an item with Orbax into the state of `optax.adamw`, and return the parameters and that state."""
    checkpointer = ocp.PyTreeCheckpointer()
    stored = checkpointer.restore(item)
    params = stored["params"]
    target = {
        "params": params,
        "step": stored["step"],
        "opt_state": optax.adamw(optax.constant_schedule(1e-3)).init(params),
    }
    restored = checkpointer.restore(item, item=target)
    return restored["params"]["params"], restored["opt_state"]


def read_moments(source: str) -> dict[int, dict[str, Any]]:
    """Export a training state for Trainer, and read its moments with PyTorch, by the number of the parameter."""
    run_ok("export", source, "--training-state", "--out", "for-trainer", "--overwrite")
    return torch.load("for-trainer/optimizer.pt", weights_only=True)["state"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_orbax_restores_the_state_of_optax(folder: None, layout: str):
    params, (adam, decay, schedule) = restore_optax(Path(layout, str(HALF), "items").absolute())
    assert int(adam.count) == int(schedule.count) == HALF
    assert decay == optax.EmptyState()
    state = read_moments("half")
    # Numbers in the order of the modules: the embedding, then 7 matrices per layer.
    for layer in range(LLAMA["num_hidden_layers"]):
        query = state[1 + 7 * layer]
        up = state[1 + 7 * layer + 5]
        moments: dict[str, Any] = {}
        for slot, tree in (("exp_avg", adam.mu), ("exp_avg_sq", adam.nu)):
            decoder = tree["params"]["decoder"]
            if layout == "maxtext":
                # Layers are stacked on axis 1.
                moments[slot] = jax.tree.map(
                    lambda leaf, index=layer: leaf[:, index], decoder["layers"]
                )
            else:
                moments[slot] = decoder[f"layers_{layer}"]
            kernel = moments[slot]["mlp"]["wi_1"]["kernel"]
            assert np.array_equal(kernel, up[slot].numpy().T)
        for slot, factor in (("exp_avg", 4), ("exp_avg_sq", 16)):
            kernel = np.asarray(moments[slot]["self_attention"]["query"]["kernel"])
            assert np.array_equal(kernel.reshape(64, 64), query[slot].numpy().T * factor)
    assert params["decoder"]["decoder_norm"]["scale"].shape == (64,)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_changes_no_bit(folder: None, layout: str):
    run_ok("verify", layout)
    run_ok("verify", layout, f"half/{HALF}")
    out = f"{layout}-back"
    run_ok("save-init", layout, "--training-state", "--pad-vocab", "8", "--out", out)
    run_ok("verify", out, f"half/{HALF}")
    moved = read_moments(out)
    original = read_moments("half")
    assert moved.keys() == original.keys()
    for number, entry in moved.items():
        assert all(torch.equal(entry[slot], original[number][slot]) for slot in entry)


def test_verify_finds_a_changed_count_of_the_schedule(folder: None, capsys):
    """The last bytes of the item are this count. It gives the learning rate of the next step."""
    shutil.copytree("maxtext", "changed")
    data_files = Path("changed", str(HALF), "items", "d").iterdir()
    path = max(data_files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    assert content[-4:] == HALF.to_bytes(4, "little")
    content[-1] ^= 1
    path.write_bytes(content)
    assert "changed is damaged" in error_lines(capsys, "verify", "changed")[0]


def test_rounded_moments_are_counted_and_not_read_back(tmp_path: Path, monkeypatch, capsys):
    """Heads of 8 elements have the divisor sqrt(8), so that values are rounded."""
    monkeypatch.chdir(tmp_path)
    make_folder(LLAMA | {"num_attention_heads": 8, "hidden_size": 64})
    train("half", stop_after=HALF)
    run_ok("export", "half", "--training-state", "--layout", "maxtext", "--out", "out")
    records = json.loads(Path("out/prep-manifest.json").read_text())["scales"]
    powers = {name.partition("/")[0]: record.get("power", 1) for name, record in records.items()}
    assert powers["opt_state.adam.mu"] == -1
    assert powers["opt_state.adam.nu"] == -2
    # The square of the root is 8, a power of 2.
    assert all(not r["lost"] for name, r in records.items() if name.startswith("opt_state.adam.nu"))
    assert any(r["lost"] for name, r in records.items() if name.startswith("opt_state.adam.mu"))
    run_ok("verify", "out")
    # The moments of the run are scaled before they are compared.
    run_ok("verify", "out", "half")
    run_ok("verify", "out", "--chain")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "out", "--training-state", "--out", "never")
    assert "cannot be converted back" in lines[0]


def test_parts_without_a_counterpart_are_named(folder: None):
    record = json.loads(Path("maxtext/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == ["random state", "settings of the optimizer"]
    shutil.copytree(Path("maxtext", str(HALF)), Path("by-maxtext", str(HALF)))
    shutil.rmtree(Path("by-maxtext", str(HALF), "items", "hf"))
    run_ok("save-init", "./by-maxtext", "--training-state", "--config", "tiny", "--out", "step")
    record = json.loads(Path("step/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == ["settings of the optimizer"]


def test_item_without_moments_is_refused(folder: None, capsys):
    run_ok("export", "half", "--layout", "maxtext", "--out", "no-state")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "no-state", "--training-state", "--out", "never")
    assert "no-state has no moments of AdamW" in lines[0]


def continue_in_maxtext(item: str, name: str, **changes: Any) -> dict[int, float]:
    """Take steps in MaxText from an item, save the item NAME, and return the losses."""
    request = {
        "config": "tiny/config.json",
        "item": str(Path(item).absolute()),
        "layout": "maxtext",
        "has_state": True,
        "ids": "steps.npy",
        "first": HALF + 1,
        "last": STEPS,
        "rates": [SETTINGS["lr"] * relative_rate(step) for step in range(STEPS + 1)],
        "adam": {key: SETTINGS[key] for key in ("b1", "b2", "eps")} | {"weight_decay": 0.0},
    }
    return train_elsewhere("maxtext", name, request | changes)


@pytest.mark.slow
@pytest.mark.skipif("PREP_MAXTEXT_PYTHON" not in os.environ, reason="needs MaxText")
def test_maxtext_and_prep_continue_each_other(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_folder(QWEN3)
    np.save("steps.npy", token_ids().reshape(STEPS, BATCH, SEQ_LENGTH))
    expected = train("full", NO_DECAY)
    later = {step: expected[step] for step in range(HALF + 1, STEPS + 1)}
    train("half", NO_DECAY, stop_after=HALF)
    run_ok("export", "half", "--training-state", "--layout", "maxtext", "--out", "out")
    losses = continue_in_maxtext(f"out/{HALF}/items", "from-prep")
    assert losses == pytest.approx(later, abs=2e-6)
    fresh = continue_in_maxtext(f"out/{HALF}/items", "fresh", has_state=False)
    assert max(abs(fresh[step] - later[step]) for step in later) > 5e-3
    run_ok("export", "tiny", "--layout", "maxtext", "--out", "start")
    continue_in_maxtext("start/0/items", "by-maxtext", has_state=False, first=1, last=HALF)
    run_ok("save-init", "by-maxtext", "--training-state", "--config", "tiny", "--pad-vocab", "8",
           "--mesh", "1,2,4", "--out", "back")  # fmt: skip
    losses = train(
        "continued", NO_DECAY, "model.path=back", "model.training_state=true", "data.tokenizer=tiny"
    )
    assert losses == pytest.approx(later, abs=2e-6)
