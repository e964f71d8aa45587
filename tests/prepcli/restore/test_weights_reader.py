"""Leaves straight from other formats: those that the trainer's tests make, whole and in parts, of any dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.errors import PrepError
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.opening import open_source
from tests.helpers.pickle_builder import make_torch_file
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import ALL_CONFIGS, GPT2, LLAMA, make_checkpoint, write_checkpoint
from tests.helpers.tiny_transformers import tiny_transformer
from trainer.models.param_tree import flatten_tree
from trainer.training.setup import model_from_manifest

Box = tuple[tuple[int, int], ...]


def read(reader: WeightsReader, name: str, dtype: str = "float32") -> np.ndarray:
    found = np.full(reader.leaves[name].shape, np.nan, dtype)
    reader.read(name, {tuple((0, extent) for extent in found.shape): found})
    return found


def opened(folder: Path, vocab_parts: int = 1) -> WeightsReader:
    return WeightsReader(open_source(folder, folder.name), vocab_parts)


@pytest.mark.parametrize("base", ALL_CONFIGS, ids=lambda base: base["model_type"])
def test_leaves_are_those_of_the_model(base: dict[str, Any], tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", base, legacy=True)
    named = {place.tensor for place in tiny_transformer(base).locations}
    wanted = flatten_tree(
        tiny_transformer(base).params_from_tensors({name: tensor for name, tensor in tensors.items() if name in named})
    )
    with opened(tmp_path / "m") as reader:
        assert {*reader.leaves} == {f"params.{path}" for path in wanted}
        assert {path: leaf.shape for path, leaf in model_from_manifest(reader.manifest).leaves.items()} == {
            path: leaf.shape for path, leaf in wanted.items()
        }
        for path, leaf in wanted.items():
            np.testing.assert_array_equal(read(reader, f"params.{path}"), leaf)


def test_parts_are_parts_of_the_whole(tmp_path: Path):
    make_checkpoint(tmp_path / "m", GPT2)
    with opened(tmp_path / "m") as reader:
        name = "params.layers.attn.k.weight"
        whole = read(reader, name)
        boxes: list[Box] = [((0, 3), (1, 2), (0, 8), (5, 9)), ((1, 2), (0, 4), (3, 4), (0, 32)), ((2, 2),) * 4]
        parts = {box: np.zeros([high - low for low, high in box], np.float32) for box in boxes}
        reader.read(name, parts)
        for box, part in parts.items():
            np.testing.assert_array_equal(part, whole[tuple(slice(*span) for span in box)])


def test_padding_is_zeros_and_known_as_such(tmp_path: Path):
    make_checkpoint(tmp_path / "m", LLAMA)
    with opened(tmp_path / "m") as plain, opened(tmp_path / "m", 8) as padded:
        model = model_from_manifest(padded.manifest)
        assert (model.true_vocab_size, model.leaves["head.weight"].shape) == (131, (136, 32))
        for name in ("params.embed.tokens", "params.head.weight"):
            np.testing.assert_array_equal(read(padded, name)[:131], read(plain, name))
            assert not read(padded, name)[131:].any()


def test_values_are_cast_to_what_is_asked_for(tmp_path: Path):
    make_checkpoint(tmp_path / "m", LLAMA, "bfloat16")
    with opened(tmp_path / "m") as reader:
        name = "params.layers.mlp.up.weight"
        assert reader.leaves[name].dtype == "bfloat16"
        np.testing.assert_array_equal(read(reader, name), read(reader, name, "bfloat16").astype(np.float32))


@pytest.mark.parametrize("options", [("--no-scan",), ("--scan-axis", "1", "--rule", "embed=mp")])
def test_layers_are_stacked_on_the_first_axis_however_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("m"), LLAMA)
    run_ok("save-init", "./m", "--pad-vocab", "8", *options, "--out", "init")
    with opened(Path("m"), 8) as wanted, opened(Path("init"), 8) as reader:
        assert {*reader.leaves} == {*wanted.leaves}
        assert len(reader.manifest["rules"]) == len(options) // 4
        for name in wanted.leaves:
            np.testing.assert_array_equal(read(reader, name), read(wanted, name))


def test_a_leaf_whose_tensors_differ_in_dtype_holds_the_values_of_all(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", LLAMA)
    path = "model.layers.{}.mlp.up_proj.weight"
    mixed = tensors | {path.format(0): tensors[path.format(0)].astype(np.float16)}
    config = json.loads((tmp_path / "m/config.json").read_text())
    write_checkpoint(tmp_path / "mixed", config, mixed)
    name = "params.layers.mlp.up.weight"
    with opened(tmp_path / "mixed") as reader:
        assert reader.leaves[name].dtype == "float32"
        for layer, found in enumerate(read(reader, name)):
            np.testing.assert_array_equal(found.reshape(-1), mixed[path.format(layer)].reshape(-1))


def test_other_formats_are_read_alike(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", LLAMA)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_bytes((tmp_path / "m/config.json").read_bytes())
    (tmp_path / "b/pytorch_model.bin").write_bytes(make_torch_file(tensors))
    with opened(tmp_path / "m") as one, opened(tmp_path / "b") as other:
        assert one.leaves == other.leaves
        for name in one.leaves:
            np.testing.assert_array_equal(read(one, name), read(other, name))


def test_a_head_that_is_not_the_embedding_is_an_error(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", GPT2)
    head = tensors["transformer.wte.weight"].copy()
    write_checkpoint(tmp_path / "same", GPT2, tensors | {"lm_head.weight": head})
    with opened(tmp_path / "same") as reader:
        assert "params.head.weight" not in reader.leaves
    head[7, 3] += 1
    write_checkpoint(tmp_path / "other", GPT2, tensors | {"lm_head.weight": head})
    with pytest.raises(PrepError, match=r"lm_head.weight is not equal to transformer.wte.weight .* at \[7, 3\]"):
        opened(tmp_path / "other")


def test_what_does_not_add_up_is_an_error(tmp_path: Path):
    tensors = make_checkpoint(tmp_path / "m", GPT2)
    del tensors["transformer.h.1.mlp.c_fc.bias"]
    write_checkpoint(tmp_path / "less", GPT2, tensors)
    with pytest.raises(PrepError, match="missing"):
        opened(tmp_path / "less")
