"""`--storage zarr3`: items with arrays of zarr 3, which Orbax and all commands read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

import prepcli as prep
from prepcli.cli.main import main
from tests.helpers.killing import read_files
from tests.helpers.run_cli import run_json, run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, assert_same, make_checkpoint, read_tensors
from tests.prepcli.formats.test_orbax import run_orbax

SAVE = ("save-init", "./model", "--mesh", "1,2,4", "--pad-vocab", "8")
COMPRESS = pytest.mark.parametrize("compress", [(), ("--compress", "zstd:5")], ids=["raw", "zstd"])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    monkeypatch.chdir(tmp_path)
    return make_checkpoint(tmp_path / "model", GPT_NEO, "bfloat16")


@COMPRESS
def test_orbax_restores_the_same_tree_from_zarr3(
    tmp_path: Path, model: dict[str, np.ndarray], compress: tuple[str, ...]
):
    run_ok(*SAVE, "--out", "zarr2")
    run_ok(*SAVE, *compress, "--storage", "zarr3", "--out", "zarr3")
    assert json.loads(Path("zarr3/_METADATA").read_text())["use_zarr3"] is True
    assert not run_orbax("same", tmp_path / "zarr2", tmp_path / "zarr3")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=True)) as checkpointer:
        tree = checkpointer.restore(Path("zarr3").absolute())
    embedding = tree["params"]["embed"]["tokens"][:131]
    assert embedding.tobytes() == model["transformer.wte.weight"].tobytes()


@COMPRESS
def test_commands_read_zarr3(
    model: dict[str, np.ndarray],
    compress: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
):
    run_ok(*SAVE, *compress, "--storage", "zarr3", "--out", "zarr3")
    run_ok("verify", "zarr3")
    run_ok("verify", "zarr3", "./model")
    run_ok("verify", "zarr3", "--chain")
    assert run_json(capsys, "inspect", "zarr3")["source"]["mesh"] == "1,2,4"
    run_ok("reshard", "zarr3", "--no-scan", "--storage", "zarr3", "--out", "unstacked")
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


def test_verify_finds_a_flipped_bit_in_zarr3(model: dict[str, np.ndarray]):
    run_ok(*SAVE, "--storage", "zarr3", "--out", "out")
    data_file = max(Path("out/d").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(data_file.read_bytes())
    # Zeros may be the gap between two chunks.
    position = next(number for number, byte in enumerate(data) if byte)
    data[position] ^= 1
    data_file.write_bytes(data)
    assert main(["verify", "out", "-q"]) == 1
