"""Training moves between prep and transformers' Trainer in the middle of a run, with equal losses.

The judges are Trainer itself, and the state dicts that PyTorch loads.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.restore.item_reader import open_reader
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.other_trainers import (
    HALF,
    ROUNDING,
    SETTINGS,
    STEPS,
    VISIBLE,
    HFTraining,
    make_folder,
    train,
)
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.training_states import read_leaves, same_state

torch = lazy_module("torch")
transformers = lazy_module("transformers")


@pytest.fixture(autouse=True)
def own_folder() -> None:
    """Stay in the folder of the module's fixture."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[dict[int, float]]:
    """Train in prep, with a second run that stops in the middle, and with Trainer. Return the losses of prep."""
    path = tmp_path_factory.mktemp("pair")
    with contextlib.chdir(path):
        make_folder()
        losses = train("full")
        train("half", stop_after=HALF)
        run_ok("export", "half", "--training-state")
        HFTraining("tiny", "hf").train()
        run_ok("save-init", "hf/checkpoint-4", "--training-state", "--pad-vocab", "8",
               "--mesh", "1,2,4", "--out", "from-hf")  # fmt: skip
        yield losses


def differences(losses: dict[int, float], expected: dict[int, float]) -> list[float]:
    """Return the differences of losses after the middle of the run."""
    steps = range(HALF + 1, STEPS + 1)
    return [abs(losses[step] - expected[step]) for step in steps]


def test_trainer_resumes_a_run_of_prep(folder: dict[int, float]):
    resumed = HFTraining("checkpoint-4", "hf-resumed").train("checkpoint-4")
    assert list(resumed) == list(range(HALF + 1, STEPS + 1))
    assert max(differences(resumed, folder)) < ROUNDING


def test_trainer_without_moments_has_other_losses(folder: dict[int, float]):
    shutil.copytree("checkpoint-4", "no-moments")
    Path("no-moments/optimizer.pt").unlink()
    resumed = HFTraining("no-moments", "hf-no-moments").train("no-moments")
    assert max(differences(resumed, folder)) > VISIBLE


def test_prep_continues_a_run_of_trainer(folder: dict[int, float]):
    losses = train("continued", "model.path=from-hf", "model.training_state=true", "data.tokenizer=tiny")  # fmt: skip
    assert min(losses) == HALF + 1
    assert max(differences(losses, folder)) < ROUNDING


def test_prep_continues_its_own_step_with_equal_bits(folder: dict[int, float]):
    train("own", f"model.path=half/{HALF}", "model.training_state=true")
    with open_reader(Path("own", str(STEPS))) as own, open_reader(Path("full", str(STEPS))) as full:
        assert same_state(read_leaves(own), read_leaves(full))


def test_cast_moments_are_named(folder: dict[int, float], capsys):
    overrides = ("model.path=from-hf", "model.training_state=true", "data.tokenizer=tiny")
    arguments = ["train", "recipe.toml", "--out", "cast", "--dry-run"]
    for override in (*overrides, 'optimizer.moment_dtype="bfloat16"'):
        arguments += ["--set", override]
    assert main(arguments) == 0
    warning = "24 leaves of from-hf are cast, e.g. opt_state.adam.mu.embed.tokens from float32 to bfloat16"
    assert warning in " ".join(capsys.readouterr().err.split())


def test_averages_of_one_side_are_named(folder: dict[int, float], capsys):
    train("averaged", "optimizer.ema=0.9", stop_after=1)
    start = ("--set", "model.training_state=true", "--set", "data.tokenizer=tiny", "--dry-run")
    arguments = ("train", "recipe.toml", "--out", "next", *start)
    assert main([*arguments, "--set", "model.path=averaged/1"]) == 0
    warning = "12 leaves of averaged/1 are not used, e.g. opt_state.ema.embed.tokens"
    assert warning in " ".join(capsys.readouterr().err.split())
    ema = ("--set", "model.path=from-hf", "--set", "optimizer.ema=0.9")
    lines = error_lines(capsys, *arguments, *ema)
    assert lines[0] == "error: from-hf has no averages for `optimizer.ema`"
    assert lines[2] == " hint: `--set optimizer.ema=0`"


def test_prep_without_moments_has_other_losses(folder: dict[int, float]):
    losses = train("fresh", "model.path=from-hf", "data.tokenizer=tiny")
    assert abs(losses[2] - folder[HALF + 2]) > VISIBLE


def test_moments_have_the_bits_of_the_run(folder: dict[int, float]):
    state = torch.load("checkpoint-4/optimizer.pt", weights_only=True)
    # The first parameter of `named_parameters` is the embedding. Its padding is taken off.
    with open_reader(Path("half", str(HALF))) as reader:
        leaves = read_leaves(reader)
    for entry, slot in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
        stored = leaves[f"opt_state.adam.{slot}.embed.tokens"][:131]
        assert state["state"][0][entry].numpy().tobytes() == stored.tobytes()
    assert state["state"][0]["step"].item() == HALF


def test_settings_equal_those_that_trainer_writes(folder: dict[int, float]):
    ours = torch.load("checkpoint-4/optimizer.pt", weights_only=True)["param_groups"]
    theirs = torch.load("hf/checkpoint-4/optimizer.pt", weights_only=True)["param_groups"]
    for own, other in zip(ours, theirs, strict=True):
        # The implementation is a choice of the machine.
        assert own | {"fused": True} == other
    ours = torch.load("checkpoint-4/scheduler.pt", weights_only=True)
    assert ours == torch.load("hf/checkpoint-4/scheduler.pt", weights_only=True)


def test_round_trip_changes_no_bit(folder: dict[int, float]):
    run_ok("export", "from-hf", "--training-state", "--out", "back")
    run_ok("verify", "back", "from-hf")
    ours = torch.load("back/optimizer.pt", weights_only=True)["state"]
    theirs = torch.load("hf/checkpoint-4/optimizer.pt", weights_only=True)["state"]
    assert ours.keys() == theirs.keys()
    for number, entry in ours.items():
        for name, tensor in entry.items():
            assert torch.equal(tensor, theirs[number][name])
    run_ok("save-init", "checkpoint-4", "--training-state", "--pad-vocab", "8", "--out", "again")
    run_ok("verify", "again", f"half/{HALF}")


def test_verify_finds_a_changed_moment(folder: dict[int, float], capsys):
    shutil.copytree("checkpoint-4", "damaged")
    path = Path("damaged/optimizer.pt")
    content = bytearray(path.read_bytes())
    moment = torch.load(path, weights_only=True)["state"][3]["exp_avg"].numpy().tobytes()
    content[content.index(moment)] ^= 1
    path.write_bytes(content)
    assert main(["verify", "damaged"]) == 1
    out, err = capsys.readouterr()
    assert "opt_state.adam.mu" in out + err


def test_manifest_names_what_is_not_converted(folder: dict[int, float]):
    record = json.loads(Path("from-hf/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == ["rng_state.pth", "training_args.bin", "scheduler.pt"]
    assert record["optimizer"] | SETTINGS == record["optimizer"] | {"lr": SETTINGS["lr"]}


def test_other_weight_decay_in_the_recipe_is_named(folder: dict[int, float]):
    """Trainer has no weight decay for norms. A recipe may."""
    train("norms", 'optimizer.decay_include=["re:norm"]', stop_after=1)
    for name, options in (("norms-hf", ()), ("norms-dcp", ("--format", "dcp"))):
        run_ok("export", "norms", "--training-state", *options, "--out", name)
        record = json.loads(Path(name, "prep-manifest.json").read_text())["training_state"]
        assert record["left_out"][-1].startswith(
            "weight decay of 7 parameters, e.g. model.layers.0"
        )
    record = json.loads(Path("checkpoint-4/prep-manifest.json").read_text())["training_state"]
    assert record["left_out"] == ["rng_state.pth", "training_args.bin"]


def test_missing_moments_of_an_export_are_damage(folder: dict[int, float], capsys):
    shutil.copytree("checkpoint-4", "no-optimizer")
    Path("no-optimizer/optimizer.pt").unlink()
    assert "no-optimizer is damaged" in error_lines(capsys, "verify", "no-optimizer")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "tiny-init", "--training-state"), "tiny-init has no training state"),
        (("export", "half", "--training-state", "--dtype", "bfloat16"), "is not supported with"),
        (("export", "half", "--training-state", "--layout", "easylm"), "is not supported with"),
        (("save-init", "tiny", "--training-state"), "tiny has no training state"),
        (
            ("save-init", "hf/checkpoint-4", "--training-state", "--layers", "1"),
            "not supported with",
        ),
    ],
)
def test_contradicting_requests_are_errors(
    folder: dict[int, float], capsys, arguments: tuple[str, ...], message: str
):
    assert message in error_lines(capsys, *arguments, "--out", "never")[0]
    assert not Path("never").exists()
