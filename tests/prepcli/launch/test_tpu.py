"""The Cloud TPU script, run by bash with recorders in place of gcloud and prep."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.core.errors import UsageError
from prepcli.core.option_spec import with_defaults
from prepcli.launch.job import LaunchedCommand, LaunchJob
from prepcli.launch.tpu import TpuOptions, tpu_script
from tests.helpers.launched_jobs import train_command
from tests.helpers.scripts import Calls, install_recorders, lines, run_script, words
from tests.helpers.slow_cases import slow_except
from tests.helpers.waiting import wait_until

JOB = LaunchJob(command=train_command("recipes/llama-7b.toml"), name="llama-7b", max_restarts=2)
OPTIONS = with_defaults(TpuOptions, {"accelerator": "v5p-256", "zone": "us-east5-a"})


@pytest.fixture(scope="module")
def recorders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorders")
    install_recorders(folder)
    return folder


def test_tpu_script_creates_copies_and_trains(recorders: Path):
    options = with_defaults(
        TpuOptions, {"accelerator": "v5p-256", "zone": "us-east5-a", "project": "lab", "spot": True}
    )
    script = tpu_script(JOB, options)
    done = run_script(script, recorders, states=("", "ACTIVE"))
    place = ["--zone=us-east5-a", "--project=lab"]
    resources, vm = ["compute", "tpus", "queued-resources"], ["compute", "tpus", "tpu-vm"]
    hardware = ["--accelerator-type=v5p-256", "--runtime-version=v2-alpha-tpuv5", "--spot"]
    assert done.code == 0
    calls = done.words_of("gcloud")
    assert calls[:4] == [
        [*resources, "describe", "llama-7b", *place, "--format=value(state.state)"],
        [*resources, "create", "llama-7b", "--node-id=llama-7b", *place, *hardware],
        [*resources, "describe", "llama-7b", *place, "--format=value(state.state)"],
        [*vm, "scp", "recipes/llama-7b.toml", "llama-7b:llama-7b.toml", "--worker=all", *place],
    ]
    assert calls[4][:-1] == [*vm, "ssh", "llama-7b", "--worker=all", *place]
    assert done.words_of("prep") == [["train", f"{recorders}/llama-7b.toml"]]


def test_tpu_script_uses_an_existing_tpu(recorders: Path):
    done = run_script(tpu_script(JOB, OPTIONS), recorders)
    assert not [call for call in done.words_of("gcloud") if "create" in call]


@pytest.mark.slow
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=lines, train_words=st.lists(words, max_size=3), values=st.lists(words, max_size=3))
def test_tpu_script_passes_on_every_value(
    recorders: Path, name: str, train_words: list[str], values: list[str]
):
    env = {f"V{number}": value for number, value in enumerate(values)}
    job = LaunchJob(
        command=train_command(f"r/{name}.toml", train_words), name="run", env=tuple(env.items())
    )
    done = run_script(tpu_script(job, OPTIONS), recorders)
    recipe = PurePosixPath(job.command.recipe)
    assert done.code == 0
    assert done.words_of("prep") == [["train", f"{recorders}/{recipe.name}", *train_words]]
    assert done.variables_of("prep").items() >= env.items()
    source = next(call[4] for call in done.words_of("gcloud") if "scp" in call)
    assert PurePosixPath(source) == recipe


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    slow_except(
        [([75, 0], 0, 2), ([75, 75, 75, 75], 75, 3), ([1], 1, 1), ([137, 130], 130, 2)],
        [([75, 0], 0, 2), ([137, 130], 130, 2)],
    ),
)
def test_tpu_host_starts_again_after_a_stop_or_a_kill(
    recorders: Path, codes: list[int], code: int, starts: int
):
    done = run_script(
        tpu_script(JOB, OPTIONS),
        recorders,
        codes={"prep": codes},
    )
    assert (done.code, len(done.words_of("prep"))) == (code, starts)


def test_tpu_script_suggests_a_type():
    with pytest.raises(UsageError, match="unknown TPU type") as caught:
        tpu_script(JOB, with_defaults(TpuOptions, {"accelerator": "v5pp-8", "zone": "a"}))
    assert "v5p" in caught.value.hint


def test_tpu_script_rejects_a_name_of_other_characters():
    with pytest.raises(UsageError, match="invalid name of a job"):
        tpu_script(LaunchJob(command=train_command("r.toml"), name="My run"), OPTIONS)


# Flags in the synopsis of each command (https://cloud.google.com/sdk/gcloud/reference/compute/tpus), as far as scripts
# use them. `--project`, `--quiet` and `--format` are flags of every command.
EVERY_COMMAND = {"--zone", "--project", "--quiet", "--format"}
REFERENCE_FLAGS = {
    "queued-resources create": EVERY_COMMAND
    | {"--accelerator-type", "--node-id", "--runtime-version", "--spot"},
    "queued-resources describe": EVERY_COMMAND,
    "queued-resources delete": EVERY_COMMAND | {"--force"},
    "tpu-vm scp": EVERY_COMMAND | {"--worker"},
    "tpu-vm ssh": EVERY_COMMAND | {"--worker", "--command"},
}
SPOT = with_defaults(TpuOptions, {"accelerator": "v5p-256", "zone": "us-east5-a", "spot": True})


def gcloud_verbs(done: Calls) -> list[str]:
    """Return the verbs of the calls of gcloud, without `describe`."""
    verbs = [call[3] for call in done.words_of("gcloud")]
    return [verb for verb in verbs if verb != "describe"]


def test_tpu_script_resumes_on_a_new_tpu_after_a_preemption(recorders: Path):
    # The connection breaks, the resource is suspended, and it is deleted before the next one is created.
    states = ("ACTIVE", "SUSPENDING", "SUSPENDED", "", "ACTIVE")
    done = run_script(tpu_script(JOB, SPOT), recorders, codes={"prep": [255]}, states=states)
    assert done.code == 0
    assert gcloud_verbs(done) == ["scp", "ssh", "delete", "create", "scp", "ssh"]
    assert len(done.words_of("prep")) == 2


@pytest.mark.slow
def test_tpu_script_ends_after_the_last_restart(recorders: Path):
    done = run_script(
        tpu_script(JOB, SPOT),
        recorders,
        codes={"prep": [255] * 9},
        states=("ACTIVE", "SUSPENDING", "ACTIVE", "SUSPENDING", "ACTIVE", "SUSPENDING"),
    )
    assert (done.code, len(done.words_of("prep"))) == (255, 3)


def test_tpu_script_ends_when_the_tpu_failed(recorders: Path):
    done = run_script(tpu_script(JOB, OPTIONS), recorders, states=("FAILED",))
    assert (done.code, gcloud_verbs(done)) == (1, [])


def test_tpu_script_passes_on_flags_of_gcloud(recorders: Path):
    flags = ("--network=lab", "--labels=team=a b")
    options = with_defaults(
        TpuOptions, {"accelerator": "v4-8", "zone": "us-central2-b", "gcloud": flags}
    )
    done = run_script(tpu_script(JOB, options), recorders, states=("", "ACTIVE"))
    create = next(call for call in done.words_of("gcloud") if "create" in call)
    assert create[-2:] == [*flags]


def test_tpu_script_rejects_a_word_that_is_no_flag():
    options = with_defaults(
        TpuOptions, {"accelerator": "v4-8", "zone": "us-central2-b", "gcloud": ("lab",)}
    )
    with pytest.raises(UsageError, match="is invalid"):
        tpu_script(JOB, options)


def test_tpu_script_runs_a_conversion_on_one_host(recorders: Path):
    command = LaunchedCommand(name="save-init", arguments=("my model",), has_shares=True)
    done = run_script(tpu_script(LaunchJob(command=command, name="job"), OPTIONS), recorders)
    assert done.words_of("prep") == [["save-init", "my model"]]
    ssh = next(call for call in done.words_of("gcloud") if "ssh" in call)
    assert "--worker=0" in ssh


def test_detached_command_outlives_the_connection(recorders: Path):
    options = with_defaults(
        TpuOptions, {"accelerator": "v5p-256", "zone": "us-east5-a", "detach": True}
    )
    done = run_script(tpu_script(JOB, options), recorders, codes={"prep": [75, 0]})
    assert done.code == 0
    wait_until(lambda: len(Calls.read(recorders).words_of("prep")) == 2)
    assert (recorders / "llama-7b.log").exists()


def test_flags_are_those_of_the_reference(recorders: Path):
    options = with_defaults(
        TpuOptions,
        {"accelerator": "v5p-256", "zone": "us-east5-a", "project": "lab", "spot": True},
    )
    states = ("SUSPENDED", "", "ACTIVE")
    done = run_script(tpu_script(JOB, options), recorders, states=states)
    for _, _, group, verb, *rest in done.words_of("gcloud"):
        flags = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert flags <= REFERENCE_FLAGS[f"{group} {verb}"], verb
