"""`prep inspect` of decoded weights and of the leaves of towers and scales."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.formatting import format_bytes
from prepcli.planning.tensors import itemsize
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.towers import write_model

DECODE = ("--quantized", "dequantize")
SCALES = "quantization.model.layers.*.mlp.up_proj.weight_scale_inv"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def inspect_json(capsys: Capture, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", *words, "--json", "-q"]) == 0
    return json.loads(capsys.readouterr().out)


def shards(capsys: Capture, folder: str, leaf: str, *words: str) -> dict[str, Any]:
    return inspect_json(capsys, folder, "--shards", leaf, "--mesh", "1,2,2", *words)["shards"]


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "nf4"])
def test_stats_of_decoded_weights_are_those_of_the_values(method: str, capsys: Capture):
    values = make_quantized(Path("m"), method)
    tensors = inspect_json(capsys, "./m", "--stats", *DECODE)["tensors"]
    assert {tensor["name"] for tensor in tensors} == values.keys()
    for tensor in tensors:
        expected = values[tensor["name"]].astype(ml_dtypes.bfloat16).astype(np.float32)
        assert (tensor["dtype"], tensor["shape"]) == ("bfloat16", [*expected.shape])
        statistics = tensor["stats"]
        assert statistics["min"] == expected.min()
        assert statistics["max"] == expected.max()


@pytest.mark.parametrize("method", ["fp8", "gptq"])
def test_shards_of_decoded_weights_are_those_of_the_init(method: str, capsys: Capture):
    make_quantized(Path("m"), method)
    prep.save_init("./m", "init", quantized="dequantize")
    for leaf in ("layers.attn.q.weight", "layers.mlp.up.weight"):
        expected = shards(capsys, "init", leaf)
        assert shards(capsys, "./m", leaf, *DECODE) == expected
        assert expected["dtype"] == "bfloat16"


def test_shards_of_kept_weights_are_those_of_the_init(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init")
    leaf = "model.layers.*.self_attn.q_proj.weight"
    assert shards(capsys, "./m", leaf) == shards(capsys, "init", leaf)


def test_scales_of_decoded_weights_are_whole(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    scales = shards(capsys, "init", SCALES)
    assert scales["shard"] == scales["shape"]
    assert scales["copies"] == 4


@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl"])
def test_shards_of_towers_are_the_chunks_of_the_init(model_type: str, capsys: Capture):
    write_model(model_type)
    run_ok("save-init", "./m", "--mesh", "1,2,2", "--pad-vocab", "auto", "--out", "init")
    leaves = [tensor.name for tensor in prep.inspect("init").tensors]
    towers = [name for name in leaves if name.startswith("towers.")]
    for leaf in towers[:8]:
        expected = shards(capsys, "init", leaf)
        assert shards(capsys, "./m", leaf) == expected
    assert any(shards(capsys, "./m", leaf)["copies"] == 1 for leaf in towers)


def test_decoding_without_effect_is_an_error(capsys: Capture):
    make_checkpoint(Path("m"), LLAMA)
    assert "is not quantised" in run_failing(capsys, 2, "inspect", "./m", *DECODE)
    make_quantized(Path("q"), "fp8")
    message = run_failing(capsys, 2, "inspect", "./q", "--diff", "./m", *DECODE)
    assert "`--quantized dequantize` has no effect" in message


def test_only_decoding_needs_the_scales_of_quantised_tensors(capsys: Capture):
    scale = "model.layers.1.self_attn.q_proj.weight_scale_inv"
    make_quantized(Path("m"), "fp8", change=lambda stored: stored.pop(scale))
    run_ok("inspect", "./m")
    assert main(["inspect", "./m", *DECODE]) == 1


def test_page_shards_towers_and_scales_like_the_init(capsys: Capture):
    write_model("llava", Path("multimodal"))
    make_quantized(Path("m"), "fp8")
    prep.save_init("./multimodal", "towers", mesh="1,2,2", pad_vocab="auto")
    prep.save_init("./m", "scales", mesh="1,2,2", pad_vocab="auto", quantized="dequantize")
    for init in ("towers", "scales"):
        nbytes = 0
        for tensor in inspect_json(capsys, init)["tensors"]:
            leaf = shards(capsys, init, tensor["name"])
            nbytes += math.prod(leaf["shard"]) * itemsize(leaf["dtype"])
        run_ok("inspect", init, "--html", "page.html")
        assert f"Each device holds {format_bytes(nbytes)}" in Path("page.html").read_text()


def test_page_has_decoded_weights(capsys: Capture):
    values = make_quantized(Path("m"), "fp8")
    run_ok("inspect", "./m", "--html", "page.html", *DECODE)
    page = Path("page.html").read_text()
    assert "weight_scale_inv" not in page
    assert all(name.rpartition(".")[2] in page for name in values)
    make_checkpoint(Path("dense"), LLAMA)
    error = run_failing(capsys, 2, "inspect", "./dense", "--html", "dense.html", *DECODE)
    assert "./dense is not quantised" in error
    words = ("--diff", "./dense", "--html", "diff.html", *DECODE)
    error = run_failing(capsys, 2, "inspect", "./m", *words)
    assert "compares the tensors as they are stored" in error
