"""`prep train` and `prep generate` in several processes: the batches, losses, steps and tokens of one process."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED
from prepcli.formats.manifest import saved_steps
from prepcli.restore.item_reader import open_reader
from tests.helpers.fork_server import ForkedProcess
from tests.helpers.processes import finish, start_processes
from tests.helpers.recorded_train import VARIABLE, batch_digests, read_records, record_batch
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import read_tensors
from tests.helpers.train_runs import read_losses, set_keys
from tests.helpers.training_states import read_leaves
from tests.helpers.waiting import wait_until
from trainer.run.run_record import SAMPLES_FILE
from trainer.training import loop
from trainer.training.metrics import METRICS_FILE, read_metrics

# `prep train` and `prep generate` in several processes: the same batches, losses and tokens as in one process.

ROOT = Path(__file__).resolve().parents[3]

SHORT = set_keys("train.steps=4", "checkpoint.every=2", "optimizer.warmup_steps=1")

RELATIVE = 1e-5  # rounding of losses: other orders of the sums over devices

GLOO_LINE = re.compile(r"^\[Gloo\]|peer ranks")


def run(
    *words: str, count: int, devices: int, record: str = "record", **options: Any
) -> list[tuple[int, str, str]]:
    """Run `prep`, record its batches, and return the exit code, stdout without lines of gloo, and stderr of each."""
    env = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", VARIABLE: record}
    started = start_processes(
        *words,
        count=count,
        devices=devices,
        env=env,
        module="tests.helpers.recorded_train",
        **options,
    )
    return [
        (code, _without_gloo(out), _without_gloo(err)) for code, out, err in finish(started, 600)
    ]


def _without_gloo(text: str) -> str:
    """Remove the lines that threads of gloo print, which run into each other."""
    return "".join(
        line
        for line in text.splitlines(keepends=True)
        if line.strip() and not GLOO_LINE.search(line)
    )


def train(folder: str, *words: str, count: int, devices: int) -> None:
    """Train the recipe in `folder` with a record of the same name. Raise AssertionError if a process fails."""
    command, record = ("train", "recipe.toml", "--out", folder, *SHORT, *words), f"{folder}-record"
    results = run(*command, count=count, devices=devices, record=record)
    assert [code for code, *_ in results] == [OK] * count, results


def train_here(folder: str, *words: str) -> None:
    """Train as `train` does, in the process of the tests, which has 8 devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, f"{folder}-record")
        patch.setattr(loop, "load_batch", record_batch)
        run_ok("train", "recipe.toml", "--out", folder, *SHORT, *words)


def read_params(folder: str, step: int) -> dict[str, np.ndarray]:
    """Return the parameters and moments of a saved step."""
    with open_reader(Path(folder) / str(step) / "state") as reader:
        return read_leaves(reader)


def evaluations(folder: str) -> list[float]:
    """Return the losses of a run's evaluations."""
    return [
        line["eval_loss"]
        for line in read_metrics(Path(folder) / METRICS_FILE)
        if "eval_loss" in line
    ]


def assert_equal_runs(folder: str, expected: str) -> None:
    """Assert that two runs had the same batches, and the same losses, evaluation and last step within rounding."""
    assert batch_digests(Path(f"{folder}-record")) == batch_digests(Path(f"{expected}-record"))
    assert read_losses(folder) == pytest.approx(read_losses(expected), rel=RELATIVE)
    assert evaluations(folder) == pytest.approx(evaluations(expected), rel=RELATIVE)
    leaves, expected_leaves = read_params(folder, 4), read_params(expected, 4)
    assert leaves.keys() == expected_leaves.keys()
    for name, leaf in leaves.items():
        if not name.startswith("opt_state"):
            np.testing.assert_allclose(
                leaf, expected_leaves[name], rtol=1e-3, atol=1e-5, err_msg=name
            )


def test_two_processes_train_like_one(work_dir: Path):
    """Process 0 alone prints and writes. Each process reads the rows of its devices only.

    With exact reduction the results have equal bits.
    """
    words = (
        *set_keys("mesh=2,4,1", "train.reduction=exact"),
        *set_keys("log.samples=w1 w2", "log.sample_tokens=4"),
    )
    results = run(
        "train", "recipe.toml", "--json", *SHORT, *words, count=2, devices=4, record="two"
    )
    (code, out, err), other = results
    assert (code, other) == (OK, (OK, "", "")), results
    assert json.loads(out)["step"] == 4
    assert "step 4/4" in err
    folder = Path("runs/recipe")
    assert saved_steps(folder) == [2, 4]
    files = [".lock", "environment.json", METRICS_FILE, "recipe.toml", SAMPLES_FILE]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == files
    data_files = [path.name for path in (folder / "data").iterdir() if path.is_file()]
    assert data_files
    assert all(name.startswith("opened") for name in data_files)
    # In a process of its own: exact reduction needs one that has not computed yet.
    train("one", *words, count=1, devices=8)
    Path("runs/recipe").rename("two")
    for index in range(2):
        Path(f"two.{index}.jsonl").rename(f"two-record.{index}.jsonl")
    assert_equal_runs("two", "one")
    assert read_losses("two") == read_losses("one")
    leaves, expected = read_params("two", 4), read_params("one", 4)
    assert all(np.array_equal(leaf, expected[name]) for name, leaf in leaves.items())
    assert Path("two", SAMPLES_FILE).read_text() == Path("one", SAMPLES_FILE).read_text()
    for first, second in zip(*read_records(Path("two-record"))):
        assert (sorted(first["read"]), sorted(second["read"])) == (
            sorted(first["rows"][:4]),
            sorted(first["rows"][4:]),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "words"),
    [
        (2, 4, ["--set", "mesh=1,1,8"]),  # mp across processes
        (4, 2, ["--set", "mesh=1,2,4"]),  # a replica of each shard in two processes
        (4, 2, ["--set", "mesh=8,1,1"]),  # two replicas in each process
        (2, 4, set_keys("mesh=fsdp:2,sp:4", "data.seq_length=32")),
        (4, 2, set_keys("mesh=fsdp:1,sp:8", "data.seq_length=32")),  # sp across processes
        (
            2,
            4,
            set_keys("mesh=2,2,2", "model.dropout=0.1", "batch.accumulate=2"),
        ),
    ],
)
def test_several_processes_train_like_one(
    work_dir: Path, count: int, devices: int, words: Sequence[str]
):
    train("many", *words, count=count, devices=devices)
    train_here("one", *words)
    assert_equal_runs("many", "one")


@pytest.mark.slow
def test_run_resumes_with_other_numbers_of_processes(work_dir: Path):
    """2 -> 1 -> 4 -> 2 processes, with 8, 4, 8 and 4 devices, take the batches of one process with 8 devices."""
    words = (
        "train",
        "recipe.toml",
        "--out",
        "many",
        *set_keys("mesh=dp:1,fsdp:-1", "train.steps=8"),
    )
    shapes = [(2, 4), (1, 4), (4, 2), (2, 2)]
    for phase, (count, devices) in enumerate(shapes):
        results = run(
            *words, "--stop-after", "2", count=count, devices=devices, record=f"phase{phase}"
        )
        expected_code = OK if phase == len(shapes) - 1 else STOPPED
        assert [code for code, *_ in results] == [expected_code] * count, results
        assert [err for _, _, err in results[1:]] == [""] * (count - 1), (
            "process 0 reports the stop"
        )
    assert run(*words, "--out", "one", count=1, devices=8, record="one-record")[0][0] == OK
    digests = [
        digest for phase in range(len(shapes)) for digest in batch_digests(Path(f"phase{phase}"))
    ]
    assert digests == batch_digests(Path("one-record"))
    assert len(set(digests)) == 8
    assert read_losses("many") == pytest.approx(read_losses("one"), rel=RELATIVE)
    assert evaluations("many") == pytest.approx(evaluations("one"), rel=RELATIVE)


def test_generate_without_a_mesh_runs_alone(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for variable, value in (
        ("NUM_PROCESSES", "2"),
        ("PROCESS_ID", "1"),
        ("COORDINATOR_ADDRESS", "127.0.0.1:1"),
    ):
        monkeypatch.setenv(f"JAX_{variable}", value)
    capsys.readouterr()
    assert main(["generate", "tiny", "--prompt", "w1", "--max-new-tokens", "2", "--json"]) == OK
    assert len(json.loads(capsys.readouterr().out)["tokens"][0]) == 2


# `train.reduction = "exact"` with `prep train` in real processes.

TIMINGS = ("seconds", "tokens_per_s")

EXACT = ("train.reduction=exact", "train.steps=3", "checkpoint.every=0", "data.holdout=0.1")


def train_exactly(
    name: str, mesh: str, *, count: int, devices: int
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Train in some processes, and return log lines without timings, and the bytes of the exported tensors."""
    overrides = set_keys(*EXACT, f"mesh={mesh}")
    words = ("train", "recipe.toml", "--out", name, *overrides)
    results = finish(start_processes(*words, count=count, devices=devices))
    assert [code for code, _, _ in results] == [OK] * count, results
    run_ok("export", name, "--out", f"{name}-tensors")
    lines = read_metrics(Path(name) / METRICS_FILE)
    tensors = {
        path: tensor.tobytes() for path, tensor in read_tensors(Path(f"{name}-tensors")).items()
    }
    return [{key: line[key] for key in line if key not in TIMINGS} for line in lines], tensors


# By default test_two_processes_train_like_one compares an exact run of two processes with one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "mesh", "one_process_mesh"),
    [(2, 1, "2,1,1", "1,1,1"), (2, 4, "2,4,1", "1,8,1"), (4, 2, "1,8,1", "8,1,1")],
)
def test_exact_runs_in_processes_end_in_equal_bytes(
    work_dir: Path, *, count: int, devices: int, mesh: str, one_process_mesh: str
):
    num_devices = 1 if one_process_mesh == "1,1,1" else count * devices
    expected = train_exactly("one", one_process_mesh, count=1, devices=num_devices)
    assert train_exactly("several", mesh, count=count, devices=devices) == expected


# Checkpoints of training in several processes: complete or absent, and readable by every number of processes.

SETTINGS = ("mesh=1,2,2", "checkpoint.every=1", "checkpoint.keep='all'", "data.holdout=0")


def start(run: str, count: int, *words: str, steps: int) -> list[ForkedProcess]:
    """Start a training in `count` processes with four devices together."""
    settings = set_keys(*SETTINGS, f"train.steps={steps}")
    command = ("train", "recipe.toml", "--out", run, *settings, *words)
    return start_processes(*command, count=count, devices=4 // count, env={"PYTHONPATH": str(ROOT)})


def check_codes(results: list[tuple[int, str, str]], code: int = OK) -> None:
    assert [result[0] for result in results] == [code] * len(results), results


def kill_during_a_save(processes: list[ForkedProcess], rng: random.Random) -> None:
    """Kill one process while a step is staged, and the other a moment later."""
    wait_until(lambda: list(Path("run").glob("[0-9]*.partial")), processes[0])
    time.sleep(rng.uniform(0.0, 0.1))
    first, other = rng.sample(processes, 2)
    first.kill()
    time.sleep(2.0)
    other.kill()
    finish(processes)


@pytest.mark.slow
def test_killed_process_leaves_complete_steps(work_dir: Path):
    """Each next start continues from a complete step, and the losses are those of a run without kills."""
    rng = random.Random(3)
    last_step = 0
    for _ in range(4):
        kill_during_a_save(start("run", 2, steps=60), rng)
        steps = saved_steps(Path("run"))
        assert max(steps, default=0) >= last_step
        last_step = max(steps, default=0)
        for step in steps:
            run_ok("verify", f"run/{step}")
    check_codes(finish(start("run", 2, steps=60)))
    assert saved_steps(Path("run"))[-1] == 60
    assert not [path for path in Path("run").iterdir() if path.name.endswith(".partial")]
    check_codes(finish(start("whole", 2, steps=60)))
    killed, whole = (
        {line["step"]: line["loss"] for line in read_metrics(Path(run) / METRICS_FILE)}
        for run in ("run", "whole")
    )
    assert killed == whole


@pytest.mark.slow
def test_all_workers_log_to_files_of_their_own(work_dir: Path):
    words = ("train", "recipe.toml", "--json", *SHORT, "--set", "log.all_workers=true")
    (code, out, err), (other_code, other_out, other_err) = run(*words, count=2, devices=4)
    assert (code, other_code, other_out) == (OK, OK, "")
    assert json.loads(out)["step"] == 4
    assert "process 0: step 4/4" in err
    assert "process 1: step 4/4" in other_err
    assert "tokenize" not in other_err
    lines = [read_metrics(Path("runs/recipe") / name) for name in (METRICS_FILE, "metrics.1.jsonl")]
    losses = [[line["loss"] for line in process_lines if "loss" in line] for process_lines in lines]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert run(*words, "--restart", count=1, devices=8)[0][0] == OK
    assert not Path("runs/recipe/metrics.1.jsonl").exists(), "its steps are taken again"


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices", "mesh"), [(2, 4, "2,2,2"), (4, 2, "1,2,4")])
def test_several_processes_generate_like_one(work_dir: Path, count: int, devices: int, mesh: str):
    Path("prompts.txt").write_text("w3 w1 w4\nw5\n")
    words = ("generate", "tiny", "--mesh", mesh, "--max-new-tokens", "20", "--json")
    (code, out, err), *others = run(
        *words, "--prompts", "-", count=count, devices=devices, stdin=Path("prompts.txt")
    )
    assert code == OK, err
    assert others == [(OK, "", "")] * (count - 1)
    (_, expected, _), *_ = run(*words, "--prompts", "prompts.txt", count=1, devices=8)
    assert json.loads(out)["tokens"] == json.loads(expected)["tokens"]


@pytest.mark.slow
def test_dry_run_of_processes_writes_nothing(work_dir: Path):
    (code, out, _), other = run("train", "recipe.toml", "--json", "--dry-run", count=2, devices=4)
    assert (code, other) == (OK, (OK, "", ""))
    assert json.loads(out)["dry_run"]
    assert not Path("runs").exists()


# test_processes shows that a failed process ends all, and test_train_buckets that a failed save keeps earlier steps.
@pytest.mark.slow
def test_failed_save_ends_all_processes(work_dir: Path):
    """The save in the background fails in process 0: something else has the name of the step."""
    Path("run").mkdir()
    for name in (".lock", "2"):
        Path("run", name).touch()
    results = finish(start("run", 2, steps=200))
    assert [code for code, _, _ in results] == [FAILED] * 2, results
    assert all("run/2 exists" in stderr for _, _, stderr in results), results
    assert saved_steps(Path("run")) == [1]
