"""Training moves between prep and a plain loop of PyTorch as a torch distributed checkpoint, with equal losses."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.other_trainers import (
    HALF,
    ROUNDING,
    SETTINGS,
    STEPS,
    VISIBLE,
    TorchTraining,
    make_folder,
    train,
)
from tests.helpers.run_cli import error_lines, exported_tensors, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, assert_same

torch = lazy_module("torch")
transformers = lazy_module("transformers")

CONTINUE = ("model.path=from-torch", "data.tokenizer=tiny")


@pytest.fixture(autouse=True)
def own_folder() -> None:
    """Stay in the folder of the module's fixture."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[None]:
    """Train in PyTorch to the middle, and move the state to prep and back."""
    path = tmp_path_factory.mktemp("pair")
    with contextlib.chdir(path):
        make_folder()
        training = TorchTraining("tiny")
        training.train(1, HALF)
        training.save("torch")
        run_ok("save-init", "torch", "--training-state", "--config", "tiny", "--pad-vocab", "8",
               "--mesh", "1,2,4", "--out", "from-torch")  # fmt: skip
        run_ok("export", "from-torch", "--training-state", "--format", "dcp", "--out", "back")
        yield


@pytest.fixture(scope="module")
def losses(folder: None) -> dict[int, float]:
    """Train in prep, with a second run that stops in the middle. Return the losses."""
    losses = train("full")
    train("half", stop_after=HALF)
    run_ok("export", "half", "--training-state", "--format", "dcp", "--out", "to-torch")
    return losses


def largest_difference(losses: dict[int, float], expected: dict[int, float]) -> float:
    """Return the largest difference of losses after the middle of the run."""
    return max(abs(losses[step] - expected[step]) for step in range(HALF + 1, STEPS + 1))


@pytest.mark.slow
def test_torch_resumes_a_run_of_prep(losses: dict[int, float]):
    training = TorchTraining("tiny")
    training.load("to-torch")
    assert largest_difference(training.train(HALF + 1, STEPS), losses) < ROUNDING


@pytest.mark.slow
def test_torch_without_moments_has_other_losses(losses: dict[int, float]):
    training = TorchTraining("tiny")
    training.load("to-torch")
    training.optimizer.state.clear()
    assert largest_difference(training.train(HALF + 1, STEPS), losses) > VISIBLE


@pytest.mark.slow
def test_prep_continues_a_run_of_torch(losses: dict[int, float]):
    continued = train("continued", *CONTINUE, "model.training_state=true")
    assert min(continued) == HALF + 1
    assert largest_difference(continued, losses) < ROUNDING


def test_round_trip_changes_no_bit(folder: None):
    """PyTorch loads the keys, settings and moments of its own state."""
    run_ok("verify", "back", "from-torch")
    original = TorchTraining("tiny")
    original.load("torch")
    back = TorchTraining("tiny")
    back.load("back")
    loaded = back.optimizer.state_dict()
    trained = original.optimizer.state_dict()
    assert loaded["param_groups"] == [
        group | {"initial_lr": SETTINGS["lr"]} for group in trained["param_groups"]
    ]
    assert loaded["state"].keys() == trained["state"].keys()
    for number, entry in loaded["state"].items():
        assert entry.keys() == trained["state"][number].keys()
        assert all(torch.equal(entry[name], trained["state"][number][name]) for name in entry)
        assert entry["step"].item() == HALF


def test_verify_finds_changed_moments_and_settings(folder: None):
    for number in range(2):
        shutil.copytree("back", f"damaged-{number}")
        path = Path(f"damaged-{number}/__0_{number}.distcp")
        content = bytearray(path.read_bytes())
        content[-2000 if number else len(content) // 2] ^= 1
        path.write_bytes(content)
        assert main(["verify", f"damaged-{number}"]) == 1


def left_out(out: str) -> list[str]:
    """Return the recorded parts without a counterpart."""
    return json.loads(Path(out, "prep-manifest.json").read_text())["training_state"]["left_out"]


def test_parts_without_a_counterpart_are_named(folder: None):
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    training = TorchTraining("tiny")
    training.load("torch")
    model, optimizer = get_state_dict(training.model, training.optimizer)
    zeros = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "step": torch.tensor(4.0)}
    state = {
        "model": model,
        "optimizer": optimizer | {"acc_grads": torch.zeros(3)},
        "scheduler": training.schedule.state_dict(),
        "ema": {"embed_tokens": torch.zeros(3), "norm": torch.zeros(3)},
    }
    state["optimizer"]["state"]["value_head.weight"] = zeros
    save(state, checkpoint_id="scheduled")
    run_ok(
        "save-init", "scheduled", "--training-state", "--config", "tiny", "--out", "scheduled-step"
    )
    assert sorted(left_out("scheduled-step")) == [
        "ema",
        "optimizer.acc_grads",
        "optimizer.state.value_head.weight",
        "scheduler",
    ]
    assert left_out("back") == ["the state of a scheduler", "random state"]


def test_state_of_amsgrad_is_refused(folder: None, capsys):
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    training = TorchTraining("tiny")
    training.load("torch")
    model, optimizer = get_state_dict(training.model, training.optimizer)
    states: Any = optimizer["state"]
    first = next(iter(states.values()))
    first["max_exp_avg_sq"] = first["exp_avg_sq"].clone()
    save({"model": model, "optimizer": optimizer}, checkpoint_id="amsgrad")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "amsgrad", "--training-state", "--config", "tiny",
                        "--out", "never")  # fmt: skip
    assert "amsgrad has no state of AdamW" in lines[0]
    assert "max_exp_avg_sq" in lines[1]


def test_import_without_state_reads_the_model(folder: None):
    run_ok("save-init", "torch", "--config", "tiny", "--out", "model-only")
    run_ok("verify", "model-only", "from-torch")
    training = TorchTraining("tiny")
    training.load("torch")
    expected = {name: tensor.numpy() for name, tensor in training.model.state_dict().items()}
    assert_same(exported_tensors("model-only"), expected)


def test_tied_head_moves_in_both_directions(tmp_path: Path, monkeypatch):
    """The state dict of PyTorch has a tied head under both names, and its moments under one."""
    from prepcli.commands.testing.tiny_model import torch_random_model

    monkeypatch.chdir(tmp_path)
    torch_random_model(LLAMA | {"tie_word_embeddings": True}).save_pretrained("tied")
    training = TorchTraining("tied")
    training.train(1, 1)
    training.save("torch")
    run_ok("save-init", "torch", "--training-state", "--config", "tied", "--out", "step")
    run_ok("export", "step", "--training-state", "--format", "dcp", "--out", "back")
    run_ok("verify", "back", "step")
    loaded = TorchTraining("tied")
    loaded.load("back")
    assert loaded.train(2, 2) == training.train(2, 2)


def test_state_of_torchtitan_is_refused(folder: None, capsys):
    run_ok("export", "from-torch", "--layout", "torchtitan", "--out", "torchtitan")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "torchtitan", "--training-state", "--out", "never")
    assert lines[0] == "error: `--training-state` is not supported for torchtitan"


def test_state_without_moments_is_refused(folder: None, capsys):
    run_ok("export", "from-torch", "--format", "dcp", "--out", "no-state")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "no-state", "--training-state", "--out", "never")
    assert "no-state has no training state" in lines[0]
