"""`--storage files`: each leaf is a folder with one file per chunk, which Orbax and all commands read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.engine import files
from prepcli.execution.folder_store import FolderStore
from prepcli.sources.openers import orbax_item
from tests.helpers.killing import read_files
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint, read_tensors, same_bits
from tests.prepcli.formats.test_orbax import run_orbax

SAVE = ("save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "8")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    monkeypatch.chdir(tmp_path)
    return make_checkpoint(tmp_path / "model", GPT_NEO, "bfloat16")


@pytest.mark.parametrize("compress", [(), ("--compress", "zstd")], ids=["raw", "zstd"])
def test_orbax_restores_equal_trees_from_both_storages(
    tmp_path: Path, model: dict[str, np.ndarray], compress: tuple[str, ...]
):
    run_ok(*SAVE, "--out", "database")
    run_ok(*SAVE, *compress, "--storage", "files", "--out", "files")
    assert not (tmp_path / "files/manifest.ocdbt").exists()
    assert not (tmp_path / "files/d").exists()
    assert not run_orbax("same", tmp_path / "database", tmp_path / "files")


def test_each_chunk_is_a_file_of_its_leaf(tmp_path: Path, model: dict[str, np.ndarray]):
    run_ok(*SAVE, "--storage", "files", "--out", "out")
    manifest = json.loads((tmp_path / "out/prep-manifest.json").read_text())
    assert manifest["storage"] == "files"
    for name, leaf in manifest["leaves"].items():
        counts = [-(-n // chunk) for n, chunk in zip(leaf["shape"], leaf["chunk"])]
        expected = {".".join(map(str, index)) for index in np.ndindex(*counts)}
        stored = {path.name for path in (tmp_path / "out" / name).iterdir()}
        assert stored == {".zarray", *expected}


@pytest.mark.parametrize("compress", [(), ("--compress", "zstd:9")], ids=["raw", "zstd"])
def test_commands_read_chunk_files(
    tmp_path: Path, model: dict[str, np.ndarray], compress: tuple[str, ...]
):
    run_ok(*SAVE, *compress, "--storage", "files", "--out", "files")
    run_ok("verify", "files")
    run_ok("verify", "files", "./model")
    run_ok("verify", "files", "--chain")
    run_ok("inspect", "files")
    run_ok("reshard", "files", "--no-scan", "--storage", "files", "--out", "unstacked")
    run_ok("verify", "unstacked", "./model")
    run_ok("reshard", "files", "--out", "database")
    assert (tmp_path / "database/manifest.ocdbt").exists()
    run_ok("export", "unstacked", "--out", "back")
    tensors = read_tensors(tmp_path / "back")
    assert tensors.keys() == model.keys()
    assert all(same_bits(tensors[name], model[name]) for name in model)


@pytest.mark.parametrize("compress", [(), ("--compress", "zstd")], ids=["raw", "zstd"])
def test_chunk_files_are_deterministic(
    tmp_path: Path, model: dict[str, np.ndarray], compress: tuple[str, ...]
):
    words = [*SAVE, *compress, "--storage", "files"]
    run_ok(*words, "--out", "a")
    run_ok(*words, "--out", "b", "--memory", "128MiB", "--workers", "2")
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")


@pytest.mark.parametrize("compress", [(), ("--compress", "zstd")], ids=["raw", "zstd"])
def test_unpublished_chunk_files_resume(
    tmp_path: Path,
    model: dict[str, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    compress: tuple[str, ...],
):
    words = [*SAVE, *compress, "--storage", "files"]
    run_ok(*words, "--out", "whole")
    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "publish", fail)
        assert main([*words, "--out", "out", "-q"]) == 1
    run_ok(*words, "--out", "out")
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")


def fail(*_: object) -> None:
    raise PrepError("the power is gone")


def test_verify_finds_a_flipped_bit_in_a_chunk_file(
    tmp_path: Path, model: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    run_ok(*SAVE, "--storage", "files", "--out", "out")
    chunk = tmp_path / "out/params.layers.attn.k.weight/1.0.0.0"
    data = bytearray(chunk.read_bytes())
    data[7] ^= 1
    chunk.write_bytes(data)
    assert main(["verify", "out", "--progress", "none"]) == 1
    assert "layers.attn.k.weight" in capsys.readouterr().err


def test_missing_chunk_file_is_damage(
    tmp_path: Path, model: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    run_ok(*SAVE, "--storage", "files", "--out", "out")
    (tmp_path / "out/params.layers.attn.k.weight/1.0.0.0").unlink()
    assert main(["verify", "out", "--progress", "none"]) == 1
    assert "chunk 1.0.0.0 of `params.layers.attn.k.weight` is missing" in capsys.readouterr().err
    assert main([*SAVE, "--storage", "files", "--out", "out", "-q"]) == 1
    assert "its files are damaged" in capsys.readouterr().err


def test_damaged_array_document_cannot_be_accepted(
    tmp_path: Path, model: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    run_ok(*SAVE, "--storage", "files", "--out", "out")
    name = "params.layers.attn.k.weight/.zarray"
    (tmp_path / "out" / name).write_text("{}")
    assert main(["verify", "out", "-q"]) == 1
    error = capsys.readouterr().err
    assert f"{name} is damaged" in error
    assert "--accept" not in error
    assert main(["verify", "out", "--accept", name, "-q"]) != 0


def test_other_storage_is_another_output(
    tmp_path: Path, model: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    run_ok(*SAVE, "--out", "out")
    assert main([*SAVE, "--storage", "files", "--out", "out", "-q"]) == 1
    assert "exists and is something else" in capsys.readouterr().err


def test_leaf_with_a_slash_in_its_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"model_type": "unknown"}))
    save_file({"a/b": np.ones((2, 3), np.float32)}, tmp_path / "model/model.safetensors")
    assert main(["save-init", "./model", "--storage", "files", "--out", "out", "-q"]) == 2
    error = capsys.readouterr().err
    assert "`--storage files` cannot store `params.a/b`" in error
    assert "`--storage ocdbt` has no such limit" in error
    assert not (tmp_path / "out.partial").exists()
    run_ok("save-init", "./model", "--out", "out")


def test_limit_of_kept_files_does_not_change_the_output(
    tmp_path: Path, model: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
):
    words = [*SAVE, "--storage", "files"]
    run_ok(*words, "--out", "a")
    monkeypatch.setattr(files, "MAX_KEPT_FILES", 5)
    monkeypatch.setattr(orbax_item, "MAX_OPEN_FILES", 5)
    run_ok(*words, "--out", "b")
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")
    run_ok("verify", "b", "./model")
