"""Tensors beside the text model: towers of multimodal models, and layers of multi-token prediction."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.testing.tiny_model import model_logits, tiny_transformer
from prepcli.core.errors import USAGE
from prepcli.core.formatting import format_bytes
from tests.helpers.fork_server import PREP, run_python
from tests.helpers.hub_server import FakeRepo, serve_hub
from tests.helpers.manifests import changed_manifest
from tests.helpers.quantized_formats import fp8
from tests.helpers.range_server import serve_ranges
from tests.helpers.run_cli import Capture, error_lines, run_failing_unchanged, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import StoredTensor, safetensors_bytes, write_safetensors
from tests.helpers.tiny_checkpoints import LLAMA, checkpoint_tensors, read_tensors, write_checkpoint
from tests.helpers.tiny_configs import GOLDEN
from tests.helpers.tokenizer_folders import train_tokenizer, write_json
from tests.helpers.towers import PROCESSOR, TYPES, read_golden, write_model
from tests.helpers.training_folder import RECIPE, make_training_folder

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


def test_text_only_export_is_text_model():
    tensors = write_model("qwen3_vl")
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--text-only", "--out", "text")
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


def test_verify_reports_lost_towers():
    tensors = write_model("llava")
    run_ok("save-init", "./m")
    shutil.copytree("m", "broken")
    names = ("language_model.", "multi_modal_projector")
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
def test_saved_params_export_with_towers_of_like():
    tensors = write_model("llava")
    run_ok("save-init", "./m")
    prep.save_params(prep.load_params("m-init"), "saved", like="./m")
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


def test_inspect_names_text_family_and_model(capsys: Capture):
    write_model("llava")
    run_ok("save-init", "./m")
    for checkpoint in ("./m", "m-init"):
        assert main(["inspect", checkpoint]) == 0
        assert "llama in llava" in capsys.readouterr().out


# Quantised multimodal models: decoded text parts are those of their family, and the quantised bytes come back


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


def test_export_of_multimodal_model_has_quantised_bytes():
    stored, _ = write_quantized("llava")
    run_ok("save-init", "./m", "--quantized", "dequantize", "--pad-vocab", "100")
    run_ok("export", "m-init", "--quantized-source", "./m", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == stored
    assert read_json("hf/config.json") == read_json("m/config.json")


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


# Embeddings and heads of multi-token prediction have the vocabulary rows of their model in every output


GLM = GOLDEN["glm4_moe"] | {"num_nextn_predict_layers": 1}
LAYER = f"model.layers.{GLM['num_hidden_layers']}."


Arrays = dict[str, np.ndarray]
WIDTH = GLM["hidden_size"]
SIZE = GLM["vocab_size"]
EMBEDDING = f"{LAYER}embed_tokens.weight"
HEAD = f"{LAYER}shared_head.head.weight"
# Config, and the embeddings and heads of its multi-token prediction. Published files have such names.
VOCABULARY_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "glm4_moe": (GLM, (EMBEDDING, HEAD)),
    "deepseek_v3": (GOLDEN["deepseek_v3"], (EMBEDDING, HEAD)),
    "glm4_moe_lite": (GOLDEN["glm4_moe_lite"], (EMBEDDING, HEAD)),
    "qwen3_next": (GOLDEN["qwen3_next"], ("mtp.embed_tokens.weight", "mtp.lm_head.weight")),
    "llama": (LLAMA, (f"{LAYER}transformer.shared_head.output.weight",)),
}
NORM = f"{LAYER}shared_head.norm.weight"
PROJECTION = f"{LAYER}eh_proj.weight"
NO_SHAPES: Mapping[str, tuple[int, ...]] = {}


def write_vocabulary(
    config: Mapping[str, Any] = GLM,
    names: tuple[str, ...] = (EMBEDDING, HEAD),
    shapes: Mapping[str, tuple[int, ...]] = NO_SHAPES,
) -> Arrays:
    """Write a model with multi-token prediction, with tensors of further shapes, to `m`, and return all tensors."""
    config = dict(config)
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    rng = np.random.default_rng(0)
    width = config["hidden_size"]
    rows = config["vocab_size"]
    copies = dict.fromkeys(names, (rows, width))
    others = {NORM: (width,), PROJECTION: (width, 2 * width)}
    for name, shape in {**copies, **others, **shapes}.items():
        tensors[name] = rng.standard_normal(shape).astype(np.float32)
    write_checkpoint(Path("m"), config, tensors)
    return read_tensors(Path("m"))


def write_model_with_tokenizer() -> tuple[int, Arrays]:
    """Write a model with a tokenizer, and return the number of its tokens and its tensors."""
    tokenizer = train_tokenizer("wordlevel", 0)
    size = tokenizer.get_vocab_size()
    tensors = write_vocabulary(GLM | {"vocab_size": size})
    tokenizer.save("m/tokenizer.json")
    write_json(Path("tokens.json"), ["<tool>", "<end>"])
    return size, tensors


def write_quantized_head(tensors: Mapping[str, np.ndarray]) -> None:
    """Write the model `m` again with projections and the head of its prediction in fp8."""
    rng = np.random.default_rng(0)
    stored: Arrays = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and (name.endswith("_proj.weight") or name == HEAD):
            parts, _ = fp8(rng, tensor.shape)
            stored |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
        else:
            stored[name] = tensor.astype(ml_dtypes.bfloat16)
    for path in (*Path("m").glob("*.safetensors"), *Path("m").glob("*.index.json")):
        path.unlink()
    Path("m/model.safetensors").write_bytes(safetensors_numpy.save(stored))
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    config = json.loads(Path("m/config.json").read_text())
    write_json(Path("m/config.json"), config | {"quantization_config": settings})


def is_vocabulary(name: str) -> bool:
    words = ("embed_tokens", "lm_head", "shared_head.head", "shared_head.output")
    return any(word in name for word in words)


def check_rows(folder: str, before: Mapping[str, np.ndarray], kept: int, rows: int) -> Arrays:
    """Check that each vocabulary has its first `kept` rows and `rows` rows in all, and return the new rows.

    The other tensors must be equal. The judge is the safetensors library.
    """
    tensors = read_tensors(Path(folder))
    assert tensors.keys() == before.keys()
    added: Arrays = {}
    for name, tensor in tensors.items():
        if is_vocabulary(name):
            assert tensor.shape == (rows, *before[name].shape[1:]), name
            assert tensor[:kept].tobytes() == before[name][:kept].tobytes(), name
            added[name] = tensor[kept:]
        else:
            assert tensor.tobytes() == before[name].tobytes(), name
    config = json.loads(Path(folder, "config.json").read_text())
    assert config.get("text_config", config)["vocab_size"] == rows
    return added


def check_equal(folder: str, expected: Mapping[str, np.ndarray]) -> None:
    """Check that a folder has the bytes of these tensors, as the safetensors library reads them."""
    tensors = read_tensors(Path(folder))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == expected[name].shape, name
        assert tensor.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("model_type", slow_except(list(VOCABULARY_CASES), ["glm4_moe"]))
def test_pad_vocab_pads_prediction(model_type: str):
    config, names = VOCABULARY_CASES[model_type]
    tensors = write_vocabulary(config | {"num_nextn_predict_layers": 1}, names)
    size = config["vocab_size"]
    run_ok("pad-vocab", "./m", "--multiple", "64", "--out", "padded")
    padding = check_rows("padded", tensors, size, -(-size // 64) * 64)
    assert {*names} < padding.keys()
    assert not any(rows.any() for rows in padding.values())
    run_ok("verify", "padded", "./m")
    run_ok("verify", "padded", "--chain")
    run_ok("export", "./padded", "--out", "unpadded")
    check_equal("unpadded", tensors)
    run_ok("save-init", "./padded", "--out", "init")
    run_ok("export", "init", "--out", "hf")
    check_equal("hf", tensors)


def test_padded_init_has_padded_prediction():
    tensors = write_vocabulary()
    run_ok("save-init", "./m", "--mesh", "1,2,1", "--pad-vocab", "64", "--out", "init")
    run_ok("reshard", "init", "--mesh", "1,1,1", "--no-scan", "--out", "other")
    for checkpoint in ("init", "other"):
        run_ok("verify", checkpoint)
        run_ok("verify", checkpoint, "./m")
        run_ok("export", checkpoint, "--keep-padding", "--out", f"{checkpoint}-padded")
        padding = check_rows(f"{checkpoint}-padded", tensors, SIZE, 64)
        assert not any(rows.any() for rows in padding.values())
        run_ok("export", checkpoint, "--out", f"{checkpoint}-hf")
        check_equal(f"{checkpoint}-hf", tensors)
        run_ok("verify", f"{checkpoint}-hf", "--chain")


def test_padding_of_prediction_has_the_requested_values():
    tensors = write_vocabulary()
    run_ok("pad-vocab", "./m", "--size", "40", "--init", "mean", "--out", "padded")
    padding = check_rows("padded", tensors, SIZE, 40)
    assert {EMBEDDING, HEAD} < padding.keys()
    for name, rows in padding.items():
        mean = np.tile(tensors[name].mean(axis=0, dtype=np.float64), (len(rows), 1))
        np.testing.assert_allclose(rows, mean, rtol=1e-5, atol=1e-6)
    run_ok("verify", "padded", "--chain")


def test_wrapped_model_has_padded_prediction():
    tensors = write_vocabulary()
    shutil.copytree("m", "w", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    Path("w/model.safetensors").write_bytes(safetensors_numpy.save(wrapped))
    run_ok("pad-vocab", "./w", "--multiple", "64", "--out", "padded")
    check_rows("padded", tensors, SIZE, 64)
    run_ok("verify", "padded", "./w")


def test_tokens_are_added_to_prediction():
    size, tensors = write_model_with_tokenizer()
    run_ok("add-tokens", "./m", "--tokens", "tokens.json", "--out", "added")
    run_ok("export", "added", "--keep-padding", "--out", "hf")
    added = check_rows("hf", tensors, size, size + 2)
    for name, values in added.items():
        assert values.any(axis=1).all(), name
    run_ok("verify", "added")
    run_ok("verify", "added", "--chain")
    run_ok("remove-tokens", "added", "--out", "removed")
    run_ok("export", "removed", "--out", "back")
    check_equal("back", {n: t[:size] if is_vocabulary(n) else t for n, t in tensors.items()})
    run_ok("verify", "removed", "--chain")


def test_quantized_head_of_prediction_is_refused(capsys: Capture):
    _, tensors = write_model_with_tokenizer()
    write_quantized_head(tensors)
    words = ("add-tokens", "./m", "--tokens", "tokens.json", "--out", "added")
    code, lines = run_failing_unchanged(capsys, *words)
    assert code == USAGE
    assert HEAD in lines[1]
    assert "--quantized dequantize" in lines[2]


# A tensor that keeps its rows, by its name and shape: it has the name of a head and other rows, or the shape of an
# embedding and an unknown name.
UNFIT = [(HEAD, (3, 5)), (f"{LAYER}token_table.weight", (SIZE, WIDTH))]


@pytest.mark.parametrize(("name", "shape"), slow_except(UNFIT, [UNFIT[1]]))
def test_unfit_prediction_is_refused(name: str, shape: tuple[int, ...], capsys: Capture):
    tensors = write_vocabulary(names=(EMBEDDING,), shapes={name: shape})
    code, lines = run_failing_unchanged(
        capsys, "save-init", "./m", "--pad-vocab", "64", "--out", "padded"
    )
    assert code == USAGE
    assert lines == [
        "error: the multi-token prediction of ./m does not fit 64 vocabulary rows",
        f"  why: `{name}` is float32 {list(shape)}",
        " hint: `prep export ./m --text-only` leaves it out",
    ]
    # Without a change of the vocabulary, the tensor is copied.
    assert main(["save-init", "./m", "--out", "init"]) == 0
    has_warning = shape[0] != SIZE
    warning = f"multi-token prediction has other vocabulary rows than its model: {name}"
    assert (warning in capsys.readouterr().err) == has_warning
    run_ok("export", "init", "--out", "hf")
    check_equal("hf", tensors)
    run_ok("export", "./m", "--text-only", "--out", "text")
    run_ok("save-init", "./text", "--pad-vocab", "64", "--out", "padded")


def test_layer_projection_with_vocabulary_rows_is_kept():
    name = f"{LAYER}self_attn.q_proj.weight"
    tensors = write_vocabulary(shapes={name: (SIZE, WIDTH)})
    run_ok("pad-vocab", "./m", "--multiple", "64", "--out", "padded")
    check_rows("padded", tensors, SIZE, 64)


def test_verify_finds_other_rows_of_prediction():
    tensors = write_vocabulary()
    config = json.loads(Path("m/config.json").read_text())
    write_checkpoint(Path("other"), config, tensors | {HEAD: tensors[HEAD][:-9]})
    for pair in (("./m", "./other"), ("./other", "./m")):
        results = [prep.verify(*pair), prep.verify(*pair, quick=True)]
        results.append(prep.verify(*pair, tolerance=0.0))
        for result in results:
            (difference,) = result.differences
            assert not result
            assert difference["tensor"] == HEAD
            assert "has shapes" in difference["what"]


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


@pytest.mark.slow
def test_trained_run_has_prediction_of_its_vocabulary(capsys: Capture):
    make_training_folder()
    write_json(Path("tokens.json"), ["<tool>", "<end>"])
    tensors = read_tensors(Path("tiny"))
    embedding = tensors["model.embed_tokens.weight"]
    copies = {f"mtp.{name}.weight": embedding + 1 for name in ("embed_tokens", "lm_head")}
    shutil.rmtree("tiny-init")
    write_checkpoint(Path("m"), LLAMA, tensors | copies)
    shutil.copy("tiny/tokenizer.json", "m")
    run_ok("save-init", "./m", "--pad-vocab", "8", "--mesh", "1,2,4", "--out", "tiny-init")
    recipe = RECIPE.replace("[train]\nsteps = 12", "[train]\nsteps = 1")
    Path("recipe.toml").write_text(recipe)
    run_ok("train", "recipe.toml")
    size = len(embedding)
    for words, rows in (((), size), (("--keep-padding",), 136)):
        run_ok("export", "runs/recipe", *words, "--out", f"hf-{rows}")
        exported = read_tensors(Path(f"hf-{rows}"))
        for name, tensor in copies.items():
            assert exported[name].shape == (rows, LLAMA["hidden_size"])
            assert exported[name][:size].tobytes() == tensor.tobytes()
            assert not exported[name][size:].any()
    run_ok("verify", "hf-131", "--chain")
    # The start model has no rows for tokens that were added to the step.
    run_ok("add-tokens", "runs/recipe", "--tokens", "tokens.json", "--out", "added")
    capsys.readouterr()
    code, lines = run_failing_unchanged(capsys, "export", "added", "--out", "more")
    assert code == 1
    assert "has no rows for new tokens" in lines[0]
    assert "--towers" in lines[2]
    run_ok("add-tokens", "tiny-init", "--tokens", "tokens.json", "--out", "start")
    run_ok("export", "added", "--towers", "start", "--out", "more")
    exported = read_tensors(Path("more"))
    for name, tensor in copies.items():
        assert exported[name].shape == (size + 2, LLAMA["hidden_size"])
        assert exported[name][:size].tobytes() == tensor.tobytes()
        assert exported[name][size:].any(axis=1).all()
    (link, *_) = prep.verify_chain("more").links
    assert link.status == "holds"
    assert "read from the start model" in link.not_shown
    run_ok("export", "added", "--text-only", "--out", "text")
    run_ok("remove-tokens", "added", "--out", "removed")
    run_ok("export", "removed", "--out", "less")
    assert read_tensors(Path("less")).keys() == tensors.keys() | copies.keys()
    run_ok("verify", "less", "hf-131")
