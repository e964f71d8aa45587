"""`eval.patience` ends a run, and `checkpoint.best` keeps the best step by any value of the evaluations."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, UsageError
from prepcli.formats.manifest import NO_MANIFEST, read_manifest, saved_steps
from prepcli.formats.step_scores import best_step
from tests.helpers.run_cli import error_lines, run_json, run_ok
from tests.helpers.train_runs import set_keys
from trainer.training.metrics import METRICS_FILE, read_metrics

# `eval.patience` ends a run, and `checkpoint.best` keeps the best step by any value of the evaluations.

# The learning rate is too large, so that the loss rises after an early step.
DIVERGING = ("train.eval_every=2", "optimizer.lr=0.3", "optimizer.clip_norm=0")


PATIENT = (*DIVERGING, "eval.patience=2")


def words(run: str, *settings: str) -> tuple[str, ...]:
    keys = set_keys(*settings)
    return ("train", "recipe.toml", "--out", run, *keys)


def evaluations(run: str, name: str = "eval_loss") -> dict[int, float]:
    lines = read_metrics(Path(run, METRICS_FILE))
    return {line["step"]: line[name] for line in lines if name in line}


def end_of(losses: dict[int, float], patience: int) -> int:
    """Return the step at which `patience` losses in a row have not been below the lowest before them."""
    lowest, since = float("inf"), 0
    for step, loss in losses.items():
        since = 0 if loss < lowest else since + 1
        lowest = min(lowest, loss)
        if since == patience:
            return step
    raise AssertionError("the losses fall")


def parameter_digests(run: str, step: int) -> dict[str, Any]:
    fields = read_manifest(Path(run, str(step))) or NO_MANIFEST
    return dict(fields["tensors"])


def test_run_ends_after_evaluations_without_a_better_loss(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    run_ok(*words("whole", *DIVERGING, "checkpoint.every=2", "checkpoint.keep='all'"))
    losses = evaluations("whole")
    end = end_of(losses, 2)
    assert end < 12
    result = run_json(capsys, *words("run", *PATIENT))
    assert (result["step"], result["steps"]) == (end, 12)
    lowest = min(losses, key=lambda step: losses[step] if step <= end else float("inf"))
    assert result["end_reason"] == (
        "eval_loss has not improved in 2 evaluations: "
        f"its lowest is {losses[lowest]:.4f} at step {lowest}"
    )
    assert saved_steps(Path("run"))[-1] == end
    assert parameter_digests("run", end) == parameter_digests("whole", end)

    sparse = run_json(capsys, *words("sparse", *PATIENT, "train.log_every=10"))
    assert (sparse["step"], sparse["loss"]) == (end, result["loss"])
    # The same command again changes nothing.
    before = (Path("run", METRICS_FILE).read_bytes(), saved_steps(Path("run")))
    again = run_json(capsys, *words("run", *PATIENT))
    assert again["end_reason"] == result["end_reason"]
    assert (Path("run", METRICS_FILE).read_bytes(), saved_steps(Path("run"))) == before

    # With more patience it goes on, and ends as the run without an early end.
    run_ok(*words("run", *DIVERGING, "eval.patience=9"))
    assert evaluations("run") == losses
    assert parameter_digests("run", 12) == parameter_digests("whole", 12)


def test_last_step_of_an_early_end_is_logged(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    result = run_json(capsys, *words("run", *PATIENT, "train.log_every=100"))
    losses = {
        line["step"]: line["loss"]
        for line in read_metrics(Path("run", METRICS_FILE))
        if "loss" in line
    }
    assert [*losses] == [1, result["step"]]
    assert result["loss"] == losses[result["step"]]


def test_best_step_by_a_metric_of_the_user(work_dir: Path):
    def highest_logit(logits: Any, targets: Any) -> dict[str, Any]:
        return {"top": jnp.max(logits, axis=-1)}

    overrides = (*DIVERGING, "checkpoint.best=eval_top", "checkpoint.keep=1")
    lowest = prep.train(
        "recipe.toml",
        "low",
        overrides=(*overrides, "checkpoint.best_is=lowest"),
        metric_fn=highest_logit,
    )
    values = {step: value for step, value in evaluations("low", "eval_top").items() if step}
    assert lowest.is_finished
    assert best_step(Path("low")) == min(values, key=lambda step: values[step])
    prep.train(
        "recipe.toml",
        "high",
        overrides=(*overrides, "checkpoint.best_is=highest"),
        metric_fn=highest_logit,
    )
    assert best_step(Path("high")) == max(values, key=lambda step: values[step])
    with pytest.raises(UsageError, match=r"an evaluation has .*eval_accuracy, eval_top"):
        prep.train(
            "recipe.toml",
            "wrong",
            overrides=(*overrides, "checkpoint.best=eval_up", "checkpoint.best_is=highest"),
            metric_fn=highest_logit,
        )
    assert not os.path.exists("wrong/12")


def test_metric_without_its_function_is_an_error(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    settings = ("checkpoint.best=eval_bleu", "checkpoint.best_is=highest", "train.eval_every=2")
    lines = error_lines(capsys, *words("run", *settings))
    assert lines[0].startswith('error: `checkpoint.best` is "eval_bleu"')
    assert "eval_loss, eval_perplexity, eval_accuracy" in "\n".join(lines)


def test_dry_run_describes_schedule_windows_and_early_end(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    settings = (
        *(
            "train.eval_every=2",
            "eval.patience=3",
            "eval.stride=8",
            "checkpoint.best=eval_accuracy",
        ),
        *("optimizer.schedule=cosine_restarts", "optimizer.cycles=2"),
    )
    assert main([*words("run", *settings), "--dry-run", "--progress", "lines"]) == OK
    err = capsys.readouterr().err
    assert (
        "learning rate 0.01, linear warm-up from 0 in 2 steps, 2 cosines to 0 until step 12" in err
    )
    assert "windows with stride 8; the run ends after 3 without a better eval_accuracy" in err


def test_windows_of_the_held_out_tokens_are_evaluated(work_dir: Path):
    run_ok(*words("rows", "train.steps=2"))
    run_ok(*words("windows", "train.steps=2", "eval.stride=8"))
    rows, windows = evaluations("rows", "eval_tokens"), evaluations("windows", "eval_tokens")
    # Each row of 16 tokens has 15 targets. Windows also predict its first token, and the rest of the text.
    num_rows = rows[2] / 15
    assert windows[2] >= num_rows * 16 - 1
    assert windows[2] < (num_rows + 1) * 16
    assert evaluations("windows")[2] != evaluations("rows")[2]


def test_stride_without_evaluation_data_is_an_error(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    lines = error_lines(capsys, *words("run", "data.holdout=0", "eval.stride=8"))
    assert "there is no evaluation data" in "\n".join(lines)
    assert not Path("run/data").exists(), "the data may take hours to tokenize"


def test_stride_without_concatenated_texts_is_an_error(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    lines = error_lines(capsys, *words("run", "data.packing=documents", "eval.stride=8"))
    assert "windows need concatenated texts" in "\n".join(lines)
    assert not Path("run/data").exists(), "the data may take hours to tokenize"
