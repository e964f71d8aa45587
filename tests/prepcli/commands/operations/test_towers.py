"""Multimodal models: the text part as a family's parameters, the towers beside it, and the same files back."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.testing.tiny_model import model_logits, tiny_transformer
from prepcli.core.formatting import format_bytes
from tests.helpers.fork_server import PREP, run_python, run_two_processes
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.manifests import changed_manifest
from tests.helpers.range_server import serve_ranges
from tests.helpers.run_cli import Capture, error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import StoredTensor, safetensors_bytes, write_safetensors
from tests.helpers.towers import PROCESSOR, TYPES, read_golden, write_model

LOGITS_ATOL = 2e-5


def read_json(path: str) -> dict[str, Any]:
    """Return the content of a JSON file."""
    return json.loads(Path(path).read_text())


def check_export(folder: str, tensors: dict[str, StoredTensor]) -> None:
    """Check that a folder has these tensors, and the other files of the model."""
    assert safetensors_bytes(Path(folder)) == tensors
    for name in ("config.json", PROCESSOR):
        assert (Path(folder) / name).read_bytes() == (Path("m") / name).read_bytes()


def errors_of(capsys: Capture, *words: str) -> list[str]:
    """Run a command that fails after commands that printed, and return the lines of its error."""
    capsys.readouterr()
    return error_lines(capsys, *words)


@pytest.mark.parametrize("model_type", slow_except(TYPES, ["mistral3"]))
def test_multimodal_model_round_trips(model_type: str):
    tensors = write_model(model_type)
    run_ok("save-init", "./m", "--mesh", "1,2,2")
    run_ok("reshard", "m-init", "--mesh", "1,4,1", "--no-scan", "--out", "other")
    run_ok("export", "other", "--out", "hf", "--shard-size", "50KB")
    check_export("hf", tensors)
    for checkpoint in ("m-init", "other", "hf"):
        run_ok("verify", checkpoint)
        run_ok("verify", checkpoint, "./m")
    assert read_json("other/prep-manifest.json")["towers"]["model_type"] == model_type


# By default test_parity covers the text models of the others. It has no M-RoPE, of which there are two layouts.
@pytest.mark.parametrize("model_type", slow_except(TYPES, ["qwen2_5_vl", "qwen3_vl"]))
def test_text_part_computes_logits_of_transformers(model_type: str):
    golden = read_golden(model_type)
    write_model(model_type)
    run_ok("save-init", "./m")
    config = read_json("m-init/prep-manifest.json")["config"]
    params = prep.load_params("m-init")
    tokens = np.array([golden["tokens"]], np.int32)
    logits = model_logits(tiny_transformer(config).model, params, {"tokens": tokens})[0]
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=LOGITS_ATOL)


def test_item_has_towers_beside_params():
    import orbax.checkpoint as ocp

    tensors = write_model("llava")
    run_ok("save-init", "./m", "--mesh", "1,2,2")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree: Any = checkpointer.restore(Path("m-init").absolute())
    assert tree.keys() == {"params", "towers"}
    text = "language_model."
    assert {*tree["towers"]} == {name for name in tensors if not name.startswith(text)}
    for name, leaf in tree["towers"].items():
        assert np.asarray(leaf).tobytes() == tensors[name][2]
    embedding = tensors["language_model.model.embed_tokens.weight"]
    assert np.asarray(tree["params"]["embed"]["tokens"]).tobytes() == embedding[2]


@pytest.mark.slow
def test_large_dims_of_towers_are_split():
    tensors = write_model("llava")
    shape = (2048, 1024)
    large = ("F32", shape, bytes(4 * 2048 * 1024))
    tensors |= {"projector.1.weight": large, "projector.2.weight": large}
    write_safetensors(Path("m/model.safetensors"), tensors)
    run_ok(
        "save-init", "./m", "--mesh", "1,2,4", "--rule", r"re:^towers\.projector\.weight=none,mp"
    )
    leaves = read_json("m-init/prep-manifest.json")["leaves"]
    assert leaves["towers.projector.1.weight"]["chunk"] == [2048, 256]
    run_ok("save-init", "./m", "--mesh", "1,2,4", "--out", "other")
    leaves = read_json("other/prep-manifest.json")["leaves"]
    assert leaves["towers.projector.1.weight"]["chunk"] == [512, 512]


@pytest.mark.slow
def test_tower_tensors_without_elements_round_trip():
    tensors = write_model("llava")
    tensors["vision_tower.none.weight"] = ("F32", (0, 4), b"")
    write_safetensors(Path("m/model.safetensors"), tensors)
    run_ok("save-init", "./m", "--mesh", "1,2,2")
    run_ok("reshard", "m-init", "--mesh", "1,4,1", "--out", "other")
    run_ok("verify", "other", "./m")
    run_ok("export", "other", "--out", "hf")
    check_export("hf", tensors)


@pytest.mark.slow
def test_verbatim_keeps_names_of_multimodal_model():
    tensors = write_model("llava")
    run_ok("save-init", "./m", "--verbatim", "--out", "verbatim")
    run_ok("reshard", "verbatim", "--mesh", "1,1,2", "--out", "other")
    run_ok("export", "other", "--out", "hf")
    check_export("hf", tensors)
    assert read_json("other/prep-manifest.json")["family"] == "verbatim"
    # The export keeps the choice, and `--no-verbatim` takes it back.
    run_ok("save-init", "./hf", "--out", "again")
    assert read_json("again/prep-manifest.json")["family"] == "verbatim"
    run_ok("save-init", "./hf", "--no-verbatim", "--out", "text")
    assert read_json("text/prep-manifest.json")["family"] == "llama"


def test_pad_vocab_changes_text_vocabulary():
    tensors = write_model("llava")
    before = read_json("m/config.json")
    run_ok("pad-vocab", "./m", "--size", "136")
    config = read_json("m-padded/config.json")
    assert config["text_config"]["vocab_size"] == 136
    assert config["text_config"]["true_vocab_size"] == 128
    padded = safetensors_bytes(Path("m-padded"))
    changed = {name for name in tensors if padded[name] != tensors[name]}
    head = "language_model.lm_head.weight"
    assert changed == {"language_model.model.embed_tokens.weight", head}
    assert padded[head][1] == (136, 64)
    assert padded[head][2].startswith(tensors[head][2])
    run_ok("save-init", "./m-padded", "--out", "init")
    run_ok("export", "init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors
    assert read_json("hf/config.json") == before


def test_pad_vocab_counts_towers_of_full_copy(capsys: Capture):
    tensors = write_model("llava")
    assert main(["pad-vocab", "./m", "--size", "128", "--dry-run"]) == 0
    nbytes = sum(len(data) for _, _, data in tensors.values())
    assert f"the output is a full copy of {format_bytes(nbytes)}" in capsys.readouterr().err


@pytest.mark.slow
def test_init_with_padded_vocabulary_exports_source():
    tensors = write_model("qwen3_vl")
    before = read_json("m/config.json")
    run_ok("save-init", "./m", "--pad-vocab", "100")
    assert read_json("m-init/hf/config.json")["text_config"]["vocab_size"] == 200
    run_ok("export", "m-init")
    assert safetensors_bytes(Path("m-hf")) == tensors
    assert read_json("m-hf/config.json") == before


def test_first_layers_of_text_part_keep_towers():
    tensors = write_model("llava")
    run_ok("save-init", "./m", "--layers", "1")
    run_ok("export", "m-init")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("language_model.model.layers.") or ".layers.0." in name
    }
    assert safetensors_bytes(Path("m-hf")) == kept
    config = read_json("m-hf/config.json")
    assert config["text_config"]["num_hidden_layers"] == 1
    assert config["vision_config"] == read_json("m/config.json")["vision_config"]


def test_cast_applies_to_towers():
    write_model("llava")
    run_ok("save-init", "./m", "--dtype", "bfloat16")
    run_ok("export", "m-init")
    assert {code for code, _, _ in safetensors_bytes(Path("m-hf")).values()} == {"BF16"}
    config = read_json("m-hf/config.json")
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("source", slow_except(["./m", "m-init"], ["m-init"]))
def test_text_only_export_is_text_model(source: str):
    tensors = write_model("qwen3_vl")
    run_ok("save-init", "./m")
    run_ok("export", source, "--text-only", "--out", "text")
    text = safetensors_bytes(Path("text"))
    prefix = "model.language_model."
    assert text == {
        name.replace(prefix, "model."): tensor
        for name, tensor in tensors.items()
        if name.startswith((prefix, "lm_head."))
    }
    assert read_json("text/config.json")["model_type"] == "qwen3"
    assert not (Path("text") / PROCESSOR).exists()
    run_ok("save-init", "./text", "--out", "text-init")


@pytest.mark.slow
def test_verify_compares_text_parts_if_one_side_has_towers(capsys: Capture):
    write_model("qwen3_vl")
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--text-only", "--out", "text")
    for checkpoints in (("text", "m-init"), ("./m", "text")):
        capsys.readouterr()
        assert main(["verify", *checkpoints]) == 0
        assert "ignored: only the text part is compared" in capsys.readouterr().err
    data = (Path("text") / "model.safetensors").read_bytes()
    (Path("text") / "model.safetensors").write_bytes(data[:-4] + b"\0\0\0\0")
    assert main(["verify", "text", "m-init"]) == 1


@pytest.mark.parametrize(
    "kept", [pytest.param(("none",), marks=pytest.mark.slow), ("multi_modal_projector",)]
)
def test_verify_reports_lost_towers(kept: tuple[str, ...]):
    tensors = write_model("llava")
    run_ok("save-init", "./m")
    shutil.copytree("m", "broken")
    names = ("language_model.", *kept)
    left = {name: tensor for name, tensor in tensors.items() if name.startswith(names)}
    write_safetensors(Path("broken/model.safetensors"), left)
    for checkpoints in (("./m", "./broken"), ("./broken", "./m"), ("m-init", "./broken")):
        result = prep.verify(*checkpoints)
        assert not result
        assert {difference["what"] for difference in result.differences} == {"is not in ./broken"}
        assert len(result.differences) == len(tensors) - len(left)


def test_verify_compares_towers_by_names_of_the_file():
    write_model("llava")
    run_ok("save-init", "./m", "--verbatim", "--out", "verbatim")
    run_ok("verify", "verbatim", "./m")
    run_ok("export", "./m", "--text-only", "--out", "text")
    assert main(["verify", "verbatim", "text"]) == 1


@pytest.mark.slow
def test_damaged_tower_is_an_error(capsys: Capture):
    write_model("llava")
    run_ok("save-init", "./m")
    name = "multi_modal_projector.linear_1.weight"
    with changed_manifest(Path("m-init")) as manifest:
        manifest["tensors"][name]["digests"] = [[0, 64, "0" * 32]]
    (line, *_) = errors_of(capsys, "export", "m-init", "--out", "hf")
    assert line == f"error: {name} in m-init is damaged"
    assert not Path("hf").exists()


@pytest.mark.slow
def test_workers_write_towers_together():
    tensors = write_model("gemma3")
    run_ok("save-init", "./m", "--workers", "2")
    run_ok("export", "m-init", "--workers", "2", "--out", "hf")
    check_export("hf", tensors)


@pytest.mark.slow
def test_processes_write_one_output(tmp_path: Path):
    tensors = write_model("qwen3_vl")
    words = ("save-init", "./m", "--mesh", "1,2,2", "--out", "init", "-q")
    assert run_two_processes(*words, cwd=tmp_path) == [0, 0]
    run_ok("export", "init", "--out", "hf")
    check_export("hf", tensors)


def test_towers_are_streamed_from_the_hub(tmp_path: Path):
    tensors = write_model("llava")
    files = {path.name: path.read_bytes() for path in Path("m").iterdir()}
    weights = files["model.safetensors"]
    with serve_ranges({hashlib.sha256(weights).hexdigest(): weights}) as store:
        repos = {"o/m": FakeRepo(files, large=("model.safetensors",), store=store)}
        with serve_hub(repos) as hub:
            environment = {**os.environ, **hub.environment(tmp_path / "home")}
            words = ("save-init", "o/m", "--stream", "--out", "init")
            process = run_python(PREP, *words, cwd=tmp_path, env=environment)
    assert process.returncode == 0, process.stderr
    run_ok("export", "init", "--out", "hf")
    check_export("hf", tensors)


def test_options_for_towers_are_refused_without_towers(capsys: Capture):
    write_model("llava")
    run_ok("export", "./m", "--text-only", "--out", "text")
    run_ok("save-init", "./text", "--out", "init")
    (line, *_) = errors_of(capsys, "export", "init", "--text-only")
    assert line == "error: `--text-only` has no effect for init"
    (line, *_) = errors_of(capsys, "export", "init", "--towers", "m")
    assert line == "error: `--towers m` has no effect for init"


def test_other_layout_of_multimodal_model_is_refused(capsys: Capture):
    write_model("llava")
    run_ok("save-init", "./m")
    lines = errors_of(capsys, "export", "m-init", "--layout", "easylm")
    assert lines[0] == "error: layout easylm is not supported for multimodal models"
    assert "--text-only" in lines[-1]
    run_ok("export", "m-init", "--layout", "easylm", "--text-only", "--out", "stream")


def test_wrapper_with_other_computation_stays_verbatim():
    write_model("llava")
    config = read_json("m/config.json") | {"model_type": "paligemma"}
    Path("m/config.json").write_text(json.dumps(config))
    run_ok("save-init", "./m")
    assert read_json("m-init/prep-manifest.json")["family"] == "verbatim"


@pytest.mark.slow
@pytest.mark.parametrize("like", slow_except(["./m", "m-init"], ["./m"]))
def test_saved_params_export_with_towers_of_like(like: str):
    tensors = write_model("llava")
    run_ok("save-init", "./m")
    prep.save_params(prep.load_params("m-init"), "saved", like=like)
    run_ok("export", "saved", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors
    assert read_json("hf/config.json") == read_json("m/config.json")


def write_bare_model() -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Write a model to `m` and a copy without towers to `bare`, and return the tensors of both."""
    tensors = write_model("llava")
    shutil.copytree("m", "bare")
    text = {name: t for name, t in tensors.items() if name.startswith("language_model.")}
    write_safetensors(Path("bare/model.safetensors"), text)
    return tensors, text


@pytest.mark.slow
def test_model_without_stored_towers_round_trips():
    _, text = write_bare_model()
    run_ok("save-init", "./bare", "--mesh", "1,2,2")
    run_ok("reshard", "bare-init", "--mesh", "1,4,1", "--no-scan", "--out", "other")
    for checkpoint in ("bare-init", "other"):
        run_ok("export", checkpoint, "--out", "hf", "--overwrite")
        check_export("hf", text)
        run_ok("verify", "hf", checkpoint)
        run_ok("verify", checkpoint, "./bare")


def test_model_without_stored_towers_exports_with_named_ones():
    tensors, _ = write_bare_model()
    run_ok("save-init", "./bare")
    run_ok("export", "bare-init", "--towers", "./m", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors


def test_saved_params_export_without_towers_of_bare_like():
    _, text = write_bare_model()
    run_ok("save-init", "./bare")
    prep.save_params(prep.load_params("bare-init"), "saved", like="bare-init")
    run_ok("export", "saved", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == text
    assert read_json("hf/config.json") == read_json("m/config.json")


def test_saved_params_without_path_name_no_towers(capsys: Capture):
    write_bare_model()
    run_ok("save-init", "./bare")
    prep.save_params(prep.load_params("bare-init"), "saved", like="bare-init")
    # Older versions recorded no path for a model without towers.
    with changed_manifest(Path("saved")) as manifest:
        del manifest["towers"]["path"]
    lines = errors_of(capsys, "export", "saved", "--out", "hf")
    assert lines[0] == "error: the manifest of saved does not name the model with the towers"
    assert "--towers" in lines[-1]
    assert "--text-only" in lines[-1]


@pytest.mark.slow
def test_lock_approves_towers(capsys: Capture):
    tensors = write_model("llava")
    run_ok("lock", "./m", "--out", "m.lock")
    run_ok("save-init", "./m", "--lock", "m.lock")
    name = "multi_modal_projector.linear_1.weight"
    code, shape, data = tensors[name]
    changed = {**tensors, name: (code, shape, data[::-1])}
    write_safetensors(Path("m/model.safetensors"), changed)
    (line, *_) = errors_of(capsys, "save-init", "./m", "--lock", "m.lock", "--out", "other")
    assert line == f"error: {name} in ./m is damaged"


def test_inspect_names_text_family_and_model(capsys: Capture):
    write_model("llava")
    run_ok("save-init", "./m")
    for checkpoint in ("./m", "m-init"):
        assert main(["inspect", checkpoint]) == 0
        assert "llama in llava" in capsys.readouterr().out


# Quantised multimodal models: decoded text parts are those of their family, and the quantised bytes come back


TEXT_FAMILIES = {"llava": "llama", "qwen3_vl": "qwen3"}
BLOCK = 16


def quantize(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return random fp8 codes, and the scales of their blocks."""
    codes = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    grid = tuple(-(-size // BLOCK) for size in shape)
    scales = np.exp(rng.normal(-4, 0.5, grid)).astype(np.float32)
    return codes, scales


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    rows, columns = codes.shape
    spread = np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)[:rows, :columns]
    return (codes.astype(np.float32) * spread).astype(ml_dtypes.bfloat16)


def write_quantized(model_type: str) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Write the model `m` with projections in fp8, and return its tensors and the decoded ones."""
    original = write_model(model_type)
    rng = np.random.default_rng(0)
    stored: dict[str, StoredTensor] = {}
    decoded: dict[str, StoredTensor] = {}
    for name, (code, shape, data) in original.items():
        if len(shape) != 2 or not name.endswith("proj.weight"):
            stored[name] = decoded[name] = (code, shape, data)
            continue
        codes, scales = quantize(rng, shape)
        stored[name] = ("F8_E4M3", shape, codes.tobytes())
        stored[f"{name}_scale_inv"] = ("F32", scales.shape, scales.tobytes())
        decoded[name] = ("BF16", shape, decode(codes, scales).tobytes())
    write_safetensors(Path("m/model.safetensors"), stored)
    settings = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    config = read_json("m/config.json") | {"quantization_config": settings}
    Path("m/config.json").write_text(json.dumps(config))
    return stored, decoded


@pytest.mark.slow
@pytest.mark.parametrize("model_type", slow_except(TEXT_FAMILIES, ["llava"]))
def test_decoded_text_part_has_its_family(model_type: str):
    _, decoded = write_quantized(model_type)
    run_ok("save-init", "./m", "--quantized", "dequantize", "--mesh", "1,2,2")
    assert read_json("m-init/prep-manifest.json")["family"] == TEXT_FAMILIES[model_type]
    run_ok("export", "m-init", "--quantized", "dequantize", "--out", "values")
    assert safetensors_bytes(Path("values")) == decoded
    config = read_json("m/config.json")
    del config["quantization_config"]
    assert read_json("values/config.json") == config
    run_ok("verify", "m-init")
    run_ok("verify", "m-init", "./m")
    run_ok("verify", "./m", "m-init")
    run_ok("verify", "m-init", "values")


@pytest.mark.parametrize(
    "options", slow_except([[], ["--quantized-source", "./m"]], [["--quantized-source", "./m"]])
)
@pytest.mark.parametrize("model_type", slow_except(TEXT_FAMILIES, ["llava"]))
def test_export_of_multimodal_model_has_quantised_bytes(model_type: str, options: list[str]):
    stored, _ = write_quantized(model_type)
    run_ok("save-init", "./m", "--quantized", "dequantize", "--pad-vocab", "100")
    run_ok("export", "m-init", *options, "--out", "hf")
    assert safetensors_bytes(Path("hf")) == stored
    assert read_json("hf/config.json") == read_json("m/config.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    slow_except(
        ["", "model.language_model.layers.0.self_attn.extra"],
        ["model.language_model.layers.0.self_attn.extra"],
    ),
)
def test_decoded_wrapped_multimodal_model_verifies(extra: str):
    stored, decoded = write_quantized("qwen3_vl")
    prefixed = {f"_orig_mod.{name}": tensor for name, tensor in stored.items()}
    drop: tuple[str, ...] = ()
    if extra:
        prefixed[f"_orig_mod.{extra}"] = ("F32", (3,), bytes(12))
        drop = ("--drop", "*.extra")
    write_safetensors(Path("m/model.safetensors"), prefixed)
    run_ok("save-init", "./m", "--quantized", "dequantize", *drop)
    assert read_json("m-init/prep-manifest.json")["family"] == "qwen3"
    run_ok("export", "m-init", "--quantized", "dequantize", "--out", "values")
    assert safetensors_bytes(Path("values")) == decoded
    run_ok("verify", "m-init", "./m")
    run_ok("verify", "./m", "m-init")
    run_ok("save-init", "./m", "--quantized", "keep", *drop, "--out", "kept")
    run_ok("verify", "kept", "./m")


def test_text_only_export_of_decoded_model_writes_values():
    _, decoded = write_quantized("qwen3_vl")
    run_ok("save-init", "./m", "--quantized", "dequantize")
    prep.export("m-init", "text", text_only=True)
    prefix = "model.language_model."
    assert safetensors_bytes(Path("text")) == {
        name.replace(prefix, "model."): tensor
        for name, tensor in decoded.items()
        if name.startswith((prefix, "lm_head."))
    }
    assert read_json("text/config.json")["model_type"] == "qwen3"


def test_first_layers_of_decoded_text_part_keep_towers():
    stored, _ = write_quantized("llava")
    run_ok("save-init", "./m", "--quantized", "dequantize", "--layers", "1")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == {
        name: tensor
        for name, tensor in stored.items()
        if not name.startswith("language_model.model.layers.") or ".layers.0." in name
    }


@pytest.mark.slow
def test_verbatim_keeps_names_of_decoded_multimodal_model():
    stored, _ = write_quantized("llava")
    run_ok("save-init", "./m", "--quantized", "dequantize", "--verbatim")
    assert read_json("m-init/prep-manifest.json")["family"] == "verbatim"
    run_ok("verify", "m-init", "./m")
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == stored


def test_load_params_reads_decoded_text_part():
    _, decoded = write_quantized("llava")
    run_ok("save-init", "./m", "--quantized", "dequantize")
    params = prep.load_params("m-init")
    embedding = decoded["language_model.model.embed_tokens.weight"]
    assert np.asarray(params["embed"]["tokens"]).tobytes() == embedding[2]
