"""`prep train`: the steps that remain, the best step, other dtypes, exports, samples, pushes and profiles."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.
from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, STOPPED, UsageError
from prepcli.formats.manifest import MANIFEST_FILE, NO_MANIFEST, read_manifest, saved_steps
from prepcli.formats.step_scores import best_step
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.hub_server import hub_environment
from tests.helpers.killed_train import VARIABLE
from tests.helpers.processes import finish, start_processes
from tests.helpers.push_server import TOKEN, serve_push_hub
from tests.helpers.run_cli import error_lines, run_failing, run_json, run_ok
from tests.helpers.train_runs import read_losses, set_keys, start_train, wait_for_step
from trainer.run import checks, display
from trainer.run.exports import EXPORTS_FOLDER, remove_exports
from trainer.run.run_record import ENVIRONMENT_FILE, SAMPLES_FILE, read_run
from trainer.run.storage import TOKENS_FOLDER
from trainer.training.metrics import METRICS_FILE, read_metrics

# `prep train`: the steps that remain, the best step, checkpoints in other dtypes, exports, the hub and profiles.

BEST = (
    "train.eval_every=2",
    "checkpoint.best=eval_loss",
    "checkpoint.keep=1",
    "checkpoint.every=0",
)

MAX_KILLS = 12  # one per step


def train(run: str, *settings: str, words: tuple[str, ...] = ()) -> None:
    run_ok("train", "recipe.toml", "--out", run, *set_keys(*settings), *words)


def eval_losses(run: str) -> dict[int, float]:
    lines = read_metrics(Path(run, METRICS_FILE))
    return {
        line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line and line["step"]
    }


def read_files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_best_step_and_milestones_outlive_keep(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    """The learning rate is too large, so that an early step is the best one. A resumed run keeps the same steps."""
    settings = (*BEST, "checkpoint.milestones=5", "optimizer.lr=0.3", "optimizer.clip_norm=0")
    train("whole", *settings)
    losses = eval_losses("whole")
    best = min(losses, key=lambda step: losses[step])
    assert saved_steps(Path("whole")) == sorted({5, 10, 12, best})
    assert best_step(Path("whole")) == best
    assert (read_manifest(Path("whole", str(best))) or NO_MANIFEST)["eval_loss"] == losses[best]

    run_failing(
        capsys,
        75,
        "train",
        "recipe.toml",
        "--out",
        "cut",
        *set_keys(*settings),
        "--stop-after",
        "7",
    )
    train("cut", *settings)
    assert saved_steps(Path("cut")) == saved_steps(Path("whole"))
    run_ok("export", "whole", "--step", "best", "--out", "best-hf")
    run_ok("export", "whole", "--step", str(best), "--out", "numbered-hf")
    run_ok("verify", "best-hf", "numbered-hf")
    run_ok("export", "cut", "--step", "last", "--out", "last-hf")
    assert (
        run_json(
            capsys, "eval", "whole", "--step", "best", "--data", "text.txt", "--seq-length", "16"
        )["step"]
        == best
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kills_keep_best_steps_milestones_and_exports(work_dir: Path, seed: int):
    """A run that is killed at random times ends with the steps, the losses and the exports of an undisturbed one."""
    settings = (
        *BEST,
        "checkpoint.every=3",
        "checkpoint.milestones=5",
        "checkpoint.export_every=4",
        "mesh=1,1,8",
    )
    command = [*set_keys(*settings), *set_keys("optimizer.lr=0.3", "optimizer.clip_norm=0")]
    run_ok("train", "recipe.toml", "--out", "whole", *command)
    assert kill_until_done(command, Random(seed)) > 0
    run_ok("train", "recipe.toml", "--out", "killed", *command)
    assert saved_steps(Path("killed")) == saved_steps(Path("whole"))
    assert best_step(Path("killed")) == best_step(Path("whole"))
    assert eval_losses("killed") == eval_losses("whole")
    for name in ("4", "8", "12"):
        assert read_weights(Path("killed", "exports", name)) == read_weights(
            Path("whole", "exports", name)
        )


def kill_until_done(command: list[str], random: Random) -> int:
    """Start the run `killed` again and again, and kill it soon after a further step, until it ends by itself.

    Return the number of kills.
    """
    for kills in range(MAX_KILLS):
        running = start_train("--out", "killed", *command)
        wait_for_step(running, "killed", len(read_losses("killed")) + 1)
        time.sleep(random.uniform(0, 0.3))
        running.kill()
        running.communicate()
        if running.returncode == OK:
            return kills
    return MAX_KILLS


def read_weights(folder: Path) -> dict[str, bytes]:
    return {
        name: data for name, data in read_files(folder).items() if name.endswith(".safetensors")
    }


def test_run_from_a_training_state_is_a_new_run(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    first = ("train", "recipe.toml", "--out", "first", "--stop-after", "3")
    run_failing(capsys, STOPPED, *first, *set_keys("train.eval_every=3"))
    settings = ("model.path=first/3", "model.training_state=true", "eval.at_start=true")
    report = run_json(capsys, "train", "recipe.toml", "--out", "next", *set_keys(*settings))
    environment = json.loads(Path("next", ENVIRONMENT_FILE).read_text())
    assert (report["resumed_at"], environment["resumed_at"], report["step"]) == (0, 0, 12)
    assert sorted(eval_losses("next")) == [3, 12]
    assert eval_losses("next")[3] == eval_losses("first")[3], "the parameters of the start"


def test_checks_of_a_training_state_begin_at_its_step(
    work_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The warnings and the bar are of the steps that are left."""
    first = ("train", "recipe.toml", "--out", "first", "--stop-after", "3")
    run_failing(capsys, STOPPED, *first)
    begins: dict[str, int] = {}

    def disk_warnings(*_: Any, first_step: int, **__: Any) -> list[str]:
        begins["disk"] = first_step
        return []

    def open_display(run: Any, step: int, **options: Any) -> Any:
        begins["bar"] = step
        return display.open_display(run, step, **options)

    monkeypatch.setattr(checks, "disk_warnings", disk_warnings)
    monkeypatch.setattr("trainer.run.train.open_display", open_display)
    settings = ("model.path=first/3", "model.training_state=true", "train.steps=4")
    profile = "train.profile={ start = 2, steps = 1 }"
    keys = set_keys(*settings, profile)
    report = run_json(capsys, "train", "recipe.toml", "--out", "next", *keys)
    assert begins == {"disk": 4, "bar": 3}
    (warning,) = [text for text in report["warnings"] if "profile" in text]
    assert warning.endswith("the run resumes after step 3: nothing is recorded")


def test_step_option_rejects_a_step_that_is_not_saved(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    train("run", "train.steps=4")
    capsys.readouterr()
    assert (
        error_lines(capsys, "export", "run", "--step", "best")[0] == "error: run has no best step"
    )
    assert (
        error_lines(capsys, "export", "run", "--step", "first")[0]
        == "error: `--step first` is invalid"
    )
    assert error_lines(capsys, "export", "run", "--step", "9")[0] == "error: run has no step 9"
    assert error_lines(capsys, "export", "tiny", "--step", "last")[0] == "error: tiny has no step"


def test_parameters_are_saved_in_the_dtype_of_the_recipe(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    train("run", "train.steps=4", "checkpoint.optimizer_state=false", "checkpoint.dtype=bfloat16")
    cast = json.loads(Path("run", "4", MANIFEST_FILE).read_bytes())["param_cast"]
    assert (cast["from"], cast["to"]) == ("float32", "bfloat16")
    assert 0 < cast["changed"] <= cast["values"]
    run_ok("export", "run", "--out", "hf")
    tensors = run_json(capsys, "inspect", "hf")["tensors"]
    assert {tensor["dtype"] for tensor in tensors} == {"bfloat16"}
    lines = error_lines(
        capsys, "train", "recipe.toml", "--out", "other", "--set", "checkpoint.dtype=bfloat16"
    )
    assert '`checkpoint.dtype` is "bfloat16"' in lines[0]


def test_parameters_in_the_dtype_of_the_state_are_not_cast(work_dir: Path):
    train("run", "train.steps=4", "checkpoint.dtype=float32")
    assert "param_cast" not in (read_manifest(Path("run", "4")) or NO_MANIFEST)


def test_rounded_parameters_are_not_resumed(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    settings = (
        "optimizer.type=sgd",
        "optimizer.momentum=0",
        "checkpoint.optimizer_state=false",
        "checkpoint.dtype=bfloat16",
    )
    command = ("train", "recipe.toml", "--out", "run", *set_keys(*settings))
    run_failing(capsys, 75, *command, "--stop-after", "1")
    lines = error_lines(capsys, *command)
    assert lines[0] == "error: step 1 has no exact parameters to resume from"
    assert "run/1" in lines[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("checkpoint.best=eval_loss",), "the run evaluates only after its last step"),
        (("checkpoint.best=eval_loss", "data.holdout=0"), "there is no evaluation data"),
        (("train.eval_every=2", "train.eval_every_epochs=1"), "both set the same interval"),
        (("checkpoint.every_epochs=1",), "both set the same interval"),
        (("train.profile={ start = 0, steps = 1 }",), "`start` is 0"),
        (("train.profile={ start = 1 }",), "`steps` is missing"),
    ],
)
def test_conflicting_eval_and_checkpoint_keys_are_errors(
    work_dir: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...], message: str
):
    assert message in "\n".join(error_lines(capsys, "train", "recipe.toml", *set_keys(*settings)))


def test_steps_are_exported_while_the_run_goes_on(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    settings = ("checkpoint.export_every=4", "checkpoint.keep=1")
    train("run", *settings)
    assert saved_steps(Path("run")) == [12]
    assert sorted(path.name for path in Path("run", "exports").iterdir()) == ["12", "4", "8"]
    stopped = ("train", "recipe.toml", "--out", "all", "--stop-after", "4")
    run_failing(capsys, STOPPED, *stopped)
    run_ok("export", "all", "--out", "four")
    run_ok("verify", "run/exports/4", "four")


def test_next_start_makes_a_missing_export(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    settings = ("checkpoint.export_every=2", "checkpoint.keep='all'", "train.steps=4")
    stopped = (
        "train",
        "recipe.toml",
        "--out",
        "run",
        *set_keys(*settings),
        "--stop-after",
        "2",
    )
    run_failing(capsys, 75, *stopped)
    shutil.rmtree(Path("run", "exports"), ignore_errors=True)  # as if it had been killed
    train("run", *settings)
    assert sorted(path.name for path in Path("run", "exports").iterdir()) == ["2", "4"]
    shutil.rmtree(Path("run", "exports", "4"))
    train("run", *settings)
    run_ok("verify", "run/exports/4")


def test_restart_removes_the_exports(work_dir: Path):
    train("run", "train.steps=4", "checkpoint.export_every=3")
    assert Path("run", "exports", "3").is_dir()
    train("run", "train.steps=4", "checkpoint.export_every=2", words=("--restart",))
    assert sorted(path.name for path in Path("run", "exports").iterdir()) == ["2", "4"]


def test_profile_is_written_to_the_run(work_dir: Path):
    train("run", "train.steps=4", "train.profile={ start = 2, steps = 2 }")
    assert list(Path("run", "profile").rglob("*.xplane.pb"))


def test_last_step_is_pushed_once(work_dir: Path):
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PREP_"))
    }
    settings = set_keys("train.steps=4", "checkpoint.push=o/m")

    def run(url: str, **variables: str) -> dict[str, Any]:
        environment = inherited | hub_environment(url, work_dir / "home") | variables
        process = run_python(
            PREP,
            "train",
            "recipe.toml",
            "--out",
            "run",
            *settings,
            "--json",
            env=environment,
            has_jax=True,
        )
        return json.loads(process.stdout)

    with serve_push_hub() as hub:
        refused = run(hub.url)
        assert not refused["ok"]
        assert not Path("run", TOKENS_FOLDER).exists(), (
            "the hub is asked before the data is tokenized"
        )
        report = run(hub.url, HF_TOKEN=TOKEN)
        assert report["ok"], report
        assert report["pushed"]["repo"] == "o/m"
        exported = read_files(Path("run", "exports", "4"))
        assert hub.repos["o/m"].branches["main"] == exported
        hub.requests.clear()
        assert run(hub.url, HF_TOKEN=TOKEN)["ok"]
        assert not [line for line in hub.requests if line.startswith("PUT")]


# `prep train` with `log.samples`: its file, the resumed run, the report, and runs without a tokenizer.

# The mesh and the number of steps are those of the recipe, so that other tests compile the step too.
SETTINGS = (
    *("--set", 'log.samples=["w1 w2 w3", "w50"]'),
    *("--set", "log.sample_every=5"),
    *("--set", "log.sample_tokens=4"),
)


def read_lines(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, SAMPLES_FILE).read_text().splitlines()]


def test_resumed_run_has_the_samples_of_a_whole_one(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    fields = run_json(capsys, "train", "recipe.toml", "--out", "whole", *SETTINGS)
    lines = read_lines("whole")
    assert [line["step"] for line in lines] == [0, 0, 5, 5, 10, 10, 12, 12]
    assert fields["samples"] == lines[-2:]
    generated = run_json(
        capsys,
        "generate",
        "whole",
        "--prompt",
        "w1 w2 w3",
        "--prompt",
        "w50",
        "--max-new-tokens",
        "4",
    )
    assert generated["texts"] == [line["text"] for line in lines[-2:]]

    run_failing(capsys, 75, "train", "recipe.toml", "--out", "cut", *SETTINGS, "--stop-after", "7")
    with Path("cut", SAMPLES_FILE).open("a") as file:
        file.write(
            json.dumps({"step": 8, "prompt": "w50", "text": "of a step that was not saved"}) + "\n"
        )
    run_ok("train", "recipe.toml", "--out", "cut", *SETTINGS)
    assert read_lines("cut") == lines
    assert [(sample.step, sample.text) for sample in read_run(Path("cut")).samples] == [
        (line["step"], line["text"]) for line in lines
    ]

    run_ok("report", "whole", "cut")
    page = Path("whole", "report.html").read_text()
    assert page.count('<h3 class="sample">w1 w2 w3</h3>') == 1
    assert page.count(f'<span class="sample">{lines[-1]["text"]}</span>') >= 4, (
        "last and all texts of both runs"
    )
    restart = ("train", "recipe.toml", "--out", "cut", "--restart", "--stop-after", "1")
    run_failing(capsys, 75, *restart)
    assert not read_run(Path("cut")).samples


def test_run_resumed_without_prompts_keeps_earlier_samples(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    run_failing(capsys, 75, "train", "recipe.toml", "--out", "run", *SETTINGS, "--stop-after", "1")
    lines = read_lines("run")
    with Path("run", SAMPLES_FILE).open("a") as file:
        file.write(
            json.dumps({"step": 5, "prompt": "w50", "text": "of a step that was not saved"}) + "\n"
        )
    run_failing(capsys, 75, "train", "recipe.toml", "--out", "run", "--stop-after", "1")
    assert read_lines("run") == lines


def test_samples_without_a_tokenizer_are_refused(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    for path in work_dir.rglob("tokenizer.json"):
        path.unlink()
    error = run_failing(capsys, 1, "train", "recipe.toml", *SETTINGS, "--no-verify")
    assert "`log.samples` needs a tokenizer" in error


def test_sample_keys_without_prompts_are_refused(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    error = run_failing(capsys, 2, "train", "recipe.toml", "--set", "log.sample_every=5")
    assert "there are no prompts: `log.samples` is not set" in error


# Exports in the folder of a run.


@pytest.mark.parametrize(("process", "is_kept"), [(0, False), (1, True)])
def test_only_process_0_removes_exports(tmp_path: Path, process: int, is_kept: bool):
    (tmp_path / EXPORTS_FOLDER / "10").mkdir(parents=True)
    run: Any = SimpleNamespace(folder=tmp_path, is_process_0=process == 0)
    remove_exports(run)
    assert (tmp_path / EXPORTS_FOLDER).exists() == is_kept


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

    sparse = run_json(capsys, *words("sparse", *PATIENT, "train.log_every=100"))
    assert (sparse["step"], sparse["loss"]) == (end, result["loss"])
    logged = [line["step"] for line in read_metrics(Path("sparse", METRICS_FILE)) if "loss" in line]
    assert logged == [1, end], "the last step is logged"
    # The same command again changes nothing.
    before = (Path("run", METRICS_FILE).read_bytes(), saved_steps(Path("run")))
    again = run_json(capsys, *words("run", *PATIENT))
    assert again["end_reason"] == result["end_reason"]
    assert (Path("run", METRICS_FILE).read_bytes(), saved_steps(Path("run"))) == before

    # With more patience it goes on, and ends as the run without an early end.
    run_ok(*words("run", *DIVERGING, "eval.patience=9"))
    assert evaluations("run") == losses
    assert parameter_digests("run", 12) == parameter_digests("whole", 12)


def test_best_step_by_a_metric_of_the_user(work_dir: Path):
    def highest_logit(logits: Any, targets: Any) -> dict[str, Any]:
        return {"top": jnp.max(logits, axis=-1)}

    overrides = (*DIVERGING, "checkpoint.best=eval_top", "checkpoint.keep=1")
    highest = prep.train(
        "recipe.toml",
        "high",
        overrides=(*overrides, "checkpoint.best_is=highest"),
        metric_fn=highest_logit,
    )
    assert highest.is_finished
    values = {step: value for step, value in evaluations("high", "eval_top").items() if step}
    assert values[min(values)] != max(values.values()) != values[max(values)]
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


def _patience(folder: str, step: int) -> dict[str, Any]:
    """Return the evaluations that the manifest of a step records."""
    fields: Any = read_manifest(Path(folder, str(step))) or NO_MANIFEST
    return dict(fields["patience"])


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


ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "choose"), [("eval_accuracy", max), ("eval_perplexity", min)])
def test_best_step_is_chosen_by_the_metric(work_dir: Path, metric: str, choose: Any):
    run_ok(*words("run", *DIVERGING, f"checkpoint.best={metric}", "checkpoint.keep=1"))
    values = {step: value for step, value in evaluations("run", metric).items() if step}
    best = choose(values, key=lambda step: values[step])
    assert best_step(Path("run")) == best
    assert best in saved_steps(Path("run"))


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
def test_changed_metric_starts_patience_again(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    run_ok(*words("run", *PATIENT))
    end = saved_steps(Path("run"))[-1]
    run_ok(*words("run", *PATIENT, "checkpoint.best=eval_perplexity"))
    # The first evaluation of the new metric is the best one so far.
    assert saved_steps(Path("run"))[-1] >= min(end + 6, 12)


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
