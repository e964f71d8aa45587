"""`--compress zstd`: Orbax restores the output, all commands read it, and its bytes are deterministic."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from prepcli.algebra.boxes import full_box
from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.engine.fills import numpy_dtype
from prepcli.execution.folder_store import FolderStore
from prepcli.restore.item_reader import open_reader
from tests.helpers.killing import read_files
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint, read_tensors, same_bits
from tests.prepcli.formats.test_orbax import run_orbax


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    monkeypatch.chdir(tmp_path)
    return make_checkpoint(tmp_path / "model", GPT_NEO)


def test_orbax_restores_compressed_checkpoint(tmp_path: Path, model: dict[str, np.ndarray]):
    run_ok("save-init", "./model", "--out", "raw", "--mesh", "1,2,4", "--pad-vocab", "8")
    run_ok(
        "save-init",
        "./model",
        "--out",
        "packed",
        "--mesh",
        "1,2,4",
        "--pad-vocab",
        "8",
        "--compress",
        "zstd:3",
    )
    expected = {}
    for path in ("raw", "packed"):
        leaves = {}
        with open_reader(tmp_path / path) as reader:
            for name, leaf in reader.leaves.items():
                array = np.full(leaf.shape, 77, numpy_dtype(leaf.dtype))
                reader.read(name, {full_box(leaf.shape): array})
                leaves[name] = [leaf.dtype, list(leaf.shape), array.tobytes().hex()]
        expected[path] = leaves
    assert expected["raw"] == expected["packed"]
    (tmp_path / "expected.json").write_text(json.dumps(expected["raw"]))
    assert not run_orbax("compare", tmp_path / "expected.json", tmp_path / "packed")


CASES = [(base, dtype) for base in (GPT_NEO, LLAMA) for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(
    ("base", "dtype"), slow_except(CASES, [(GPT_NEO, "bfloat16"), (LLAMA, "float32")])
)
def test_commands_read_compressed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: dict, dtype: str
):
    monkeypatch.chdir(tmp_path)
    tensors = make_checkpoint(tmp_path / "model", base, dtype)
    run_ok("save-init", "./model", "--out", "packed", "--compress", "zstd")
    run_ok("verify", "packed")
    run_ok("verify", "packed", "./model")
    run_ok(
        "reshard",
        "packed",
        "--mesh",
        "1,4,1",
        "--no-scan",
        "--compress",
        "zstd:9",
        "--out",
        "again",
    )
    run_ok("verify", "again")
    run_ok("reshard", "again", "--mesh", "1,1,1", "--out", "raw")
    run_ok("export", "again", "--out", "back")
    for folder in ("again", "raw"):
        run_ok("verify", folder, "./model")
    actual = read_tensors(tmp_path / "back")
    assert actual.keys() == tensors.keys()
    assert all(same_bits(actual[name], tensors[name]) for name in tensors)


def test_compressed_output_is_deterministic(tmp_path: Path, model: dict[str, np.ndarray]):
    words = ["save-init", "./model", "--mesh", "1,2,1", "--compress", "zstd"]
    run_ok(*words, "--out", "a")
    run_ok(*words, "--out", "b", "--memory", "32MiB")
    run_ok(*words, "--out", "c", "--workers", "2")
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b") == read_files(tmp_path / "c")


def test_compression_ratio_is_reported(
    tmp_path: Path, model: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    assert main(["save-init", "./model", "--out", "packed", "--compress", "zstd", "--json"]) == 0
    output = capsys.readouterr()
    compression = json.loads(output.out)["compress"]
    stored = sum(
        json.loads((tmp_path / "packed/prep-manifest.json").read_text())["packed"].values()
    )
    assert compression == {
        "with": "zstd:1",
        "raw": compression["raw"],
        "stored": stored,
        "ratio": round(stored / compression["raw"], 4),
    }
    assert f"{compression['ratio']:.2f} x, with zstd:1" in output.err


def test_damaged_compressed_output_is_not_done(
    tmp_path: Path, model: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    words = ["save-init", "./model", "--out", "packed", "--compress", "zstd"]
    run_ok(*words)
    assert main(words) == 0
    assert "already done" in capsys.readouterr().err
    name = next(iter(json.loads((tmp_path / "packed/prep-manifest.json").read_text())["packed"]))
    (tmp_path / "packed" / name).write_bytes(b"short")
    assert main(words) == 1
    assert "its files are damaged" in capsys.readouterr().err


def test_verify_finds_damaged_compressed_chunk(
    tmp_path: Path, model: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    run_ok("save-init", "./model", "--out", "packed", "--compress", "zstd")
    name = next(iter(json.loads((tmp_path / "packed/prep-manifest.json").read_text())["packed"]))
    data = bytearray((tmp_path / "packed" / name).read_bytes())
    data[len(data) // 2] ^= 16
    (tmp_path / "packed" / name).write_bytes(data)
    assert main(["verify", "packed", "--progress", "none"]) == 1


def test_unknown_compression_is_a_usage_error(
    tmp_path: Path, model: dict[str, np.ndarray], capsys: pytest.CaptureFixture[str]
):
    assert main(["save-init", "./model", "--compress", "unknown"]) == 2
    assert "zstd, and zstd:1 to zstd:19" in capsys.readouterr().err


def test_resumed_compression_needs_no_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model
):
    words = ["save-init", "./model", "--out", "out", "--compress", "zstd", "-q"]
    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "publish", fail)
        assert main(words) == 1
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        assert main(words) == 0
    run_ok("verify", "out", "./model")


def fail(*_: object) -> None:
    raise PrepError("the power is gone")
