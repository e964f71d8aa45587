"""`save-init --layers N`: the first layers of a model of every family and of none, with a config that fits them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.make_architectures import FOLDER
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.stored_tensors import StoredTensor, safetensors_bytes, write_safetensors
from tests.helpers.tiny_checkpoints import ALL_CONFIGS, make_checkpoint
from trainer.models.registry import family_of
from trainer.models.truncation import truncate_config


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def layer_of(name: str) -> int:
    """Return the first number in a name, or -1."""
    match = re.search(r"\.(\d+)\.", f".{name}.")
    return int(match[1]) if match else -1


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=lambda config: config["model_type"])
def test_family_keeps_its_first_layer(config: dict[str, Any]):
    make_checkpoint(Path("m"), config, legacy=False)
    run_ok("save-init", "./m", "--layers", "1")
    run_ok("verify", "m-init")
    run_ok("export", "m-init", "--out", "hf")
    expected = {name: t for name, t in safetensors_bytes(Path("m")).items() if layer_of(name) < 1}
    assert safetensors_bytes(Path("hf")) == expected
    exported = json.loads(Path("hf/config.json").read_text())
    family = family_of(exported)
    family.arch_config(exported)
    assert family.sizes(exported)["layers"] == 1


def write_golden(model_type: str) -> dict[str, StoredTensor]:
    """Write a model of an architecture without a family."""
    golden = json.loads((FOLDER / f"{model_type}.json").read_text())
    rng = np.random.default_rng(0)
    tensors: dict[str, StoredTensor] = {}
    for name, (code, shape) in golden["tensors"].items():
        tensors[name] = (code, tuple(shape), rng.bytes(4 * int(np.prod(shape))))
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), tensors)
    Path("m/config.json").write_text(json.dumps(golden["config"]))
    return tensors


@pytest.mark.parametrize(
    ("model_type", "section"), [("deepseek_v3", ""), ("gemma3", "text_config")]
)
def test_verbatim_model_keeps_its_first_layers(model_type: str, section: str):
    tensors = write_golden(model_type)
    run_ok("save-init", "./m", "--verbatim", "--layers", "2")
    run_ok("export", "m-init", "--out", "hf")
    expected = {name: tensor for name, tensor in tensors.items() if layer_of(name) < 2}
    exported = safetensors_bytes(Path("hf"))
    if model_type == "deepseek_v3":
        assert exported == expected
    assert {name for name in exported if "language_model.layers.2" in name} == set()
    config = json.loads(Path("hf/config.json").read_text())
    config = config[section] if section else config
    assert config["num_hidden_layers"] == 2
    assert len(config.get("layer_types") or [0, 0]) == 2


@pytest.mark.parametrize(
    ("config", "layers", "message"),
    [
        ({"model_type": "x", "num_hidden_layers": 2}, "2", "removes no layer"),
        ({}, "1", "needs the number of layers"),
    ],
)
def test_layers_that_cannot_be_truncated(
    capsys: pytest.CaptureFixture[str], config: dict[str, Any], layers: str, message: str
):
    Path("m").mkdir()
    write_safetensors(
        Path("m/model.safetensors"), {f"h.{i}.w": ("U8", (1,), b"1") for i in range(2)}
    )
    Path("m/config.json").write_text(json.dumps(config))
    code = 2 if config else 1
    assert message in run_failing(capsys, code, "save-init", "./m", "--layers", layers)


def test_pattern_of_layer_types_is_repeated_before_it_is_cut():
    config = {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}
    assert truncate_config(config, 3) == {
        "num_layers": 3,
        "attention_types": [[["global", "local", "global"], 1]],
    }
