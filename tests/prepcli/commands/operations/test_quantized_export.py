"""Exports of decoded weights, and the scales beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError, UsageError
from tests.helpers.manifests import changed_manifest
from tests.helpers.quantized_folders import FORMATS, Arrays, make_mxfp4_experts, make_quantized
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import assert_same, read_tensors

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def assert_same_tensors(folder: str, original: str) -> None:
    assert_same(read_tensors(Path(folder)), read_tensors(Path(original)))


def export_note(capsys: Capture, *words: str) -> str:
    """Export `init` to `exported`, and return the note on decoded weights. Empty without one."""
    capsys.readouterr()
    assert main(["export", "init", *words, "--out", "exported"]) == 0
    lines = capsys.readouterr().err.splitlines()
    return next((line for line in lines if "decoded weights" in line), "")


def assert_values() -> None:
    """Check that `exported` has the values of the weights in `init`."""
    assert read_tensors(Path("exported"))[Q_PROJ].dtype == "bfloat16"
    assert "quantization_config" not in json.loads(Path("exported/config.json").read_text())
    assert prep.verify("exported", "init")


def quantization_config(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())["quantization_config"]


# Formats with the kinds of codes and scales of fp8, compressed-nvfp4, awq and nf4.
LIKE_OTHERS = ("compressed-fp8", "modelopt-nvfp4", "gptq", "int8")


# Each kind of codes and scales with one layout: the layouts round-trip by themselves.
@pytest.mark.parametrize("name", slow_except(FORMATS, lambda name: name not in LIKE_OTHERS))
def test_export_has_the_bytes_of_the_source(name: str):
    make_quantized(Path("m"), name)
    prep.save_init("./m", "init", quantized="dequantize", mesh="1,2,2", pad_vocab="auto")
    prep.export("init", "exported")
    assert_same_tensors("exported", "m")
    assert quantization_config("exported") == quantization_config("m")
    assert prep.verify("exported")


def test_true_vocab_cuts_rows_of_quantised_exports():
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    stored = read_tensors(Path("m"))
    size = stored["model.embed_tokens.weight"].shape[0] - 8
    prep.export("init", "exported", true_vocab=size)
    tensors = read_tensors(Path("exported"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert tensors[name].tobytes() == stored[name][:size].tobytes()
    assert tensors[Q_PROJ].tobytes() == stored[Q_PROJ].tobytes()
    assert json.loads(Path("exported/config.json").read_text())["vocab_size"] == size
    with pytest.raises(UsageError, match="out of range"):
        prep.export("init", "other", true_vocab=size + 9)


def test_export_of_decoded_verbatim_model_equals_the_source():
    make_quantized(Path("m"), "fp8")
    config_path = Path("m/config.json")
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "model_type": "unheard_of"}))
    prep.save_init("./m", "init", quantized="dequantize")
    prep.export("init", "exported")
    assert_same_tensors("exported", "m")


def test_missing_source_leaves_the_values(capsys: Capture):
    make_quantized(Path("m"), "gptq")
    prep.save_init("./m", "init", quantized="dequantize")
    Path("m").rename("moved")
    note = export_note(capsys)
    assert note.startswith("21 decoded weights in bfloat16, without the quantised bytes: ")
    assert "`./m` does not exist" in note
    assert "`--quantized-source SOURCE` names the quantised model" in note
    assert_values()
    # The export has no record of its quantised model, whose weights are decoded for the comparison.
    assert prep.verify("exported", "moved")
    assert prep.verify("moved", "exported")


def test_model_of_the_hub_is_not_downloaded(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    with changed_manifest(Path("init")) as manifest:
        manifest["source"]["name"] = "owner/name"
    assert "owner/name is not in the cache of the hub. `--quantized-source" in export_note(capsys)
    assert_values()


def test_cached_model_of_the_hub_supplies_the_bytes(monkeypatch: MonkeyPatch, capsys: Capture):
    commit = "0123456789" * 4
    snapshot = Path("hub/models--owner--name/snapshots", commit)
    snapshot.parent.mkdir(parents=True)
    make_quantized(Path("m"), "awq")
    prep.save_init("./m", "init", quantized="dequantize")
    Path("m").rename(snapshot)
    with changed_manifest(Path("init")) as manifest:
        manifest["source"]["name"] = "owner/name"
        manifest["origin"] = {"commit": commit}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(Path("hub").absolute()))
    assert not export_note(capsys)
    assert_same_tensors("exported", str(snapshot))


@pytest.mark.parametrize("name", slow_except(FORMATS, ["fp8", "nf4"]))
def test_quantized_source_supplies_the_bytes(name: str):
    make_quantized(Path("m"), name)
    prep.save_init("./m", "init", quantized="dequantize")
    prep.export("init", "exported", quantized_source="./m")
    assert_same_tensors("exported", "m")
    assert quantization_config("exported") == quantization_config("m")


def change_codes(stored: Arrays) -> None:
    codes = stored[Q_PROJ].view(np.uint8)
    codes[0, 0] ^= 1


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("./other", {}, r"q_proj.* of \./other"),
        ("./gptq", {}, "is not the source of init"),
        ("./values", {}, "has no quantised bytes"),
        ("./m", {"quantized": "dequantize"}, "has no effect"),
    ],
)
def test_other_quantized_source_is_refused(source: str, options: dict[str, Any], message: str):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    if source == "./other":
        make_quantized(Path("other"), "fp8", change=change_codes)
    elif source == "./gptq":
        make_quantized(Path("gptq"), "gptq")
    elif source == "./values":
        prep.export("init", "values", quantized="dequantize")
    kind = UsageError if source in {"./values", "./m"} else PrepError
    with pytest.raises(kind, match=message):
        prep.export("init", "exported", quantized_source=source, **options)
    assert not Path("exported").exists()


def test_option_of_values_leaves_the_values(capsys: Capture):
    words = ("--keep-padding",)
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    error = run_failing(capsys, 2, "export", "init", *words, "--quantized-source", "m")
    assert "is not supported for quantised weights" in error
    note = export_note(capsys, *words)
    assert note.startswith("21 decoded weights in bfloat16, without the quantised bytes: ")
    assert "`--keep-padding` is not supported for quantised weights" in note
    assert_values()


def test_training_state_of_decoded_weights_is_refused(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    error = run_failing(capsys, 2, "export", "init", "--training-state")
    assert "`--training-state` is not supported with `--quantized keep`" in error


def test_source_with_other_values_ends_the_export(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    shutil.rmtree("m")
    # Its headers and sizes are the recorded ones.
    make_quantized(Path("m"), "fp8", change=change_codes)
    error = run_failing(capsys, 1, "export", "init", "--out", "exported")
    assert f"{Q_PROJ} of m has other values than init" in error
    assert not Path("exported").exists()
    assert "`--quantized dequantize` writes the values. Add `--restart`" in error
    run_ok("export", "init", "--quantized", "dequantize", "--restart", "--out", "exported")
    assert_values()


@pytest.mark.parametrize("name", slow_except(FORMATS, ["fp8"]))
def test_verify_compares_an_init_with_its_quantised_source(name: str):
    make_quantized(Path("m"), name)
    prep.save_init("./m", "init", quantized="dequantize")
    prep.save_init("./m", "kept")
    for init in ("init", "kept"):
        assert prep.verify(init, "./m")
        assert prep.verify("./m", init)


def test_verify_decodes_to_the_dtype_of_the_init(capsys: Capture):
    make_quantized(Path("m"), "gptq")
    prep.save_init("./m", "init", quantized="dequantize", dtype="float32")
    assert main(["verify", "init", "./m"]) == 1
    error = capsys.readouterr().err
    # The norms of the source are bfloat16.
    assert "model.norm.weight" in error
    assert "proj" not in error


def test_export_of_mxfp4_has_the_bytes_of_the_source():
    make_mxfp4_experts(Path("m"), exponents=253)
    prep.save_init("./m", "init", quantized="dequantize", mesh="1,2,2", allow_overflow=True)
    assert prep.verify("init", "./m")
    prep.export("init", "exported")
    assert_same_tensors("exported", "m")
    assert quantization_config("exported") == quantization_config("m")


# Scales of dequantised weights: leaves of the init that conversions keep and training ignores


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


@pytest.mark.parametrize("name", slow_except(FORMATS, ["fp8", "nf4"]))
def test_scales_are_leaves_below_quantization(name: str):
    scales = dequantize(name, mesh="1,2,2", pad_vocab="auto")
    leaves = restore_with_orbax("init")["quantization"]
    assert_same({key: np.asarray(leaf) for key, leaf in leaves.items()}, stack_layers(scales))


@pytest.mark.parametrize("name", slow_except(FORMATS, ["awq", "nf4"]))
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


@pytest.mark.parametrize("name", slow_except(["fp8", "compressed-int4", "nf4"], ["nf4"]))
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


def test_verify_finds_a_changed_scale(capsys: Capture):
    dequantize("fp8")
    assert prep.verify("init")
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    with changed_manifest(Path("init")) as manifest:
        manifest["slots"]["quantization"][name]["digests"][0][2] = "0" * 32
    capsys.readouterr()
    assert main(["verify", "init"]) == 1
    assert "model.layers.1.mlp.up_proj.weight_scale_inv" in capsys.readouterr().err


def test_missing_leaf_of_scales_is_an_error(capsys: Capture):
    dequantize("fp8")
    record = {"dtype": "float32", "shape": [2], "digests": []}
    with changed_manifest(Path("init")) as manifest:
        manifest["slots"]["quantization"]["model.layers.7.extra_scale"] = record
    assert main(["verify", "init"]) == 1
    assert "lacks the leaf quantization.model.layers.7.extra_scale" in capsys.readouterr().err


def edit_manifest(folder: str, edit: Callable[[dict[str, Any]], None]) -> None:
    path = Path(folder, "prep-manifest.json")
    manifest = json.loads(path.read_text())
    edit(manifest)
    del manifest["digest"], manifest["files"]
    path.write_text(json.dumps(manifest))


@pytest.mark.slow
def test_output_that_names_itself_leaves_the_values(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    edit_manifest("init", lambda manifest: manifest["source"].update(name="init"))
    assert "the quantised model is unknown" in export_note(capsys)
    assert_values()


@pytest.mark.slow
def test_changed_weight_leaves_the_values(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    edit_manifest("init", lambda manifest: manifest["quantized"][Q_PROJ].update(digest="0" * 32))
    assert f"`{Q_PROJ}` has no quantised bytes: its values were changed" in export_note(capsys)
    assert_values()
    with pytest.raises(PrepError, match="its values were changed"):
        prep.export("init", "other", quantized_source="m")


@pytest.mark.slow
def test_source_with_other_headers_leaves_the_values(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    Path("m").rename("moved")
    make_quantized(Path("m"), "gptq")
    assert "m has changed: it has no `model-0" in export_note(capsys)
    assert_values()


@pytest.mark.slow
def test_unquantised_source_leaves_the_values(capsys: Capture):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    Path("m").rename("moved")
    prep.export("init", "m", quantized="dequantize")
    assert "m has no quantised bytes: its weights are not quantised" in export_note(capsys)
    assert_values()


@pytest.mark.slow
def test_params_only_copy_has_no_scales():
    dequantize("fp8")
    conversion = prep.reshard("init", "bare", params_only=True)
    dropped = conversion.details["accounting"]["dropped"]
    assert [tensor["rule"] for tensor in dropped] == ["scales of quantised weights"]
    assert "quantization" not in restore_with_orbax("bare")
    assert "quantized" not in manifest_of("bare")
