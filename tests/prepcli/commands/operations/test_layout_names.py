"""Exports for other libraries have digests under the names of their model: without prefix, or with fused experts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import (
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)

LLAMA = GROUPED_QUERY | {"model_type": "llama", "tie_word_embeddings": True}
NUM_EXPERTS = 3
EXPERT_MODELS: dict[str, dict[str, Any]] = {
    "mixtral": GROUPED_QUERY | {"model_type": "mixtral", "num_local_experts": NUM_EXPERTS},
    "qwen3_moe": GROUPED_QUERY
    | {
        "model_type": "qwen3_moe",
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}
# Module of the experts, and the gate, up and down matrices of one.
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_base_model() -> dict[str, np.ndarray]:
    """Write a LLaMA without head to the folder `model`. Its names have no prefix."""
    tensors = make_checkpoint(Path("whole"), LLAMA, "bfloat16", tied=True)
    base = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return write_model(base)


def write_fused_experts(model_type: str) -> dict[str, np.ndarray]:
    """Write a model to the folder `model` with one tensor for the gate and up matrices of all experts of a layer."""
    tensors = make_checkpoint(Path("whole"), EXPERT_MODELS[model_type], "bfloat16")
    module, parts = EXPERT_NAMES[model_type]
    fused: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            fused[name.replace(module, "mlp")] = tensor
    for layer in range(3):
        stacks: list[np.ndarray] = []
        for part in parts:
            start = f"model.layers.{layer}.{module}.experts"
            experts = [tensors[f"{start}.{expert}.{part}.weight"] for expert in range(NUM_EXPERTS)]
            stacks.append(np.stack(experts))
        gate, up, down = stacks
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    return write_model(fused)


def write_model(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Write tensors and the config of the folder `whole` to the folder `model`."""
    Path("model").mkdir()
    shutil.copy("whole/config.json", "model")
    save_file(tensors, "model/model.safetensors")
    return tensors


def check_way_back(tensors: dict[str, np.ndarray]) -> None:
    """Check the digests of the folder `out`, and convert it back."""
    assert prep.verify("out")
    assert prep.verify("out", "./model")
    run_ok("export", "out", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.parametrize("layout", ["easylm", "levanter", "torchtitan"])
def test_base_model_has_digests_and_returns(layout: str):
    tensors = write_base_model()
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    check_way_back(tensors)


@pytest.mark.parametrize(
    ("layout", "model_type"), [("maxtext", "mixtral"), ("torchtitan", "qwen3_moe")]
)
def test_fused_experts_have_digests_and_return(layout: str, model_type: str):
    tensors = write_fused_experts(model_type)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    check_way_back(tensors)


def test_damage_of_a_base_model_stops_the_way_back(capsys: pytest.CaptureFixture[str]):
    tensors = write_base_model()
    run_ok("export", "./model", "--layout", "levanter", "--out", "out")
    data = max(Path("out/d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[content.index(tensors["norm.weight"].tobytes())] ^= 1
    data.write_bytes(content)
    assert main(["save-init", "out", "--out", "init", "-q"]) == FAILED
    assert "norm.weight in out is damaged" in capsys.readouterr().err
    assert not Path("init").exists()
