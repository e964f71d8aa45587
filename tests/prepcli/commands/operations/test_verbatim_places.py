"""Checkpoints without a family on the hub, in buckets, and converted by several processes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.stores import byte_ranges
from tests.helpers.fork_server import PREP, run_prep, run_python, run_two_processes
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.object_server import use_objects
from tests.helpers.range_server import serve_ranges
from tests.helpers.run_cli import run_ok
from tests.helpers.stored_tensors import StoredTensor, safetensors_bytes, write_safetensors

CONFIG = b'{"model_type": "unheard_of"}\n'


@pytest.fixture(autouse=True)
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, StoredTensor]:
    """Write a model `m` of 3 MB with code to the working folder, and return its tensors."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    tensors: dict[str, StoredTensor] = {"bias": ("F16", (7,), rng.bytes(14))}
    for layer in range(3):
        tensors[f"h.{layer}.w"] = ("BF16", (512, 1024), rng.bytes(1 << 20))
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), tensors)
    Path("m/config.json").write_bytes(CONFIG)
    Path("m/modeling.py").write_bytes(b"x = 1\n")
    Path("m/tokenizer.json").write_bytes(b"{}")
    return tensors


def read_files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@pytest.mark.parametrize("stream", [("--stream",), ()], ids=["streamed", "downloaded"])
def test_hub_model_converts(
    tensors: dict[str, StoredTensor], tmp_path: Path, stream: tuple[str, ...]
):
    files = read_files("m")
    weights = files["model.safetensors"]
    with serve_ranges({hashlib.sha256(weights).hexdigest(): weights}) as store:
        repos = {"o/m": FakeRepo(files, large=("model.safetensors",), store=store)}
        with serve_hub(repos) as hub:
            environment = {**os.environ, **hub.environment(tmp_path / "home")}
            words = ("save-init", "o/m", "--copy", "*.py", "--out", "init", *stream)
            process = run_python(PREP, *words, cwd=tmp_path, env=environment)
    assert process.returncode == 0, process.stderr
    assert Path("init/hf/modeling.py").read_bytes() == b"x = 1\n"
    run_ok("export", "init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors
    assert Path("hf/config.json").read_bytes() == CONFIG


def test_bucket_is_source_and_target(
    tensors: dict[str, StoredTensor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(byte_ranges, "FIRST_WAIT_S", 0.001)
    objects = {f"bucket/m/{name}": data for name, data in read_files("m").items()}
    with use_objects(monkeypatch, objects):
        run_ok("save-init", "gs://bucket/m", "--mesh", "1,1,2", "--out", "gs://bucket/init")
        run_ok("verify", "gs://bucket/init", "./m")
        run_ok("export", "gs://bucket/init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors
    assert Path("hf/config.json").read_bytes() == CONFIG


def test_several_processes_write_one_output(tensors: dict[str, StoredTensor], tmp_path: Path):
    words = ("save-init", "./m", "--mesh", "1,2,2", "--out", "init", "-q")
    assert run_two_processes(*words, cwd=tmp_path) == [0, 0]
    assert run_prep("export", "init", "--out", "hf", "--workers", "2", cwd=tmp_path).returncode == 0
    assert safetensors_bytes(Path("hf")) == tensors


def test_code_is_listed_and_copied_on_request(capsys: pytest.CaptureFixture[str]):
    assert main(["save-init", "./m", "--progress", "none"]) == 0
    assert "not copied: modeling.py (`--copy GLOB` copies them)" in capsys.readouterr().err
    assert not Path("m-init/hf/modeling.py").exists()
    run_ok("save-init", "./m", "--copy", "*.py", "--out", "with-code")
    assert Path("with-code/hf/modeling.py").read_bytes() == b"x = 1\n"
    assert main(["save-init", "./m", "--copy", "*.txt", "--out", "other"]) == 2
    assert "`--copy '*.txt'` matches no file" in capsys.readouterr().err
