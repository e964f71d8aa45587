"""Training from the init of a quantised model: scales are not read, and exports have the trained values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.tiny_checkpoints import read_tensors
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import make_training_folder, write_tokenizer

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_training_folder()


def test_trained_init_of_fp8_is_exported_with_its_values():
    values = make_quantized(Path("m"), "fp8")
    write_tokenizer(Path("m"))
    shutil.rmtree("tiny-init")
    prep.save_init("./m", "tiny-init", quantized="dequantize", pad_vocab="8", mesh="1,2,4")
    prep.train("recipe.toml", overrides=["train.steps=3", "checkpoint.every=3", "data.holdout=0"])
    step = json.loads(Path("runs/recipe/3/prep-manifest.json").read_text())
    assert "quantized" not in step
    assert not any("quantization" in name for name in step["others"])
    prep.export("runs/recipe", "exported")
    tensors = read_tensors(Path("exported"))
    assert {*tensors} == {*values}
    trained = tensors[Q_PROJ].astype(np.float32)
    assert trained.shape == values[Q_PROJ].shape
    assert 0 < np.abs(trained - values[Q_PROJ]).max() < 0.1
    assert "quantization_config" not in json.loads(Path("exported/config.json").read_text())


def test_left_over_settings_do_not_refuse_training(capsys: pytest.CaptureFixture[str]):
    config_path = Path("tiny/config.json")
    config = json.loads(config_path.read_text())
    settings = {"quantization_config": {"quant_method": "fp8"}}
    config_path.write_text(json.dumps({**config, **settings}))
    run = ["train", "recipe.toml", *set_keys('model.path="./tiny"', "train.steps=3")]
    assert main([*run, "--set", "data.holdout=0"]) == OK
    remark = "the quantisation in config.json is ignored: no tensor is quantised"
    assert capsys.readouterr().err.count(remark) == 1
    prep.export("runs/recipe", "exported")
    assert "quantization_config" not in json.loads(Path("exported/config.json").read_text())
