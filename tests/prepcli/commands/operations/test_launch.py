"""`prep launch`: scripts on stdout, in a file and at the scheduler, errors before a job waits, and local processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE
from prepcli.formats.manifest import saved_steps
from tests.helpers.processes import COMPILATION
from tests.helpers.run_cli import run_failing
from tests.helpers.training_folder import RECIPE, make_training_folder

TARGETS = [
    ["slurm"],
    ["tpu", "--accelerator", "v5p-16", "--zone", "us-east5-a"],
    ["gke", "--image", "image", "--devices-per-node", "8", "--claim", "runs"],
]


@pytest.fixture(autouse=True)
def _recipe_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(RECIPE)


def install_submitters(monkeypatch: pytest.MonkeyPatch, *, code: int) -> None:
    """Put programs into PATH. They copy their stdin to stdin.txt, print `17` and exit with `code`."""
    Path("bin").mkdir()
    for name in ("sbatch", "bash", "kubectl"):
        (Path("bin") / name).write_text(f"#!/bin/sh\ncat > stdin.txt\necho 17\nexit {code}\n")
        (Path("bin") / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').resolve()}:/usr/bin:/bin")


@pytest.mark.parametrize("words", TARGETS, ids=lambda words: words[0])
def test_script_is_printed_written_or_submitted(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["launch", words[0], "recipe.toml", *words[1:], "--env", "A=b c"]
    assert main([*command, "--", "--set", "train.steps=3"]) == OK
    script = capsys.readouterr().out
    assert "export A=" in script
    assert "--set train.steps=3" in script
    assert main([*command, "--out", "job", "--", "--set", "train.steps=3"]) == OK
    assert (capsys.readouterr().out, Path("job").read_text()) == ("job\n", script)
    install_submitters(monkeypatch, code=0)
    assert main([*command, "--submit", "--json", "--", "--set", "train.steps=3"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["target"], report["script"]) == (True, words[0], script)
    assert Path("stdin.txt").read_text() == script


@pytest.mark.parametrize(
    "name",
    [
        "caf\u00e9.toml",
        "a\u200bb\u202e.toml",
        "bell\x07/recipe.toml",
        "not utf-8 \udcff/recipe.toml",
    ],
)
@pytest.mark.parametrize("words", [[], ["--out", "job.sh"], ["--submit"]])
def test_script_names_the_exact_bytes_of_a_recipe(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
):
    """On stdout they were escaped as in a message: the script then named another file."""
    Path(name).parent.mkdir(exist_ok=True)
    Path("recipe.toml").rename(name)
    install_submitters(monkeypatch, code=0)
    with open("stdout", "w", encoding="utf-8", errors="backslashreplace") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        assert main(["launch", "slurm", name, *words]) == OK
    script = Path(
        {"--out": "job.sh", "--submit": "stdin.txt"}.get("".join(words[:1]), "stdout")
    ).read_bytes()
    command = next(line for line in script.split(b"\n") if line.startswith(b"srun"))
    assert os.fsencode(name) in command.replace(b"'", b"").replace(b"\\", b"")


def test_submitted_job_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    install_submitters(monkeypatch, code=0)
    assert main(["launch", "slurm", "recipe.toml", "--submit"]) == OK
    assert capsys.readouterr().out == "17\n"


def test_failed_submission_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    install_submitters(monkeypatch, code=3)
    error = run_failing(capsys, FAILED, "launch", "slurm", "recipe.toml", "--submit")
    assert "the job was not submitted" in error
    assert "`sbatch --parsable` exited with 3" in error


def test_failed_job_of_a_tpu_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The script waits for the job, so its failure is no failed submission."""
    install_submitters(monkeypatch, code=3)
    words = ["recipe.toml", "--accelerator", "v5p-16", "--zone", "us-east5-a", "--submit"]
    error = run_failing(capsys, FAILED, "launch", "tpu", *words)
    assert "the job failed" in error
    assert "`bash -s` exited with 3" in error


def test_missing_scheduler_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(Path().resolve()))
    assert "`sbatch` is not installed" in run_failing(
        capsys, FAILED, "launch", "slurm", "recipe.toml", "--submit"
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["missing.toml"], "missing.toml"),
        (["recipe.toml", "--", "--set", "train.stepz=3"], "train.stepz"),
        (
            ["recipe.toml", "--nodes", "2", "--devices-per-node", "8"],
            "mesh 1,2,4 needs 8 devices, there are 16",
        ),
        (["recipe.toml", "--env", "A"], "`--env A` has no value"),
        (["recipe.toml", "--setup", "a\nb"], "`--setup` has more than one line"),
        (["recipe.toml", "--out", "recipe.toml"], "`recipe.toml` already exists"),
    ],
)
def test_invalid_requests_are_errors_before_a_job_waits(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
):
    assert what in run_failing(capsys, USAGE, "launch", "slurm", *words)
    assert Path("recipe.toml").read_text() == RECIPE


V5P = ["--accelerator", "tpu-v5p-slice"]
IMAGE = ["--image", "image"]
CLAIM = ["--claim", "runs"]
TWO_SLICES = ["--", "--set", "cluster.dcn_mesh=fsdp:2"]
IMPOSSIBLE = [  # words of `prep launch` for a mesh of 8 devices; error, hint
    (["tpu", "--accelerator", "v5p-8"], "needs 8 devices, there are 4", "`--accelerator v5p-16`"),
    (
        ["tpu", "--accelerator", "v5p-100"],
        "`--accelerator v5p-100` is invalid",
        "`--accelerator v5p-128`",
    ),
    (
        ["tpu", "--accelerator", "v5p-7"],
        "`--accelerator v5p-7` is invalid",
        "`--accelerator v5p-8`",
    ),
    (["tpu", "--accelerator", "v5p-"], "`--accelerator v5p-` is invalid", "`--accelerator v5p-8`"),
    (["tpu", "--accelerator", "tpu7x-8"], "no TPU VMs", "`prep launch gke --accelerator tpu7x`"),
    (["tpu", "--accelerator", "v6e-8", *TWO_SLICES], "has 2 slices", "`prep launch gke`"),
    (["gke", *IMAGE, *CLAIM], "`--devices-per-node` is missing", "`--devices-per-node 8`"),
    (["gke", *IMAGE, "--devices-per-node", "8"], "`--claim` is missing", "`--claim NAME`"),
    (["gke", *IMAGE, *CLAIM, *V5P], "`--topology` is missing", "`--topology 2x2x2`"),
    (
        ["gke", *IMAGE, *CLAIM, *V5P, "--topology", "2x2x2"],
        "`--devices-per-node` is missing",
        "`--devices-per-node 4`",
    ),
    (
        ["gke", *IMAGE, *CLAIM, *V5P, "--topology", "8x1x1"],
        "`--topology 8x1x1` is invalid",
        "2x2x2",
    ),
    (
        ["gke", *IMAGE, *CLAIM, *V5P, "--topology", "2x2x2", "--devices-per-node", "8"],
        "`--devices-per-node 8` is invalid",
        "`--devices-per-node 4`",
    ),
    (
        ["gke", *IMAGE, *CLAIM, *V5P, "--topology", "2x2x2", "--devices-per-node", "4"],
        "`--nodes 1` is invalid",
        "`--nodes 2`",
    ),
    (
        [
            "gke",
            *IMAGE,
            *CLAIM,
            *V5P,
            "--topology",
            "2x2x4",
            "--devices-per-node",
            "4",
            "--nodes",
            "4",
        ],
        "needs 8 devices, there are 16",
        "`--topology 2x2x2` and `--nodes 2`",
    ),
    (
        [
            "gke",
            *IMAGE,
            *CLAIM,
            *V5P,
            "--topology",
            "2x2x1",
            "--devices-per-node",
            "4",
            "--",
            *["--set", "cluster.dcn_mesh=fsdp:2"],
        ],
        "`--nodes 1` is invalid",
        "`--nodes 2`",
    ),
    (
        ["gke", *IMAGE, *CLAIM, "--devices-per-node", "8", "--topology", "4x4"],
        "for TPUs only",
        "remove `--topology`",
    ),
    (
        ["gke", *IMAGE, *CLAIM, "--accelerator", "tpu-v5p"],
        "unknown TPU label `tpu-v5p`",
        "tpu-v5p-slice",
    ),
    (
        ["slurm", "--nodes", "3", "--", "--set", "cluster.dcn_mesh=fsdp:2"],
        "`cluster.dcn_mesh` has 2 slices",
        "`--nodes 4`",
    ),
    (
        ["slurm", "--nodes", "4", "--", "--set", "cluster.n_processes=2"],
        "`cluster.n_processes` is 2",
        "n_processes=4",
    ),
    (["slurm", "--", "--out", "ftp://bucket/run"], "ftp://bucket/run", ""),
]
POSSIBLE = [
    ["slurm", "--nodes", "4096", "--", "--out", "gs://bucket/run"],
    ["tpu", "--accelerator", "v5p-16"],
    ["tpu", "--accelerator", "v2-8"],
    ["tpu", "--accelerator", "v5litepod-8"],
    ["gke", *IMAGE, "--devices-per-node", "8", "--", "--out", "gs://bucket/run"],
    ["gke", *IMAGE, *CLAIM, "--devices-per-node", "4", "--nodes", "2"],
    ["gke", *IMAGE, *CLAIM, *V5P, "--topology", "2x2x2", "--devices-per-node", "4", "--nodes", "2"],
    [
        "gke",
        *IMAGE,
        *CLAIM,
        "--accelerator",
        "tpu7x",
        "--topology",
        "2x2x1",
        "--devices-per-node",
        "4",
    ],
    [
        "gke",
        *IMAGE,
        *CLAIM,
        "--accelerator",
        "tpu-v6e-slice",
        "--topology",
        "2x4",
        "--devices-per-node",
        "8",
    ],
    [
        "slurm",
        "--nodes",
        "2",
        "--devices-per-node",
        "8",
        "--",
        "--set",
        "cluster.n_local_devices=4",
    ],
    ["slurm", "--nodes", "200", "--", "--out", "s3://bucket/run"],
]


def launch_words(words: list[str]) -> list[str]:
    """Return words of `prep launch` with the recipe and, for TPU VMs, a zone."""
    target, *options = words
    zone = ["--zone", "us-east5-a"] if target == "tpu" else []
    return ["launch", target, "recipe.toml", *zone, *options]


@pytest.mark.parametrize(
    ("words", "what", "hint"), IMPOSSIBLE, ids=[" ".join(words) for words, *_ in IMPOSSIBLE]
)
def test_jobs_that_cannot_run_are_refused(
    words: list[str], what: str, hint: str, capsys: pytest.CaptureFixture[str]
):
    error = " ".join(run_failing(capsys, USAGE, *launch_words(words)).split())
    assert what in error
    assert hint in error


@pytest.mark.parametrize("words", POSSIBLE, ids=" ".join)
def test_jobs_that_can_run_are_described(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(launch_words(words)) == OK
    assert "prep train" in capsys.readouterr().out


def test_overrides_may_change_the_mesh(capsys: pytest.CaptureFixture[str]):
    command = ["launch", "slurm", "recipe.toml", "--nodes", "2", "--devices-per-node", "8"]
    assert main([*command, "--", "--set", "mesh=2,2,4"]) == OK
    assert "#SBATCH --job-name=recipe" in capsys.readouterr().out


def test_local_processes_report_their_error(capsys: pytest.CaptureFixture[str]):
    command = ["launch", "local", "recipe.toml", "--processes", "1", "--devices", "8"]
    error = run_failing(capsys, FAILED, *command, "--env", "HF_HUB_OFFLINE=1")
    assert "[0] error: " in error
    assert "no data in `text.txt`" in error
    assert "process 0 exited with" in error


# The only job of the default suite with new interpreters: the others are forked from a server that has imported JAX.
def test_local_processes_train(capsys: pytest.CaptureFixture[str]):
    make_training_folder()
    capsys.readouterr()
    job = ["--processes", "2", "--devices", "4"]
    for name in COMPILATION:
        if name in os.environ:
            job += ["--env", f"{name}={os.environ[name]}"]
    words = ["--out", "run", "--set", "train.steps=1", "--set", "data.holdout=0"]
    assert main(["launch", "local", "recipe.toml", *job, "--", *words]) == OK
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "run/1"
    assert "[0] step 1/1" in err
    assert saved_steps(Path("run")) == [1]


@pytest.mark.slow
def test_local_run_names_a_killed_process():
    make_training_folder()
    values = ["train.steps=100000", "train.log_every=1", "cluster.heartbeat_timeout=10"]
    sets = [word for value in values for word in ("--set", value)]
    words = [
        "launch",
        "local",
        "recipe.toml",
        "--processes",
        "2",
        "--devices",
        "4",
        "--",
        "--out",
        "run",
        *sets,
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "prepcli", *words], stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stderr is not None
        lines = list[str]()
        while not any(line.startswith("[0] step ") for line in lines):
            lines.append(job.stderr.readline())
            assert lines[-1], lines
        os.kill(child_process(job.pid, index=1), signal.SIGKILL)
        text = "".join(lines) + job.stderr.read()
        assert job.wait() == STOPPED
    assert "error: process 1 was killed by SIGKILL" in text
    assert "[0] error: process 1" in text
    assert "lines that begin" not in text


def child_process(parent: int, *, index: int) -> int:
    """Return the child of a process with this index in its job."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if f"JAX_PROCESS_ID={index}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"process {parent} has no child with index {index}")
