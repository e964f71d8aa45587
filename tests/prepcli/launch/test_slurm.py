"""The SLURM batch script, run by bash with recorders in place of srun, scontrol and prep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.core.errors import UsageError
from prepcli.core.option_spec import with_defaults
from prepcli.launch.job import LaunchedCommand, LaunchJob
from prepcli.launch.slurm import SlurmOptions, slurm_script, time_limit_s
from tests.helpers.launched_jobs import train_command
from tests.helpers.scripts import install_recorders, lines, run_script, words
from tests.helpers.slow_cases import slow_except

JOB = LaunchJob(command=train_command("recipes/llama-13b.toml"), name="llama-13b", max_restarts=3)
SCRIPT = """\
#!/bin/bash
# Runs `prep train recipes/llama-13b.toml` with one process per node. Submit with `sbatch`.
#SBATCH --job-name=llama-13b
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=96
#SBATCH --mem=1000G
#SBATCH --time=24:00:00
#SBATCH --partition=main
#SBATCH --account=lab
#SBATCH --output=llama-13b-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --qos=long

set -e
module load cuda/12.3
export XLA_PYTHON_CLIENT_MEM_FRACTION=.90
source env/bin/activate

code=0
srun --label --kill-on-bad-exit=0 --wait=300 --cpus-per-task=96 prep train recipes/llama-13b.toml --set a=1 || code=$?

# 75: stopped before the time limit, or a process was lost. 131 to 159: a signal killed a process.
case $code in
    75 | 13[1-9] | 14? | 15?)
        if [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then
            scontrol requeue "$SLURM_JOB_ID"
        fi ;;
esac
exit "$code"
"""


@pytest.fixture(scope="module")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorders")
    install_recorders(folder)
    return folder


def test_slurm_script_has_every_option():
    job = LaunchJob(
        command=train_command("recipes/llama-13b.toml", ("--set", "a=1")),
        name="llama-13b",
        setup=("source env/bin/activate",),
        env=(("XLA_PYTHON_CLIENT_MEM_FRACTION", ".90"),),
    )
    options = with_defaults(
        SlurmOptions,
        {
            "nodes": 2,
            "devices_per_node": 8,
            "cpus": 96,
            "mem": "1000G",
            "time": "24:00:00",
            "partition": "main",
            "account": "lab",
            "module": ("cuda/12.3",),
            "sbatch": ("--qos=long",),
        },
    )
    assert slurm_script(job, options) == SCRIPT


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    recipe=lines,
    train_words=st.lists(words, max_size=3),
    values=st.lists(words, max_size=3),
    options=st.lists(lines, min_size=3, max_size=3),
)
def test_slurm_script_passes_on_every_value(
    recorders: Path, recipe: str, train_words: list[str], values: list[str], options: list[str]
):
    env = {f"V{number}": value for number, value in enumerate(values)}
    name, partition, module = options
    job = LaunchJob(command=train_command(recipe, train_words), name=name, env=tuple(env.items()))
    done = run_script(
        slurm_script(
            job, with_defaults(SlurmOptions, {"partition": partition, "module": (module,)})
        ),
        recorders,
    )
    assert done.code == 0
    assert done.words_of("prep") == [["train", recipe, *train_words]]
    assert done.words_of("module") == [["load", module]]
    assert done.variables_of("prep").items() >= env.items()


@pytest.mark.parametrize(
    ("code", "restarts", "is_requeued"),
    slow_except(
        [
            *((code, "0", False) for code in (0, 1, 2, 130, 160, 255)),
            *((code, "0", True) for code in (75, 134, 137, 143)),
            *((75, restarts, restarts != "3") for restarts in ("", "2", "3")),
        ],
        lambda case: case[0] in (0, 2, 75, 137),
    ),
)
def test_slurm_script_requeues_stopped_and_killed_runs(
    recorders: Path, code: int, restarts: str, is_requeued: bool
):
    env: dict[str, Any] = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": restarts}
    done = run_script(
        slurm_script(JOB, with_defaults(SlurmOptions, {})), recorders, codes={"prep": [code]}, **env
    )
    assert done.code == code
    assert done.words_of("scontrol") == [["requeue", "17"]] * is_requeued


# The formats in the manual of sbatch.
@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("2", 120),
        ("2:30", 150),
        ("1:2:30", 3750),
        ("1-2", 93600),
        ("1-2:30", 95400),
        ("1-0:0:1", 86401),
        ("UNLIMITED", None),
        ("-1", None),
        ("1:2:3:4", None),
        ("9" * 5000, None),
    ],
)
def test_time_limit_has_every_format_of_sbatch(limit: str, seconds: int | None):
    assert time_limit_s(limit) == seconds


@pytest.mark.parametrize("limit", ["2", "00:02:00", "0-0:2"])
def test_grace_of_the_whole_time_limit_is_refused(limit: str):
    with pytest.raises(UsageError, match="would stop at its start"):
        slurm_script(JOB, with_defaults(SlurmOptions, {"time": limit}))
    for other in ("3", "0", "UNLIMITED"):
        slurm_script(JOB, with_defaults(SlurmOptions, {"time": other}))


@pytest.mark.parametrize("limit", ["24h", "1:2:3:4", "1d", "two hours"])
def test_time_limit_that_sbatch_refuses_is_an_error(limit: str):
    with pytest.raises(UsageError, match="is invalid"):
        slurm_script(JOB, with_defaults(SlurmOptions, {"time": limit}))
    for other in ("infinite", "-1", "1-12"):
        slurm_script(JOB, with_defaults(SlurmOptions, {"time": other}))


def test_slurm_script_ends_when_its_setup_fails(recorders: Path):
    job = LaunchJob(command=train_command("r.toml"), name="r", setup=("false",))
    done = run_script(slurm_script(job, with_defaults(SlurmOptions, {})), recorders)
    assert (done.code, done.calls) == (1, [])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a b", '"a b"'),
        ('"', r'"\""'),
        ("a\\b", r'"a\\b"'),
        ("#", r'"\#"'),
        ("x-%j_1.log", "x-%j_1.log"),
    ],
)
def test_slurm_script_quotes_directives_as_sbatch_reads_them(value: str, text: str):
    assert f"#SBATCH --account={text}\n" in slurm_script(
        JOB, with_defaults(SlurmOptions, {"account": value})
    )


@pytest.mark.parametrize(
    "options",
    [
        with_defaults(SlurmOptions, {"mem": "1G\n#"}),
        with_defaults(SlurmOptions, {"module": ("a\nb",)}),
        with_defaults(SlurmOptions, {"sbatch": ("--qos=a\nrm",)}),
    ],
)
def test_slurm_script_rejects_line_breaks(options: SlurmOptions):
    with pytest.raises(UsageError, match="more than one line"):
        slurm_script(JOB, options)


CONVERSION = LaunchedCommand(name="save-init", arguments=("my model", "--", "x"), has_shares=True)


def test_array_task_writes_its_share(recorders: Path):
    job = LaunchJob(command=CONVERSION, name="job%", max_restarts=3)
    script = slurm_script(job, with_defaults(SlurmOptions, {"array": 4}))
    assert "#SBATCH --array=0-3\n" in script
    assert "#SBATCH --output=job%%-%A_%a.log\n" in script
    done = run_script(script, recorders, SLURM_ARRAY_TASK_ID="2")
    assert done.words_of("prep") == [["save-init", "--processes", "4/2", "my model", "--", "x"]]


def test_array_requeues_only_the_stopped_task(recorders: Path):
    """One task has the number of the array as its own: with it, SLURM would requeue all tasks."""
    script = slurm_script(
        LaunchJob(command=CONVERSION, name="job"), with_defaults(SlurmOptions, {"array": 4})
    )
    env: dict[str, Any] = {
        "SLURM_JOB_ID": "17",
        "SLURM_ARRAY_JOB_ID": "17",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    done = run_script(script, recorders, codes={"prep": [75]}, **env)
    assert done.code == 75
    assert done.words_of("scontrol") == [["requeue", "17_3"]]
