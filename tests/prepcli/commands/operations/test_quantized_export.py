"""`export` of decoded weights: the bytes of their quantised model, or the values with a note that says why."""

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
from tests.helpers.quantized_folders import FORMATS, Arrays, make_mxfp4_experts, make_quantized
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import read_tensors

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_same_tensors(folder: str, original: str) -> None:
    tensors = read_tensors(Path(folder))
    stored = read_tensors(Path(original))
    assert {*tensors} == {*stored}
    for key, array in stored.items():
        assert (tensors[key].dtype, tensors[key].shape) == (array.dtype, array.shape)
        assert tensors[key].tobytes() == array.tobytes(), key


def edit_manifest(folder: str, edit: Callable[[dict[str, Any]], None]) -> None:
    path = Path(folder, "prep-manifest.json")
    manifest = json.loads(path.read_text())
    edit(manifest)
    del manifest["digest"], manifest["files"]
    path.write_text(json.dumps(manifest))


def export_note(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Export `init` to `exported`, and return the note on decoded weights. Empty without one."""
    capsys.readouterr()
    assert main(["export", "init", *words, "--out", "exported"]) == 0
    lines = capsys.readouterr().err.splitlines()
    return next((line for line in lines if "decoded weights" in line), "")


def assert_values(dtype: str = "bfloat16") -> None:
    """Check that `exported` has the values of the weights in `init`."""
    assert read_tensors(Path("exported"))[Q_PROJ].dtype == dtype
    assert "quantization_config" not in json.loads(Path("exported/config.json").read_text())
    if dtype == "bfloat16":
        assert prep.verify("exported", "init")


def quantization_config(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, "config.json").read_text())["quantization_config"]


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"mesh": "1,2,2", "pad_vocab": "auto"},
    {"scan": False},
    {"layers": 2},
]


# Each layout with one format, and each format with one layout.
@pytest.mark.parametrize(
    ("name", "layout"),
    slow_except(
        [(name, layout) for name in FORMATS for layout in LAYOUTS],
        lambda case: case[0] == "fp8" or case[1] == LAYOUTS[1],
    ),
)
def test_export_has_the_bytes_of_the_source(name: str, layout: dict[str, Any]):
    make_quantized(Path("m"), name)
    prep.save_init("./m", "init", quantized="dequantize", **layout)
    prep.export("init", "exported")
    if "layers" in layout:
        prep.save_init("./m", "kept", layers=2)
        prep.export("kept", "expected")
        assert_same_tensors("exported", "expected")
    else:
        assert_same_tensors("exported", "m")
    assert quantization_config("exported") == quantization_config("m")
    assert prep.verify("exported")


def test_verify_ignores_the_padding_of_decoded_weights():
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize", pad_vocab="64")
    for pair in (("init", "./m"), ("./m", "init")):
        assert prep.verify(*pair)

    def change_embedding(stored: Arrays) -> None:
        stored["model.embed_tokens.weight"][3] += 1

    make_quantized(Path("other"), "fp8", change=change_embedding)
    (difference,) = prep.verify("init", "./other").differences
    assert difference["tensor"] == "model.embed_tokens.weight"


def test_export_of_resharded_init_has_the_bytes_of_the_source():
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    prep.reshard("init", "resharded", mesh="1,2,1", scan=False)
    prep.export("resharded", "exported", shard_size="100KB")
    assert_same_tensors("exported", "m")


@pytest.mark.parametrize("options", [{}, {"quantized_source": "./m"}])
def test_true_vocab_cuts_rows_of_quantised_exports(options: dict[str, Any]):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    stored = read_tensors(Path("m"))
    size = stored["model.embed_tokens.weight"].shape[0] - 8
    prep.export("init", "exported", true_vocab=size, **options)
    tensors = read_tensors(Path("exported"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert tensors[name].tobytes() == stored[name][:size].tobytes()
    assert tensors[Q_PROJ].tobytes() == stored[Q_PROJ].tobytes()
    assert json.loads(Path("exported/config.json").read_text())["vocab_size"] == size
    with pytest.raises(UsageError, match="out of range"):
        prep.export("init", "other", true_vocab=size + 9, **options)


def test_export_in_processes_has_the_bytes_of_the_source():
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    run_ok("export", "init", "--workers", "2", "--out", "exported")
    assert_same_tensors("exported", "m")


def test_export_of_decoded_verbatim_model_equals_the_source():
    make_quantized(Path("m"), "fp8")
    config_path = Path("m/config.json")
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "model_type": "unheard_of"}))
    prep.save_init("./m", "init", quantized="dequantize")
    prep.export("init", "exported")
    assert_same_tensors("exported", "m")


def test_missing_source_leaves_the_values(capsys: pytest.CaptureFixture[str]):
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


def test_source_with_other_headers_leaves_the_values(capsys: pytest.CaptureFixture[str]):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    Path("m").rename("moved")
    make_quantized(Path("m"), "gptq")
    assert "m has changed: it has no `model-0" in export_note(capsys)
    assert_values()


def test_unquantised_source_leaves_the_values(capsys: pytest.CaptureFixture[str]):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    Path("m").rename("moved")
    prep.export("init", "m", quantized="dequantize")
    assert "m has no quantised bytes: its weights are not quantised" in export_note(capsys)
    assert_values()


def test_model_of_the_hub_is_not_downloaded(capsys: pytest.CaptureFixture[str]):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    edit_manifest("init", lambda manifest: manifest["source"].update(name="owner/name"))
    assert "owner/name is not in the cache of the hub. `--quantized-source" in export_note(capsys)
    assert_values()


def test_cached_model_of_the_hub_supplies_the_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    commit = "0123456789" * 4
    snapshot = Path("hub/models--owner--name/snapshots", commit)
    snapshot.parent.mkdir(parents=True)
    make_quantized(Path("m"), "awq")
    prep.save_init("./m", "init", quantized="dequantize")
    Path("m").rename(snapshot)

    def name_the_hub(manifest: dict[str, Any]) -> None:
        manifest["source"]["name"] = "owner/name"
        manifest["origin"] = {"commit": commit}

    edit_manifest("init", name_the_hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(Path("hub").absolute()))
    assert not export_note(capsys)
    assert_same_tensors("exported", str(snapshot))


def test_output_that_names_itself_leaves_the_values(capsys: pytest.CaptureFixture[str]):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    edit_manifest("init", lambda manifest: manifest["source"].update(name="init"))
    assert "the quantised model is unknown" in export_note(capsys)
    assert_values()


@pytest.mark.parametrize(
    ("name", "dtype"),
    slow_except(
        [(name, dtype) for name in FORMATS for dtype in (None, "float32")],
        lambda case: case[0] == "fp8" or case[1] is None,
    ),
)
def test_quantized_source_supplies_the_bytes(name: str, dtype: Any):
    make_quantized(Path("m"), name)
    prep.save_init("./m", "init", quantized="dequantize", dtype=dtype)
    prep.export("init", "exported", quantized_source="./m")
    exported = read_tensors(Path("exported"))
    # A cast to float32 also changes the other tensors.
    for key, array in read_tensors(Path("m")).items():
        if dtype is None or "_proj." in key:
            assert exported[key].tobytes() == array.tobytes()
    assert quantization_config("exported") == quantization_config("m")


def change_codes(stored: Arrays) -> None:
    codes = stored[Q_PROJ].view(np.uint8)
    codes[0, 0] ^= 1


def test_other_quantized_source_is_refused():
    make_quantized(Path("m"), "fp8")
    make_quantized(Path("other"), "fp8", change=change_codes)
    prep.save_init("./m", "init", quantized="dequantize")
    with pytest.raises(PrepError, match="q_proj") as caught:
        prep.export("init", "exported", quantized_source="./other")
    assert "./other" in caught.value.what
    assert not Path("exported").exists()


def test_quantized_source_of_another_format_is_refused():
    make_quantized(Path("m"), "fp8")
    make_quantized(Path("other"), "gptq")
    prep.save_init("./m", "init", quantized="dequantize")
    with pytest.raises(PrepError, match="is not the source of init"):
        prep.export("init", "exported", quantized_source="./other")


def test_unquantised_source_of_bytes_is_refused():
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    prep.export("init", "values", quantized="dequantize")
    with pytest.raises(UsageError, match="has no quantised bytes"):
        prep.export("init", "exported", quantized_source="./values")


@pytest.mark.parametrize(
    "words", [("--dtype", "float32"), ("--keep-padding",), ("--layout", "hf-flax")]
)
def test_option_of_values_leaves_the_values(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    error = run_failing(capsys, 2, "export", "init", *words, "--quantized-source", "m")
    assert "is not supported for quantised weights" in error
    note = export_note(capsys, *words)
    dtype = "float32" if "--dtype" in words else "bfloat16"
    assert note.startswith(f"21 decoded weights in {dtype}, without the quantised bytes: ")
    assert f"`{' '.join(words)}` is not supported for quantised weights" in note
    if "--layout" in words:
        assert prep.verify("exported", "m")
    else:
        assert_values(dtype)


def test_training_state_of_decoded_weights_is_refused(capsys: pytest.CaptureFixture[str]):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    error = run_failing(capsys, 2, "export", "init", "--training-state")
    assert "`--training-state` is not supported with `--quantized keep`" in error


def test_quantized_source_without_effect_is_refused():
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    with pytest.raises(UsageError, match="has no effect"):
        prep.export("init", "out", quantized="dequantize", quantized_source="./m")


def test_source_with_other_values_ends_the_export(capsys: pytest.CaptureFixture[str]):
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


def test_changed_weight_leaves_the_values(capsys: pytest.CaptureFixture[str]):
    make_quantized(Path("m"), "fp8")
    prep.save_init("./m", "init", quantized="dequantize")
    edit_manifest("init", lambda manifest: manifest["quantized"][Q_PROJ].update(digest="0" * 32))
    assert f"`{Q_PROJ}` has no quantised bytes: its values were changed" in export_note(capsys)
    assert_values()
    with pytest.raises(PrepError, match="its values were changed"):
        prep.export("init", "other", quantized_source="m")


@pytest.mark.parametrize("name", slow_except(FORMATS, ["fp8", "compressed-nvfp4", "awq", "nf4"]))
def test_verify_compares_an_init_with_its_quantised_source(name: str):
    make_quantized(Path("m"), name)
    prep.save_init("./m", "init", quantized="dequantize")
    prep.save_init("./m", "kept")
    for init in ("init", "kept"):
        assert prep.verify(init, "./m")
        assert prep.verify("./m", init)


def test_verify_finds_a_difference_from_the_quantised_source(capsys: pytest.CaptureFixture[str]):
    make_quantized(Path("m"), "fp8")
    make_quantized(Path("other"), "fp8", change=change_codes)
    prep.save_init("./m", "init", quantized="dequantize")
    prep.save_init("./m", "kept")
    for pair in (("init", "./other"), ("./other", "init"), ("kept", "./other")):
        assert main(["verify", *pair]) == 1
        assert Q_PROJ in capsys.readouterr().err


def test_verify_decodes_to_the_dtype_of_the_init(capsys: pytest.CaptureFixture[str]):
    make_quantized(Path("m"), "gptq")
    prep.save_init("./m", "init", quantized="dequantize", dtype="float32")
    assert main(["verify", "init", "./m"]) == 1
    error = capsys.readouterr().err
    # The norms of the source are bfloat16.
    assert "model.norm.weight" in error
    assert "proj" not in error


@pytest.mark.parametrize(("mesh", "exponents"), [(None, 256), ("1,2,2", 253)])
def test_export_of_mxfp4_has_the_bytes_of_the_source(mesh: str | None, exponents: int):
    make_mxfp4_experts(Path("m"), exponents=exponents)
    prep.save_init("./m", "init", quantized="dequantize", mesh=mesh, allow_overflow=True)
    assert prep.verify("init", "./m")
    prep.export("init", "exported")
    assert_same_tensors("exported", "m")
    assert quantization_config("exported") == quantization_config("m")
