"""Tests of WeightsReader: leaves of other formats, whole and in parts, of any dtype."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import tiny_transformer
from prepcli.core.errors import PrepError
from prepcli.models.param_tree import flatten_tree
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from tests.helpers.pickle_builder import make_torch_file
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import (
    ALL_CONFIGS,
    GPT2,
    LLAMA,
    make_checkpoint,
    write_checkpoint,
)
from trainer.nn.model_spec import model_from_manifest

Box = tuple[tuple[int, int], ...]


def read_leaf(reader: WeightsReader, name: str, dtype: str = "float32") -> np.ndarray:
    values = np.full(reader.leaves[name].shape, np.nan, dtype)
    reader.read(name, {tuple((0, extent) for extent in values.shape): values})
    return values


def open_weights(folder: Path, vocab_multiple: int = 1) -> WeightsReader:
    return WeightsReader(open_source(locate(str(folder))), vocab_multiple)


@pytest.mark.parametrize("base", ALL_CONFIGS, ids=lambda base: base["model_type"])
def test_read_returns_the_leaves_of_the_model(base: dict[str, Any], tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", base, legacy=True)
    tensor_names = {location.tensor for location in tiny_transformer(base).locations}
    expected = flatten_tree(
        tiny_transformer(base).params_from_tensors(
            {name: tensor for name, tensor in tensors.items() if name in tensor_names}
        )
    )
    with open_weights(tmp_path / "m") as reader:
        assert {*reader.leaves} == {f"params.{path}" for path in expected}
        assert {
            path: leaf.shape for path, leaf in model_from_manifest(reader.manifest).leaves.items()
        } == {path: leaf.shape for path, leaf in expected.items()}
        for path, leaf in expected.items():
            np.testing.assert_array_equal(read_leaf(reader, f"params.{path}"), leaf)


def test_read_of_parts_equals_slices_of_the_leaf(tmp_path: Path):
    make_checkpoint(tmp_path / "m", GPT2)
    with open_weights(tmp_path / "m") as reader:
        name = "params.layers.attn.k.weight"
        whole = read_leaf(reader, name)
        boxes: list[Box] = [
            ((0, 3), (1, 2), (0, 8), (5, 9)),
            ((1, 2), (0, 4), (3, 4), (0, 32)),
            ((2, 2),) * 4,
        ]
        parts = {box: np.zeros([high - low for low, high in box], np.float32) for box in boxes}
        reader.read(name, parts)
        for box, part in parts.items():
            np.testing.assert_array_equal(part, whole[tuple(slice(*span) for span in box)])


def test_vocab_padding_is_zeros_and_recorded(tmp_path: Path):
    make_checkpoint(tmp_path / "m", LLAMA)
    with open_weights(tmp_path / "m") as plain, open_weights(tmp_path / "m", 8) as padded:
        model = model_from_manifest(padded.manifest)
        assert (model.true_vocab_size, model.leaves["head.weight"].shape) == (131, (136, 32))
        for name in ("params.embed.tokens", "params.head.weight"):
            np.testing.assert_array_equal(read_leaf(padded, name)[:131], read_leaf(plain, name))
            assert not read_leaf(padded, name)[131:].any()


def test_read_writes_no_zeros_without_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Zeros in every array would touch all its pages in one thread, before the first byte is read."""
    make_checkpoint(tmp_path / "m", LLAMA)
    monkeypatch.setattr(WeightsReader, "run_reads", lambda *arguments: [])
    with open_weights(tmp_path / "m", 8) as reader:
        assert np.isnan(read_leaf(reader, "params.layers.attn.q.weight")).all()
        assert not read_leaf(reader, "params.embed.tokens").any()


def test_read_casts_to_the_dtype_of_the_array(tmp_path: Path):
    make_checkpoint(tmp_path / "m", LLAMA, "bfloat16")
    with open_weights(tmp_path / "m") as reader:
        name = "params.layers.mlp.up.weight"
        assert reader.leaves[name].dtype == "bfloat16"
        np.testing.assert_array_equal(
            read_leaf(reader, name), read_leaf(reader, name, "bfloat16").astype(np.float32)
        )


@pytest.mark.parametrize("options", [("--no-scan",), ("--scan-axis", "1", "--rule", "embed=mp")])
def test_layers_are_stacked_on_axis_0_for_any_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--pad-vocab", "8", *options, "--out", "init")
    with open_weights(Path("m"), 8) as expected, open_weights(Path("init"), 8) as reader:
        assert {*reader.leaves} == {*expected.leaves}
        assert len(reader.manifest["rules"]) == len(options) // 4
        for name in expected.leaves:
            np.testing.assert_array_equal(read_leaf(reader, name), read_leaf(expected, name))


def test_leaf_of_mixed_dtypes_is_float32(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", LLAMA)
    path = "model.layers.{}.mlp.up_proj.weight"
    mixed = tensors | {path.format(0): tensors[path.format(0)].astype(np.float16)}
    config = json.loads((tmp_path / "m/config.json").read_text())
    write_checkpoint(tmp_path / "mixed", config, mixed)
    name = "params.layers.mlp.up.weight"
    with open_weights(tmp_path / "mixed") as reader:
        assert reader.leaves[name].dtype == "float32"
        for layer, values in enumerate(read_leaf(reader, name)):
            np.testing.assert_array_equal(values.reshape(-1), mixed[path.format(layer)].reshape(-1))


def test_torch_source_equals_safetensors_source(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", LLAMA)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_bytes((tmp_path / "m/config.json").read_bytes())
    (tmp_path / "b/pytorch_model.bin").write_bytes(make_torch_file(tensors))
    with (
        open_weights(tmp_path / "m") as safetensors_reader,
        open_weights(tmp_path / "b") as torch_reader,
    ):
        assert safetensors_reader.leaves == torch_reader.leaves
        for name in safetensors_reader.leaves:
            np.testing.assert_array_equal(
                read_leaf(safetensors_reader, name), read_leaf(torch_reader, name)
            )


def test_untied_head_of_a_tied_model_is_an_error(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", GPT2)
    head = tensors["transformer.wte.weight"].copy()
    write_checkpoint(tmp_path / "same", GPT2, tensors | {"lm_head.weight": head})
    with open_weights(tmp_path / "same") as reader:
        assert "params.head.weight" not in reader.leaves
    head[7, 3] += 1
    write_checkpoint(tmp_path / "other", GPT2, tensors | {"lm_head.weight": head})
    difference = r"lm_head.weight is not equal to transformer.wte.weight .* at \[7, 3\]"
    with open_weights(tmp_path / "other") as reader, pytest.raises(PrepError, match=difference):
        read_leaf(reader, "params.embed.tokens")


def test_missing_tensor_is_an_error(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", GPT2)
    del tensors["transformer.h.1.mlp.c_fc.bias"]
    write_checkpoint(tmp_path / "less", GPT2, tensors)
    with pytest.raises(PrepError, match="missing"):
        open_weights(tmp_path / "less")
