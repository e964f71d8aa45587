"""Scales of dequantised weights: leaves of the init that conversions keep and training ignores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from tests.helpers.quantized_folders import FORMATS, make_quantized
from tests.helpers.tiny_checkpoints import read_tensors


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def manifest_of(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "prep-manifest.json").read_text())


def dequantize(name: str, **options: Any) -> dict[str, np.ndarray]:
    """Write the init of a quantised model, and return the stored tensors other than codes and float weights."""
    values = make_quantized(Path("m"), name)
    prep.save_init("./m", "init", quantized="dequantize", **options)
    codes = {record["codes"] for record in manifest_of("init")["quantized"].values()}
    stored = read_tensors(Path("m"))
    return {key: stored[key] for key in stored.keys() - codes - values.keys()}


def restore_with_orbax(folder: str) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointer().restore(Path(folder).absolute())


def stack_layers(scales: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the leaves of scales of 3 layers, as Orbax names them."""
    leaves: dict[str, np.ndarray] = {}
    for name in scales:
        if ".0." in name:
            layers = [scales[name.replace(".0.", f".{layer}.")] for layer in range(3)]
            leaves[name.replace(".0.", ".*.")] = np.stack(layers)
    return leaves


@pytest.mark.parametrize("mesh", [None, "1,2,2"])
@pytest.mark.parametrize("name", FORMATS)
def test_scales_are_leaves_below_quantization(name: str, mesh: str | None):
    scales = dequantize(name, mesh=mesh, pad_vocab="no" if mesh is None else "auto")
    leaves = restore_with_orbax("init")["quantization"]
    expected = stack_layers(scales)
    assert {*leaves} == {*expected}
    for key, array in expected.items():
        leaf = np.asarray(leaves[key])
        assert (leaf.dtype, leaf.shape) == (array.dtype, array.shape)
        assert leaf.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_manifest_records_format_codes_and_digest(name: str):
    dequantize(name)
    manifest = manifest_of("init")
    assert len(manifest["quantized"]) == 21
    stored = read_tensors(Path("m"))
    for key, record in manifest["quantized"].items():
        codes = stored[record["codes"]]
        assert record["format"] == FORMATS[name].settings["quant_method"]
        assert (record["dtype"], tuple(record["shape"])) == (codes.dtype.name, codes.shape)
        assert [[0, manifest["tensors"][key]["shape"][0], record["digest"]]] == (
            manifest["tensors"][key]["digests"]
        )


@pytest.mark.parametrize("name", ["fp8", "compressed-int4", "nf4"])
def test_reshard_carries_scales(name: str):
    scales = dequantize(name)
    prep.reshard("init", "resharded", mesh="1,2,1", scan=False)
    prep.reshard("resharded", "again", mesh="2,1,1", scan=True)
    for key in ("quantization", "quantized", "slots"):
        assert manifest_of("again")[key] == manifest_of("init")[key]
    leaves = restore_with_orbax("again")["quantization"]
    for key, array in stack_layers(scales).items():
        assert np.asarray(leaves[key]).tobytes() == array.tobytes()
    assert prep.verify("again")


def test_params_only_copy_has_no_scales():
    dequantize("fp8")
    conversion = prep.reshard("init", "bare", params_only=True)
    dropped = conversion.details["accounting"]["dropped"]
    assert [tensor["rule"] for tensor in dropped] == ["scales of quantised weights"]
    assert "quantization" not in restore_with_orbax("bare")
    assert "quantized" not in manifest_of("bare")


def test_first_layers_have_their_scales():
    make_quantized(Path("m"), "compressed-fp8")
    prep.save_init("./m", "init", quantized="dequantize", layers=2)
    leaves = restore_with_orbax("init")["quantization"]
    assert {np.asarray(leaf).shape[0] for leaf in leaves.values()} == {2}
    assert len(manifest_of("init")["quantized"]) == 14


def test_load_params_ignores_scales():
    dequantize("fp8")
    params = prep.load_params("init")
    assert {*params} == {"embed", "final_norm", "head", "layers"}


def test_verify_finds_a_changed_scale(capsys: pytest.CaptureFixture[str]):
    dequantize("fp8")
    assert prep.verify("init")
    manifest = manifest_of("init")
    records = manifest["slots"]["quantization"]
    records["model.layers.1.mlp.up_proj.weight_scale_inv"]["digests"][0][2] = "0" * 32
    del manifest["digest"], manifest["files"]
    Path("init/prep-manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert main(["verify", "init"]) == 1
    assert "model.layers.1.mlp.up_proj.weight_scale_inv" in capsys.readouterr().err


def test_missing_leaf_of_scales_is_an_error(capsys: pytest.CaptureFixture[str]):
    dequantize("fp8")
    manifest = manifest_of("init")
    records = manifest["slots"]["quantization"]
    records["model.layers.7.extra_scale"] = {"dtype": "float32", "shape": [2], "digests": []}
    del manifest["digest"], manifest["files"]
    Path("init/prep-manifest.json").write_text(json.dumps(manifest))
    assert main(["verify", "init"]) == 1
    assert "lacks the leaf quantization.model.layers.7.extra_scale" in capsys.readouterr().err
