"""Sources without a family: PyTorch files, torch distributed checkpoints, Flax files, and Orbax items of any tree."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.formats.torch_dcp import METADATA_FILE, read_dcp_folder
from tests.golden.make_dcp import FOLDER, VALUES
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.stored_tensors import orbax_bytes, safetensors_bytes

TREE: dict[str, Any] = {
    "params": {
        "layers_0": {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4)},
        "layers_1": {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4) + 1},
        "a/b": np.arange(3, dtype=np.int32),
    },
    "batch_stats": {"mean": np.arange(5, dtype=np.float16)},
}
TREE_BYTES = {
    "params.layers_0.kernel": TREE["params"]["layers_0"]["kernel"].tobytes(),
    "params.layers_1.kernel": TREE["params"]["layers_1"]["kernel"].tobytes(),
    "params.a/b": TREE["params"]["a/b"].tobytes(),
    "batch_stats.mean": TREE["batch_stats"]["mean"].tobytes(),
}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def exported_bytes(source: str) -> dict[str, bytes]:
    """Convert a source to Orbax and then to safetensors, and return the bytes of each tensor."""
    run_ok("save-init", source, "--mesh", "1,1,2", "--out", "init")
    run_ok("export", "init", "--out", "hf")
    return {name: data for name, (_, _, data) in safetensors_bytes(Path("hf")).items()}


def test_distributed_checkpoint_of_two_ranks_converts():
    expected = dict(VALUES) | {"model.v": VALUES["model.v"].astype(ml_dtypes.bfloat16)}
    assert exported_bytes(str(FOLDER)) == {name: v.tobytes() for name, v in expected.items()}
    shapes = {name: shape for name, (_, shape, _) in safetensors_bytes(Path("hf")).items()}
    assert shapes == {name: values.shape for name, values in expected.items()}
    run_ok("verify", "hf", str(FOLDER))
    run_ok("export", str(FOLDER), "--out", "direct")
    assert safetensors_bytes(Path("direct")) == safetensors_bytes(Path("hf"))


def test_distributed_checkpoint_is_inspected(capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(FOLDER), "--stats"]) == 0
    out = capsys.readouterr().out
    assert "torch distributed checkpoint, 2 files, 7 tensors" in out
    assert "step is not a tensor" in out


def test_distributed_checkpoint_without_metadata_is_rejected(capsys: pytest.CaptureFixture[str]):
    shutil.copytree(FOLDER, "m")
    Path("m", METADATA_FILE).unlink()
    assert "is an incomplete torch distributed checkpoint" in run_failing(
        capsys, 1, "save-init", "./m"
    )


def test_cut_file_of_a_rank_is_rejected(capsys: pytest.CaptureFixture[str]):
    shutil.copytree(FOLDER, "m")
    path = Path("m/__0_0.distcp")
    path.write_bytes(path.read_bytes()[:-100])
    message = run_failing(capsys, 1, "save-init", "./m")
    assert "m/__0_0.distcp is broken" in message
    assert "it is cut short" in message


@pytest.mark.parametrize("name", [METADATA_FILE, "__0_0.distcp"])
def test_damaged_distributed_checkpoint_raises_one_error(name: str):
    shutil.copytree(FOLDER, "m")
    data = Path("m", name).read_bytes()
    rng = random.Random(0)
    n_refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        Path("m", name).write_bytes(damaged)
        try:
            read_dcp_folder(Path("m"))
        except PrepError:
            n_refused += 1
    assert n_refused > 0


def test_torch_file_without_config_converts():
    torch = pytest.importorskip("torch")
    tensors = {
        "h.0.w": torch.arange(6).reshape(2, 3).T,
        "h.1.w": torch.ones(3, 2, dtype=torch.int64),
    }
    Path("m").mkdir()
    torch.save(tensors, "m/pytorch_model.bin")
    assert exported_bytes("./m") == {
        name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()
    }


def test_flax_file_of_any_tree_converts():
    serialization = pytest.importorskip("flax.serialization")
    Path("m").mkdir()
    Path("m/flax_model.msgpack").write_bytes(serialization.msgpack_serialize(TREE))
    assert exported_bytes("./m") == TREE_BYTES


def test_orbax_item_of_any_tree_converts(capsys: pytest.CaptureFixture[str]):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(Path("m").absolute(), {**TREE, "note": "text"})
    assert exported_bytes("./m") == TREE_BYTES
    assert main(["save-init", "./m", "--dry-run", "-v"]) == 0
    assert "dropped note: not an array" in capsys.readouterr().err


def test_orbax_item_with_int4_leaves_converts_to_orbax_only(capsys: pytest.CaptureFixture[str]):
    values = np.array([[1, -8, 7], [2, 3, -1]], ml_dtypes.int4)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(Path("m").absolute(), {"x": values})
    run_ok("save-init", "./m", "--out", "init")
    run_ok("reshard", "init", "--out", "again")
    assert orbax_bytes(Path("again")) == {"x": values.tobytes()}
    loaded: dict[str, Any] = prep.load_params("again", dtype="keep")
    np.testing.assert_array_equal(np.asarray(loaded["x"]), values)
    assert "x is int4" in run_failing(capsys, 1, "export", "init")
