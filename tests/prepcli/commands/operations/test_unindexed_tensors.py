"""Tensors in shards that the index assigns to another file, or does not name: ignored with a note, or refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prepcli.commands.cli.main import main
from tests.helpers.fork_server import start_python
from tests.helpers.golden_flax import LLAMA as FLAX_LLAMA
from tests.helpers.golden_flax import decode_msgpack
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.object_server import use_objects
from tests.helpers.pickle_builder import make_torch_file
from tests.helpers.run_cli import exported_tensors, run_failing, run_json, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, make_checkpoint, read_tensors

pytestmark = pytest.mark.waits

INDEX = "model.safetensors.index.json"
OVERLAY = "model-overlay.safetensors"
REPLACED = "model.layers.0.self_attn.q_proj.weight"
PREP_SCRIPT = "import sys; from prepcli.commands.cli.main import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_overlay(folder: Path) -> dict[str, np.ndarray]:
    """Write a model whose index takes one tensor from an overlay, and names no draft head. Return its tensors."""
    tensors = make_checkpoint(folder, LLAMA)
    index = json.loads((folder / INDEX).read_text())
    shard = index["weight_map"][REPLACED]
    stored = load_file(folder / shard)
    earlier = {REPLACED: np.zeros_like(tensors[REPLACED]), "draft.fc": np.zeros(4, np.float32)}
    save_file(stored | earlier, folder / shard)
    save_file({REPLACED: tensors[REPLACED]}, folder / OVERLAY)
    index["weight_map"][REPLACED] = OVERLAY
    (folder / INDEX).write_text(json.dumps(index))
    return tensors


def folder_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_note(error: str, source: str, count: int) -> None:
    lines = [line for line in error.splitlines() if "not in its index" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{count} tensors of {source} are ignored")


def test_tensors_outside_of_the_index_are_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_overlay(Path("m"))
    assert main(["save-init", "./m", "--out", "init"]) == 0
    error = capsys.readouterr().err
    assert_note(error, "./m", 2)
    assert f": {REPLACED}" in error
    assert ": draft.fc" in error
    assert_same(exported_tensors("init"), tensors)
    dropped = json.loads(Path("init/prep-manifest.json").read_text())["dropped"]
    assert {entry["rule"] for entry in dropped} == {"not in the index"}
    assert {entry["name"].partition(": ")[2] for entry in dropped} == {REPLACED, "draft.fc"}


@pytest.mark.parametrize("command", ["pad-vocab", "verify", "generate"])
def test_each_reader_notes_unindexed_tensors(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = make_overlay(Path("m"))
    make_checkpoint(Path("same"), LLAMA)
    words = {
        "pad-vocab": ["./m", "--size", "131", "--out", "padded"],
        "verify": ["./m", "./same"],
        "generate": ["./m", "--tokens", "1", "--max-new-tokens", "1"],
    }
    assert main([command, *words[command]]) == 0
    assert_note(capsys.readouterr().err, "./m", 2)
    if command == "pad-vocab":
        assert_same(read_tensors(Path("padded")), tensors)


def test_inspect_lists_unindexed_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_overlay(Path("m"))
    report = run_json(capsys, "inspect", "./m")
    assert {tensor["name"] for tensor in report["tensors"]} == tensors.keys()
    assert [line.endswith("is not in the index") for line in report["source"]["others"]] == [
        True,
        True,
    ]


def test_strict_refuses_unindexed_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    make_overlay(Path("m"))
    for command in ("save-init", "pad-vocab"):
        error = run_failing(capsys, 1, command, "./m", "--strict", "--out", "init")
        assert "2 tensors of ./m are not in its index" in error
        assert REPLACED in error
        assert "remove" not in error
    assert not Path("init").exists()


def test_strict_accepts_unindexed_tensors_that_are_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors = make_overlay(Path("m"))
    command = ("save-init", "./m", "--strict", "--drop", "draft*")
    error = run_failing(capsys, 1, *command, "--out", "init")
    assert "1 tensor of ./m is not in its index\n  why: " in error
    assert REPLACED in error
    assert "draft.fc" not in error
    run_ok(*command, "--drop", REPLACED, "--out", "init")
    assert_same(exported_tensors("init"), tensors)


def test_drop_may_name_an_unindexed_tensor() -> None:
    tensors = make_overlay(Path("m"))
    run_ok("save-init", "./m", "--drop", "draft*", "--out", "init")
    assert_same(exported_tensors("init"), tensors)


def test_index_of_torch_files_decides(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_checkpoint(Path("m"), LLAMA)
    Path("b").mkdir()
    shutil.copy("m/config.json", "b")
    rest = {name: value for name, value in tensors.items() if name != REPLACED}
    earlier = {REPLACED: np.zeros_like(tensors[REPLACED])}
    Path("b/weights.bin").write_bytes(make_torch_file(rest | earlier))
    Path("b/overlay.bin").write_bytes(make_torch_file({REPLACED: tensors[REPLACED]}))
    weight_map = dict.fromkeys(rest, "weights.bin") | {REPLACED: "overlay.bin"}
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    Path("b/pytorch_model.bin.index.json").write_text(index)
    run_failing(capsys, 1, "save-init", "./b", "--strict", "--out", "init")
    assert main(["save-init", "./b", "--out", "init"]) == 0
    assert f"weights.bin: {REPLACED}" in capsys.readouterr().err
    assert_same(exported_tensors("init"), tensors)


def test_index_of_flax_files_decides(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(FLAX_LLAMA / "sharded", "f")
    index_path = Path("f/flax_model.msgpack.index.json")
    index = json.loads(index_path.read_text())
    shard = Path("f", sorted({*index["weight_map"].values()})[-1])
    content = shard.read_bytes()
    path, array = next(iter(decode_msgpack(content, "flax").items()))
    Path("f/overlay.msgpack").write_bytes(content)
    shard.write_bytes(content.replace(array.tobytes(), bytes(array.nbytes)))
    index["weight_map"]["/".join(path)] = "overlay.msgpack"
    index_path.write_text(json.dumps(index))
    run_failing(capsys, 1, "save-init", "./f", "--strict", "--out", "init")
    assert main(["save-init", "./f", "--out", "init"]) == 0
    assert "not in its index" in capsys.readouterr().err
    assert_same(exported_tensors("init"), read_tensors(FLAX_LLAMA / "hf"))


def run_with_hub(files: Mapping[str, bytes], *words: str) -> tuple[dict[str, object], str]:
    """Run a command with the model `o/m` on a hub. Return its report and stderr."""
    large = tuple(name for name in files if name.endswith(".safetensors"))
    with serve_hub({"o/m": FakeRepo(files, large=large)}) as hub:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment = inherited | hub.environment(Path.cwd() / "home")
        process = start_python(PREP_SCRIPT, *words, "--json", cwd=Path.cwd(), env=environment)
        out, error = process.communicate()
    return json.loads(out), error.decode()


@pytest.mark.parametrize("options", [(), ("--stream",)], ids=["download", "stream"])
def test_index_of_a_hub_model_decides(options: tuple[str, ...]) -> None:
    tensors = make_overlay(Path("m"))
    unused = save_unused(Path("unused.safetensors"))
    files = {**folder_files(Path("m")), "consolidated.safetensors": unused}
    report, error = run_with_hub(files, "save-init", "o/m", "--out", "init", *options)
    assert report["ok"], report
    assert_note(error, "o/m", 2)
    assert_same(exported_tensors("init"), tensors)
    assert not list(Path("home").rglob("consolidated.safetensors"))
    refused, _ = run_with_hub(files, "save-init", "o/m", "--strict", "--out", "other", *options)
    assert not refused["ok"]


def save_unused(path: Path) -> bytes:
    """Write weights that no index names, and return their bytes."""
    save_file({"layers.0.attention.wq.weight": np.zeros(4, np.float32)}, path)
    return path.read_bytes()


def test_index_in_a_bucket_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = make_overlay(Path("m"))
    objects = {f"bucket/m/{name}": data for name, data in folder_files(Path("m")).items()}
    with use_objects(monkeypatch, objects):
        assert main(["save-init", "gs://bucket/m", "--out", "init"]) == 0
        assert_note(capsys.readouterr().err, "gs://bucket/m", 2)
        run_failing(capsys, 1, "save-init", "gs://bucket/m", "--strict", "--out", "other")
    assert_same(exported_tensors("init"), tensors)


def test_tensor_missing_from_its_indexed_file_is_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_overlay(Path("m"))
    index = json.loads(Path("m", INDEX).read_text())
    index["weight_map"]["draft.fc"] = OVERLAY
    Path("m", INDEX).write_text(json.dumps(index))
    error = run_failing(capsys, 1, "save-init", "./m", "--out", "init")
    assert "1 not in the file that the index names: `draft.fc`" in error
    assert f"get {OVERLAY} again" in error
