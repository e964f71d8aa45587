"""The Cloud TPU script, run by bash with recorders in place of gcloud and prep."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.errors import UsageError
from prepcli.launch.job import LaunchJob
from prepcli.launch.options import TpuOptions
from prepcli.launch.tpu import tpu_script
from prepcli.option_spec import with_defaults
from tests.helpers.scripts import install_recorders, lines, run_script, words

JOB = LaunchJob(recipe="recipes/llama-7b.toml", name="llama-7b", max_restarts=2)
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
    done = run_script(tpu_script(JOB, options), recorders, codes={"gcloud": [1]})
    place = ["--zone=us-east5-a", "--project=lab"]
    resources, vm = ["compute", "tpus", "queued-resources"], ["compute", "tpus", "tpu-vm"]
    hardware = ["--accelerator-type=v5p-256", "--runtime-version=v2-alpha-tpuv5", "--spot"]
    assert done.code == 0
    calls = done.words_of("gcloud")
    assert calls[:4] == [
        [*resources, "describe", "llama-7b", *place],
        [*resources, "create", "llama-7b", "--node-id=llama-7b", *place, *hardware],
        [*resources, "describe", "llama-7b", *place, "--format=value(state.state)"],
        [*vm, "scp", "recipes/llama-7b.toml", "llama-7b:llama-7b.toml", "--worker=all", *place],
    ]
    assert calls[4][:-1] == [*vm, "ssh", "llama-7b", "--worker=all", *place]
    assert done.words_of("prep") == [["train", f"{recorders}/llama-7b.toml"]]


def test_tpu_script_uses_an_existing_tpu(recorders: Path):
    done = run_script(tpu_script(JOB, OPTIONS), recorders)
    assert not [call for call in done.words_of("gcloud") if "create" in call]


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=lines, train_words=st.lists(words, max_size=3), values=st.lists(words, max_size=3))
def test_tpu_script_passes_on_every_value(
    recorders: Path, name: str, train_words: list[str], values: list[str]
):
    env = {f"V{number}": value for number, value in enumerate(values)}
    job = LaunchJob(
        recipe=f"r/{name}.toml", name="run", train_words=tuple(train_words), env=tuple(env.items())
    )
    done = run_script(tpu_script(job, OPTIONS), recorders)
    recipe = PurePosixPath(job.recipe)
    assert done.code == 0
    assert done.words_of("prep") == [["train", f"{recorders}/{recipe.name}", *train_words]]
    assert done.variables_of("prep").items() >= env.items()
    source = next(call[4] for call in done.words_of("gcloud") if "scp" in call)
    assert PurePosixPath(source) == recipe


@pytest.mark.parametrize(
    ("codes", "code", "starts"),
    [([75, 0], 0, 2), ([75, 75, 75, 75], 75, 3), ([1], 1, 1), ([137, 130], 130, 2)],
)
def test_tpu_host_starts_again_after_a_stop_or_a_kill(
    recorders: Path, codes: list[int], code: int, starts: int
):
    done = run_script(tpu_script(JOB, OPTIONS), recorders, codes={"prep": codes})
    assert (done.code, len(done.words_of("prep"))) == (code, starts)


def test_tpu_script_suggests_a_type():
    with pytest.raises(UsageError, match="unknown TPU type") as caught:
        tpu_script(JOB, with_defaults(TpuOptions, {"accelerator": "v5pp-8", "zone": "a"}))
    assert "v5p" in caught.value.hint


def test_tpu_script_rejects_a_name_of_other_characters():
    with pytest.raises(UsageError, match="invalid name of a job"):
        tpu_script(LaunchJob(recipe="r.toml", name="My run"), OPTIONS)
