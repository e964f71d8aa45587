"""Embeddings and heads of multi-token prediction have the vocabulary rows of their model in every output."""

from __future__ import annotations

import json
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
from prepcli.core.errors import USAGE
from tests.helpers.quantized_formats import fp8
from tests.helpers.run_cli import Capture, run_failing_unchanged, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import safetensors_bytes, write_safetensors
from tests.helpers.tiny_checkpoints import LLAMA, checkpoint_tensors, read_tensors, write_checkpoint
from tests.helpers.tiny_configs import GOLDEN
from tests.helpers.tokenizer_folders import train_tokenizer, write_json
from tests.helpers.towers import write_model as write_multimodal_model
from tests.helpers.training_folder import RECIPE, make_training_folder

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


@pytest.fixture(autouse=True)
def token_list() -> None:
    write_json(Path("tokens.json"), ["<tool>", "<end>"])


def write_vocabulary(
    config: Mapping[str, Any] = GLM,
    names: tuple[str, ...] = (EMBEDDING, HEAD),
    shapes: Mapping[str, tuple[int, ...]] = NO_SHAPES,
) -> Arrays:
    """Write a model with multi-token prediction to the folder `m`, and return all tensors.

    Args:
        config: Content of its config.json.
        names: Embeddings and heads of the multi-token prediction.
        shapes: Shapes of its other tensors.
    """
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


def write_model_with_tokenizer(padding: int = 0) -> tuple[int, Arrays]:
    """Write a model with a tokenizer and rows of padding, and return the number of its tokens and its tensors."""
    tokenizer = train_tokenizer("wordlevel", 0)
    size = tokenizer.get_vocab_size()
    config = GLM | {"vocab_size": size + padding}
    if padding:
        config["true_vocab_size"] = size
    tensors = write_vocabulary(config)
    tokenizer.save("m/tokenizer.json")
    return size, tensors


def write_quantized(tensors: Mapping[str, np.ndarray], also: tuple[str, ...] = ()) -> Arrays:
    """Write the model `m` again with projections in fp8, and return its tensors."""
    rng = np.random.default_rng(0)
    stored: Arrays = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and (name.endswith("_proj.weight") or name in also):
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
    return stored


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


@pytest.mark.parametrize("storage", slow_except(["ocdbt", "files", "zarr3"], ["ocdbt"]))
def test_padded_init_has_padded_prediction(storage: str):
    tensors = write_vocabulary()
    words = ("--mesh", "1,2,1", "--pad-vocab", "64", "--storage", storage)
    run_ok("save-init", "./m", *words, "--out", "init")
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


@pytest.mark.parametrize("init", slow_except(["mean", "normal"], ["mean"]))
def test_padding_of_prediction_has_the_requested_values(init: str):
    tensors = write_vocabulary()
    run_ok("pad-vocab", "./m", "--size", "40", "--init", init, "--out", "padded")
    padding = check_rows("padded", tensors, SIZE, 40)
    assert {EMBEDDING, HEAD} < padding.keys()
    for name, rows in padding.items():
        if init == "mean":
            mean = np.tile(tensors[name].mean(axis=0, dtype=np.float64), (len(rows), 1))
            np.testing.assert_allclose(rows, mean, rtol=1e-5, atol=1e-6)
        else:
            assert rows.any(axis=1).all()
    run_ok("verify", "padded", "--chain")


@pytest.mark.slow
def test_true_vocab_cuts_padding_of_prediction():
    tensors = write_vocabulary()
    run_ok("pad-vocab", "./m", "--true-vocab", "20", "--size", "40", "--out", "padded")
    check_rows("padded", tensors, SIZE, 40)
    run_ok("save-init", "./padded", "--out", "init")
    run_ok("export", "init", "--out", "hf")
    check_rows("hf", tensors, 20, 20)


def test_wrapped_model_has_padded_prediction():
    tensors = write_vocabulary()
    shutil.copytree("m", "w", ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    Path("w/model.safetensors").write_bytes(safetensors_numpy.save(wrapped))
    run_ok("pad-vocab", "./w", "--multiple", "64", "--out", "padded")
    check_rows("padded", tensors, SIZE, 64)
    run_ok("verify", "padded", "./w")


@pytest.mark.slow
def test_prediction_of_a_text_part_is_padded():
    """As in the files of GLM-OCR: its text part has one layer more than the config states."""
    tensors = write_multimodal_model("qwen3_vl")
    config = json.loads(Path("m/config.json").read_text())
    text_config = config["text_config"]
    size = text_config["vocab_size"]
    name = f"model.language_model.layers.{text_config['num_hidden_layers']}.embed_tokens.weight"
    values = np.random.default_rng(0).standard_normal((size, 8)).astype(np.float32)
    tensors[name] = ("F32", values.shape, values.tobytes())
    write_safetensors(Path("m/model.safetensors"), tensors)
    text_config["num_nextn_predict_layers"] = 1
    write_json(Path("m/config.json"), config)
    run_ok("save-init", "./m", "--no-verbatim", "--pad-vocab", "100")
    run_ok("export", "m-init", "--keep-padding", "--out", "padded")
    padded = -(-size // 100) * 100
    zeros = bytes((padded - size) * 8 * 4)
    assert safetensors_bytes(Path("padded"))[name] == ("F32", (padded, 8), values.tobytes() + zeros)
    run_ok("export", "m-init", "--out", "hf")
    assert safetensors_bytes(Path("hf")) == tensors


@pytest.mark.parametrize(
    ("source", "padding"),
    slow_except([("./m", 0), ("./m", 6), ("m-init", 0), ("m-init", 6)], [("./m", 0)]),
)
def test_tokens_are_added_to_prediction(source: str, padding: int):
    size, tensors = write_model_with_tokenizer(padding)
    run_ok("save-init", "./m")
    run_ok("add-tokens", source, "--tokens", "tokens.json", "--out", "added")
    run_ok("export", "added", "--keep-padding", "--out", "hf")
    rows = max(size + 2, size + padding)
    added = check_rows("hf", tensors, size, rows)
    for name, values in added.items():
        assert values[:2].any(axis=1).all(), name
        assert not values[2:].any(), name
    run_ok("verify", "added")
    run_ok("verify", "added", "--chain")
    run_ok("remove-tokens", "added", "--out", "removed")
    run_ok("export", "removed", "--out", "back")
    check_equal("back", {n: t[:size] if is_vocabulary(n) else t for n, t in tensors.items()})
    run_ok("verify", "removed", "--chain")


@pytest.mark.slow
def test_added_tokens_of_a_quantized_model_have_rows_in_prediction():
    size, tensors = write_model_with_tokenizer()
    stored = write_quantized(tensors)
    run_ok("add-tokens", "./m", "--tokens", "tokens.json", "--out", "added")
    added = check_rows("added", stored, size, size + 2)
    assert {EMBEDDING, HEAD} < added.keys()
    assert all(rows.astype(np.float32).any(axis=1).all() for rows in added.values())
    run_ok("verify", "added", "--chain")
    run_ok("save-init", "./added", "--quantized", "dequantize", "--out", "init")
    run_ok("remove-tokens", "./added", "--out", "removed")
    check_equal("removed", stored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "has_quantized_head"),
    slow_except(
        [((), False), (("--quantized-source", "./m"), True), ((), True)],
        lambda case: case[0] != (),
    ),
)
def test_export_of_padded_prediction_has_quantised_bytes(
    options: tuple[str, ...], has_quantized_head: bool
):
    stored = write_quantized(write_vocabulary(), also=(HEAD,) * has_quantized_head)
    run_ok("save-init", "./m", "--quantized", "dequantize", "--pad-vocab", "64")
    run_ok("verify", "m-init", "./m")
    run_ok("export", "m-init", *options, "--out", "hf")
    check_equal("hf", stored)
    run_ok("export", "m-init", "--quantized", "dequantize", "--keep-padding", "--out", "values")
    values = read_tensors(Path("values"))
    for name in (EMBEDDING, HEAD):
        assert values[name].shape == (64, WIDTH)
        assert not values[name][SIZE:].astype(np.float32).any()


@pytest.mark.slow
def test_quantized_export_takes_a_true_vocab_between_digests():
    """Added tokens have a digest of their own rows."""
    size, tensors = write_model_with_tokenizer()
    stored = write_quantized(tensors)
    run_ok("save-init", "./m", "--quantized", "dequantize", "--out", "init")
    run_ok("add-tokens", "init", "--tokens", "tokens.json", "--out", "added")
    run_ok("export", "added", "--true-vocab", f"{size + 1}", "--out", "hf")
    added = check_rows("hf", stored, size, size + 1)
    assert {EMBEDDING, HEAD} < added.keys()
    assert all(rows.astype(np.float32).any(axis=1).all() for rows in added.values())


@pytest.mark.parametrize("padding", [0, 6])
def test_quantized_head_of_prediction_is_refused(capsys: Capture, padding: int):
    _, tensors = write_model_with_tokenizer(padding)
    write_quantized(tensors, also=(HEAD,))
    words = ("add-tokens", "./m", "--tokens", "tokens.json", "--out", "added")
    code, lines = run_failing_unchanged(capsys, *words)
    assert code == USAGE
    assert HEAD in lines[1]
    assert "--quantized dequantize" in lines[2]


# A tensor that keeps its rows, by its name and shape: it has the name of a head and other rows, or the shape of an
# embedding and an unknown name.
UNFIT = [(HEAD, (3, 5)), (f"{LAYER}token_table.weight", (SIZE, WIDTH))]


@pytest.mark.parametrize(("name", "shape"), slow_except(UNFIT, [UNFIT[1]]))
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("pad-vocab", "--multiple", "64"), marks=pytest.mark.slow),
        ("save-init", "--pad-vocab", "64"),
    ],
)
def test_unfit_prediction_is_refused(
    words: tuple[str, ...], name: str, shape: tuple[int, ...], capsys: Capture
):
    tensors = write_vocabulary(names=(EMBEDDING,), shapes={name: shape})
    code, lines = run_failing_unchanged(capsys, words[0], "./m", *words[1:], "--out", "padded")
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
    run_ok(words[0], "./text", *words[1:], "--out", "padded")


def test_layer_projection_with_vocabulary_rows_is_kept():
    name = f"{LAYER}self_attn.q_proj.weight"
    tensors = write_vocabulary(shapes={name: (SIZE, WIDTH)})
    run_ok("pad-vocab", "./m", "--multiple", "64", "--out", "padded")
    check_rows("padded", tensors, SIZE, 64)


@pytest.mark.slow
def test_unpadded_prediction_of_a_padded_model_is_padded():
    """Versions of prep up to 0.1.0 padded the model alone."""
    tensors = write_vocabulary()
    run_ok("pad-vocab", "./m", "--size", "40", "--out", "padded")
    earlier = read_tensors(Path("padded"))
    earlier |= {name: tensors[name] for name in (EMBEDDING, HEAD)}
    config = json.loads(Path("padded/config.json").read_text())
    write_checkpoint(Path("earlier"), config, earlier)
    run_ok("verify", "./earlier", "./padded")
    run_ok("save-init", "./earlier", "--out", "init")
    run_ok("export", "init", "--keep-padding", "--out", "again")
    check_rows("again", tensors, SIZE, 40)
    run_ok("export", "init", "--out", "hf")
    check_equal("hf", tensors)


@pytest.mark.parametrize("rows", slow_except([3, SIZE - 9, SIZE + 16], [SIZE - 9]))
def test_verify_finds_other_rows_of_prediction(rows: int):
    tensors = write_vocabulary()
    config = json.loads(Path("m/config.json").read_text())
    write_checkpoint(
        Path("other"), config, tensors | {HEAD: np.resize(tensors[HEAD], (rows, WIDTH))}
    )
    for pair in (("./m", "./other"), ("./other", "./m")):
        results = [prep.verify(*pair), prep.verify(*pair, quick=True)]
        results.append(prep.verify(*pair, tolerance=0.0))
        for result in results:
            (difference,) = result.differences
            assert not result
            assert difference["tensor"] == HEAD
            assert "has shapes" in difference["what"]


@pytest.mark.slow
def test_trained_run_has_prediction_of_its_vocabulary(capsys: Capture):
    make_training_folder()
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
