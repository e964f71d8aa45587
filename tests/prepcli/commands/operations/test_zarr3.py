"""`--storage zarr3` and `zarr3-files`: items with arrays of zarr 3, which Orbax and all commands read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.killing import read_files
from tests.helpers.run_cli import run_json, run_ok
from tests.helpers.tiny_checkpoints import (
    GPT_NEO,
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)
from tests.prepcli.formats.test_orbax import run_orbax

SAVE = ("save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "8")
RAW = ()
ZSTD = ("--compress", "zstd:5")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    monkeypatch.chdir(tmp_path)
    return make_checkpoint(tmp_path / "model", GPT_NEO, "bfloat16")


@pytest.mark.parametrize(("storage", "compress"), [("zarr3", RAW), ("zarr3-files", ZSTD)])
def test_orbax_restores_the_same_tree_from_zarr3(
    tmp_path: Path, model: dict[str, np.ndarray], compress: tuple[str, ...], storage: str
):
    run_ok(*SAVE, "--out", "zarr2")
    run_ok(*SAVE, *compress, "--storage", storage, "--out", "zarr3")
    metadata = json.loads(Path("zarr3/_METADATA").read_text())
    assert metadata["use_zarr3"] is True
    assert metadata["use_ocdbt"] is (storage == "zarr3")
    assert not run_orbax("same", tmp_path / "zarr2", tmp_path / "zarr3")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        tree = checkpointer.restore(Path("zarr3").absolute())
    embedding = tree["params"]["embed"]["tokens"][:131]
    assert embedding.tobytes() == model["transformer.wte.weight"].tobytes()


@pytest.mark.parametrize(("storage", "compress"), [("zarr3", ZSTD), ("zarr3-files", RAW)])
def test_commands_read_zarr3(
    model: dict[str, np.ndarray],
    compress: tuple[str, ...],
    storage: str,
    capsys: pytest.CaptureFixture[str],
):
    run_ok(*SAVE, *compress, "--storage", storage, "--out", "zarr3")
    run_ok("verify", "zarr3")
    run_ok("verify", "zarr3", "./model")
    run_ok("verify", "zarr3", "--chain")
    assert run_json(capsys, "inspect", "zarr3")["source"]["mesh"] == "1,2,4"
    run_ok("reshard", "zarr3", "--no-scan", "--storage", storage, "--out", "unstacked")
    run_ok("verify", "unstacked", "./model")
    run_ok("export", "unstacked", "--out", "back")
    assert_same(read_tensors(Path("back")), model)
    params = prep.load_params("zarr3", "1,2,4", dtype="keep")
    tokens = np.asarray(params["embed"]["tokens"])[:131]
    assert tokens.tobytes() == model["transformer.wte.weight"].tobytes()


def test_zarr3_items_are_deterministic(model: dict[str, np.ndarray]):
    run_ok(*SAVE, "--storage", "zarr3", "--out", "a")
    run_ok(*SAVE, "--storage", "zarr3", "--out", "b", "--memory", "128MiB", "--workers", "2")
    assert read_files(Path("a")) == read_files(Path("b"))


def test_zarr3_files_are_the_keys_of_the_array(model: dict[str, np.ndarray]):
    run_ok(*SAVE, "--storage", "zarr3-files", "--out", "out")
    manifest = json.loads(Path("out/prep-manifest.json").read_text())
    assert manifest["storage"] == "zarr3-files"
    assert not Path("out/manifest.ocdbt").exists()
    for name, leaf in manifest["leaves"].items():
        counts = [-(-n // chunk) for n, chunk in zip(leaf["shape"], leaf["chunk"])]
        expected = {"/".join(map(str, ("c", *index))) for index in np.ndindex(*counts)}
        assert read_files(Path("out") / name).keys() == {"zarr.json", *expected}


def _flip_a_byte(data_file: Path) -> None:
    data = bytearray(data_file.read_bytes())
    # Zeros may be the gap between two chunks.
    position = next(number for number, byte in enumerate(data) if byte)
    data[position] ^= 1
    data_file.write_bytes(data)


def test_verify_finds_a_flipped_bit_in_zarr3(model: dict[str, np.ndarray]):
    run_ok(*SAVE, "--storage", "zarr3", "--out", "out")
    _flip_a_byte(max(Path("out/d").iterdir(), key=lambda path: path.stat().st_size))
    assert main(["verify", "out", "-q"]) == 1


def test_verify_finds_a_flipped_bit_in_zarr3_files(model: dict[str, np.ndarray]):
    run_ok(*SAVE, "--storage", "zarr3-files", "--out", "out")
    _flip_a_byte(Path("out/params.layers.attn.k.weight/c/1/0/0/0"))
    assert main(["verify", "out", "-q"]) == 1


# Exports for other trainers


@pytest.mark.parametrize(
    ("layout", "storage"),
    [("maxtext", "zarr3-files"), ("maxtext-unscanned", "zarr3"), ("tunix", "files")],
)
def test_trainer_export_in_each_storage_is_restored_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, storage: str
):
    monkeypatch.chdir(tmp_path)
    tensors = make_checkpoint(tmp_path / "model", GROUPED_QUERY | {"model_type": "llama"})
    run_ok("export", "./model", "--layout", layout, "--out", "database")
    run_ok("export", "./model", "--layout", layout, "--storage", storage, "--out", "out")
    item = "0/model_params" if layout == "tunix" else "0/items"
    metadata = json.loads(Path("out", item, "_METADATA").read_text())
    assert metadata["use_ocdbt"] is (storage == "zarr3")
    assert metadata["use_zarr3"] is (storage != "files")
    assert not run_orbax("same", tmp_path / "database" / item, tmp_path / "out" / item)
    run_ok("verify", "out", "./model")
    run_ok("save-init", "./out", "--out", "again")
    run_ok("export", "again", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_storage_of_a_layout_without_an_item_is_refused(
    model: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    words = ["export", "./model", "--layout", "hf-flax", "--storage", "zarr3", "-q"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "`--storage zarr3` is not supported with `--layout hf-flax`" in error
    assert "maxtext" in error
