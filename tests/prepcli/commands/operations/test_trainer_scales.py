"""Values that MaxText scales: queries divided by a root, and norms and embeddings of Gemma, with a checked way back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.core.errors import PrepError
from prepcli.execution import folder_converter
from tests.helpers.damage import flip_bit, largest_file
from tests.helpers.llama_trees import read_init
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import Capture, error_lines, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GROUPED_QUERY, assert_same, make_checkpoint, read_tensors
from tests.helpers.trainer_trees import TREES, Config, Leaves, Tensors, heads_of
from tests.helpers.zarr_items import write_item

NORMS = {
    "input_layernorm": "pre_self_attention_norm",
    "post_attention_layernorm": "post_self_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "self_attention.query_norm",
    "self_attn.k_norm": "self_attention.key_norm",
}
PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
MLP = {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}


def gemma_leaves(tensors: Tensors, config: Config, *, scan: bool) -> Leaves:
    """Return the leaves of MaxText for a Gemma 2 or 3."""
    is_gemma2 = config["model_type"] == "gemma2"
    root_dtype = np.float32 if is_gemma2 else ml_dtypes.bfloat16
    normalizer = root_dtype(config["hidden_size"] ** 0.5)
    embedding = tensors["model.embed_tokens.weight"]
    leaves: Leaves = {
        "token_embedder.embedding": (embedding * normalizer).astype(embedding.dtype),
        "decoder.decoder_norm.scale": _offset(tensors["model.norm.weight"]),
    }
    layers: list[Leaves] = []
    for number in range(config["num_hidden_layers"]):
        layers.append(_layer_leaves(tensors, config, number))
    if is_gemma2:
        leaves |= _gemma2_layers(layers, scan=scan)
    elif scan:
        leaves |= _gemma3_groups(layers)
    else:
        leaves |= _numbered("decoder.layers_", layers)
    return {f"params.params.{path}": leaf for path, leaf in leaves.items()}


def _offset(weight: np.ndarray) -> np.ndarray:
    """Return the weight of a norm in MaxText: `scale_rmsnorm_layer`."""
    return (weight + 1.0).astype(weight.dtype)


def _layer_leaves(tensors: Tensors, config: Config, number: int) -> Leaves:
    """Return the leaves of one layer of Hugging Face, by their paths in the layer."""
    heads, kv_heads, head_dim = heads_of(config)
    prefix = f"model.layers.{number}."
    leaves: Leaves = {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix):
            continue
        module = name.removeprefix(prefix).removesuffix(".weight")
        last = module.rpartition(".")[2]
        if module in NORMS:
            leaves[f"{NORMS[module]}.scale"] = _offset(tensor)
        elif last in MLP:
            leaves[f"mlp.{MLP[last]}.kernel"] = tensor.T
        elif last == "o_proj":
            leaves["self_attention.out.kernel"] = tensor.T.reshape(heads, head_dim, -1)
        else:
            num_heads = heads if last == "q_proj" else kv_heads
            kernel = tensor.T.reshape(-1, num_heads, head_dim)
            if last == "q_proj" and config["model_type"] == "gemma2":
                depth_scale = np.float32(1 / np.sqrt(config["query_pre_attn_scalar"]))
                kernel = (kernel * depth_scale).astype(tensor.dtype)
            leaves[f"self_attention.{PROJECTIONS[last]}.kernel"] = kernel
    return leaves


def _gemma2_layers(layers: list[Leaves], *, scan: bool) -> Leaves:
    """Return pairs of layers: `layers_0` of MaxText has the layers 0 and 1 of Hugging Face."""
    pairs: list[Leaves] = []
    for number in range(0, len(layers), 2):
        pair: Leaves = {}
        for kind, layer in zip(("local", "global"), layers[number : number + 2], strict=True):
            for path, leaf in layer.items():
                pair[path.replace(".", f"_{kind}.", 1)] = leaf
        pairs.append(pair)
    if scan:
        return _stacked("decoder.layers.", pairs)
    return _numbered("decoder.layers_", pairs)


def _gemma3_groups(layers: list[Leaves]) -> Leaves:
    """Return groups of six layers, and the remaining layers."""
    num_grouped = len(layers) - len(layers) % 6
    leaves = _numbered("decoder.layers_remainder.layers_", layers[num_grouped:])
    if num_grouped:
        for position in range(6):
            leaves |= _stacked(f"decoder.layers.layers_{position}.", layers[position:num_grouped:6])
    return leaves


def _stacked(prefix: str, layers: list[Leaves]) -> Leaves:
    """Return the leaves of layers, stacked on axis 1."""
    leaves: Leaves = {}
    for path in layers[0]:
        leaves[prefix + path] = np.stack([layer[path] for layer in layers], axis=1)
    return leaves


def _numbered(prefix: str, layers: list[Leaves]) -> Leaves:
    """Return the leaves of layers, with their numbers in the paths."""
    leaves: Leaves = {}
    for number, layer in enumerate(layers):
        for path, leaf in layer.items():
            leaves[f"{prefix}{number}.{path}"] = leaf
    return leaves


# Heads of 8 elements: 1 / sqrt(8) rounds.
ROUNDED = GROUPED_QUERY | {"model_type": "llama"} | {"head_dim": 8}
QUERIES = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]


def way_back(query: np.ndarray) -> np.ndarray:
    """Return queries that were scaled and multiplied back, by the formulas of MaxText."""
    scaled = (query.astype(np.float32) * np.float32(1 / np.sqrt(8))).astype(query.dtype)
    return (scaled.astype(np.float32) * np.float32(np.sqrt(8))).astype(query.dtype)


def flip_leaf(name: str) -> None:
    """Change one bit of a leaf of `out`."""
    item = Path("out/0/items")
    values = next(leaf for path, leaf in read_init(item).items() if name in path)
    path = largest_file(item / "d")
    flip_bit(path, path.read_bytes().index(values.reshape(-1)[:8].tobytes()))


def test_scale_that_rounds_is_counted():
    tensors = make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    conversion = prep.export("./model", "out", layout="maxtext")
    assert conversion.next_command == "prep verify out"
    assert_same(read_init(Path("out/0/items")), TREES["maxtext"](tensors, ROUNDED))
    changed = sum(np.count_nonzero(tensors[name] != way_back(tensors[name])) for name in QUERIES)
    manifest = json.loads(Path("out/prep-manifest.json").read_text())
    (entry,) = manifest["casts"]
    assert (entry["sqrt"], entry["tensors"], entry["changed"]) == (8, 3, changed)
    assert changed > 0
    assert sum(manifest["scales"][name]["lost"] for name in QUERIES) == changed


def test_export_with_a_rounding_scale_cannot_be_converted_back(capsys: Capture):
    make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    capsys.readouterr()
    lines = error_lines(capsys, "verify", "out", "./model", "--tolerance", "1")
    assert lines[0] == "error: out cannot be converted back"
    lines = error_lines(capsys, "save-init", "out", "--out", "init")
    assert lines[0] == "error: out cannot be converted back"
    assert "divides by the square root of 8, which changed" in lines[1]
    assert not Path("init").exists()


def test_verify_checks_stored_values_of_a_scale_that_rounds():
    make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    run_ok("lock", "out")
    run_ok("verify", "out", "--lock", "out.lock.json")
    run_ok("verify", "out", "./model", "--lock", "out.lock.json")
    flip_leaf("query.kernel")
    assert not prep.verify("out", lock="out.lock.json")
    differences = prep.verify("out").differences
    assert len(differences) == 1
    assert "self_attn.q_proj.weight" in differences[0]["tensor"]


def test_verify_divides_the_model_by_a_scale_that_rounds():
    make_checkpoint(Path("model"), ROUNDED, "float32")
    run_ok("save-init", "./model", "--out", "init")
    run_ok("export", "init", "--layout", "maxtext", "--out", "out")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "same")
    assert json.loads(Path("out/prep-manifest.json").read_text())["scales"][QUERIES[0]]["lost"]
    for pair in (("out", "./model"), ("./model", "out"), ("init", "out"), ("out", "same")):
        assert prep.verify(*pair), pair
    flip_leaf("query.kernel")
    for pair in (("out", "./model"), ("./model", "out")):
        (difference,) = prep.verify(*pair).differences
        assert "self_attn.q_proj.weight" in difference["tensor"]
        assert "the square root of 8" in difference["what"]
    (difference,) = prep.verify("out", "same").differences
    assert difference.get("count") == 1


def test_chain_does_not_show_a_scale_that_rounds():
    make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    run_ok("save-init", "./model", "--out", "init")
    run_ok("export", "init", "--layout", "maxtext", "--out", "out")
    chain = prep.verify_chain("out")
    assert [link.status for link in chain.links] == ["holds", "proven"]
    assert (chain.links[0].not_shown, chain.links[0].check) == ("scaled", "prep verify out init")
    assert prep.verify("out", "init")


def test_other_values_behind_a_scale_are_not_proven():
    tensors = make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    shutil.copytree("model", "other", ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors[QUERIES[1]] = -tensors[QUERIES[1]]
    save_file(tensors, "other/model.safetensors")
    run_ok("export", "./other", "--layout", "maxtext", "--out", "forged")
    # The stored values are those of the other model. The recorded tensors and the source are those of the first one.
    genuine = json.loads(Path("out/prep-manifest.json").read_text())
    with changed_manifest(Path("forged")) as manifest:
        for key in ("tensors", "source", "request"):
            manifest[key] = genuine[key]
    (link,) = prep.verify_chain("forged").links
    assert (link.status, link.not_shown) == ("not proven", "scaled")
    assert not prep.verify("forged", "model")


def test_scale_of_another_layout_is_not_accepted():
    """Halved values in a Hugging Face folder, with a record that says they are divided by the square root of 4."""
    tensors = make_checkpoint(Path("model"), ROUNDED, "float32", files=1)
    prep.pad_vocab("./model", "out", multiple=8)
    halved = read_tensors(Path("out"))
    path = next(Path("out").glob("*.safetensors"))
    name = QUERIES[0]
    path.write_bytes(
        path.read_bytes().replace(tensors[name].tobytes(), (halved[name] / 2).tobytes())
    )
    with changed_manifest(Path("out")) as manifest:
        digest = xxhash.xxh3_128_hexdigest((halved[name] / 2).tobytes())
        manifest["tensors"][name]["digests"][0][2] = digest
        record = {"sqrt": 4, "significant": "", "digest": digest, "lost": 1}
        manifest["scales"] = {name: record}
        manifest["leaves"] = {"a": {"shape": [1], "dtype": "float32", "chunk": [1]}}
    assert not prep.verify("out", "./model")
    chain = prep.verify_chain("out", allow_unproven=True)
    assert chain.broken_link is not None


def test_scale_of_another_number_is_not_accepted():
    make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    with changed_manifest(Path("out")) as manifest:
        for record in manifest["scales"].values():
            record["sqrt"] = 2
    with pytest.raises(PrepError, match="records another scale than its layout"):
        prep.verify("out")


def test_queries_of_several_dtypes_are_not_rounded_to_one(capsys: Capture):
    tensors = make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    tensors[QUERIES[0]] = tensors[QUERIES[0]].astype(np.float16)
    Path("mixed").mkdir()
    shutil.copy("model/config.json", "mixed")
    save_file(tensors, "mixed/model.safetensors")
    words = ("--layout", "maxtext", "--dtype", "float32")
    run_ok("export", "./mixed", *words, "--out", "out")
    run_ok("verify", "out")
    # A value that is lost is counted, and is not found as damage later.
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "out", "--out", "init")
    assert lines[0] == "error: out cannot be converted back"


def test_wider_dtype_makes_the_way_back_exact():
    tensors = make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    words = ("--layout", "maxtext", "--dtype", "float32", "--out", "out")
    run_ok("export", "./model", *words)
    run_ok("verify", "out")
    run_ok("save-init", "out", "--dtype", "bfloat16", "--out", "init")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_queries_of_an_item_without_a_manifest_are_unscaled():
    tensors = make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    write_item(Path("run/7/items"), TREES["maxtext"](tensors, ROUNDED))
    run_ok("export", "./run", "--config", "./model", "--out", "back")
    restored = {name: way_back(tensors[name]) for name in QUERIES}
    assert_same(read_tensors(Path("back")), {**tensors, **restored})


def test_flax_file_with_a_scale_is_refused(capsys: Capture):
    serialization = pytest.importorskip("flax.serialization")
    tensors = make_checkpoint(Path("model"), ROUNDED)
    tree: dict[str, Any] = {}
    for name, leaf in TREES["maxtext"](tensors, ROUNDED).items():
        *parents, key = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[key] = leaf
    Path("tree.msgpack").write_bytes(serialization.to_bytes(tree))
    lines = error_lines(capsys, "save-init", "./tree.msgpack", "--config", "model", "--out", "init")
    assert "its tree is that of maxtext, which prep reads from Orbax items" in lines[1]


def test_killed_export_with_a_scale_resumes():
    """The notes have the digests of values before and after the scale."""
    tensors = make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_converter, "write_last_files", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prep.export("./model", "out", layout="maxtext")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    assert_same(read_init(Path("out/0/items")), TREES["maxtext"](tensors, ROUNDED))
    manifest = json.loads(Path("out/prep-manifest.json").read_text())
    run_ok("export", "./model", "--layout", "maxtext", "--out", "whole")
    whole = json.loads(Path("whole/prep-manifest.json").read_text())
    assert manifest["tensors"] == whole["tensors"]
    assert manifest["scales"] == whole["scales"]


def interrupt(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


# Gemma 2 and 3 for MaxText: groups of layers, sums of norms and multiplied embeddings, with a checked way back


GEMMA2 = GROUPED_QUERY | {
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 16,
}
# One group of six layers, and two remaining layers.
GEMMA3 = GROUPED_QUERY | {"model_type": "gemma3_text", "num_hidden_layers": 8}
GEMMA_MODELS: dict[str, dict[str, Any]] = {"gemma2": GEMMA2, "gemma3": GEMMA3}
# sqrt(80) is no power of 2, and 8.94 in bfloat16 is another number than in float32.
ROUNDED_SIZE = {"hidden_size": 80}
GEMMA_CASES = [
    (layout, model) for layout in ("maxtext", "maxtext-unscanned") for model in GEMMA_MODELS
]
FAST_GEMMA_CASES = [("maxtext", "gemma3"), ("maxtext-unscanned", "gemma2")]


def make_model(config: dict[str, Any], dtype: str = "bfloat16") -> Leaves:
    """Write a model with a tied head to `model`, and return its tensors."""
    return make_checkpoint(Path("model"), config, dtype, tied=True)


def expected_leaves(tensors: Leaves, config: dict[str, Any], layout: str, dtype: Any) -> Leaves:
    cast = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    return gemma_leaves(cast, config, scan=layout == "maxtext")


@pytest.mark.parametrize(("layout", "model"), slow_except(GEMMA_CASES, FAST_GEMMA_CASES))
def test_gemma_has_the_leaves_of_maxtext(layout: str, model: str):
    config = GEMMA_MODELS[model] | ROUNDED_SIZE
    tensors = make_model(config)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    expected = expected_leaves(tensors, config, layout, ml_dtypes.bfloat16)
    assert_same(read_init(Path("out/0/items")), expected)


@pytest.mark.parametrize(("layout", "model"), slow_except(GEMMA_CASES, FAST_GEMMA_CASES[1:]))
def test_gemma_in_float32_returns_every_bit(layout: str, model: str):
    tensors = make_model(GEMMA_MODELS[model] | ROUNDED_SIZE)
    words = ("--layout", layout, "--dtype", "float32", "--out", "out")
    run_ok("export", "./model", *words)
    manifest = json.loads(Path("out/prep-manifest.json").read_text())
    assert {record["lost"] for record in manifest["scales"].values()} == {0}
    run_ok("verify", "out")
    run_ok("save-init", "out", "--dtype", "bfloat16", "--out", "init", "--mesh", "1,2,1")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.parametrize(("layout", "model"), slow_except(GEMMA_CASES, FAST_GEMMA_CASES))
def test_gemma_of_maxtext_itself_converts(layout: str, model: str):
    config = GEMMA_MODELS[model]
    tensors = make_model(config)
    write_item(Path("run/7/items"), expected_leaves(tensors, config, layout, np.float32))
    run_ok("export", "./run", "--config", "./model", "--dtype", "bfloat16", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_changed_values_of_gemma_are_counted():
    config = GEMMA3 | ROUNDED_SIZE
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


def test_gemma_with_changed_values_is_not_read_back(capsys: Capture):
    make_model(GEMMA2 | ROUNDED_SIZE)
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "out", "--out", "init")
    assert lines[0] == "error: out cannot be converted back"
    why = " ".join(lines[1:])
    assert "multiplies by the square root of 80" in why
    assert "adds 1" in why


@pytest.mark.slow
def test_padded_embedding_of_gemma_is_verified():
    """MaxText's own Gemma 2 has 128 tokens more than the files of Hugging Face."""
    tensors = make_model(GEMMA2 | ROUNDED_SIZE)
    run_ok("save-init", "./model", "--pad-vocab", "8", "--out", "init")
    words = ("--layout", "maxtext", "--keep-padding", "--dtype", "bfloat16", "--out", "out")
    run_ok("export", "init", *words)
    embedding = read_init(Path("out/0/items"))["params.params.token_embedder.embedding"]
    true_vocab = tensors["model.embed_tokens.weight"].shape[0]
    assert embedding.shape[0] > true_vocab
    assert not embedding[true_vocab:].any()
    assert prep.verify("out")
    flip_leaf("token_embedder.embedding")
    assert not prep.verify("out")


def test_scale_of_queries_is_that_of_the_config():
    """Gemma 2 27B divides its scores by sqrt(144), and its heads have 128 elements."""
    config = GEMMA2 | {"query_pre_attn_scalar": 24.0}
    tensors = make_model(config, "float32")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    expected = expected_leaves(tensors, config, "maxtext", np.float32)
    assert_same(read_init(Path("out/0/items")), expected)


def test_gemma2_with_an_odd_layer_is_refused(capsys: Capture):
    make_model(GEMMA2 | {"num_hidden_layers": 3})
    lines = error_lines(capsys, "export", "./model", "--layout", "maxtext", "--out", "out")
    assert "the layout has no place for model.layers.2" in " ".join(lines)


def test_fraction_in_the_scale_of_queries_has_no_layout(capsys: Capture):
    make_model(GEMMA2 | {"query_pre_attn_scalar": 16.5})
    run_ok("save-init", "./model", "--out", "init")
    capsys.readouterr()
    lines = error_lines(capsys, "export", "init", "--layout", "maxtext", "--out", "out")
    assert "the layout has no place for model.layers.0.self_attn.q_proj" in " ".join(lines)


def test_gemma1_has_no_layout_of_maxtext():
    make_model(GROUPED_QUERY | {"model_type": "gemma"})
    with pytest.raises(PrepError, match="maxtext"):
        prep.export("./model", "out", layout="maxtext")
