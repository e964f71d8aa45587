"""The batch script of PBS, run by bash with recorders in place of pbsdsh, qsub and prep."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.core.errors import UsageError
from prepcli.core.option_spec import with_defaults
from prepcli.launch.job import LaunchedCommand, LaunchJob
from prepcli.launch.pbs import PbsOptions, pbs_script, walltime_s
from tests.helpers.launched_jobs import train_command
from tests.helpers.scripts import Calls, install_recorders, lines, run_script, words

JOB = LaunchJob(command=train_command("recipes/llama-13b.toml"), name="llama-13b", max_restarts=3)
SCRIPT = r"""#!/bin/bash
# Runs `prep train recipes/llama-13b.toml` with one process per node. Submit with `qsub`.
# The authors of prep have not run this file on a real cluster.
#PBS -N llama-13b
#PBS -l select=2:ncpus=96:mpiprocs=1:ngpus=8:mem=1000gb
#PBS -l place=scatter
#PBS -l walltime=24:00:00
#PBS -q gpu
#PBS -A lab
#PBS -j oe
#PBS -k doe
#PBS -r y
#PBS -l filesystems=home:eagle

cd "$PBS_O_WORKDIR" || exit 1
# The next job has other numbers in these lines.
prep_restarts=0

codes=$(mktemp -d "$PWD/.prep-launch-XXXXXX") || exit 1
trap 'rm -rf "$codes"' EXIT
coordinator="$(head -n 1 "$PBS_NODEFILE"):$((61440 + ${PBS_JOBID%%[^0-9]*} % 4096))"
process='(
set -e
cd "$PBS_O_WORKDIR"
module load cuda/12.3
export XLA_PYTHON_CLIENT_MEM_FRACTION=.90
source env/bin/activate
stop_s=$((SECONDS < 86280 ? 86280 - SECONDS : 1))
timeout --preserve-status --signal=USR1 "$stop_s" prep train recipes/llama-13b.toml --set a=1
)
echo "$?" > "$PREP_EXIT_FILE"'
for ((index = 0; index < 2; index++)); do
    pbsdsh -n "$index" -- env \
        PREP_EXIT_FILE="$codes/$index" \
        JAX_COORDINATOR_ADDRESS="$coordinator" \
        JAX_NUM_PROCESSES=2 \
        JAX_PROCESS_ID="$index" \
        bash -l -c "$process" < /dev/null &
done
wait

# 75: stopped before the time limit, or a process was lost. 131 to 159: a signal killed a process. An error wins.
code=0
for ((index = 0; index < 2; index++)); do
    read -r ended < "$codes/$index" || ended=75
    case $ended in
        0) ;;
        75 | 13[1-9] | 14? | 15?) [ "$code" -ne 0 ] || code=$ended ;;
        *) code=$ended ;;
    esac
done
case $code in
    75 | 13[1-9] | 14? | 15?)
        if [ "$prep_restarts" -lt 100 ]; then
            sed -e "s/^prep_restarts=.*/prep_restarts=$((prep_restarts + 1))/" "$0" | qsub
        fi ;;
esac
exit "$code"
"""


@pytest.fixture(scope="module")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorders")
    install_recorders(folder)
    (folder / "nodes").write_text("n003.cluster\nn004.cluster\n")
    return folder


def options_of(**values: object) -> PbsOptions:
    return with_defaults(PbsOptions, values)


def run_job(
    script: str,
    recorders: Path,
    codes: dict[str, list[int]] | None = None,
    *,
    job_id: str = "17.server",
    **env: str,
) -> Calls:
    """Run a script as a job of two nodes."""
    (recorders / "qsub.stdin").unlink(missing_ok=True)
    done = run_script(
        script,
        recorders,
        codes=codes,
        states=(),
        is_file=True,
        PBS_JOBID=job_id,
        PBS_NODEFILE=str(recorders / "nodes"),
        PBS_O_WORKDIR=str(recorders),
        **env,
    )
    assert not list(recorders.glob(".prep-launch-*"))
    return done


def submitted(recorders: Path) -> str:
    """Return the script of the next job. Empty if there is none."""
    path = recorders / "qsub.stdin"
    return path.read_text() if path.exists() else ""


def test_pbs_script_has_every_option():
    job = LaunchJob(
        command=train_command("recipes/llama-13b.toml", ("--set", "a=1")),
        name="llama-13b",
        setup=("source env/bin/activate",),
        env=(("XLA_PYTHON_CLIENT_MEM_FRACTION", ".90"),),
    )
    options = options_of(
        nodes=2,
        devices_per_node=8,
        cpus=96,
        mem="1000gb",
        time="24:00:00",
        queue="gpu",
        account="lab",
        module=("cuda/12.3",),
        qsub=("-l filesystems=home:eagle",),
    )
    assert pbs_script(job, options) == SCRIPT


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    recipe=lines,
    train_words=st.lists(words, max_size=3),
    values=st.lists(words, max_size=3),
    options=st.lists(lines, min_size=3, max_size=3),
)
def test_pbs_script_passes_on_every_value(
    recorders: Path, recipe: str, train_words: list[str], values: list[str], options: list[str]
):
    env = {f"V{number}": value for number, value in enumerate(values)}
    name, queue, module = options
    job = LaunchJob(command=train_command(recipe, train_words), name=name, env=tuple(env.items()))
    script = pbs_script(job, options_of(queue=queue, module=(module,), time="1:00:00"))
    done = run_job(script, recorders)
    assert done.code == 0
    assert done.words_of("prep") == [["train", recipe, *train_words]]
    assert done.words_of("module") == [["load", module]]
    assert done.variables_of("prep").items() >= env.items()


def test_each_node_has_a_numbered_process(recorders: Path):
    done = run_job(pbs_script(JOB, options_of(nodes=2)), recorders)
    assert done.code == 0
    tasks = sorted(words[:3] for words in done.words_of("pbsdsh"))
    assert tasks == [["-n", "0", "--"], ["-n", "1", "--"]]
    processes = [variables for name, _, variables in done.calls if name == "prep"]
    assert {variables["JAX_PROCESS_ID"] for variables in processes} == {"0", "1"}
    for variables in processes:
        assert variables["JAX_NUM_PROCESSES"] == "2"
        # 61440 + 17
        assert variables["JAX_COORDINATOR_ADDRESS"] == "n003.cluster:61457"


def test_job_of_one_node_needs_no_task_manager(recorders: Path):
    done = run_job(pbs_script(JOB, options_of()), recorders)
    assert (done.code, done.words_of("pbsdsh")) == (0, [])
    assert "JAX_NUM_PROCESSES" not in done.variables_of("prep")


@pytest.mark.parametrize(
    ("code", "is_submitted"),
    [
        *((code, False) for code in (0, 1, 2, 130, 160, 255)),
        *((code, True) for code in (75, 134, 137, 143)),
    ],
)
def test_stopped_and_killed_runs_are_submitted_again(
    recorders: Path, code: int, is_submitted: bool
):
    script = pbs_script(JOB, options_of())
    done = run_job(script, recorders, {"prep": [code]})
    assert done.code == code
    assert done.words_of("qsub") == [[]] * is_submitted
    expected = script.replace("prep_restarts=0\n", "prep_restarts=1\n") if is_submitted else ""
    assert submitted(recorders) == expected


def test_restarts_of_a_job_are_limited(recorders: Path):
    script = pbs_script(JOB, options_of())
    # JOB may be restarted three times.
    for number in (1, 2, 3):
        run_job(script, recorders, {"prep": [75]})
        script = submitted(recorders)
        assert f"\nprep_restarts={number}\n" in script
    done = run_job(script, recorders, {"prep": [75]})
    assert (done.code, submitted(recorders)) == (75, "")


@pytest.mark.parametrize(
    ("codes", "code"),
    [((0, 75), 75), ((137, 75), 137), ((75, 1), 1), ((1, 75), 1), ((0, 2), 2), ((0, 0), 0)],
)
def test_error_of_one_process_is_the_error_of_the_job(
    recorders: Path, codes: tuple[int, int], code: int
):
    script = pbs_script(JOB, options_of(nodes=2))
    done = run_job(script, recorders, {"prep0": [codes[0]], "prep1": [codes[1]]})
    assert done.code == code
    assert bool(submitted(recorders)) == (code in (75, 137))


def test_node_that_starts_no_process_restarts_the_job(recorders: Path):
    """`pbsdsh` exits with 0 also if it cannot start a task."""
    script = pbs_script(JOB, options_of(nodes=2)).replace("pbsdsh -n", "true -n")
    done = run_job(script, recorders)
    assert done.code == 75
    assert submitted(recorders)


def test_command_is_stopped_before_the_time_limit(recorders: Path):
    job = LaunchJob(
        command=train_command("r.toml"), name="r", setup=(f"PATH={recorders}/slow:$PATH",)
    )
    slow = recorders / "slow"
    slow.mkdir()
    (slow / "prep").write_text(
        "#!/bin/bash\ntrap 'exit 75' USR1\nwhile true; do /bin/sleep .1; done\n"
    )
    (slow / "prep").chmod(0o755)
    done = run_job(pbs_script(job, options_of(time="0:11", grace=10)), recorders)
    assert done.code == 75
    assert submitted(recorders)


def test_setup_that_fails_ends_the_job(recorders: Path):
    job = LaunchJob(command=train_command("r.toml"), name="r", setup=("false",))
    done = run_job(pbs_script(job, options_of()), recorders)
    assert (done.code, done.calls) == (1, [])


CONVERSION = LaunchedCommand(name="save-init", arguments=("my model", "--", "x"), has_shares=True)


def test_task_of_an_array_writes_and_restarts_its_share(recorders: Path):
    script = pbs_script(LaunchJob(command=CONVERSION, name="job"), options_of(array=4))
    assert "#PBS -J 0-3\n" in script
    expected = ["save-init", "--processes", "4/2", "my model", "--", "x"]
    done = run_job(script, recorders, {"prep": [75]}, PBS_ARRAY_INDEX="2", job_id="17[2].server")
    assert done.words_of("prep") == [expected]
    # The next job is no array, and has the task.
    again = submitted(recorders)
    assert "\n#PBS -J" not in again
    done = run_job(again, recorders, {"prep": [75]})
    assert done.words_of("prep") == [expected]
    assert "\nprep_restarts=2\nprep_task=2\n" in submitted(recorders)


def test_conversion_has_a_share_per_node(recorders: Path):
    job = LaunchJob(command=CONVERSION, name="job")
    done = run_job(pbs_script(job, options_of(nodes=2)), recorders)
    assert done.words_of("prep") == [["save-init", "my model", "--", "x"]] * 2


@pytest.mark.parametrize(
    ("name", "written"),
    [("My_Run.2", "My_Run.2"), ("7b run", "prep-7b-run"), ("caf\u00e9", "caf-"), ("-", "prep-")],
)
def test_name_of_a_job_has_the_letters_of_qsub(name: str, written: str):
    job = LaunchJob(command=train_command("r.toml"), name=name)
    assert f"#PBS -N {written}\n" in pbs_script(job, options_of())


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 90), ("2:30", 150), ("1:2:30", 3750), ("1-2", None), ("1:2:3:4", None), ("24h", None)],
)
def test_walltime_has_the_formats_of_pbs(limit: str, seconds: int | None):
    assert walltime_s(limit) == seconds


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"time": "24h"}, "is invalid"),
        ({"time": "0"}, "is invalid"),
        ({"time": "UNLIMITED"}, "is invalid"),
        ({"time": "2:00"}, "excludes"),
        ({"array": 2}, "for conversions only"),
        ({"mem": "1gb\n#"}, "more than one line"),
        ({"qsub": ("-P a\nrm",)}, "more than one line"),
    ],
)
def test_invalid_options_of_pbs_are_errors(values: dict[str, object], what: str):
    with pytest.raises(UsageError, match=what):
        pbs_script(JOB, options_of(**values))


def test_array_of_one_task_is_an_error():
    job = LaunchJob(command=CONVERSION, name="job")
    with pytest.raises(UsageError, match="at least two tasks"):
        pbs_script(job, options_of(array=1))


@pytest.mark.parametrize("value", ["a b", '"', "a'b", "a\\b", "#", "x-1.2"])
def test_directives_are_quoted_for_qsub(value: str):
    """`qsub` splits a directive at spaces, and takes quotes and backslashes off as a shell does."""
    script = pbs_script(JOB, options_of(account=value))
    directive = next(line for line in script.splitlines() if line.startswith("#PBS -A "))
    assert shlex.split(directive.removeprefix("#PBS ")) == ["-A", value]
