"""Training moves between prep and a plain loop of PyTorch as a torch distributed checkpoint, with equal losses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from prepcli.cli.main import main
from tests.helpers.other_trainers import STEPS, TorchTraining, make_folder, train
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.tiny_checkpoints import LLAMA

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

HALF = STEPS // 2
ROUNDING = 2e-6
VISIBLE = 5e-3
CONTINUE = ("model.path=from-torch", "data.tokenizer=tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[dict[int, float]]:
    """Train in prep, with a second run that stops in the middle, and in PyTorch. Return the losses of prep."""
    path = tmp_path_factory.mktemp("pair")
    before = Path.cwd()
    os.chdir(path)
    make_folder()
    losses = train("full")
    train("half", stop_after=HALF)
    run_ok("export", "half", "--training-state", "--format", "dcp", "--out", "to-torch")
    training = TorchTraining("tiny")
    training.train(1, HALF)
    training.save("torch")
    run_ok("save-init", "torch", "--training-state", "--config", "tiny", "--pad-vocab", "8",
           "--mesh", "1,2,4", "--out", "from-torch")  # fmt: skip
    yield losses
    os.chdir(before)


def largest_difference(losses: dict[int, float], expected: dict[int, float]) -> float:
    """Return the largest difference of losses after the middle of the run."""
    return max(abs(losses[step] - expected[step]) for step in range(HALF + 1, STEPS + 1))


def test_torch_resumes_a_run_of_prep(folder: dict[int, float]):
    training = TorchTraining("tiny")
    training.load("to-torch")
    assert largest_difference(training.train(HALF + 1, STEPS), folder) < ROUNDING


def test_torch_without_moments_has_other_losses(folder: dict[int, float]):
    training = TorchTraining("tiny")
    training.load("to-torch")
    training.optimizer.state.clear()
    assert largest_difference(training.train(HALF + 1, STEPS), folder) > VISIBLE


def test_prep_continues_a_run_of_torch(folder: dict[int, float]):
    losses = train("continued", *CONTINUE, "model.training_state=true")
    assert min(losses) == HALF + 1
    assert largest_difference(losses, folder) < ROUNDING


def test_state_dict_equals_the_one_of_torch(folder: dict[int, float]):
    """The state that PyTorch loads from a checkpoint of prep has the keys and settings of its own state."""
    training = TorchTraining("tiny")
    training.load("to-torch")
    own = TorchTraining("tiny")
    own.train(1, HALF)
    loaded = training.optimizer.state_dict()
    trained = own.optimizer.state_dict()
    assert loaded["state"].keys() == trained["state"].keys()
    for group, other in zip(loaded["param_groups"], trained["param_groups"], strict=True):
        # The loop sets the learning rate before each step, and prep after it.
        assert group | {"lr": 0} == other | {"lr": 0}
    assert {entry["step"].item() for entry in loaded["state"].values()} == {HALF}


def test_round_trip_changes_no_bit(folder: dict[int, float]):
    run_ok("verify", "to-torch", f"half/{HALF}")
    run_ok("save-init", "to-torch", "--training-state", "--pad-vocab", "8", "--out", "again")
    run_ok("verify", "again", f"half/{HALF}")
    run_ok("export", "from-torch", "--training-state", "--format", "dcp", "--out", "back")
    original = TorchTraining("tiny")
    original.load("torch")
    back = TorchTraining("tiny")
    back.load("back")
    for entry, other in zip(
        original.optimizer.state.values(), back.optimizer.state.values(), strict=True
    ):
        assert entry.keys() == other.keys()
        assert all(torch.equal(entry[name], other[name]) for name in entry)


def test_verify_finds_changed_moments_and_settings(folder: dict[int, float]):
    for number in range(2):
        shutil.copytree("to-torch", f"damaged-{number}")
        path = Path(f"damaged-{number}/__0_{number}.distcp")
        content = bytearray(path.read_bytes())
        content[-2000 if number else len(content) // 2] ^= 1
        path.write_bytes(content)
        assert main(["verify", f"damaged-{number}"]) == 1


def test_export_without_state_reads_the_model(folder: dict[int, float]):
    run_ok("save-init", "torch", "--config", "tiny", "--out", "model-only")
    run_ok("verify", "model-only", "from-torch")


def test_tied_head_moves_in_both_directions(tmp_path: Path, monkeypatch):
    """The state dict of PyTorch has a tied head under both names, and its moments under one."""
    from prepcli.testing.torch_transformers import torch_random_model

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


def test_state_without_moments_is_refused(folder: dict[int, float], capsys):
    run_ok("export", "half", "--format", "dcp", "--out", "no-state")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "no-state", "--training-state", "--out", "never")
    assert "no-state has no training state" in lines[0]
