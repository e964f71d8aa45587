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
from prepcli.commands.cli.root import all_commands
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


def install_program(monkeypatch: MonkeyPatch, script: str, *names: str) -> None:
    """Put a program into PATH, under each of these names."""
    Path("bin").mkdir()
    for name in names:
        program = Path("bin", name)
        program.write_text(script.format(name=name))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').resolve()}:/usr/bin:/bin")


def install_submitters(monkeypatch: MonkeyPatch, *, code: int) -> None:
    """Install programs that copy their stdin to stdin.txt, print `17` and exit with `code`."""
    script = f"#!/bin/sh\ncat > stdin.txt\necho 17\nexit {code}\n"
    install_program(monkeypatch, script, *(ENGINES[engine].submit[0] for engine in STDIN_ENGINES))


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


IMAGE = "gke recipe.toml --image image"
GKE = f"{IMAGE} --claim runs"
V5P = f"{GKE} --accelerator tpu-v5p-slice"
TPU = "tpu recipe.toml --zone us-east5-a --accelerator"
DCN = "-- --set cluster.dcn_mesh=fsdp:2"
SAVE_INIT = "save-init ./model --mesh 1,2,1"
SKY = "sky --accelerator"
SKY_OUT = "--out gs://models/a"
SKY_TRAIN = f"-- train recipe.toml {SKY_OUT}"
SKY_EXPORT = f"-- export gs://runs/a {SKY_OUT}"
# Words of `prep launch`, for a recipe with a mesh of 8 devices; parts of the error and of its hint
REFUSED = [
    ("slurm missing.toml", "missing.toml", ""),
    ("slurm recipe.toml -- --set train.stepz=3", "train.stepz", ""),
    ("slurm recipe.toml --nodes 2 --devices-per-node 8", "needs 8 devices, there are 16", ""),
    ("slurm recipe.toml --env A", "`--env A` has no value", ""),
    ("slurm recipe.toml --setup 'a\nb'", "`--setup` has more than one line", ""),
    ("slurm recipe.toml --out recipe.toml", "`recipe.toml` already exists", ""),
    (f"{TPU} v5p-8", "needs 8 devices, there are 4", "`--accelerator v5p-16`"),
    (f"{TPU} v5p-100", "`--accelerator v5p-100` is invalid", "`--accelerator v5p-128`"),
    (f"{TPU} v5p-7", "`--accelerator v5p-7` is invalid", "`--accelerator v5p-8`"),
    (f"{TPU} v5p-", "`--accelerator v5p-` is invalid", "`--accelerator v5p-8`"),
    (f"{TPU} tpu7x-8", "no TPU VMs", "`prep launch gke --accelerator tpu7x`"),
    (f"{TPU} v6e-8 {DCN}", "has 2 slices", "`prep launch gke`"),
    (GKE, "`--devices-per-node` is missing", "`--devices-per-node 8`"),
    (f"{IMAGE} --devices-per-node 8", "`--claim` is missing", "`--claim NAME`"),
    (V5P, "`--topology` is missing", "`--topology 2x2x2`"),
    (f"{V5P} --topology 2x2x2", "`--devices-per-node` is missing", "`--devices-per-node 4`"),
    (f"{V5P} --topology 8x1x1", "`--topology 8x1x1` is invalid", "2x2x2"),
    (
        f"{V5P} --topology 2x2x2 --devices-per-node 8",
        "`--devices-per-node 8` is invalid",
        "`--devices-per-node 4`",
    ),
    (f"{V5P} --topology 2x2x2 --devices-per-node 4", "`--nodes 1` is invalid", "`--nodes 2`"),
    (
        f"{V5P} --topology 2x2x4 --devices-per-node 4 --nodes 4",
        "needs 8 devices, there are 16",
        "`--topology 2x2x2` and `--nodes 2`",
    ),
    (f"{V5P} --topology 2x2x1 --devices-per-node 4 {DCN}", "`--nodes 1` is invalid", "`--nodes 2`"),
    (f"{GKE} --devices-per-node 8 --topology 4x4", "for TPUs only", "remove `--topology`"),
    (f"{GKE} --accelerator tpu-v5p", "unknown TPU label `tpu-v5p`", "tpu-v5p-slice"),
    (f"slurm recipe.toml --nodes 3 {DCN}", "`cluster.dcn_mesh` has 2 slices", "`--nodes 4`"),
    (
        "slurm recipe.toml --nodes 4 -- --set cluster.n_processes=2",
        "`cluster.n_processes` is 2",
        "n_processes=4",
    ),
    ("slurm recipe.toml -- --out ftp://bucket/run", "ftp://bucket/run", ""),
    ("pbs recipe.toml --nodes 2 --devices-per-node 8", "needs 8 devices, there are 16", ""),
    # The parser of `prep` checks the command before a script is written.
    ("slurm -- save-init ./model --messh 1,2,1", "no option `--messh`", "--mesh"),
    ("slurm -- save-init ./model --workers none", "--workers", "prep save-init --help"),
    ("slurm -- save-init ''", "CHECKPOINT is empty", ""),
    ("slurm -- save-int ./model", "unknown command `save-int`", "save-init"),
    (
        "slurm -- prep save-init m",
        "unknown command `prep`",
        "leave out `prep`",
    ),
    ("slurm -- launch slurm recipe.toml", "unknown command `launch`", ""),
    ("slurm --", "no command was given", "`prep launch slurm -- COMMAND ARGS`"),
    ("slurm save-init 'my model'", "`save-init` is a command", "slurm -- save-init 'my model'`"),
    ("slurm", "no command was given", "`prep launch slurm -- COMMAND ARGS`"),
    ("slurm -- train", "no recipe was given", "`prep train RECIPE`"),
    ("slurm -- train --force recipe.toml", "the recipe must follow", "train recipe.toml"),
    ("slurm recipe.toml -- --stepz 3", "no option `--stepz`", ""),
    ("slurm recipe.toml -- --lr 3", "no option `--lr`", "--set optimizer.lr=VALUE"),
    ("slurm recipe.toml --nodes 2 -- --lr 3 --wd 1", "and 1 other", "--set"),
    ("slurm recipe.toml extra", "extra", ""),
    ("slurm recipe.toml --set seed=1", "no option `--set`", "`-- --set`"),
    ("slurm recipe.toml --devices-per-node 4", "there are 4", "`-- --set mesh=1,4,1`"),
    ("slurm --devices-per-node 4 -- eval m --mesh 1,2,4", "4", "`--mesh 1,4,1`"),
    (f"slurm -- {SAVE_INIT} --processes 4/0", "`--processes` cannot be given", "remove"),
    ("slurm --nodes 2 -- inspect m", "`prep inspect` runs in one process", "--nodes 1"),
    ("slurm --array 2 -- eval m --data d", "`--array 2` is for conversions", "--nodes 2"),
    ("slurm --array 2 recipe.toml", "`--array 2` is for conversions", "`--nodes 2` instead"),
    (f"slurm --array 2 --nodes 3 -- {SAVE_INIT}", "`--array 2` excludes `--nodes 3`", ""),
    ("slurm --nodes 2 --devices-per-node 8 -- eval m --mesh 1,2,4", "16", ""),
    ("slurm -- tokenize recipe.toml --out gs://bucket/tokens", "write gs://bucket/tokens", ""),
    # The disks of these machines do not outlive the job.
    (f"gke --image image -- {SAVE_INIT}", "the output is lost", "`--claim NAME`"),
    (f"ray -- {SAVE_INIT}", "the output is lost", "`--folder FOLDER`"),
    (f"sky -- {SAVE_INIT}", "the output is lost", "--out gs://BUCKET/NAME"),
    ("sky -- tokenize recipe.toml", "", "`prep launch slurm`"),
    ("gke --image image -- tokenize recipe.toml", "", "`--claim NAME`, or `prep launch slurm`"),
    (f"{SKY} H100 {SKY_TRAIN}", "there are 1", ""),
    (f"{SKY} H100:4 {SKY_TRAIN}", "there are 4", ""),
    (f"{SKY} H100:8 --nodes 2 {SKY_TRAIN}", "", "`--accelerator H100:4`"),
    (f"{SKY} tpu-v5p-32 {SKY_TRAIN}", "", "`--accelerator tpu-v5p-16`"),
    (f"{SKY} tpu-v5p-6 {SKY_TRAIN}", "", "`--accelerator tpu-v5p-8`"),
    (f"{SKY} tpu-v5p-8 --nodes 2 {SKY_TRAIN}", "", "`prep launch gke`"),
    (f"{SKY} tpu-v5p-16 --nodes 2 {SKY_EXPORT}", "", "`--nodes 1`"),
    (f"{SKY} tpu-v5p-16 -- inspect gs://runs/a", "", "remove `--accelerator`"),
]
# Words of `prep launch`, and what its script runs
ACCEPTED = [
    ("slurm recipe.toml --nodes 4096 -- --out gs://bucket/run", "prep train"),
    ("pbs recipe.toml --nodes 2 --devices-per-node 4 --time 1:00:00", "prep train"),
    (f"{TPU} v5p-16", "prep train"),
    (f"{TPU} v2-8", "prep train"),
    (f"{TPU} v5litepod-8", "prep train"),
    (f"{IMAGE} --devices-per-node 8 -- --out gs://bucket/run", "prep train"),
    (f"{GKE} --devices-per-node 4 --nodes 2", "prep train"),
    (f"{V5P} --topology 2x2x2 --devices-per-node 4 --nodes 2", "prep train"),
    (f"{GKE} --accelerator tpu7x --topology 2x2x1 --devices-per-node 4", "prep train"),
    (f"{GKE} --accelerator tpu-v6e-slice --topology 2x4 --devices-per-node 8", "prep train"),
    (
        "slurm recipe.toml --nodes 2 --devices-per-node 8 -- --set cluster.n_local_devices=4",
        "prep train",
    ),
    (
        "slurm recipe.toml --nodes 2 --devices-per-node 8 -- --set mesh=2,2,4",
        "#SBATCH --job-name=recipe",
    ),
    (
        f"slurm --array 4 -- {SAVE_INIT}",
        'prep save-init --processes 4/"$SLURM_ARRAY_TASK_ID" ./model',
    ),
    (
        f"slurm --nodes 4 -- {SAVE_INIT}",
        "srun --label --kill-on-bad-exit=0 --wait=300 prep save-init",
    ),
    (f"pbs --array 4 -- {SAVE_INIT}", 'prep save-init --processes 4/"$PREP_TASK" ./model'),
    (f"pbs --nodes 4 -- {SAVE_INIT}", "JAX_NUM_PROCESSES=4"),
    (f"tpu --accelerator v5p-16 --zone us-east5-a -- {SAVE_INIT}", f"prep {SAVE_INIT}"),
    (f"gke --image image --claim models --nodes 4 -- {SAVE_INIT}", f"exec prep {SAVE_INIT}"),
    (f"ray --workers 4 --folder /shared -- {SAVE_INIT}", "name='save-init',"),
    (f"{SKY} tpu-v5p-16 {SKY_TRAIN}", "prep train"),
    (f"{SKY} H100 --devices-per-node 4 --nodes 2 {SKY_TRAIN}", "prep train"),
    (f"{SKY} tpu-v9-16 --nodes 2 {SKY_TRAIN}", "prep train"),
    (f"{SKY} tpu-v5p-16 {SKY_EXPORT}", "prep export"),
    (f"{SKY} tpu-v5p-8 --nodes 2 {SKY_EXPORT}", "prep export"),
]


@pytest.mark.parametrize(("words", "what", "hint"), REFUSED, ids=lambda value: str(value))
def test_jobs_that_cannot_run_are_refused(words: str, what: str, hint: str, capsys: Capture):
    code = main(["launch", *shlex.split(words)])
    out, err = capsys.readouterr()
    error = " ".join(err.split())
    assert (code, out) == (USAGE, "")
    assert what in error
    assert hint in error
    assert Path("recipe.toml").read_text() == RECIPE


@pytest.mark.parametrize(("words", "command"), ACCEPTED, ids=lambda value: str(value))
def test_jobs_that_can_run_are_described(words: str, command: str, capsys: Capture):
    assert main(["launch", *shlex.split(words)]) == OK
    assert command in capsys.readouterr().out


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


def test_long_form_of_a_training_equals_the_short_form(capsys: Capture):
    assert main(["launch", "slurm", "recipe.toml", "--", "--set", "seed=1"]) == OK
    short = capsys.readouterr().out
    assert main(["launch", "slurm", "--", "train", "recipe.toml", "--set", "seed=1"]) == OK
    assert capsys.readouterr().out == short


def test_recipe_may_have_the_name_of_a_command(capsys: Capture):
    Path("recipe.toml").rename("train")
    assert main(["launch", "slurm", "train"]) == OK
    assert "prep train train" in capsys.readouterr().out


@pytest.mark.parametrize("name", [each.name for each in all_commands() if not each.group])
def test_parser_knows_every_command(name: str, capsys: Capture):
    """A new command can be launched without a change of `prep launch`."""
    assert main(["launch", "slurm", "--", name, "--help"]) == OK
    assert f"Usage: prep {name} " in capsys.readouterr().out


def test_relative_folder_of_ray_is_refused(capsys: Capture):
    error = run_failing(
        capsys, USAGE, "launch", "ray", "--folder", "runs", "--", *SAVE_INIT.split()
    )
    assert "`--folder runs` is a relative path" in error
    assert f"`--folder {Path('runs').absolute()}`" in error.replace("\n", "").replace("       ", "")


def test_local_processes_convert_together(capsys: Capture):
    make_checkpoint(Path("model"), LLAMA)
    assert (
        main(["launch", "local", "--processes", "2", "--", *SAVE_INIT.split(), "--out", "two"])
        == OK
    )
    out, err = capsys.readouterr()
    assert out.strip() == "two"
    assert "[1] process 1 of 2" in err
    assert main([*SAVE_INIT.split(), "--out", "one", "--processes", "1/0"]) == OK
    capsys.readouterr()
    assert main(["verify", "two", "one", "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["ok"]


# It records its words, and the content of a YAML file.
RECORDER = """#!/bin/bash
printf '%s\\0' "$@" > {name}.words
for word in "$@"; do
    case $word in *.yaml) cat "$word" > {name}.file ;; esac
done
echo submitted
"""


def test_sky_reads_the_job_from_a_file(monkeypatch: MonkeyPatch, capsys: Capture):
    command = ["--", "export", "gs://runs/a", "--out", "gs://models/a"]
    assert main(["launch", "sky", *command]) == OK
    task = capsys.readouterr().out
    install_program(monkeypatch, RECORDER, "sky")
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
    install_program(monkeypatch, RECORDER, "ray")
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
    install_program(monkeypatch, RECORDER, "ray")
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
