"""`prep train` from models of other formats: the same steps as from an init, without an init."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.core.errors import OK, STOPPED, USAGE
from prepcli.formats.manifest import saved_steps
from prepcli.restore.weights_reader import WeightsReader
from tests.helpers.fork_server import start_python
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.object_server import use_objects
from tests.helpers.processes import finish, start_processes
from tests.helpers.range_server import serve_ranges
from tests.helpers.run_cli import run_code, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import read_tensors
from tests.helpers.torch_checkpoints import to_torch, write_bin_folder
from tests.helpers.train_runs import (
    read_losses,
    read_step_files,
    set_keys,
    train_error,
    train_json,
)

pytestmark = pytest.mark.usefixtures("work_dir")

PREP_SCRIPT = "import sys; from prepcli.commands.cli.main import main; sys.exit(main())"
EXPORTS = {
    "hf-flax": ("--layout", "hf-flax"),
    "easylm": ("--layout", "easylm"),
    "maxtext": ("--layout", "maxtext"),
    "exported": (),
}


def train_two_steps(model: str, *words: str) -> dict[str, bytes]:
    """Train two steps, remove the run, and return the files of the second step."""
    assert (
        run_code(
            "train", "recipe.toml", "--stop-after", "2", "--set", f"model.path={model}", *words
        )
        == STOPPED
    )
    assert not Path("runs/recipe/init").exists()
    files = read_step_files("runs/recipe", 2)
    shutil.rmtree("runs")
    return files


def comparable(files: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Split the files of a step into data files, and its manifest without file times and the start's identity."""
    manifest = json.loads(files.pop("prep-manifest.json"))
    return files, {
        key: value
        for key, value in manifest.items()
        if key not in ("plan", "recipe", "digest", "origin")
    }


def make_source(kind: str) -> str:
    """Write the model `tiny` in another format, and return its path."""
    if kind in EXPORTS:
        run_ok("export", "tiny" if EXPORTS[kind] else "tiny-init", *EXPORTS[kind], "--out", kind)
    elif kind == "bin":
        torch = pytest.importorskip("torch")
        tensors = {name: to_torch(value) for name, value in read_tensors(Path("tiny")).items()}
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
        write_bin_folder(Path("tiny"), Path("bin"), tensors, num_files=2)
    return kind


KINDS = ["tiny", "bin", "hf-flax", "easylm", "maxtext", "exported"]


@pytest.mark.parametrize("kind", slow_except(KINDS, ["hf-flax", "maxtext"]))
def test_training_from_a_source_equals_training_from_its_init(kind: str):
    run_ok("save-init", "tiny", "--pad-vocab", "auto", "--mesh", "1,2,4", "--out", "init")
    assert comparable(train_two_steps(make_source(kind))) == comparable(train_two_steps("init"))


def test_exports_equal_exports_of_a_run_from_an_init():
    exports: list[dict[str, bytes]] = []
    for model in ("tiny", "tiny-init"):
        run = f"from-{model}"
        words = ("--out", run, "--set", f"model.path={model}")
        assert run_code("train", "recipe.toml", "--stop-after", "1", *words) == STOPPED
        run_ok("export", run, "--out", "learned")
        exports.append({path.name: path.read_bytes() for path in Path("learned").iterdir()})
        shutil.rmtree("learned")
    manifests = [json.loads(files.pop("prep-manifest.json")) for files in exports]
    assert exports[0] == exports[1]
    assert manifests[0]["tensors"] == manifests[1]["tensors"]


def test_resuming_does_not_need_the_source(capsys: pytest.CaptureFixture[str]):
    shutil.copytree("tiny", "other")
    words = ("--set", "model.path=other")
    assert run_code("train", "recipe.toml", "--stop-after", "1", *words) == STOPPED
    shutil.rmtree("other")
    capsys.readouterr()
    code, report = train_json(capsys, *words)
    assert (code, report["resumed_at"], report["step"]) == (OK, 1, 12)
    assert Path("runs/recipe/12/state/hf/tokenizer.json").is_file()
    run_ok("inspect", "runs/recipe")


def test_dry_run_from_a_folder_reads_no_leaf(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise AssertionError("a leaf was read")

    monkeypatch.setattr(WeightsReader, "read", refuse)
    capsys.readouterr()
    code, report = train_json(capsys, "--dry-run", *set_keys("model.path=tiny", "mesh=1,4,2"))
    assert (code, report["dry_run"]) == (OK, True)
    assert not Path("runs").exists()


def test_folder_of_an_earlier_failed_start_is_accepted():
    Path("runs/recipe/init/tiny-init").mkdir(parents=True)
    assert (
        run_code("train", "recipe.toml", "--stop-after", "1", "--set", "model.path=tiny") == STOPPED
    )
    assert saved_steps(Path("runs/recipe")) == [1]


def test_damaged_tensor_of_an_exported_folder_stops_the_start(capsys: pytest.CaptureFixture[str]):
    make_source("exported")
    path = next(Path("exported").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    _, what, why, _ = train_error(capsys, "--set", "model.path=exported")
    assert what.endswith("in exported is damaged")
    assert "differ from their recorded digest" in why
    assert saved_steps(Path("runs/recipe")) == []
    assert (
        run_code(
            "train",
            "recipe.toml",
            "--stop-after",
            "1",
            "--no-verify",
            "--set",
            "model.path=exported",
        )
        == STOPPED
    )


def test_stream_from_the_hub_equals_training_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    expected = comparable(train_two_steps("tiny"))
    files = {path.name: path.read_bytes() for path in Path("tiny").iterdir()}
    large = tuple(name for name in files if name.endswith(".safetensors"))
    kept = {hashlib.sha256(files[name]).hexdigest(): files[name] for name in large}
    words = (
        "train",
        "recipe.toml",
        "--stop-after",
        "2",
        "--stream",
        "--set",
        "model.path=o/tiny",
        "-q",
    )
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with (
        serve_ranges(kept) as store,
        serve_hub({"o/tiny": FakeRepo(files, large=large, store=store)}) as hub,
    ):
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        running = start_python(PREP_SCRIPT, *words, has_jax=True)
        out, err = running.communicate()
    assert running.returncode == STOPPED, out + err
    assert comparable(read_step_files("runs/recipe", 2)) == expected
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_model_in_an_object_store_is_trained(monkeypatch: pytest.MonkeyPatch):
    expected = comparable(train_two_steps("tiny"))
    objects = {f"bucket/m/tiny/{path.name}": path.read_bytes() for path in Path("tiny").iterdir()}
    with use_objects(monkeypatch, objects):
        assert comparable(train_two_steps("gs://bucket/m/tiny")) == expected


def test_stream_of_a_local_folder_is_rejected(capsys: pytest.CaptureFixture[str]):
    code, what, *_ = train_error(capsys, "--stream", "--set", "model.path=tiny")
    assert (code, what) == (USAGE, "`--stream` has no effect")


@pytest.mark.slow  # test_leaf_loading has two processes
def test_two_processes_start_from_a_folder():
    assert (
        run_code("train", "recipe.toml", "--stop-after", "2", "--set", "model.path=tiny") == STOPPED
    )
    words = (
        "train",
        "recipe.toml",
        "--stop-after",
        "2",
        "--set",
        "model.path=tiny",
        "--out",
        "two",
        "-q",
    )
    results = finish(start_processes(*words, count=2, devices=4))
    assert [code for code, _, _ in results] == [STOPPED] * 2, results
    np.testing.assert_allclose(read_losses("two"), read_losses("runs/recipe"), rtol=1e-5)
    assert Path("two/2/state/hf/tokenizer.json").is_file()
    assert not Path("two/init").exists()
