"""`prep train` with every optimizer: stop, resume, reshard and export."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, STOPPED, USAGE
from prepcli.restore.item_reader import open_reader
from tests.helpers.optimizers import KEYS
from tests.helpers.run_cli import run_ok
from tests.helpers.train_runs import set_keys
from tests.helpers.training_states import read_leaves, same_state

RULE = {"adafactor": ["min_factored_size=8"], "palm": ["warmup_steps=10"]}
COMPACT = ["ema=0.9", "moment_dtype=bfloat16", "decay_exclude=re:attn"]
FREEZE = "freeze=['embed.tokens', 're:mlp|norm']"  # what is not frozen takes time to compile
STEPS = [*set_keys("train.steps=4", "checkpoint.every=0"), "-q"]


def options_of(name: str) -> list[str]:
    """Return the `--set` options of an optimizer with all that it can keep between steps."""
    keys = [f"type={name}", *RULE.get(name, []), *COMPACT, FREEZE]
    return set_keys(*(f"optimizer.{key}" for key in keys))


# By default test_bfloat16_run_is_saved_resumed_and_exported takes these steps with AdamW, and test_resume
# and test_optimizer_states restore the state of the others.
@pytest.mark.slow
@pytest.mark.parametrize("name", KEYS)
def test_stopped_run_resumes_and_reshards(work_dir: Path, name: str):
    options = [*options_of(name), *STEPS]
    assert main(["train", "recipe.toml", "--out", "whole", *options]) == OK
    assert (
        main(["train", "recipe.toml", "--out", "parts", "--stop-after", "2", *options]) == STOPPED
    )
    assert main(["train", "recipe.toml", "--out", "parts", *options]) == OK
    with open_reader(Path("whole/4")) as whole, open_reader(Path("parts/4")) as parts:
        state = read_leaves(parts)
        assert same_state(state, read_leaves(whole))
    assert any(leaf.startswith("opt_state.ema.layers") for leaf in state)
    assert not any(leaf.startswith("opt_state") and leaf.endswith("embed.tokens") for leaf in state)
    run_ok("reshard", "parts", "--mesh", "1,4,2", "--no-scan", "--out", "apart")
    run_ok("verify", "apart", "parts")
    run_ok("export", "apart", "--out", "learned")
    run_ok("verify", "learned", "parts")


def test_run_without_optimizer_state_resumes(work_dir: Path):
    options = [*set_keys("optimizer.type=sgd", "optimizer.momentum=0.0"), *STEPS]
    assert (
        main(["train", "recipe.toml", "--out", "plain", "--stop-after", "2", *options]) == STOPPED
    )
    assert main(["train", "recipe.toml", "--out", "plain", *options]) == OK


def test_summary_states_batch_and_optimizer_size(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    sizes: dict[str, str] = {}
    for name in ("adamw", "lion"):
        assert main(["train", "recipe.toml", "--dry-run", "--set", f"optimizer.type={name}"]) == OK
        summary = capsys.readouterr().err
        assert "batch 8 x 16 = 128 tokens per step" in summary
        (sizes[name],) = re.findall(r"([\d.]+) KiB of parameters and moments per device", summary)
    assert float(sizes["lion"]) == pytest.approx(float(sizes["adamw"]) * 2 / 3, rel=0.01)


def test_float16_run_trains(work_dir: Path):
    options = ["--set", "model.dtype=float16", *STEPS]
    assert main(["train", "recipe.toml", "--out", "half", *options]) == OK
    with open_reader(Path("half/4")) as reader:
        state = read_leaves(reader)
    assert (state["skipped"], state["loss_scale"], state["loss_scale_steps"]) == (0, 2.0**15, 4)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            ["type=lion", "eps=1e-6"],
            "unknown key `optimizer.eps` hint: `eps` is a key of adamw and muon",
        ),
        (["freeze=layers.attention"], "`layers.attention` of `optimizer.freeze` matches no leaf"),
        (["decay_exclude=re:xyz"], "`re:xyz` of `optimizer.decay_exclude` matches no leaf"),
    ],
)
def test_wrong_optimizer_keys_are_errors(
    work_dir: Path, capsys: pytest.CaptureFixture[str], keys: list[str], words: str
):
    options = set_keys(*(f"optimizer.{key}" for key in keys))
    assert main(["train", "recipe.toml", *options]) == USAGE
    assert words in " ".join(capsys.readouterr().err.split())
