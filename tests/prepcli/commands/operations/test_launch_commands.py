"""`prep launch ENGINE -- COMMAND`: the parser of `prep` checks the command before a script is written."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.cli.root import COMMANDS
from prepcli.commands.operations.launch import submit_line, submit_script
from prepcli.core.errors import FAILED, OK, USAGE
from tests.helpers.run_cli import run_failing
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import RECIPE

SAVE_INIT = ["save-init", "./model", "--mesh", "1,2,1"]
TPU = ["--accelerator", "v5p-16", "--zone", "us-east5-a"]
GKE = ["--image", "image", "--claim", "models"]
# Engine and options; the command that its script runs
CONVERSIONS = [
    (["slurm", "--array", "4"], 'prep save-init --processes 4/"$SLURM_ARRAY_TASK_ID" ./model'),
    (["slurm", "--nodes", "4"], "srun --label --kill-on-bad-exit=0 --wait=300 prep save-init"),
    (["tpu", *TPU], "prep save-init ./model --mesh 1,2,1"),
    (["gke", *GKE, "--nodes", "4"], "exec prep save-init ./model --mesh 1,2,1"),
    (["ray", "--workers", "4", "--folder", "/shared"], "name='save-init',"),
]
REFUSED = [  # words after `prep launch slurm`; error, hint
    (["--", "save-init", "./model", "--messh", "1,2,1"], "no option `--messh`", "--mesh"),
    (["--", "save-init", "./model", "--workers", "none"], "--workers", "prep save-init --help"),
    (["--", "save-init", ""], "CHECKPOINT is empty", ""),
    (["--", "save-int", "./model"], "unknown command `save-int`", "save-init"),
    (["--", "launch", "slurm", "recipe.toml"], "unknown command `launch`", ""),
    (["--"], "no command was given", "`prep launch slurm -- COMMAND ARGS`"),
    (["save-init", "my model"], "`save-init` is a command", "slurm -- save-init 'my model'`"),
    ([], "no command was given", "`prep launch slurm -- COMMAND ARGS`"),
    (["--", "train"], "no recipe was given", "`prep train RECIPE`"),
    (["--", "train", "--force", "recipe.toml"], "the recipe must follow", "train recipe.toml"),
    (["recipe.toml", "--", "--stepz", "3"], "no option `--stepz`", ""),
    (["recipe.toml", "--", "--lr", "3"], "no option `--lr`", "--set optimizer.lr=3"),
    (["recipe.toml", "--nodes", "2", "--", "--lr", "3", "--wd", "1"], "and 1 other", "--set"),
    (["recipe.toml", "extra"], "extra", ""),
    (["recipe.toml", "--set", "seed=1"], "no option `--set`", "`-- --set`"),
    (["recipe.toml", "--devices-per-node", "4"], "there are 4", "`-- --set mesh=1,4,1`"),
    (["--devices-per-node", "4", "--", "eval", "m", "--mesh", "1,2,4"], "4", "`--mesh 1,4,1`"),
    (["--", *SAVE_INIT, "--processes", "4/0"], "`--processes` cannot be given", "remove"),
    (["--nodes", "2", "--", "inspect", "m"], "`prep inspect` runs in one process", "--nodes 1"),
    (["--array", "2", "--", "eval", "m", "--data", "d"], "`--array 2` is for conv", "--nodes 2"),
    (["--array", "2", "recipe.toml"], "`--array 2` is for conversions", "`--nodes 2` instead"),
    (["--array", "2", "--nodes", "3", "--", *SAVE_INIT], "`--array 2` excludes `--nodes 3`", ""),
    (["--nodes", "2", "--devices-per-node", "8", "--", "eval", "m", "--mesh", "1,2,4"], "16", ""),
]


@pytest.fixture(autouse=True)
def _recipe_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(RECIPE)


@pytest.mark.parametrize(("words", "command"), CONVERSIONS, ids=lambda value: value[0])
def test_every_engine_runs_a_conversion(
    words: list[str], command: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["launch", *words, "--", *SAVE_INIT]) == OK
    assert command in capsys.readouterr().out


@pytest.mark.parametrize(("words", "what", "hint"), REFUSED, ids=lambda value: str(value))
def test_invalid_commands_are_usage_errors(
    words: list[str], what: str, hint: str, capsys: pytest.CaptureFixture[str]
):
    code = main(["launch", "slurm", *words])
    out, err = capsys.readouterr()
    error = " ".join(err.split())
    assert (code, out) == (USAGE, "")
    assert what in error
    assert hint in error


def test_long_form_of_a_training_equals_the_short_form(capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "slurm", "recipe.toml", "--", "--set", "seed=1"]) == OK
    short = capsys.readouterr().out
    assert main(["launch", "slurm", "--", "train", "recipe.toml", "--set", "seed=1"]) == OK
    assert capsys.readouterr().out == short


def test_recipe_may_have_the_name_of_a_command(capsys: pytest.CaptureFixture[str]):
    Path("recipe.toml").rename("train")
    assert main(["launch", "slurm", "train"]) == OK
    assert "prep train train" in capsys.readouterr().out


@pytest.mark.parametrize("name", [each.name for each in COMMANDS if not each.group])
def test_parser_knows_every_command(name: str, capsys: pytest.CaptureFixture[str]):
    """A new command can be launched without a change of `prep launch`."""
    assert main(["launch", "slurm", "--", name, "--help"]) == OK
    assert f"Usage: prep {name} " in capsys.readouterr().out


def test_relative_folder_of_ray_is_refused(capsys: pytest.CaptureFixture[str]):
    error = run_failing(capsys, USAGE, "launch", "ray", "--folder", "runs", "--", *SAVE_INIT)
    assert "`--folder runs` is a relative path" in error
    assert f"`--folder {Path('runs').absolute()}`" in error.replace("\n", "").replace("       ", "")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["gke", "--image", "image"], "`--claim NAME`"),
        (["ray"], "`--folder FOLDER`"),
        (["sky"], "--out gs://BUCKET/NAME"),
    ],
)
def test_outputs_on_lost_disks_are_refused(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
):
    error = run_failing(capsys, USAGE, "launch", *words, "--", *SAVE_INIT)
    assert "the output is lost" in error
    assert hint in " ".join(error.split())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["sky"], "`prep launch slurm`"),
        (["gke", "--image", "image"], "`--claim NAME`, or `prep launch slurm`"),
    ],
)
def test_tokens_need_a_folder(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]):
    error = run_failing(capsys, USAGE, "launch", *words, "--", "tokenize", "recipe.toml")
    assert hint in " ".join(error.split())


SKY_OUT = ["--out", "gs://models/a"]
# Options of `prep launch sky`, its command, and the error
SKY_REFUSED = [
    ("--accelerator H100", "recipe.toml", "there are 1"),
    ("--accelerator H100:4", "recipe.toml", "there are 4"),
    ("--accelerator H100:8 --nodes 2", "recipe.toml", "`--accelerator H100:4`"),
    ("--accelerator tpu-v5p-32", "recipe.toml", "`--accelerator tpu-v5p-16`"),
    ("--accelerator tpu-v5p-6", "recipe.toml", "`--accelerator tpu-v5p-8`"),
    ("--accelerator tpu-v5p-8 --nodes 2", "recipe.toml", "`prep launch gke`"),
    ("--accelerator tpu-v5p-16 --nodes 2", "export gs://runs/a", "`--nodes 1`"),
    ("--accelerator tpu-v5p-16", "inspect gs://runs/a", "remove `--accelerator`"),
]


@pytest.mark.parametrize(("options", "command", "error"), SKY_REFUSED)
def test_sky_checks_the_job_against_its_machines(
    options: str, command: str, error: str, capsys: pytest.CaptureFixture[str]
):
    words = command.split()
    if words[0] == "recipe.toml":
        words = ["train", *words]
    if words[0] != "inspect":
        words += SKY_OUT
    printed = run_failing(capsys, USAGE, "launch", "sky", *options.split(), "--", *words)
    assert error in " ".join(printed.split())


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ("--accelerator tpu-v5p-16", "train recipe.toml"),
        ("--accelerator H100 --devices-per-node 4 --nodes 2", "train recipe.toml"),
        ("--accelerator tpu-v9-16 --nodes 2", "train recipe.toml"),
        ("--accelerator tpu-v5p-16", "export gs://runs/a"),
        ("--accelerator tpu-v5p-8 --nodes 2", "export gs://runs/a"),
    ],
)
def test_sky_starts_jobs_that_fit_their_machines(options: str, command: str):
    words = [*options.split(), "--", *command.split(), *SKY_OUT]
    assert main(["launch", "sky", *words]) == OK


def test_tokens_in_a_bucket_are_refused(capsys: pytest.CaptureFixture[str]):
    command = ["tokenize", "recipe.toml", "--out", "gs://bucket/tokens"]
    error = run_failing(capsys, USAGE, "launch", "slurm", "--", *command)
    assert "cannot write gs://bucket/tokens" in error


def test_local_processes_convert_together(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), LLAMA)
    assert main(["launch", "local", "--processes", "2", "--", *SAVE_INIT, "--out", "two"]) == OK
    out, err = capsys.readouterr()
    assert out.strip() == "two"
    assert "[1] process 1 of 2" in err
    assert main([*SAVE_INIT, "--out", "one", "--processes", "1/0"]) == OK
    capsys.readouterr()
    assert main(["verify", "two", "one", "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["ok"]


RECORDER = """#!/bin/bash
printf '%s\\0' "$@" > {name}.words
for word in "$@"; do
    case $word in *.yaml) cat "$word" > {name}.file ;; esac
done
echo submitted
"""


def install_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program into PATH. It records its words, and the content of a YAML file."""
    Path("bin").mkdir()
    program = Path("bin") / name
    program.write_text(RECORDER.format(name=name))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').resolve()}:/usr/bin:/bin")


def test_sky_reads_the_job_from_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["--", "export", "gs://runs/a", "--out", "gs://models/a"]
    assert main(["launch", "sky", *command]) == OK
    task = capsys.readouterr().out
    install_program("sky", monkeypatch)
    assert main(["launch", "sky", "--submit", *command]) == OK
    assert capsys.readouterr().out == "submitted\n"
    words = Path("sky.words").read_text().split("\0")
    assert words[:4] == ["jobs", "launch", "--yes", "--async"]
    assert Path("sky.file").read_text() == task
    # The file is removed when SkyPilot has read it.
    assert not Path(words[4]).exists()


# How Ray 2.60 and Ray 2.50 join the words of a job for a shell.
@pytest.mark.parametrize("join", [shlex.join, subprocess.list2cmdline])
@pytest.mark.parametrize("is_printed", [False, True])
def test_ray_runs_the_exact_driver(
    join: Callable[[list[str]], str],
    is_printed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    driver = """print('`echo a` $(echo b) $HOME "c" \\\\ é')\n"""
    install_program("ray", monkeypatch)
    if is_printed:
        Path("a b.py").write_text(driver)
        subprocess.run(["sh", "-c", submit_line("ray", Path("a b.py"))], check=True)
    else:
        submit_script("ray", driver)
    words = Path("ray.words").read_text().split("\0")[:-1]
    assert words[:3] == ["job", "submit", "--no-wait"]
    python, *arguments = words[words.index("--") + 1 :]
    assert python == "python"
    output = subprocess.check_output(["sh", "-c", join([sys.executable, *arguments])], text=True)
    assert output == """`echo a` $(echo b) $HOME "c" \\ é\n"""


def test_too_long_driver_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    install_program("ray", monkeypatch)
    with Path("recipe.toml").open("a") as recipe:
        recipe.write(f"# {'x' * 200_000}\n")
    words = ["launch", "ray", "recipe.toml", "--folder", "/shared", "--submit"]
    assert "Argument list too long" in run_failing(capsys, FAILED, *words)


@pytest.mark.parametrize("engine", ["sky", "ray"])
def test_missing_engine_is_an_error(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(Path().resolve()))
    words = ["launch", engine, "--submit", "--", "export", "m", "--out", "gs://models/a"]
    assert f"`{engine}` is not installed" in run_failing(capsys, FAILED, *words)


@pytest.mark.parametrize("engine", ["sky", "ray", "gke"])
def test_next_command_submits_the_written_file(engine: str, capsys: pytest.CaptureFixture[str]):
    options = ["--image", "image"] if engine == "gke" else []
    words = ["--", "export", "m", "--out", "gs://models/a"]
    assert main(["launch", engine, *options, "--out", "a b.job", *words]) == OK
    out, err = capsys.readouterr()
    assert out == "a b.job\n"
    assert "'a b.job'" in err
