"""Architectures without a family: names of transformers' checkpoints, there and back, compared byte by byte."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.make_architectures import FOLDER, TYPES, make_model, model_types
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import StoredTensor, safetensors_bytes, write_safetensors

ITEMSIZES = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1, "U8": 1}


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def random_tensors(types: dict[str, Any]) -> dict[str, StoredTensor]:
    """Return tensors of random bytes with these dtypes and shapes."""
    rng = np.random.default_rng(0)
    tensors: dict[str, StoredTensor] = {}
    for name, (code, shape) in types.items():
        nbytes = int(np.prod(shape)) * ITEMSIZES[code]
        tensors[name] = (code, tuple(shape), rng.bytes(nbytes))
    return tensors


def check_round_trip(model: Path) -> None:
    """Convert a folder, reshard the result, export it, and compare config and tensors with the folder."""
    run_ok("save-init", str(model), "--verbatim", "--mesh", "1,2,2", "--out", "init")
    run_ok("reshard", "init", "--mesh", "1,1,4", "--no-scan", "--out", "other")
    run_ok("export", "other", "--out", "hf")
    assert Path("hf/config.json").read_bytes() == (model / "config.json").read_bytes()


# The other architectures convert by the same rules, so every second one runs by default.
@pytest.mark.parametrize("model_type", slow_except(TYPES, TYPES[::2]))
def test_architecture_round_trips(model_type: str):
    golden = json.loads((FOLDER / f"{model_type}.json").read_text())
    tensors = random_tensors(golden["tensors"])
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), tensors)
    Path("m/config.json").write_text(json.dumps(golden["config"]))
    check_round_trip(Path("m"))
    assert safetensors_bytes(Path("hf")) == tensors
    manifest = json.loads(Path("other/prep-manifest.json").read_text())
    assert manifest["family"] == "verbatim"


@pytest.mark.slow
@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_type_of_transformers_round_trips(dtype: str, file_format: str):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    converted: list[str] = []
    skipped: dict[str, str] = {}
    for model_type in model_types():
        folder = Path(model_type)
        folder.mkdir()
        with contextlib.chdir(folder):
            try:
                state = _save_model(model_type, dtype)
            except Exception as error:
                skipped[model_type] = f"{type(error).__name__}: {error}"[:200]
            else:
                _check_conversion(state, file_format)
                converted.append(model_type)
        shutil.rmtree(folder)
    print(f"{len(converted)} converted; no tiny model: {json.dumps(skipped, indent=1)}")
    assert len(converted) > 270


def _save_model(model_type: str, dtype: str) -> dict[str, Any]:
    """Save a tiny model with transformers to `expected`, and return its tensors."""
    import torch

    model = make_model(model_type).to(getattr(torch, dtype))
    model.save_pretrained("expected")
    return model.state_dict()


def _check_conversion(state: dict[str, Any], file_format: str) -> None:
    """Convert the model in `expected` there and back, and compare every tensor."""
    import torch

    if file_format == "safetensors":
        check_round_trip(Path("expected"))
        assert safetensors_bytes(Path("hf")) == safetensors_bytes(Path("expected"))
        return
    Path("bin").mkdir()
    shutil.copyfile("expected/config.json", "bin/config.json")
    torch.save(state, "bin/pytorch_model.bin")
    check_round_trip(Path("bin"))
    exported = safetensors_bytes(Path("hf"))
    assert exported.keys() == state.keys()
    for name, tensor in state.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert exported[name][2] == data
