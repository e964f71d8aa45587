"""Tests of the headers of large models with few small layers. The sizes of the models need no test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.meter import CommandCost
from bench.real_shapes import (
    FP8,
    MODELS,
    MXFP4,
    ShapesRow,
    shapes_text,
    stored_entries,
    write_sparse,
)
from prepcli.commands.cli.main import main
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS

lazy_module("torch")
lazy_module("transformers")


def stored(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and shape of each tensor of a checkpoint."""
    return {name: (dtype, shape) for name, dtype, shape, _ in stored_entries(config)}


def test_fp8_weights_have_scales_and_routers_have_none():
    config = FAMILY_CONFIGS["deepseek_v3"] | {"hidden_size": 160, "quantization_config": FP8}
    entries = stored(config)
    # Blocks of 128 rows and columns.
    down = "model.layers.0.mlp.down_proj.weight"
    assert entries[down][0] == "float8_e4m3fn"
    rows, columns = entries[down][1]
    assert entries[f"{down}_scale_inv"] == ("float32", (-(-rows // 128), -(-columns // 128)))
    assert entries["model.layers.2.mlp.gate.weight"][0] == "bfloat16"
    assert "model.layers.2.mlp.gate.weight_scale_inv" not in entries
    assert entries["lm_head.weight"][0] == "bfloat16"


def test_prediction_layer_follows_the_other_layers():
    config = FAMILY_CONFIGS["deepseek_v3"] | {"num_nextn_predict_layers": 1}
    layers = config["num_hidden_layers"]
    names = stored(config).keys()
    prefix = f"model.layers.{layers}."
    prediction = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    assert {"enorm.weight", "eh_proj.weight", "mlp.experts.0.up_proj.weight"} < prediction
    assert not [name for name in names if f"layers.{layers + 1}." in name]


def test_mxfp4_experts_have_blocks_of_32_values():
    config = FAMILY_CONFIGS["gpt_oss"] | {
        "hidden_size": 64,
        "intermediate_size": 32,
        "quantization_config": MXFP4,
    }
    experts = config["num_local_experts"]
    entries = stored(config)
    gate_up = "model.layers.0.mlp.experts.gate_up_proj"
    assert entries[f"{gate_up}_blocks"] == ("uint8", (experts, 64, 2, 16))
    assert entries[f"{gate_up}_scales"] == ("uint8", (experts, 64, 2))
    assert entries[f"{gate_up}_bias"] == ("bfloat16", (experts, 64))


def test_sparse_model_has_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_sparse(tmp_path / "m", FAMILY_CONFIGS["mixtral"])
    assert main(["save-init", str(tmp_path / "m"), "--dry-run", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accounting"]["tensors"] == len(stored_entries(FAMILY_CONFIGS["mixtral"]))


def test_table_has_at_most_80_columns():
    cost = CommandCost(0, 30.0, 26.5, 357_000_000, 400_000_000, "", "")
    rows: list[ShapesRow] = []
    for name in MODELS:
        rows.append(ShapesRow(name, "verbatim", "1,64,4", 1_029_173_203_808, 139_583, cost, cost))
    lines = shapes_text(rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[:5] == ["Kimi-K2", "verbatim", "1,64,4", "1,029", "139,583"]
