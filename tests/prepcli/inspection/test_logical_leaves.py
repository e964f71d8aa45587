"""Numbers of parameters of checkpoints whose tensors are those of their family, and of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.tiny_checkpoints import checkpoint_tensors, write_checkpoint
from tests.helpers.tiny_configs import GOLDEN


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_model_of_another_kind_has_values(capsys: pytest.CaptureFixture[str]):
    """The config of Chronos-2 states the type of T5. Only two of these tensors have names of T5."""
    shapes = {
        "shared.weight": (2, 4),
        "encoder.final_layer_norm.weight": (4,),
        "encoder.block.0.layer.0.self_attention.q.weight": (4, 4),
        "input_patch_embedding.hidden_layer.weight": (8, 6),
    }
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    write_checkpoint(Path("m"), GOLDEN["t5"], tensors)
    result = prep.inspect("./m")
    assert result.parameters is None
    assert main(["inspect", "./m"]) == 0
    out = capsys.readouterr().out
    assert f"{sum(tensor.size for tensor in tensors.values())} values" in out
    assert "not the tensors of t5: encoder.block.0.layer.0." in out


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_parameters_of_a_family_are_counted(family: str):
    tensors = checkpoint_tensors(GOLDEN[family], "float32", tied=False, legacy=False)
    write_checkpoint(Path("m"), GOLDEN[family], tensors)
    assert prep.inspect("./m").parameters == sum(tensor.size for tensor in tensors.values())


def test_prediction_layers_are_no_parameters():
    config = GOLDEN["glm4_moe"] | {"num_nextn_predict_layers": 1}
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    count = sum(tensor.size for tensor in tensors.values())
    tensors[f"model.layers.{config['num_hidden_layers']}.input_layernorm.weight"] = np.ones(
        3, np.float32
    )
    write_checkpoint(Path("m"), config, tensors)
    prep.save_init("./m", "init")
    assert prep.inspect("./m").parameters == prep.inspect("init").parameters == count
