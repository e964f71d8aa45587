"""`eval.patience` ends a run, and `checkpoint.best` keeps the best step by any value of the evaluations."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.
from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, UsageError
from prepcli.formats.manifest import NO_MANIFEST, read_manifest, saved_steps
from prepcli.formats.step_scores import best_step
from tests.helpers.killed_train import VARIABLE
from tests.helpers.processes import finish, start_processes
from tests.helpers.run_cli import error_lines, run_failing, run_json, run_ok
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


@pytest.mark.slow
def test_early_end_is_the_same_after_a_stop_at_any_step(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    whole = run_json(capsys, *words("whole", *PATIENT))
    # One process takes two steps, so that runs of one stop after each of the others' saves.
    command = words("cut", *PATIENT)
    for _ in range(12):
        if saved_steps(Path("cut"))[-1:] == [whole["step"]]:
            break
        code = 75 if (saved_steps(Path("cut")) or [0])[-1] + 1 < whole["step"] else 0
        if code:
            run_failing(capsys, 75, *command, "--stop-after", "1")
        else:
            run_ok(*command)
    cut = run_json(capsys, *command)
    assert cut["end_reason"] == whole["end_reason"]
    assert evaluations("cut") == evaluations("whole")
    step = whole["step"]
    assert parameter_digests("cut", step) == parameter_digests("whole", step)
    fields = [read_manifest(Path(run, str(step))) or NO_MANIFEST for run in ("cut", "whole")]
    assert fields[0]["patience"] == fields[1]["patience"]


@pytest.mark.slow
def test_early_end_tells_why_and_samples(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    settings = (*PATIENT, 'log.samples="w1 w2"', "log.sample_tokens=2")
    assert main([*words("run", *settings), "--progress", "lines"]) == OK
    assert "ended early at step" in capsys.readouterr().err
    lines = Path("run/samples.jsonl").read_text().splitlines()
    sampled = [json.loads(line)["step"] for line in lines]
    assert sampled == saved_steps(Path("run"))[-1:]


def test_last_step_of_an_early_end_is_logged(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    result = run_json(capsys, *words("run", *PATIENT, "train.log_every=100"))
    losses = {
        line["step"]: line["loss"]
        for line in read_metrics(Path("run", METRICS_FILE))
        if "loss" in line
    }
    assert [*losses] == [1, result["step"]]
    assert result["loss"] == losses[result["step"]]


@pytest.mark.slow
def test_changed_metric_starts_patience_again(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    run_ok(*words("run", *PATIENT))
    end = saved_steps(Path("run"))[-1]
    run_ok(*words("run", *PATIENT, "checkpoint.best=eval_perplexity"))
    # The first evaluation of the new metric is the best one so far.
    assert saved_steps(Path("run"))[-1] >= min(end + 6, 12)


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "choose"), [("eval_accuracy", max), ("eval_perplexity", min)])
def test_best_step_is_chosen_by_the_metric(work_dir: Path, metric: str, choose: Any):
    run_ok(*words("run", *DIVERGING, f"checkpoint.best={metric}", "checkpoint.keep=1"))
    values = {step: value for step, value in evaluations("run", metric).items() if step}
    best = choose(values, key=lambda step: values[step])
    assert best_step(Path("run")) == best
    assert best in saved_steps(Path("run"))


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


# `eval.patience` and `checkpoint.best` in several processes, also after a kill: the results of one process.

ROOT = Path(__file__).resolve().parents[3]


SETTINGS = (*PATIENT, "checkpoint.every=2", "checkpoint.keep=1")


def run(*command: str, count: int, kill_after: str = "") -> list[tuple[int, str]]:
    """Run `prep` in processes with 8 devices together, and return the exit code and stdout of each."""
    env = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", VARIABLE: kill_after}
    module = "tests.helpers.killed_train" if kill_after else "prepcli"
    started = start_processes(*command, count=count, devices=8 // count, env=env, module=module)
    return [(code, out) for code, out, _ in finish(started, 600)]


def run_to_the_end(*command: str, count: int) -> dict[str, Any]:
    """Run `prep --json` in processes, and return the result of process 0. Assert that the others print nothing."""
    (code, out), *others = run(*command, "--json", count=count)
    assert code == OK
    assert [code for code, _ in others] == [OK] * (count - 1)
    return json.loads(next(line for line in out.splitlines() if line.startswith("{")))


def assert_same_end(result: dict[str, Any], folder: str, expected: dict[str, Any]) -> None:
    """Assert that a run ended as the run `one`: step, reason, best step, evaluations and recorded patience."""
    assert (result["step"], result["end_reason"]) == (expected["step"], expected["end_reason"])
    assert best_step(Path(folder)) == best_step(Path("one"))
    assert saved_steps(Path(folder)) == saved_steps(Path("one"))
    losses, expected_losses = evaluations(folder), evaluations("one")
    assert losses.keys() == expected_losses.keys()
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    patience, expected_patience = (_patience(name, result["step"]) for name in (folder, "one"))
    assert patience.pop("cost") == pytest.approx(expected_patience.pop("cost"), rel=1e-5)
    assert patience == expected_patience


def _patience(folder: str, step: int) -> dict[str, Any]:
    """Return the evaluations that the manifest of a step records."""
    fields: Any = read_manifest(Path(folder, str(step))) or NO_MANIFEST
    return dict(fields["patience"])


@pytest.mark.parametrize(
    ("best", "counts"),
    [
        pytest.param(("checkpoint.best=eval_loss",), (2, 2), marks=pytest.mark.slow, id="best"),
        pytest.param((), (2, 1), marks=pytest.mark.slow, id="loss"),
        pytest.param(
            ("checkpoint.best=eval_accuracy",), (4, 2), marks=pytest.mark.slow, id="accuracy"
        ),
    ],
)
def test_processes_end_early_at_one_step_after_a_kill(
    work_dir: Path, best: Sequence[str], counts: Sequence[int], capsys: pytest.CaptureFixture[str]
):
    settings = (*SETTINGS, *best)
    expected = run_json(capsys, *words("one", *settings))
    end = expected["step"]
    assert end < 12
    # The last evaluation before the kill is not the best one, so that the count has begun.
    first, second = counts
    killed = run(*words("many", *settings), count=first, kill_after=f"{end - 1} many/{end - 2}")
    # A process may also end because another one has been killed.
    assert -signal.SIGKILL in [code for code, _ in killed]
    assert saved_steps(Path("many"))[-1] == end - 2
    assert _patience("many", end - 2)["evaluations"] == 1
    result = run_to_the_end(*words("many", *settings), count=second)
    assert_same_end(result, "many", expected)
