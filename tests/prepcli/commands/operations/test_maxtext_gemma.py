"""Gemma 2 and 3 for MaxText: groups of layers, sums of norms and multiplied embeddings, with a checked way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import prepcli as prep
from prepcli.core.errors import PrepError
from tests.helpers.llama_trees import read_init
from tests.helpers.maxtext_gemma_trees import gemma_leaves
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.tiny_checkpoints import (
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)
from tests.helpers.trainer_trees import Leaves
from tests.helpers.zarr_items import write_item

GEMMA2 = GROUPED_QUERY | {
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 16,
}
# One group of six layers, and two remaining layers.
GEMMA3 = GROUPED_QUERY | {"model_type": "gemma3_text", "num_hidden_layers": 8}
MODELS: dict[str, dict[str, Any]] = {"gemma2": GEMMA2, "gemma3": GEMMA3}
# sqrt(80) is no power of 2, and 8.94 in bfloat16 is another number than in float32.
ROUNDED = {"hidden_size": 80}
CASES = [(layout, model) for layout in ("maxtext", "maxtext-unscanned") for model in MODELS]


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_model(config: dict[str, Any], dtype: str = "bfloat16") -> Leaves:
    """Write a model with a tied head to `model`, and return its tensors."""
    return make_checkpoint(Path("model"), config, dtype, tied=True)


def expected_leaves(tensors: Leaves, config: dict[str, Any], layout: str, dtype: Any) -> Leaves:
    cast = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    return gemma_leaves(cast, config, scan=layout == "maxtext")


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_gemma_has_the_leaves_of_maxtext(layout: str, model: str):
    config = MODELS[model] | ROUNDED
    tensors = make_model(config)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    expected = expected_leaves(tensors, config, layout, ml_dtypes.bfloat16)
    assert_same(read_init(Path("out/0/items")), expected)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_gemma_in_float32_returns_every_bit(layout: str, model: str):
    tensors = make_model(MODELS[model] | ROUNDED)
    words = ("--layout", layout, "--dtype", "float32", "--out", "out")
    run_ok("export", "./model", *words)
    manifest = json.loads(Path("out/prep-manifest.json").read_text())
    assert {record["lost"] for record in manifest["scales"].values()} == {0}
    run_ok("verify", "out")
    run_ok("save-init", "out", "--dtype", "bfloat16", "--out", "init", "--mesh", "1,2,1")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_gemma_of_maxtext_itself_converts(layout: str, model: str):
    config = MODELS[model]
    tensors = make_model(config)
    write_item(Path("run/7/items"), expected_leaves(tensors, config, layout, np.float32))
    run_ok("export", "./run", "--config", "./model", "--dtype", "bfloat16", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_changed_values_of_gemma_are_counted():
    config = GEMMA3 | ROUNDED
    tensors = make_model(config)
    prep.export("./model", "out", layout="maxtext")
    manifest = json.loads(Path("out/prep-manifest.json").read_text())
    entries = {entry["scale"]: entry for entry in manifest["casts"]}
    norms = [name for name in tensors if "norm" in name]
    values = sum(np.count_nonzero(tensors[n] != norm_way_back(tensors[n])) for n in norms)
    assert entries["+ 1"]["tensors"] == len(norms)
    assert entries["+ 1"]["changed"] == values > 0
    embedding = tensors["model.embed_tokens.weight"]
    root = ml_dtypes.bfloat16(80**0.5)
    restored = ((embedding * root) / root).astype(embedding.dtype)
    entry = entries["* bfloat16(sqrt(80))"]
    assert entry["changed"] == np.count_nonzero(restored != embedding) > 0


def norm_way_back(weight: np.ndarray) -> np.ndarray:
    """Return the weight of a norm after the sum and the difference of MaxText."""
    stored = (weight + 1.0).astype(weight.dtype)
    return (stored - 1.0).astype(weight.dtype)


def test_gemma_with_changed_values_is_not_read_back(capsys: pytest.CaptureFixture[str]):
    make_model(GEMMA2 | ROUNDED)
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "out", "--out", "init")
    assert lines[0] == "error: out cannot be converted back"
    why = " ".join(lines[1:])
    assert "multiplies by the square root of 80" in why
    assert "adds 1" in why


def test_verify_compares_gemma_with_its_model():
    make_model(GEMMA3 | ROUNDED)
    run_ok("save-init", "./model", "--out", "init")
    run_ok("export", "init", "--layout", "maxtext", "--out", "out")
    for pair in (("out", "./model"), ("./model", "out"), ("init", "out")):
        assert prep.verify(*pair), pair
    flip_bit("token_embedder.embedding")
    (difference,) = prep.verify("out", "./model").differences
    assert "embed_tokens" in difference["tensor"]
    assert "multiplies by the square root of 80" in difference["what"]


def flip_bit(name: str) -> None:
    """Change one bit of a leaf of `out`."""
    item = Path("out/0/items")
    values = next(leaf for path, leaf in read_init(item).items() if name in path)
    data = max((item / "d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[content.index(values[0].tobytes())] ^= 1
    data.write_bytes(content)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_padded_embedding_of_gemma_is_verified(dtype: str):
    """MaxText's own Gemma 2 has 128 tokens more than the files of Hugging Face."""
    tensors = make_model(GEMMA2 | ROUNDED)
    run_ok("save-init", "./model", "--pad-vocab", "8", "--out", "init")
    words = ("--layout", "maxtext", "--keep-padding", "--dtype", dtype, "--out", "out")
    run_ok("export", "init", *words)
    embedding = read_init(Path("out/0/items"))["params.params.token_embedder.embedding"]
    true_vocab = tensors["model.embed_tokens.weight"].shape[0]
    assert embedding.shape[0] > true_vocab
    assert not embedding[true_vocab:].any()
    assert prep.verify("out")
    flip_bit("token_embedder.embedding")
    assert not prep.verify("out")


def test_scale_of_queries_is_that_of_the_config():
    """Gemma 2 27B divides its scores by sqrt(144), and its heads have 128 elements."""
    config = GEMMA2 | {"query_pre_attn_scalar": 24.0}
    tensors = make_model(config, "float32")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    expected = expected_leaves(tensors, config, "maxtext", np.float32)
    assert_same(read_init(Path("out/0/items")), expected)


def test_gemma2_with_an_odd_layer_is_refused(capsys: pytest.CaptureFixture[str]):
    make_model(GEMMA2 | {"num_hidden_layers": 3})
    lines = error_lines(capsys, "export", "./model", "--layout", "maxtext", "--out", "out")
    assert "the layout has no place for model.layers.2" in " ".join(lines)


def test_fraction_in_the_scale_of_queries_has_no_layout(capsys: pytest.CaptureFixture[str]):
    make_model(GEMMA2 | {"query_pre_attn_scalar": 16.5})
    run_ok("save-init", "./model", "--out", "init")
    capsys.readouterr()
    lines = error_lines(capsys, "export", "init", "--layout", "maxtext", "--out", "out")
    assert "the layout has no place for model.layers.0.self_attn.q_proj" in " ".join(lines)


def test_gemma1_has_no_layout_of_maxtext():
    make_model(GROUPED_QUERY | {"model_type": "gemma"})
    with pytest.raises(PrepError, match="maxtext"):
        prep.export("./model", "out", layout="maxtext")
