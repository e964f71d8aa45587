"""`prep launch`: scripts, checks before a job waits, and local processes."""

from __future__ import annotations

import json
import os
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
from prepcli.formats.manifest import saved_steps
from prepcli.launch.engines import ENGINES
from tests.helpers.launched_jobs import REQUIRED_OPTIONS, STDIN_ENGINES
from tests.helpers.processes import COMPILATION
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.training_folder import RECIPE, make_training_folder


@pytest.fixture(autouse=True)
def _recipe_here():
    Path("recipe.toml").write_text(RECIPE)


def install_submitters(monkeypatch: MonkeyPatch, *, code: int) -> None:
    """Put programs into PATH. They copy their stdin to stdin.txt, print `17` and exit with `code`."""
    Path("bin").mkdir()
    for engine in STDIN_ENGINES:
        name = ENGINES[engine].submit[0]
        (Path("bin") / name).write_text(f"#!/bin/sh\ncat > stdin.txt\necho 17\nexit {code}\n")
        (Path("bin") / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').resolve()}:/usr/bin:/bin")


@pytest.mark.parametrize("engine", STDIN_ENGINES)
def test_script_is_printed_written_or_submitted(
    engine: str, monkeypatch: MonkeyPatch, capsys: Capture
):
    options = REQUIRED_OPTIONS.get(engine, ())
    command = ["launch", engine, "recipe.toml", *options, "--env", "A=b c"]
    assert main([*command, "--", "--set", "train.steps=3"]) == OK
    script = capsys.readouterr().out
    assert "export A=" in script
    assert "--set train.steps=3" in script
    assert main([*command, "--out", "job", "--", "--set", "train.steps=3"]) == OK
    assert (capsys.readouterr().out, Path("job").read_text()) == ("job\n", script)
    install_submitters(monkeypatch, code=0)
    assert main([*command, "--submit", "--json", "--", "--set", "train.steps=3"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["target"], report["script"]) == (True, engine, script)
    assert main([*command, "--submit", "--", "--set", "train.steps=3"]) == OK
    assert capsys.readouterr().out == "17\n"
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
    name: str, words: list[str], monkeypatch: MonkeyPatch
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


# The script of a TPU waits for the job, so its failure is no failed submission.
FAILURES = [
    ("slurm recipe.toml", "the job was not submitted", "`sbatch --parsable` exited with 3"),
    (
        "tpu recipe.toml --accelerator v5p-16 --zone us-east5-a",
        "the job failed",
        "`bash -s` exited with 3",
    ),
]


@pytest.mark.parametrize(("words", "what", "why"), FAILURES)
def test_failed_submission_is_an_error(
    words: str, what: str, why: str, monkeypatch: MonkeyPatch, capsys: Capture
):
    install_submitters(monkeypatch, code=3)
    error = run_failing(capsys, FAILED, "launch", *words.split(), "--submit")
    assert what in error
    assert why in error


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
    words: list[str], what: str, capsys: Capture
):
    assert what in run_failing(capsys, USAGE, "launch", "slurm", *words)
    assert Path("recipe.toml").read_text() == RECIPE


V5P = "--accelerator tpu-v5p-slice"
IMAGE = "--image image"
CLAIM = "--claim runs"
TWO_SLICES = "-- --set cluster.dcn_mesh=fsdp:2"
IMPOSSIBLE = [  # words of `prep launch` for a mesh of 8 devices; error, hint
    ("tpu --accelerator v5p-8", "needs 8 devices, there are 4", "`--accelerator v5p-16`"),
    ("tpu --accelerator v5p-100", "`--accelerator v5p-100` is invalid", "`--accelerator v5p-128`"),
    ("tpu --accelerator v5p-7", "`--accelerator v5p-7` is invalid", "`--accelerator v5p-8`"),
    ("tpu --accelerator v5p-", "`--accelerator v5p-` is invalid", "`--accelerator v5p-8`"),
    ("tpu --accelerator tpu7x-8", "no TPU VMs", "`prep launch gke --accelerator tpu7x`"),
    (f"tpu --accelerator v6e-8 {TWO_SLICES}", "has 2 slices", "`prep launch gke`"),
    (f"gke {IMAGE} {CLAIM}", "`--devices-per-node` is missing", "`--devices-per-node 8`"),
    (f"gke {IMAGE} --devices-per-node 8", "`--claim` is missing", "`--claim NAME`"),
    (f"gke {IMAGE} {CLAIM} {V5P}", "`--topology` is missing", "`--topology 2x2x2`"),
    (
        f"gke {IMAGE} {CLAIM} {V5P} --topology 2x2x2",
        "`--devices-per-node` is missing",
        "`--devices-per-node 4`",
    ),
    (f"gke {IMAGE} {CLAIM} {V5P} --topology 8x1x1", "`--topology 8x1x1` is invalid", "2x2x2"),
    (
        f"gke {IMAGE} {CLAIM} {V5P} --topology 2x2x2 --devices-per-node 8",
        "`--devices-per-node 8` is invalid",
        "`--devices-per-node 4`",
    ),
    (
        f"gke {IMAGE} {CLAIM} {V5P} --topology 2x2x2 --devices-per-node 4",
        "`--nodes 1` is invalid",
        "`--nodes 2`",
    ),
    (
        f"gke {IMAGE} {CLAIM} {V5P} --topology 2x2x4 --devices-per-node 4 --nodes 4",
        "needs 8 devices, there are 16",
        "`--topology 2x2x2` and `--nodes 2`",
    ),
    (
        f"gke {IMAGE} {CLAIM} {V5P} --topology 2x2x1 --devices-per-node 4 -- --set cluster.dcn_mesh=fsdp:2",
        "`--nodes 1` is invalid",
        "`--nodes 2`",
    ),
    (
        f"gke {IMAGE} {CLAIM} --devices-per-node 8 --topology 4x4",
        "for TPUs only",
        "remove `--topology`",
    ),
    (f"gke {IMAGE} {CLAIM} --accelerator tpu-v5p", "unknown TPU label `tpu-v5p`", "tpu-v5p-slice"),
    (
        "slurm --nodes 3 -- --set cluster.dcn_mesh=fsdp:2",
        "`cluster.dcn_mesh` has 2 slices",
        "`--nodes 4`",
    ),
    (
        "slurm --nodes 4 -- --set cluster.n_processes=2",
        "`cluster.n_processes` is 2",
        "n_processes=4",
    ),
    ("slurm -- --out ftp://bucket/run", "ftp://bucket/run", ""),
    ("pbs --nodes 2 --devices-per-node 8", "needs 8 devices, there are 16", ""),
]
POSSIBLE = [
    "slurm --nodes 4096 -- --out gs://bucket/run",
    "pbs --nodes 2 --devices-per-node 4 --time 1:00:00",
    "tpu --accelerator v5p-16",
    "tpu --accelerator v2-8",
    "tpu --accelerator v5litepod-8",
    f"gke {IMAGE} --devices-per-node 8 -- --out gs://bucket/run",
    f"gke {IMAGE} {CLAIM} --devices-per-node 4 --nodes 2",
    f"gke {IMAGE} {CLAIM} {V5P} --topology 2x2x2 --devices-per-node 4 --nodes 2",
    f"gke {IMAGE} {CLAIM} --accelerator tpu7x --topology 2x2x1 --devices-per-node 4",
    f"gke {IMAGE} {CLAIM} --accelerator tpu-v6e-slice --topology 2x4 --devices-per-node 8",
    "slurm --nodes 2 --devices-per-node 8 -- --set cluster.n_local_devices=4",
    "slurm --nodes 200 -- --out s3://bucket/run",
]


def launch_words(words: str) -> list[str]:
    """Return words of `prep launch` with the recipe and, for TPU VMs, a zone."""
    target, *options = words.split()
    zone = ["--zone", "us-east5-a"] if target == "tpu" else []
    return ["launch", target, "recipe.toml", *zone, *options]


@pytest.mark.parametrize(
    ("words", "what", "hint"), IMPOSSIBLE, ids=[words for words, *_ in IMPOSSIBLE]
)
def test_jobs_that_cannot_run_are_refused(words: str, what: str, hint: str, capsys: Capture):
    error = " ".join(run_failing(capsys, USAGE, *launch_words(words)).split())
    assert what in error
    assert hint in error


@pytest.mark.parametrize("words", POSSIBLE)
def test_jobs_that_can_run_are_described(words: str, capsys: Capture):
    assert main(launch_words(words)) == OK
    assert "prep train" in capsys.readouterr().out


def test_overrides_may_change_the_mesh(capsys: Capture):
    command = ["launch", "slurm", "recipe.toml", "--nodes", "2", "--devices-per-node", "8"]
    assert main([*command, "--", "--set", "mesh=2,2,4"]) == OK
    assert "#SBATCH --job-name=recipe" in capsys.readouterr().out


# The only job of the default suite with new interpreters: the others are forked from a server that has imported JAX.
@pytest.mark.slow
def test_local_processes_train(capsys: Capture):
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


# `prep launch ENGINE -- COMMAND`: the parser of `prep` checks the command before a script is written


SAVE_INIT = ["save-init", "./model", "--mesh", "1,2,1"]
TPU = ["--accelerator", "v5p-16", "--zone", "us-east5-a"]
GKE = ["--image", "image", "--claim", "models"]
# Engine and options; the command that its script runs
CONVERSIONS = [
    (["slurm", "--array", "4"], 'prep save-init --processes 4/"$SLURM_ARRAY_TASK_ID" ./model'),
    (["slurm", "--nodes", "4"], "srun --label --kill-on-bad-exit=0 --wait=300 prep save-init"),
    (["pbs", "--array", "4"], 'prep save-init --processes 4/"$PREP_TASK" ./model'),
    (["pbs", "--nodes", "4"], "JAX_NUM_PROCESSES=4"),
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
    (["recipe.toml", "--", "--lr", "3"], "no option `--lr`", "--set optimizer.lr=VALUE"),
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


@pytest.mark.parametrize(("words", "command"), CONVERSIONS, ids=lambda value: value[0])
def test_every_engine_runs_a_conversion(words: list[str], command: str, capsys: Capture):
    assert main(["launch", *words, "--", *SAVE_INIT]) == OK
    assert command in capsys.readouterr().out


@pytest.mark.parametrize(("words", "what", "hint"), REFUSED, ids=lambda value: str(value))
def test_invalid_commands_are_usage_errors(words: list[str], what: str, hint: str, capsys: Capture):
    code = main(["launch", "slurm", *words])
    out, err = capsys.readouterr()
    error = " ".join(err.split())
    assert (code, out) == (USAGE, "")
    assert what in error
    assert hint in error


def test_long_form_of_a_training_equals_the_short_form(capsys: Capture):
    assert main(["launch", "slurm", "recipe.toml", "--", "--set", "seed=1"]) == OK
    short = capsys.readouterr().out
    assert main(["launch", "slurm", "--", "train", "recipe.toml", "--set", "seed=1"]) == OK
    assert capsys.readouterr().out == short


def test_recipe_may_have_the_name_of_a_command(capsys: Capture):
    Path("recipe.toml").rename("train")
    assert main(["launch", "slurm", "train"]) == OK
    assert "prep train train" in capsys.readouterr().out


@pytest.mark.parametrize("name", [each.name for each in COMMANDS if not each.group])
def test_parser_knows_every_command(name: str, capsys: Capture):
    """A new command can be launched without a change of `prep launch`."""
    assert main(["launch", "slurm", "--", name, "--help"]) == OK
    assert f"Usage: prep {name} " in capsys.readouterr().out


def test_relative_folder_of_ray_is_refused(capsys: Capture):
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
def test_outputs_on_lost_disks_are_refused(words: list[str], hint: str, capsys: Capture):
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
def test_tokens_need_a_folder(words: list[str], hint: str, capsys: Capture):
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
    options: str, command: str, error: str, capsys: Capture
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


def test_tokens_in_a_bucket_are_refused(capsys: Capture):
    command = ["tokenize", "recipe.toml", "--out", "gs://bucket/tokens"]
    error = run_failing(capsys, USAGE, "launch", "slurm", "--", *command)
    assert "cannot write gs://bucket/tokens" in error


def test_local_processes_convert_together(capsys: Capture):
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


def install_program(name: str, monkeypatch: MonkeyPatch) -> None:
    """Put a program into PATH. It records its words, and the content of a YAML file."""
    Path("bin").mkdir()
    program = Path("bin") / name
    program.write_text(RECORDER.format(name=name))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').resolve()}:/usr/bin:/bin")


def test_sky_reads_the_job_from_a_file(monkeypatch: MonkeyPatch, capsys: Capture):
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
    join: Callable[[list[str]], str], is_printed: bool, monkeypatch: MonkeyPatch, capsys: Capture
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


def test_too_long_driver_is_an_error(monkeypatch: MonkeyPatch, capsys: Capture):
    install_program("ray", monkeypatch)
    with Path("recipe.toml").open("a") as recipe:
        recipe.write(f"# {'x' * 200_000}\n")
    words = ["launch", "ray", "recipe.toml", "--folder", "/shared", "--submit"]
    assert "Argument list too long" in run_failing(capsys, FAILED, *words)


@pytest.mark.parametrize(
    ("engine", "program"), [("slurm", "sbatch"), ("sky", "sky"), ("ray", "ray")]
)
def test_missing_engine_is_an_error(
    engine: str, program: str, monkeypatch: MonkeyPatch, capsys: Capture
):
    monkeypatch.setenv("PATH", str(Path().resolve()))
    words = ["launch", engine, "--submit", "--", "export", "m", "--out", "gs://models/a"]
    assert f"`{program}` is not installed" in run_failing(capsys, FAILED, *words)


@pytest.mark.parametrize("engine", ["sky", "ray", "gke"])
def test_next_command_submits_the_written_file(engine: str, capsys: Capture):
    options = ["--image", "image"] if engine == "gke" else []
    words = ["--", "export", "m", "--out", "gs://models/a"]
    assert main(["launch", engine, *options, "--out", "a b.job", *words]) == OK
    out, err = capsys.readouterr()
    assert out == "a b.job\n"
    assert "'a b.job'" in err
