"""Trees of other trainers (MaxText, Tunix): written, restored by Orbax, and read back without a changed bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
import xxhash
from safetensors.numpy import save_file

import prepcli as prep
from prepcli.core.errors import PrepError
from prepcli.execution import folder_run
from tests.helpers.llama_trees import read_init
from tests.helpers.manifests import changed_manifest
from tests.helpers.run_cli import error_lines, run_ok
from tests.helpers.tiny_checkpoints import (
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)
from tests.helpers.trainer_trees import ITEMS, TREES
from tests.helpers.way_back import check_way_back
from tests.helpers.zarr_items import write_item

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Heads of 16 elements, so that the scale 1 / sqrt(16) is exact.
MODELS: dict[str, dict[str, Any]] = {
    "llama": GROUPED_QUERY | {"model_type": "llama"},
    "llama3.1": GROUPED_QUERY | {"model_type": "llama", "rope_scaling": LLAMA3_ROPE},
    "mistral": GROUPED_QUERY | {"model_type": "mistral"},
    "mixtral": GROUPED_QUERY | {"model_type": "mixtral", "num_local_experts": 4},
    "qwen2": GROUPED_QUERY | {"model_type": "qwen2"},
    "qwen3": GROUPED_QUERY | {"model_type": "qwen3"},
    "qwen3_moe": GROUPED_QUERY
    | {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}
LLAMA = MODELS["llama"]
GEMMA = GROUPED_QUERY | {"model_type": "gemma"}
TUNIX_MODELS = {
    **{name: MODELS[name] for name in ("llama", "qwen2", "qwen3", "qwen3_moe")},
    "gemma": GEMMA,
    "gemma-equal-heads": GEMMA | {"num_key_value_heads": 4},
    "gemma2": GEMMA | {"model_type": "gemma2"},
    "gemma3": GEMMA | {"model_type": "gemma3_text"},
}
ALL_MODELS = MODELS | TUNIX_MODELS
CASES = [
    *(("tunix", model) for model in TUNIX_MODELS),
    *(("maxtext", model) for model in MODELS),
    *(("maxtext-unscanned", model) for model in ("llama3.1", "mixtral")),
]


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_export_has_the_leaves_of_the_trainer(layout: str, model: str):
    tensors = make_checkpoint(Path("model"), ALL_MODELS[model])
    run_ok("save-init", "./model", "--out", "init", "--pad-vocab", "8")
    run_ok("export", "init", "--layout", layout, "--out", "out")
    expected = TREES[layout](tensors, ALL_MODELS[model])
    assert_same(read_init(Path("out") / ITEMS[layout]), expected)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_export_of_the_trainer_returns_every_bit(layout: str, model: str):
    tensors = make_checkpoint(Path("model"), ALL_MODELS[model], "bfloat16")
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    check_way_back(tensors)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_tree_of_the_trainer_converts_without_manifest(layout: str, model: str):
    tensors = make_checkpoint(Path("model"), ALL_MODELS[model])
    write_item(Path("run") / ITEMS[layout], TREES[layout](tensors, ALL_MODELS[model]))
    run_ok("save-init", "./run", "--config", "./model", "--out", "init")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


@pytest.mark.parametrize("layout", TREES)
def test_tied_head_has_no_leaf(layout: str):
    tensors = make_checkpoint(Path("model"), MODELS["qwen2"], tied=True)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    leaves = read_init(Path("out") / ITEMS[layout])
    assert_same(leaves, TREES[layout](tensors, MODELS["qwen2"]))
    run_ok("verify", "out", "./model")


@pytest.mark.parametrize("layout", TREES)
def test_checkpoint_manager_restores_the_step(layout: str):
    tensors = make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    item = Path(ITEMS[layout]).name
    handlers = {item: ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(Path("out").absolute(), item_handlers=handlers) as manager:
        assert manager.latest_step() == 0
        args = ocp.args.Composite(**{item: ocp.args.PyTreeRestore()})
        tree = manager.restore(0, args=args)[item]
    for path, leaf in TREES[layout](tensors, LLAMA).items():
        value: Any = tree
        for key in path.split("."):
            value = value[key]
        assert np.array_equal(value, leaf)


@pytest.mark.parametrize("layout", TREES)
def test_dtype_of_the_export_is_cast(layout: str):
    tensors = make_checkpoint(Path("model"), LLAMA, "bfloat16")
    run_ok("export", "./model", "--layout", layout, "--dtype", "float32", "--out", "out")
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    assert_same(read_init(Path("out") / ITEMS[layout]), TREES[layout](wide, LLAMA))


@pytest.mark.parametrize("layout", TREES)
def test_damaged_export_is_found(layout: str):
    make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    data = max((Path("out") / ITEMS[layout] / "d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert not prep.verify("out").is_equal


@pytest.mark.parametrize("layout", TREES)
@pytest.mark.parametrize("fault", ["missing", "renamed", "extra", "shape"])
def test_wrong_leaf_is_named(layout: str, fault: str, capsys: pytest.CaptureFixture[str]):
    leaves = TREES[layout](make_checkpoint(Path("model"), LLAMA), LLAMA)
    module = "down_proj" if layout == "tunix" else "wo"
    path = next(path for path in leaves if f".mlp.{module}.kernel" in path)
    leaf = leaves[path]
    if fault != "extra":
        del leaves[path]
    if fault == "renamed":
        leaves[path.replace(module, "downward")] = leaf
    elif fault == "extra":
        leaves[path.replace(module, "gate_bias")] = leaf
    elif fault == "shape":
        leaves[path] = leaf[:-1]
    write_item(Path("run") / ITEMS[layout], leaves)
    shutil.copy("model/config.json", "run/config.json")
    error = "\n".join(error_lines(capsys, "save-init", "./run", "--out", "init"))
    named = "gate_bias" if fault == "extra" else f".mlp.{module}.kernel"
    # A long name is broken over several lines.
    assert named in "".join(error.split())
    assert not Path("init").exists()


def test_layout_without_place_for_a_tensor_is_refused(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), LLAMA, attention_bias=True)
    lines = error_lines(capsys, "export", "./model", "--layout", "tunix", "--out", "out")
    assert "the layout has no place for model.layers.0.self_attn.k_proj.bias" in lines[1]
    assert not Path("out").exists()


def test_shard_size_of_an_orbax_layout_is_refused(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), LLAMA)
    words = ("--layout", "maxtext", "--shard-size", "1MB", "--out", "out")
    lines = error_lines(capsys, "export", "./model", *words)
    assert lines[0] == "error: `--shard-size` is not supported for Orbax items"


@pytest.mark.parametrize(
    ("layout", "text"), [("maxtext", "layers stacked on axis 1"), ("tunix", "one leaf per layer")]
)
def test_inspect_states_the_stacked_layers(
    layout: str, text: str, capsys: pytest.CaptureFixture[str]
):
    make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    run_ok("inspect", "out")
    assert f"layout {layout}, {text}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("layout", ["maxtext", "tunix", "levanter"])
def test_inspect_counts_the_parameters(layout: str):
    tensors = make_checkpoint(Path("model"), LLAMA)
    run_ok("export", "./model", "--layout", layout, "--out", "out")
    assert prep.inspect("out").parameters == sum(tensor.size for tensor in tensors.values())


# Heads of 8 elements: 1 / sqrt(8) rounds.
ROUNDED = LLAMA | {"head_dim": 8}
QUERIES = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)]


def way_back(query: np.ndarray) -> np.ndarray:
    """Return queries that were scaled and multiplied back, by the formulas of MaxText."""
    scaled = (query.astype(np.float32) * np.float32(1 / np.sqrt(8))).astype(query.dtype)
    return (scaled.astype(np.float32) * np.float32(np.sqrt(8))).astype(query.dtype)


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


def test_export_with_a_rounding_scale_cannot_be_converted_back(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "out", "--out", "init")
    assert lines[0] == "error: out cannot be converted back"
    assert "divides by the square root of 8, which changed" in lines[1]
    assert not Path("init").exists()


def test_verify_checks_stored_values_of_a_scale_that_rounds():
    make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    assert prep.verify("out")
    flip_bit(Path("out/0/items"), "query.kernel")
    differences = prep.verify("out").differences
    assert len(differences) == 1
    assert "self_attn.q_proj.weight" in differences[0]["tensor"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_verify_divides_the_model_by_a_scale_that_rounds(dtype: str):
    make_checkpoint(Path("model"), ROUNDED, dtype)
    run_ok("save-init", "./model", "--out", "init")
    run_ok("export", "init", "--layout", "maxtext", "--out", "out")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "same")
    assert json.loads(Path("out/prep-manifest.json").read_text())["scales"][QUERIES[0]]["lost"]
    for pair in (("out", "./model"), ("./model", "out"), ("init", "out"), ("out", "same")):
        assert prep.verify(*pair), pair
    flip_bit(Path("out/0/items"), "query.kernel")
    for pair in (("out", "./model"), ("./model", "out")):
        (difference,) = prep.verify(*pair).differences
        assert "self_attn.q_proj.weight" in difference["tensor"]
        assert "the square root of 8" in difference["what"]
    (difference,) = prep.verify("out", "same").differences
    assert difference.get("count") == 1


def test_output_with_a_scale_that_rounds_has_no_tolerance(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    capsys.readouterr()
    lines = error_lines(capsys, "verify", "out", "./model", "--tolerance", "1")
    assert lines[0] == "error: out cannot be converted back"


def test_lock_of_a_scale_that_rounds_is_enforced():
    make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    run_ok("export", "./model", "--layout", "maxtext", "--out", "out")
    run_ok("lock", "out")
    run_ok("verify", "out", "--lock", "out.lock.json")
    run_ok("verify", "out", "./model", "--lock", "out.lock.json")
    flip_bit(Path("out/0/items"), "query.kernel")
    assert not prep.verify("out", lock="out.lock.json")


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


def flip_bit(item: Path, leaf: str) -> None:
    """Change one bit of a leaf in the largest data file of an item."""
    values = next(array for path, array in read_init(item).items() if leaf in path)
    row = values[0, 0].tobytes()
    data = max((item / "d").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[content.index(row)] ^= 1
    data.write_bytes(content)


def test_queries_of_several_dtypes_are_not_rounded_to_one(capsys: pytest.CaptureFixture[str]):
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wider_dtype_makes_the_way_back_exact(dtype: str):
    tensors = make_checkpoint(Path("model"), ROUNDED, dtype)
    words = ("--layout", "maxtext", "--dtype", "float32", "--out", "out")
    run_ok("export", "./model", *words)
    run_ok("verify", "out")
    run_ok("save-init", "out", "--dtype", dtype, "--out", "init")
    run_ok("export", "init", "--out", "back")
    assert_same(read_tensors(Path("back")), tensors)


def test_queries_of_a_maxtext_item_without_a_manifest_are_unscaled():
    tensors = make_checkpoint(Path("model"), ROUNDED, "bfloat16")
    write_item(Path("run/7/items"), TREES["maxtext"](tensors, ROUNDED))
    run_ok("export", "./run", "--config", "./model", "--out", "back")
    restored = {name: way_back(tensors[name]) for name in QUERIES}
    assert_same(read_tensors(Path("back")), {**tensors, **restored})


def test_flax_file_with_a_scale_is_refused(capsys: pytest.CaptureFixture[str]):
    serialization = pytest.importorskip("flax.serialization")
    tensors = make_checkpoint(Path("model"), LLAMA)
    tree: dict[str, Any] = {}
    for name, leaf in TREES["maxtext"](tensors, LLAMA).items():
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
        patch.setattr(folder_run, "finalize_folder", interrupt)
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
