"""`prep train`: training, resuming after stops and kills, exporting, and errors for invalid recipes."""

from __future__ import annotations

import ast
import errno
import importlib
import json
import os
import pkgutil
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.console.ui import Ui, open_ui
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE
from prepcli.core.observer import NullProgress
from prepcli.core.process_group import SingleProcess
from prepcli.execution import training_folder
from prepcli.execution.training_folder import FolderStorage
from prepcli.formats.manifest import saved_steps
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.killing import read_files
from tests.helpers.run_cli import run_code, run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint, read_tensors
from tests.helpers.token_stores import NAME, fill, write_shards
from tests.helpers.train_runs import (
    read_losses,
    read_step_files,
    set_keys,
    start_train,
    train_error,
    train_json,
    wait_for_step,
)
from tests.helpers.training_folder import WORDS, make_training_folder, write_tokenizer
from tests.helpers.waiting import MAX_S
from trainer import run as run_package
from trainer.run import logs
from trainer.run.recipe_data import tokenize_progress
from trainer.run.storage import hold_run
from trainer.run.train import describe_saved_progress
from trainer.training.metrics import METRICS_FILE, read_metrics

BLOCKWISE_ON_TWO_DEVICES = (
    "mesh=1,2,1",
    "model.dtype=bfloat16",
    "model.attention_kernel=blockwise",
    "model.q_chunk_size=8",
    "model.k_chunk_size=8",
    "model.remat_policy=nothing_saveable",
    "train.steps=6",
)


def last_evaluation(run: str) -> float:
    """Return the loss of a run's last evaluation."""
    lines = read_metrics(Path(run, METRICS_FILE))
    return [line["eval_loss"] for line in lines if "eval_loss" in line][-1]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a finished run of the recipe, which tests only read."""
    folder = tmp_path_factory.mktemp("unbroken")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        make_training_folder()
        run_ok("train", "recipe.toml", "--out", "run")
    return str(folder / "run")


def test_finished_run_exports_and_resumes_without_steps(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    capsys.readouterr()
    code, report = train_json(capsys)
    assert code == OK
    assert (report["step"], report["resumed_at"], report["output"]) == (12, 0, "runs/recipe/12")
    assert report["loss"] < read_losses("runs/recipe")[0] - 0.2
    assert report["eval_loss"] == last_evaluation("runs/recipe")
    assert saved_steps(Path("runs/recipe")) == [9, 12], "the newest two are kept"
    assert sorted(p.name for p in Path("runs/recipe").iterdir() if p.is_file()) == [
        ".lock",
        "environment.json",
        METRICS_FILE,
        "recipe.toml",
    ]
    run_ok("verify", "runs/recipe")
    run_ok("export", "runs/recipe", "--out", "learned")
    before, after = read_tensors(Path("tiny")), read_tensors(Path("learned"))
    assert {name: t.shape for name, t in before.items()} == {
        name: t.shape for name, t in after.items()
    }
    run_ok("verify", "learned", "runs/recipe")
    capsys.readouterr()
    assert main(["train", "recipe.toml"]) == OK
    assert "the run is finished at step 12" in capsys.readouterr().err
    again, report = train_json(capsys)
    assert (again, report["resumed_at"], report["step"]) == (OK, 12, 12), (
        "a run that is done does nothing"
    )


def test_eval_loss_equals_transformers(unbroken: str, work_dir: Path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    run_ok("export", unbroken, "--out", "learned")
    model = transformers.AutoModelForCausalLM.from_pretrained("learned", dtype=torch.float32).eval()
    words = Path("text.txt").read_text().split()
    ids = torch.tensor([WORDS.index(word) for word in words] + [0])
    blocks = ids[: len(ids) // 16 * 16].reshape(-1, 16)
    holdout = blocks[len(blocks) - round(len(blocks) * 0.1) :]
    with torch.no_grad():
        expected = float(model(holdout, labels=holdout).loss)
    assert last_evaluation(unbroken) == pytest.approx(expected, rel=1e-5)


# The process sends the signal to itself: another one could be too late for the few steps.
TRAIN_UNTIL_A_SIGNAL = f"""
import os, signal
from trainer.training.metrics import MetricsFileLog
write = MetricsFileLog.write

def write_and_signal(self, line):
    write(self, line)
    if line["step"] == 2:
        os.kill(os.getpid(), signal.SIGTERM)

MetricsFileLog.write = write_and_signal
{PREP}
"""


def test_stopped_run_resumes_to_the_same_bits(
    unbroken: str, work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    running = run_python(TRAIN_UNTIL_A_SIGNAL, "train", "recipe.toml", "--json", has_jax=True)
    report = json.loads(running.stdout)
    assert running.returncode == STOPPED
    assert report["error"]["what"] == "stopped by SIGTERM"
    assert saved_steps(Path("runs/recipe"))[-1] == report["step"] < 12
    capsys.readouterr()
    code, report = train_json(capsys)
    assert (code, report["step"]) == (OK, 12)
    assert read_losses("runs/recipe") == read_losses(unbroken)
    assert read_step_files("runs/recipe") == read_step_files(unbroken)


def run_compiled_apart(
    *words: str, settings: Sequence[str], code: int = OK, **variables: str
) -> None:
    """Train in a process that compiles the step on its own. Other tests share compiled steps."""
    sets = set_keys(*settings)
    running = start_train(*words, *sets, JAX_ENABLE_COMPILATION_CACHE="false", **variables)
    out, _ = running.communicate(timeout=MAX_S)
    assert running.returncode == code, out


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [os.environ["XLA_FLAGS"], ""], ids=["few optimizations", "flags of users"]
)
def test_separately_compiled_run_resumes_to_the_same_bits(work_dir: Path, flags: str):
    variables = {"JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": flags}
    for run, words, code in [
        ("unbroken", (), OK),
        ("broken", ("--stop-after", "3"), STOPPED),
        ("broken", (), OK),
    ]:
        run_compiled_apart(
            "--out", run, *words, settings=BLOCKWISE_ON_TWO_DEVICES, code=code, **variables
        )
    assert read_losses("broken") == read_losses("unbroken")
    assert read_step_files("broken", 6) == read_step_files("unbroken", 6)


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_bits(work_dir: Path):
    """Kill each of 5 runs 4 times at random. With a checkpoint at every step, many kills happen during a save."""
    often = set_keys("checkpoint.every=1", "checkpoint.keep=3")
    run_ok("train", "recipe.toml", "--out", "unbroken", *often)
    moments = random.Random(0)
    for number in range(5):
        run = f"runs/{number}"
        for _ in range(4):
            running = start_train("--out", run, *often)
            wait_for_step(running, run, len(read_losses(run)) + 1)
            time.sleep(moments.uniform(0, 0.3))
            running.kill()
            running.communicate()
        run_ok("train", "recipe.toml", "--out", run, *often)
        assert read_losses(run) == read_losses("unbroken")
        assert read_step_files(run) == read_step_files("unbroken")
        assert not list(Path(run).glob("*.partial"))


def test_mesh_with_too_many_devices_is_rejected(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    code, what, why, hint = train_error(capsys, "--set", "mesh=1,64,4")
    assert (code, what) == (USAGE, "mesh 1,64,4 needs 256 devices, there are 8")
    assert why.startswith("1 host with 8 x cpu")
    assert "`--set mesh=1,8,1`" in hint


def test_dry_run_without_the_devices_points_to_plan(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    *_, hint = train_error(capsys, "--set", "mesh=1,64,4", "--dry-run")
    assert hint == "`--set mesh=1,8,1`, or without devices: `prep plan recipe.toml`"


def test_missing_tokenizer_is_an_error(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    for path in work_dir.rglob("tokenizer.json"):
        path.unlink()
    run_ok("verify", "tiny-init", "--accept", "tokenizer.json")
    code, what, why, _ = train_error(capsys)
    assert (code, what) == (FAILED, "tiny-init/hf has no tokenizer")
    assert "looked for tokenizer.json, " in why


def test_too_long_sequences_are_rejected(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(work_dir / "neo", GPT_NEO)
    write_tokenizer(work_dir / "neo")
    code, what, why, _ = train_error(capsys, *set_keys("model.path=neo", "data.seq_length=128"))
    assert (code, what, why) == (USAGE, "`data.seq_length` is 128", "the model has 64 positions")


def test_resume_rejects_changed_recipe_and_data(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    recipe = Path("recipe.toml").read_text()
    Path("recipe.toml").write_text(recipe.replace("decay_steps = 12\n", ""))
    assert run_code("train", "recipe.toml", "--stop-after", "2") == STOPPED
    code, what, why, hint = train_error(capsys, "--set", "optimizer.weight_decay=0.5")
    assert (code, what) == (FAILED, "the recipe has changed since the last start")
    assert why == "optimizer.weight_decay: 0.0 -> 0.5"
    assert "`--restart`" in hint
    code, what, why, hint = train_error(capsys, "--set", "train.steps=24")
    assert (code, what) == (FAILED, "the learning rate schedule has changed since the last start")
    assert why == "train.steps: 12 -> 24 (of the schedule: decay 12 -> 24)"
    assert hint.startswith("`--set optimizer.decay_steps=12` keeps it")
    # Each start writes its recipe to the run.
    longer = set_keys("train.steps=16", "optimizer.decay_steps=12")
    assert run_code("train", "recipe.toml", "--stop-after", "1", *longer) == STOPPED
    code, what, why, hint = train_error(capsys, "--set", "train.steps=24")
    assert (code, what) == (FAILED, "the learning rate schedule has changed since the last start")
    assert why.startswith("train.steps: 16 -> 24, optimizer.decay_steps: 12 -> not set")
    text = (work_dir / "text.txt").read_text()
    (work_dir / "text.txt").write_text(text + " w1")
    code, what, *_ = train_error(capsys)
    assert (code, what) == (FAILED, "the data has changed since the run began")
    (work_dir / "text.txt").unlink()
    (work_dir / "moved.txt").write_text(text)
    moved = ("--set", "data.path=moved.txt")
    changes = (
        *moved,
        *set_keys("mesh=8,1,1", "train.log_every=5", "checkpoint.keep=1"),
    )
    assert main(["train", "recipe.toml", "-q", *changes]) == OK, "these may change"
    assert saved_steps(work_dir / "runs/recipe") == [12]
    assert run_code("train", "recipe.toml", "--restart", "--stop-after", "1", *moved) == STOPPED
    assert saved_steps(work_dir / "runs/recipe") == [1]


def test_result_of_a_stopped_run_has_the_values_of_its_step(
    unbroken: str, work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    """The step has no line of its own: the resumed run has the log of a run without a stop."""
    metrics = read_metrics(Path(unbroken, METRICS_FILE))
    lines = {line["step"]: line for line in metrics if "loss" in line}
    log_every = ("--set", "train.log_every=10")
    capsys.readouterr()
    code, report = train_json(capsys, *log_every, "--stop-after", "7")
    assert (code, report["step"]) == (STOPPED, 7)
    assert [report[name] for name in ("loss", "tokens")] == [
        lines[7][name] for name in ("loss", "tokens")
    ]
    assert train_json(capsys, *log_every)[1]["loss"] == lines[12]["loss"]
    assert read_losses("runs/recipe") == [lines[step]["loss"] for step in (1, 10, 12)]


@pytest.mark.parametrize("dry_run", [("--dry-run",), ()])
def test_resume_needs_optimizer_state(
    work_dir: Path, capsys: pytest.CaptureFixture[str], dry_run: tuple[str, ...]
):
    words = ("--set", "checkpoint.optimizer_state=false")
    assert run_code("train", "recipe.toml", "--stop-after", "1", *words) == STOPPED
    code, what, *_ = train_error(capsys, *words, *dry_run)
    assert (code, what) == (FAILED, "step 1 has no optimizer state to resume from")


def test_changed_recipe_is_refused_before_the_memory_of_a_step(
    work_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The memory is too small because of the change."""
    assert run_code("train", "recipe.toml", "--stop-after", "1") == STOPPED
    monkeypatch.setattr("trainer.run.machine.host_memory", lambda: {"available": 1})
    code, what, why, _ = train_error(capsys, "--set", "data.seq_length=64")
    assert (code, what) == (FAILED, "the recipe has changed since the last start")
    assert why == "data.seq_length: 16 -> 64"


def test_train_keeps_foreign_folder(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    (work_dir / "thesis").mkdir()
    (work_dir / "thesis" / "text").write_text("all of it")
    code, what, *_ = train_error(capsys, "--out", "thesis")
    assert (code, what) == (FAILED, "thesis already exists and is not a run")


@pytest.mark.parametrize("words", [("--dry-run",), ()])
def test_folder_in_a_file_is_refused(
    work_dir: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
):
    (work_dir / "thesis").write_text("all of it")
    code, what, why, *_ = train_error(capsys, "--out", "thesis/runs/a", *words)
    assert (code, what) == (FAILED, "thesis already exists")
    assert why == "it is a file, and thesis/runs/a would be a folder in it"


def test_train_requires_a_recipe_or_the_schema_option(capsys: pytest.CaptureFixture[str]):
    assert main(["train"]) == USAGE
    assert "no recipe was given" in capsys.readouterr().err
    assert main(["train", "--schema"]) == OK
    assert json.loads(capsys.readouterr().out)["title"] == "Recipe of prep train"


def test_failed_start_does_not_block_the_next(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    code, what, *_ = train_error(capsys, "--set", "data.seq_length=4000")
    assert (code, what) == (FAILED, "the data is shorter than one block")
    assert [path.name for path in (work_dir / "runs/recipe").iterdir()] == ["data"]
    run_ok("train", "recipe.toml", "--dry-run")


def test_start_that_cannot_write_its_recipe_removes_its_lock(
    work_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logs, "write_file", refuse)
    code, what, *_ = train_error(capsys)
    assert (code, what) == (FAILED, "the disk that holds recipe.toml is full")
    assert [path.name for path in Path("runs/recipe").iterdir()] == ["data"]


def test_run_on_a_read_only_disk_takes_no_step(
    work_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A finished run prints its result. A run with steps to take fails before its first change."""
    assert run_code("train", "recipe.toml", "--stop-after", "11") == STOPPED

    def refuse(path: Path, locked_path: Path) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(training_folder, "acquire_lock", refuse)
        before = read_files(Path("runs/recipe"))
        code, what, why, _ = train_error(capsys)
        assert (code, what) == (FAILED, "cannot read or write runs/recipe")
        assert why == "Read-only file system"
        assert read_files(Path("runs/recipe")) == before
    run_ok("train", "recipe.toml")
    monkeypatch.setattr(training_folder, "acquire_lock", refuse)
    run_ok("train", "recipe.toml")


def test_restart_deletes_steps_only_after_checks(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_code("train", "recipe.toml", "--stop-after", "4") == STOPPED
    code, what, *_ = train_error(capsys, "--restart", "--set", "data.path=nothing.txt")
    assert (code, what) == (FAILED, "no data in `nothing.txt`")
    code, what, *_ = train_error(capsys, "--restart", "--set", "model.path=runs/recipe/3")
    assert (code, what) == (USAGE, "`--restart` would delete runs/recipe/3")
    with hold_run(FolderStorage(work_dir / "runs/recipe"), SingleProcess(), pytest.fail):
        code, what, *_ = train_error(capsys, "--restart")
    assert "is locked" in what
    assert saved_steps(work_dir / "runs/recipe") == [3, 4]


# Settings with which a restart would start from its own files, the folder that it would delete, and the key.
OWN_FILES = [
    (["model.path=runs/recipe", "data.tokenizer=other"], "runs/recipe/4", "model.path"),
    (["model.path=runs/recipe/3", "data.tokenizer=other"], "runs/recipe/3", "model.path"),
    (["model.path=runs/recipe/exports/3"], "runs/recipe/exports", "model.path"),
    (["model.path=runs/recipe/exports/3", "lora.rank=2"], "runs/recipe/exports", "model.path"),
    (["data.tokenizer=runs/recipe/exports/3"], "runs/recipe/exports", "data.tokenizer"),
    (["model.config=runs/recipe/exports/3"], "runs/recipe/exports", "model.config"),
]


def test_restart_deletes_no_file_that_it_starts_from(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    Path("other").mkdir()
    write_tokenizer(Path("other"), WORDS[::-1])
    assert run_code("train", "recipe.toml", "--stop-after", "4") == STOPPED
    Path("runs/recipe/exports").mkdir()
    run_ok("export", "runs/recipe/3", "--out", "runs/recipe/exports/3")
    recipe = Path("recipe.toml").read_text()
    for settings, deleted, key in OWN_FILES:
        is_random = key == "model.config"
        start = 'init = "random"' if is_random else 'path = "tiny-init"'
        Path("recipe.toml").write_text(recipe.replace('path = "tiny-init"', start))
        options = set_keys(*settings)
        code, what, why, _ = train_error(capsys, "--restart", "--stop-after", "1", *options)
        assert (code, what) == (USAGE, f"`--restart` would delete {deleted}")
        assert f"`{key}`" in why
        assert saved_steps(work_dir / "runs/recipe") == [3, 4]
        assert Path("runs/recipe/exports/3/config.json").is_file()


def test_finished_run_needs_no_optimizer_state(work_dir: Path, capsys: pytest.CaptureFixture[str]):
    words = ("--set", "checkpoint.optimizer_state=false")
    run_ok("train", "recipe.toml", *words)
    capsys.readouterr()
    for settings in (words, (), (*words, "--dry-run")):
        code, report = train_json(capsys, *settings)
        assert (code, report["output"], report["resumed_at"]) == (OK, "runs/recipe/12", 12)


def test_unsupported_layout_is_rejected_before_work(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    run_ok("save-init", "tiny", "--no-scan", "--mesh", "1,1,1", "--out", "apart")
    code, what, *_ = train_error(capsys, "--set", "model.path=apart")
    assert (code, what) == (USAGE, "layers cannot be scanned")
    words = set_keys("model.path=apart", "model.scan_layers=false")
    code, what, _, hint = train_error(capsys, *words)
    assert (code, what) == (USAGE, "vocabulary 131 cannot be split over mp 4")
    assert "`prep save-init MODEL --mesh 1,2,4 --pad-vocab auto`" in hint
    assert not (work_dir / "runs").exists()


def test_renamed_recipe_resumes_with_out(work_dir: Path):
    assert run_code("train", "recipe.toml", "--stop-after", "1") == STOPPED
    Path("recipe.toml").rename("other.toml")
    assert run_code("train", "other.toml", "--out", "runs/recipe", "--stop-after", "1") == STOPPED
    assert saved_steps(work_dir / "runs/recipe") == [1, 2]


def test_tokenize_progress_shows_bytes_and_tokens(monkeypatch: pytest.MonkeyPatch):
    """The progress of each dataset starts at the bytes of an interrupted run."""
    calls: list[tuple[Any, ...]] = []

    class RecordingProgress(NullProgress):
        def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
            calls.append((task, total_bytes, done_bytes))

        def advance(self, written_bytes: int) -> None:
            calls.append((written_bytes,))

        def note(self, text: str) -> None:
            calls.append((text,))

        def end(self) -> None:
            calls.append(("end",))

    monkeypatch.setattr(Ui, "progress", lambda _: RecordingProgress())
    report_progress = tokenize_progress(open_ui("train", False, True, 0))
    for counts in (
        (0, 20, 0),
        (10, 20, 3_140_000),
        (11, 20, 3_140_001),
        (20, 20, 12_600_000),
        (3, 5, 90_000_000),
    ):
        report_progress(*counts)
    first = [
        ("tokenize", 20, 0),
        (0,),
        ("3.1 M tokens",),
        (10,),
        (1,),
        ("13 M tokens",),
        (9,),
        ("end",),
    ]
    assert calls == [*first, ("tokenize", 5, 3), ("90 M tokens",), (0,)]


def test_saved_progress_mentions_incomplete_token_store(tmp_path: Path):
    (tmp_path / "data" / f"{NAME}.partial").mkdir(parents=True)
    assert describe_saved_progress(FolderStorage(tmp_path)) == ""
    write_shards(tmp_path / "data" / NAME, [fill])
    expected = f"kept in {tmp_path}: a part of the tokens"
    assert describe_saved_progress(FolderStorage(tmp_path)) == expected


# The page that follows a run through the code: every function that it names exists, in the order of the calls.

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "a-training-run.md"
FUNCTION_NAME = re.compile(r"`([a-z_]+(?:\.\w+)+)`")
STAGES = {module.name for module in pkgutil.iter_modules(run_package.__path__)}
PARTS_OF_STAGES = {"checks", "summary"}
# They load the arrays of a model, and read the records of a run that has ended.
WITHOUT_A_RUN = {"params", "run_record"}


def named_objects() -> list[str]:
    """Return the names on the page, with the package of a stage such as `start`."""
    names: list[str] = []
    for name in FUNCTION_NAME.findall(PAGE.read_text()):
        root = name.partition(".")[0]
        if root in STAGES:
            names.append(f"{run_package.__name__}.{name}")
        elif root in ("prepcli", "trainer") and name != run_package.__name__:
            names.append(name)
    return list(dict.fromkeys(names))


@pytest.mark.parametrize("name", named_objects())
def test_page_names_existing_functions(name: str):
    module, _, attribute = name.rpartition(".")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_page_names_every_stage():
    stages = {name.split(".")[2] for name in named_objects() if name.startswith("trainer.run.")}
    assert stages >= STAGES - PARTS_OF_STAGES - WITHOUT_A_RUN


def test_page_has_the_order_of_the_functions_in_the_source():
    source = Path(str(run_package.__path__[0]), "train.py").read_text()
    defined = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    prefix = f"{run_package.__name__}.train."
    named = [name.removeprefix(prefix) for name in named_objects() if name.startswith(prefix)]
    assert named == [name for name in defined if name in named]


@pytest.mark.slow
def test_resume_in_another_environment_is_a_warning(
    work_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The flags are changed only in the environment: XLA has read them before the first run."""
    capsys.readouterr()
    for _ in range(2):
        assert train_json(capsys, "--stop-after", "1")[1]["warnings"] == []
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=1")
    _, report = train_json(capsys, "--stop-after", "1")
    (warning,) = report["warnings"]
    assert warning.startswith("results may differ in the last bits: since step 2, XLA_FLAGS ")
    assert warning.endswith(" -> --xla_backend_optimization_level=1")
