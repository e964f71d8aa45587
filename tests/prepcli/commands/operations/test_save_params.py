"""`save_params`: parameters in memory, written as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.testing.checkpoints import read_checkpoint
from prepcli.models.param_tree import Tree
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", GPT_NEO)
    return tmp_path / "model"


def test_save_params_of_a_checkpoint_verify_against_it(model: Path, tmp_path: Path):
    params = prep.load_params(model, "2,2,2")
    out = prep.save_params(params, tmp_path / "init", like=model)
    assert prep.verify(out).is_equal  # with its own digests
    assert prep.verify(out, model).ignored_padding_rows == 1
    assert (out / "hf" / "tokenizer_config.json").read_bytes() == (
        model / "tokenizer_config.json"
    ).read_bytes()
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_save_params_writes_changed_values(model: Path, tmp_path: Path):
    params = prep.load_params(model)
    params["final_norm"]["scale"] = np.full(32, 3, np.float32)
    out = prep.save_params(params, tmp_path / "init", like=model)
    tensors, before = (
        read_checkpoint(prep.export(out, tmp_path / "out").path),
        read_checkpoint(model),
    )
    assert (tensors.pop("transformer.ln_f.weight") == 3).all()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, before[name])


def test_save_params_like_a_saved_checkpoint_keeps_the_dtype(tmp_path: Path):
    make_checkpoint(tmp_path / "model", LLAMA)
    first = prep.save_init(tmp_path / "model", tmp_path / "init", mesh="1,4,2", pad_vocab="auto")
    params = prep.load_params(first.path, "1,4,2", dtype="bfloat16")
    out = prep.save_params(params, tmp_path / "saved", like=first.path)
    assert {tensor.dtype for tensor in prep.inspect(out).tensors} == {"bfloat16"}
    again = prep.load_params(out, "1,4,2", dtype="bfloat16")
    np.testing.assert_array_equal(again["head"]["weight"], params["head"]["weight"])
    assert again["head"]["weight"].shape == (132, 32)


@pytest.mark.parametrize(
    ("changes", "removed", "why"),
    [
        ({}, "embed", "the tree has no embed.tokens"),
        ({}, "final_norm", "the tree has no final_norm.bias"),
        ({"head": {"weight": np.ones((131, 32))}}, "", "the model has no head.weight"),
        (
            {"final_norm": {"scale": np.ones(3), "bias": np.ones(32)}},
            "",
            r"final_norm.scale has shape \(3,\), not",
        ),
        (
            {"embed": {"tokens": np.ones((130, 32)), "positions": np.ones((64, 32))}},
            "",
            r"embed.tokens has shape",
        ),
    ],
)
def test_save_params_of_another_model_is_an_error(
    model: Path, tmp_path: Path, changes: Tree, removed: str, why: str
):
    params = {
        name: value
        for name, value in (prep.load_params(model) | changes).items()
        if name != removed
    }
    with pytest.raises(prep.PrepError, match=f"the parameters do not match .*model - {why}"):
        prep.save_params(params, tmp_path / "init", like=model)
    assert not (tmp_path / "init").exists()


def test_save_params_does_not_replace_a_folder(model: Path):
    with pytest.raises(prep.OutputExistsError, match="already exists"):
        prep.save_params(prep.load_params(model), model, like=model)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
def test_load_params_keeps_the_stored_dtype(tmp_path: Path, stored: str):
    make_checkpoint(tmp_path / "model", GPT_NEO, stored)
    params = prep.load_params(tmp_path / "model", dtype="keep")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {stored}


def test_load_params_refuses_a_dtype_without_support(tmp_path: Path):
    make_checkpoint(tmp_path / "model", GPT_NEO, "float64")
    with pytest.raises(prep.UsageError, match="is stored in float64, and JAX computes in 32 bits"):
        prep.load_params(tmp_path / "model", dtype="keep")
