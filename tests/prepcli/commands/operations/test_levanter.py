"""Checkpoints of Levanter: written, read with the specs of Levanter, and read back without a changed bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import prepcli as prep
from tests.helpers.levanter_trees import TREES, read_levanter, write_levanter
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.tiny_checkpoints import (
    GPT2,
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)
from tests.helpers.way_back import check_way_back

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED_QUERY | {"model_type": "llama"},
    "mistral": GROUPED_QUERY | {"model_type": "mistral"},
    "mixtral": GROUPED_QUERY | {"model_type": "mixtral", "num_local_experts": 4},
    "qwen2": GROUPED_QUERY | {"model_type": "qwen2"},
    "qwen3": GROUPED_QUERY | {"model_type": "qwen3"},
    "qwen3_moe": GROUPED_QUERY | {"model_type": "qwen3_moe"} | EXPERTS,
    "gemma": GROUPED_QUERY | {"model_type": "gemma"},
    "gemma2": GROUPED_QUERY | {"model_type": "gemma2"},
    "gemma3": GROUPED_QUERY | {"model_type": "gemma3_text"},
    "olmo2": GROUPED_QUERY | {"model_type": "olmo2"},
    "olmo3": GROUPED_QUERY | {"model_type": "olmo3"},
    "gpt2": GPT2,
}
LLAMA = MODELS["llama"]
CASES = [
    *(("levanter", model) for model in MODELS if model != "olmo3"),
    *(("levanter-unscanned", model) for model in ("llama", "mixtral", "olmo3")),
]


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_export_has_the_leaves_of_levanter(layout: str, model: str):
    tensors = make_checkpoint(Path("model"), MODELS[model])
    run_ok("save-init", "./model", "--out", "init", "--pad-vocab", "8")
    run_ok("export", "init", "--layout", layout, "--out", "out")
    assert_same(read_levanter(Path("out")), TREES[layout](tensors, MODELS[model]))


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_export_for_levanter_returns_every_bit(layout: str, model: str):
    tensors = make_checkpoint(Path("model"), MODELS[model], "bfloat16")
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    check_way_back(tensors)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_last_step_of_a_levanter_run_converts(layout: str, model: str):
    tensors = make_checkpoint(Path("model"), MODELS[model])
    state = {"step": np.array(10, np.int32), "opt_state.0.count": np.array(10, np.int32)}
    other = {name: -tensor for name, tensor in tensors.items()}
    write_levanter(Path("run/step-9"), TREES[layout](other, MODELS[model]), 9)
    write_levanter(Path("run/step-10"), TREES[layout](tensors, MODELS[model]) | state, 10)
    run_ok("save-init", "./run", "--config", "./model", "--out", "init")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_flags_of_dropout_are_not_parameters():
    tensors = make_checkpoint(Path("model"), GPT2)
    flags = {
        "model.embeddings.dropout.inference": np.array(True),
        "model.transformer.blocks.stacked.attn.inference": np.array([True] * 3),
    }
    write_levanter(Path("run/step-3"), TREES["levanter"](tensors, GPT2) | flags, 3)
    run_ok("save-init", "./run", "--config", "./model", "--out", "init")
    manifest = json.loads(Path("init/prep-manifest.json").read_text())
    assert {entry["name"]: entry["rule"] for entry in manifest["dropped"]} == dict.fromkeys(
        flags, "not a parameter"
    )
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_chunk_of_zeros_that_tensorstore_omits_is_read():
    tensors = make_checkpoint(Path("model"), LLAMA)
    tensors["model.norm.weight"] = np.zeros_like(tensors["model.norm.weight"])
    write_levanter(Path("step-3"), TREES["levanter"](tensors, LLAMA), 3)
    run_ok("export", "./step-3", "--config", "./model", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_model_saved_alone_is_read():
    tensors = make_checkpoint(Path("model"), LLAMA)
    leaves = TREES["levanter"](tensors, LLAMA)
    alone = {name.removeprefix("model."): leaf for name, leaf in leaves.items()}
    write_levanter(Path("step-3"), alone, 3)
    run_ok("export", "./step-3", "--config", "./model", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_tied_head_has_no_leaf():
    tensors = make_checkpoint(Path("model"), MODELS["qwen2"], tied=True)
    run_ok("export", "./model", "--layout", "levanter", "--out", "out")
    assert_same(read_levanter(Path("out")), TREES["levanter"](tensors, MODELS["qwen2"]))
    run_ok("verify", "out", "./model")


def test_base_model_has_the_leaves_of_levanter():
    tensors = make_checkpoint(Path("model"), GPT2)
    base = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    Path("base").mkdir()
    shutil.copy("model/config.json", "base")
    save_file(base, "base/model.safetensors")
    run_ok("export", "./base", "--layout", "levanter", "--out", "out")
    assert_same(read_levanter(Path("out")), TREES["levanter"](tensors, GPT2))


def test_export_is_the_newest_checkpoint_of_its_folder():
    make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", "levanter", "--out", "out")
    metadata = json.loads(Path("out/metadata.json").read_text())
    assert (metadata["step"], metadata["is_temporary"]) == (0, False)
    # Levanter compares times without a time zone.
    assert "+" not in metadata["timestamp"]
    assert prep.export("./model", "out", layout="levanter").already_done


@pytest.mark.parametrize("fault", ["missing", "renamed", "extra", "shape"])
def test_wrong_leaf_is_named(fault: str, capsys: pytest.CaptureFixture[str]):
    leaves = TREES["levanter"](make_checkpoint(Path("model"), LLAMA), LLAMA)
    path = "model.transformer.layers.stacked.mlp.down_proj.weight"
    leaf = leaves[path]
    if fault != "extra":
        del leaves[path]
    if fault == "renamed":
        leaves[path.replace("down_proj", "downward")] = leaf
    elif fault == "extra":
        leaves[path.replace("down_proj", "gate_bias")] = leaf
    elif fault == "shape":
        leaves[path] = leaf[:-1]
    write_levanter(Path("step-3"), leaves, 3)
    error = "".join(error_lines(capsys, "save-init", "./step-3", "--config", "model"))
    named = "gate_bias" if fault == "extra" else "mlp.down_proj"
    assert named in "".join(error.split())


def test_damaged_export_is_found():
    make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", "levanter", "--out", "out")
    data = max(Path("out/d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert not prep.verify("out").is_equal


def test_inspect_names_the_format(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", "levanter", "--out", "out")
    run_ok("inspect", "out")
    output = " ".join(capsys.readouterr().out.split())
    assert "Levanter, 1 data file" in output
    assert "layout levanter, layers stacked on axis 0" in output


def test_shard_size_of_a_levanter_checkpoint_is_refused(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), LLAMA)
    words = ("--layout", "levanter", "--shard-size", "1MB", "--out", "out")
    lines = error_lines(capsys, "export", "./model", *words)
    assert lines[0] == "error: `--shard-size` is not supported for Levanter checkpoints"
