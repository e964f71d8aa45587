"""`prep train --out gs://…`: runs in an object store equal local runs, also after a kill, a stop or a failure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, STOPPED, USAGE
from prepcli.formats.manifest import MANIFEST_FILE, RECIPE_FILE, listed_steps
from tests.helpers.fork_server import ForkedProcess
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.processes import finish, start_processes
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import make_training_folder
from tests.helpers.waiting import wait_until
from trainer.run.run_record import ENVIRONMENT_FILE
from trainer.run.storage import TOKENS_FOLDER
from trainer.training.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[3]
URL = "gs://bucket/runs/tiny"
PREFIX = "bucket/runs/tiny/"
LOCAL = Path("runs/gs/bucket/runs/tiny")
SETTINGS = (
    "mesh=1,2,2",
    "checkpoint.every=1",
    "checkpoint.keep=2",
    "data.holdout=0",
    "train.steps=4",
)
OVERRIDES = set_keys(*SETTINGS)
EIGHT_DEVICES = set_keys("mesh=1,2,4", *SETTINGS[1:])


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeObjectStore]:
    """Make a training folder, and serve an empty store that the environment names."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "PREP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    with use_objects(monkeypatch) as fake:
        yield fake


def saved(store: FakeObjectStore) -> list[int]:
    return listed_steps(store.objects_below(PREFIX))


def digests(manifest: bytes) -> dict[str, Any]:
    content = json.loads(manifest)
    return {key: content[key] for key in ("tensors", "slots", "others")}


def bucket_digests(store: FakeObjectStore, step: int) -> dict[str, Any]:
    return digests(store.objects[f"{PREFIX}{step}/{MANIFEST_FILE}"])


def local_digests(run: str, step: int) -> dict[str, Any]:
    return digests(Path(run, str(step), MANIFEST_FILE).read_bytes())


def start(count: int, *words: str, env: dict[str, str] | None = None) -> list[ForkedProcess]:
    """Start a training in `count` processes with four devices together."""
    command = ("train", "recipe.toml", "--out", URL, *OVERRIDES, *words)
    return start_processes(
        *command, count=count, devices=4 // count, env={"PYTHONPATH": str(ROOT), **(env or {})}
    )


def run_ok(count: int, *words: str, code: int = OK) -> None:
    results = finish(start(count, *words))
    assert [result[0] for result in results] == [code] * count, results


def train(*words: str) -> int:
    return main(["train", "recipe.toml", *EIGHT_DEVICES, *words])


def test_stopped_and_resumed_run_equals_a_local_run(
    store: FakeObjectStore, capsys: pytest.CaptureFixture[str]
):
    assert train("--out", "local", "-q") == OK
    assert train("--out", URL, "--stop-after", "2") == STOPPED
    assert "cannot be locked" not in capsys.readouterr().err
    assert saved(store) == [1, 2]
    (LOCAL / METRICS_FILE).unlink()  # as on another host
    assert train("--out", URL, "--json") == OK
    report = json.loads(capsys.readouterr().out)
    assert (report["resumed_at"], report["output"], report["run"]) == (2, f"{URL}/4", URL)
    assert saved(store) == [3, 4]
    assert bucket_digests(store, 4) == local_digests("local", 4)
    names = {path.partition("/")[0] for path in store.objects_below(PREFIX)}
    assert names == {"3", "4", RECIPE_FILE, METRICS_FILE, ENVIRONMENT_FILE}
    Path("uploaded.jsonl").write_bytes(store.objects[f"{PREFIX}{METRICS_FILE}"])
    losses = [
        [line["loss"] for line in read_metrics(path) if "loss" in line]
        for path in (Path("uploaded.jsonl"), Path("local", METRICS_FILE))
    ]
    assert losses[0] == losses[1]
    assert (LOCAL / TOKENS_FOLDER).is_dir()
    assert not Path("gs:").exists()


def test_event_files_need_a_folder(store: FakeObjectStore, capsys: pytest.CaptureFixture[str]):
    assert train("--out", URL, "--set", "log.tensorboard=true", "-q") == USAGE
    assert '`log.tensorboard = "FOLDER"`' in capsys.readouterr().err
    assert store.objects == {}


def test_other_objects_are_not_a_run(store: FakeObjectStore, capsys: pytest.CaptureFixture[str]):
    store.objects[f"{PREFIX}photo.png"] = b"x"
    assert train("--out", URL, "-q") == FAILED
    assert f"{URL} already exists and is not a run" in capsys.readouterr().err
    assert list(store.objects) == [f"{PREFIX}photo.png"]


def test_refused_save_keeps_earlier_steps(
    store: FakeObjectStore, capsys: pytest.CaptureFixture[str]
):
    store.failing_requests = f"PUT {PREFIX}2/"
    assert train("--out", URL, "-q") == FAILED
    error = capsys.readouterr().err
    assert f"cannot write {URL}/2" in error
    assert "GOOGLE_APPLICATION_CREDENTIALS" in error
    assert saved(store) == [1]
    store.failing_requests = "\0"
    assert train("--out", URL, "--json") == OK
    assert json.loads(capsys.readouterr().out)["resumed_at"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("place", ["state/d/", "state/manifest.ocdbt", MANIFEST_FILE])
@pytest.mark.parametrize("count", [1, 2])
def test_kill_in_an_upload_keeps_earlier_steps(store: FakeObjectStore, count: int, place: str):
    run_ok(count, "--set", "checkpoint.keep='all'")
    expected = {step: bucket_digests(store, step) for step in (2, 4)}
    store.objects.clear()
    store.requests.clear()
    line = f"PUT {PREFIX}3/{place}"
    store.failing_requests, store.stall = line, "silent"
    running = start(count, "--set", "checkpoint.keep='all'")
    wait_until(lambda: any(line in request for request in store.requests))
    for process in running:
        process.kill()
    finish(running)
    assert saved(store) == [1, 2]
    store.failing_requests = "\0"
    run_ok(count, "--set", "checkpoint.keep='all'")
    assert {step: bucket_digests(store, step) for step in (2, 4)} == expected
    assert not [path for path in store.objects_below(PREFIX) if "/.prep/" in path]


@pytest.mark.slow
def test_processes_save_to_a_bucket_as_to_a_folder(store: FakeObjectStore):
    """Two processes on a mesh of 2 x 2 devices, resumed by four and by one."""
    words = set_keys("checkpoint.every=1", "mesh=1,2,2")
    folder = ["train", "recipe.toml", "--out", "local", *OVERRIDES]
    results = finish(start_processes(*folder, count=2, devices=2, env={"PYTHONPATH": str(ROOT)}))
    assert [code for code, _, _ in results] == [OK] * 2, results
    run_ok(2, *words)
    assert bucket_digests(store, 4) == local_digests("local", 4)
    assert len(store.objects_below(f"{PREFIX}4/state/d/")) == 3, "a file per process, and the index"
    run_ok(2, *words, "--restart", "--stop-after", "1", code=STOPPED)
    run_ok(4, *words, "--stop-after", "1", code=STOPPED)
    run_ok(1, *words)
    assert saved(store) == [3, 4]
    assert main(["verify", URL, "-q"]) == OK
