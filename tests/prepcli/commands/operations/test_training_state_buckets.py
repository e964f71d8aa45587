"""Training states in a bucket: written there and read from there, without a local copy of the tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from prepcli.restore.item_reader import open_reader
from tests.helpers.object_server import FakeObjectStore, use_objects
from tests.helpers.other_trainers import HALF, make_folder, train
from tests.helpers.run_cli import Capture, MonkeyPatch, run_json, run_ok
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS
from tests.helpers.training_states import read_leaves, same_state

# A family of all trainers.
QWEN3 = FAMILY_CONFIGS["qwen3"]


@pytest.fixture(autouse=True)
def own_folder() -> None:
    """Stay in the folder of the module's fixture."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[None]:
    """Train to the middle of the run."""
    path = tmp_path_factory.mktemp("buckets")
    with contextlib.chdir(path):
        make_folder(QWEN3)
        train("half", stop_after=HALF)
        yield


@pytest.fixture
def store(monkeypatch: MonkeyPatch) -> Iterator[FakeObjectStore]:
    """Serve an empty bucket."""
    with use_objects(monkeypatch) as store:
        yield store


WORDS = {
    "maxtext": ("--layout", "maxtext"),
    "levanter": ("--layout", "levanter"),
    "tunix": ("--layout", "tunix"),
    "trainer": (),
    "dcp": ("--format", "dcp"),
}


@pytest.mark.parametrize("trainer", WORDS)
def test_state_of_another_trainer_is_read_from_a_bucket(
    folder: None, store: FakeObjectStore, trainer: str, tmp_path: Path, capsys: Capture
):
    url = f"gs://bucket/{trainer}"
    report = run_json(capsys, "export", "half", "--training-state", *WORDS[trainer], "--out", url)
    assert report["next"] == f"prep verify {url} half"
    run_ok("verify", url, f"half/{HALF}")
    out = str(tmp_path / "back")
    run_ok(
        "save-init", url, "--training-state", "--pad-vocab", "8", "--mesh", "1,2,4", "--out", out
    )
    with open_reader(Path(out)) as moved, open_reader(Path("half", str(HALF))) as original:
        assert same_state(read_leaves(moved), read_leaves(original))


def test_state_of_a_run_is_exported_from_a_bucket(
    folder: None, store: FakeObjectStore, tmp_path: Path
):
    for path in Path("half").rglob("*"):
        if path.is_file():
            store.store(f"bucket/{path.as_posix()}", path.read_bytes())
    for name, source in (("local", "half"), ("remote", "gs://bucket/half")):
        run_ok("export", source, "--training-state", "--out", str(tmp_path / name))
    for name in ("optimizer.pt", "scheduler.pt", "trainer_state.json"):
        assert (tmp_path / "remote" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
