"""`save-init --layers N`, and other sources without a family."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.testing.checkpoints import write_checkpoint
from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonObject
from prepcli.formats.torch_dcp import METADATA_FILE, read_dcp_folder
from prepcli.models.registry import family_of
from prepcli.models.truncation import later_layers, truncate_config
from prepcli.models.verbatim import verbatim_family
from tests.golden.make_architectures import FOLDER
from tests.golden.make_dcp import FOLDER as DCP_FOLDER
from tests.golden.make_dcp import VALUES
from tests.helpers.damage import flip_bit
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.run_cli import Capture, run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import (
    StoredTensor,
    orbax_bytes,
    safetensors_bytes,
    write_safetensors,
)
from tests.helpers.tiny_checkpoints import (
    ALL_CONFIGS,
    DENSE_CONFIGS,
    FAMILY_CONFIGS,
    checkpoint_tensors,
    make_checkpoint,
    read_tensors,
)
from tests.helpers.tiny_configs import DENSE_FAMILIES

torch = lazy_module("torch")
transformers = lazy_module("transformers")


def layer_of(name: str) -> int:
    """Return the first number in a name, or -1."""
    match = re.search(r"\.(\d+)\.", f".{name}.")
    return int(match[1]) if match else -1


def num_layers_with_experts(config: dict[str, Any]) -> int:
    """Return 1, or the smallest number of layers with one that has experts."""
    dense = family_of(config).arch_config(config).dense_layers
    return 1 + next(layer for layer in range(len(dense) + 1) if layer not in dense)


# Equal layers, patterns and lists of layers, dense layers before experts, and two stacks. Tests below cut each kind of
# list and section of a config.
FAST_FAMILIES = ("gpt_neo", "deepseek_v3", "t5")


@pytest.mark.parametrize(
    "config",
    slow_except(ALL_CONFIGS, lambda config: config["model_type"] in FAST_FAMILIES),
    ids=lambda config: config["model_type"],
)
def test_family_keeps_its_first_layers(config: dict[str, Any]):
    make_checkpoint(Path("m"), config, legacy=False)
    num_layers = num_layers_with_experts(config)
    run_ok("save-init", "./m", "--layers", str(num_layers))
    run_ok("verify", "m-init")
    run_ok("export", "m-init", "--out", "hf")
    expected = {
        name: t for name, t in safetensors_bytes(Path("m")).items() if layer_of(name) < num_layers
    }
    assert safetensors_bytes(Path("hf")) == expected
    exported = json.loads(Path("hf/config.json").read_text())
    family = family_of(exported)
    family.arch_config(exported)
    assert family.sizes(exported)["layers"] == num_layers


def test_dense_layers_of_moe_model_are_not_a_model(capsys: Capture):
    config = next(config for config in ALL_CONFIGS if config["model_type"] == "deepseek_v3")
    make_checkpoint(Path("m"), config, legacy=False)
    message = run_failing(capsys, 1, "save-init", "./m", "--layers", "1")
    assert "`--layers 1` leaves a model that is not supported" in message
    assert "all 1 layers are dense" in message


def test_layers_of_multi_token_prediction_are_removed():
    """Layer 3 follows the 3 layers of the model, as layer 61 follows layer 60 in DeepSeek-V3."""
    config = FAMILY_CONFIGS["glm4_moe"] | {"num_nextn_predict_layers": 1}
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    tensors["model.layers.3.enorm.weight"] = np.ones(8, np.float32)
    write_checkpoint(Path("m"), config, tensors)
    run_ok("save-init", "./m", "--layers", "2")
    run_ok("export", "m-init", "--out", "hf")
    exported = json.loads(Path("hf/config.json").read_text())
    assert exported == config | {"num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    assert {layer_of(name) for name in safetensors_bytes(Path("hf"))} == {-1, 0, 1}


def test_module_of_multi_token_prediction_keeps_its_count():
    """A verbatim model keeps `mtp.*`, which is no layer."""
    config = DENSE_FAMILIES["exaone_moe"] | {"num_nextn_predict_layers": 1}
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    tensors["mtp.layers.0.enorm.weight"] = np.ones(8, np.float32)
    write_checkpoint(Path("m"), config, tensors)
    run_ok("save-init", "./m", "--verbatim", "--layers", "2")
    run_ok("export", "m-init", "--out", "hf")
    assert "mtp.layers.0.enorm.weight" in safetensors_bytes(Path("hf"))
    assert json.loads(Path("hf/config.json").read_text())["num_nextn_predict_layers"] == 1


GEMMA4 = DENSE_CONFIGS["gemma4_text"]
# Layers 2 to 5 attend to the keys of layers 0 and 1.
GEMMA4_SHARED = GEMMA4 | {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "layers", "num_shared"),
    [(GEMMA4, 1, 0), (GEMMA4_SHARED, 4, 2)],
    ids=["without_shared", "with_shared"],
)
def test_first_layers_of_gemma_4_compute_the_same(
    config: dict[str, Any], layers: int, num_shared: int
):
    make_checkpoint(Path("m"), config, legacy=False)
    run_ok("save-init", "./m", "--layers", str(layers))
    run_ok("verify", "m-init")
    run_ok("export", "m-init", "--out", "hf")
    exported = json.loads(Path("hf/config.json").read_text())
    assert exported["num_kv_shared_layers"] == num_shared
    tokens = torch.arange(14).reshape(2, 7) % config["vocab_size"]
    whole = transformers.AutoModelForCausalLM.from_pretrained("m", dtype="float32")
    first, info = transformers.AutoModelForCausalLM.from_pretrained(
        "hf", dtype="float32", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        actual = first(tokens).logits
        hidden = whole(tokens, output_hidden_states=True).hidden_states[layers]
        expected = whole.lm_head(whole.model.norm(hidden))
    cap = config["final_logit_softcapping"]
    torch.testing.assert_close(actual, cap * torch.tanh(expected / cap), rtol=1e-5, atol=1e-5)


def test_first_layers_of_gemma_4_may_not_change_their_attention(capsys: Capture):
    # The last layer has full attention by default, and layer 2 of 7 has a sliding window.
    own_keys = GEMMA4 | {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    config = own_keys | {"num_hidden_layers": 7, "layer_types": None, "global_head_dim": 8}
    make_checkpoint(Path("m"), config, legacy=False)
    message = run_failing(capsys, 1, "save-init", "./m", "--layers", "3")
    assert "`--layers 3` changes the attention of layer 2" in message
    full, sliding = "full_attention", "sliding_attention"
    config = own_keys | {"layer_types": [full, sliding, full, full]}
    make_checkpoint(Path("n"), config, legacy=False)
    message = run_failing(capsys, 1, "save-init", "./n", "--layers", "2")
    assert "the last of 2 layer_types must be full_attention" in message


@pytest.mark.slow
def test_damaged_columns_of_later_layers_are_found(capsys: Capture):
    make_checkpoint(Path("m"), GEMMA4, legacy=False)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--out", "hf")
    path = Path("hf/model.safetensors")
    name = "model.embed_tokens_per_layer.weight"
    last_row = read_tensors(Path("hf"))[name][-1].tobytes()
    # The last value belongs to the last layer.
    flip_bit(path, path.read_bytes().index(last_row) + len(last_row) - 1)
    message = run_failing(capsys, 1, "save-init", "./hf", "--layers", "1", "--out", "first")
    assert f"({name}) in ./hf is damaged" in message
    assert not Path("first").exists()


def test_chain_does_not_show_cut_tables_of_gemma_4():
    make_checkpoint(Path("m"), GEMMA4, legacy=False)
    run_ok("save-init", "./m", "--layers", "1")
    (link,) = prep.verify_chain("m-init").links
    # Each row of a table has the columns of all layers.
    assert (link.status, link.not_shown) == ("not proven", "resized")
    assert link.changed.startswith("resized: embed_tokens_per_layer.weight; left out: layers.1.")


def test_model_with_a_tensor_of_the_last_layer_is_not_cut(capsys: Capture):
    make_checkpoint(Path("m"), DENSE_CONFIGS["gpt_neox_japanese"], legacy=False)
    message = run_failing(capsys, 1, "save-init", "./m", "--layers", "1")
    assert "`--layers` is not supported for" in message
    assert "layers.0.attention.dense_bias does not exist" in message


def write_golden(model_type: str) -> dict[str, StoredTensor]:
    """Write a model of an architecture without a family."""
    golden = json.loads((FOLDER / f"{model_type}.json").read_text())
    rng = np.random.default_rng(0)
    tensors: dict[str, StoredTensor] = {}
    for name, (code, shape) in golden["tensors"].items():
        tensors[name] = (code, tuple(shape), rng.bytes(4 * int(np.prod(shape))))
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), tensors)
    Path("m/config.json").write_text(json.dumps(golden["config"]))
    return tensors


def test_verbatim_model_keeps_its_first_layers():
    tensors = write_golden("gemma3")
    run_ok("save-init", "./m", "--verbatim", "--layers", "2")
    run_ok("export", "m-init", "--out", "hf")
    exported = safetensors_bytes(Path("hf"))
    left = tensors.keys() - exported.keys()
    assert left == {name for name in tensors if "language_model" in name and layer_of(name) >= 2}
    assert exported == {name: tensors[name] for name in exported}
    config = json.loads(Path("hf/config.json").read_text())["text_config"]
    assert (config["num_hidden_layers"], len(config["layer_types"])) == (2, 2)


@pytest.mark.parametrize(
    ("config", "layers", "message"),
    [
        ({"model_type": "x", "num_hidden_layers": 2}, "2", "removes no layer"),
        ({}, "1", "needs the number of layers"),
    ],
)
def test_layers_that_cannot_be_truncated_are_an_error(
    capsys: Capture, config: dict[str, Any], layers: str, message: str
):
    Path("m").mkdir()
    write_safetensors(
        Path("m/model.safetensors"), {f"h.{i}.w": ("U8", (1,), b"1") for i in range(2)}
    )
    Path("m/config.json").write_text(json.dumps(config))
    code = 2 if config else 1
    assert message in run_failing(capsys, code, "save-init", "./m", "--layers", layers)


GLOBAL, LOCAL = "global", "local"
# Fields of a config of three layers -> the fields of its first two layers.
TRUNCATED: list[tuple[JsonObject, JsonObject]] = [
    ({"layer_types": ["a", "b", "a"]}, {"layer_types": ["a", "b"]}),
    # One entry is of a layer for speculative decoding.
    ({"layer_types": ["a", "b", "a", "b"]}, {"layer_types": ["a", "b"]}),
    ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, {"mlp_layer_types": ["dense", "sparse"]}),
    ({"no_rope_layers": [1, 0, 1]}, {"no_rope_layers": [1, 0]}),
    ({"layer_rope_theta": [1e4, 0, 1e4]}, {"layer_rope_theta": [1e4, 0]}),
    ({"intermediate_size": [8, 16, 16]}, {"intermediate_size": [8, 16]}),
    ({"num_key_value_heads_per_layer": [1, 2, 2]}, {"num_key_value_heads_per_layer": [1, 2]}),
    ({"moe_topk": [8, 8, 4]}, {"moe_topk": [8, 8]}),
    ({"num_experts": [64, 32, 64]}, {"num_experts": [64, 32]}),
    ({"swiglu_limits": [0.0, 7.0, 7.0]}, {"swiglu_limits": [0.0, 7.0]}),
    ({"hybrid_override_pattern": "M*-"}, {"hybrid_override_pattern": "M*"}),
    (
        {"moe_layers": [1, 2], "mlp_only_layers": [0, 1, 2]},
        {"moe_layers": [1], "mlp_only_layers": [0, 1]},
    ),
    ({"per_layer_config": {"0": {"a": 1}, "2": {"a": 2}}}, {"per_layer_config": {"0": {"a": 1}}}),
    # A pattern is repeated before it is cut.
    (
        {"attention_types": [[[GLOBAL], 1], [[LOCAL], 2]]},
        {"attention_types": [[[GLOBAL, LOCAL], 1]]},
    ),
]
# Fields that have other meanings, sizes of all layers, and lists with other numbers of entries.
KEPT: list[JsonObject] = [
    {"attention_types": [1]},
    {"attention_types": [["a", "b"], ["c"]]},
    {"attention_types": [[["a"], -1]]},
    {"attention_types": [[["a"], 1, 1]]},
    {"eos_token_id": [1, 2, 3]},
    {"time_step_limit": [0.0, 1.0, 2.0]},
    {"mlp_multipliers": [0.5, 2.0, 2.0]},
    {"image_grid_pinpoints": [[336, 672], [672, 336], [1, 1]]},
    {"moe_intermediate_size": [96, 32, 32]},
    {"intermediate_size": 8, "moe_layer_freq": 2},
    {"per_layer_config": {"full_attention": {"a": 1}}},
]


@pytest.mark.parametrize(
    ("fields", "expected"), [*TRUNCATED, *((fields, fields) for fields in KEPT)], ids=str
)
def test_config_has_the_fields_of_the_first_layers(fields: JsonObject, expected: JsonObject):
    name = "num_layers" if "attention_types" in fields else "num_hidden_layers"
    assert truncate_config({name: 3, **fields}, 2) == {name: 2, **expected}


@pytest.mark.parametrize(
    "sections", [("thinker_config", "text_config"), ("encoder", "text_config")], ids=".".join
)
def test_layers_of_nested_sections_are_truncated(sections: tuple[str, str]):
    outer, inner = sections
    vision: JsonObject = {"num_hidden_layers": 4, "layer_types": ["a", "a", "a", "a"]}
    text: JsonObject = {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"]}
    config: JsonObject = {outer: {inner: text, "vision_config": vision}}
    truncated = {"num_hidden_layers": 2, "layer_types": ["a", "b"]}
    assert truncate_config(config, 2) == {outer: {inner: truncated, "vision_config": vision}}
    names = [f"{part}.layers.{i}.w" for part in ("model", "visual") for i in range(4)]
    later = later_layers(verbatim_family({}), config, names, 2)
    assert later == {"model.layers.2.w", "model.layers.3.w"}


@pytest.mark.parametrize("field", ["layers", "num_encoder_layers"])
def test_other_names_of_the_number_of_layers_are_found(field: str):
    names = ["layers.0.w", "layers.1.w"]
    assert truncate_config({field: 2}, 1) == {field: 1}
    assert later_layers(verbatim_family({}), {field: 2}, names, 1) == {"layers.1.w"}


def test_huge_counts_need_no_memory():
    config = {"num_layers": 10**12, "attention_types": [[["global", "local"], 10**12]]}
    assert truncate_config(config, 2)["attention_types"] == [[["global", "local"], 1]]
    assert later_layers(verbatim_family({}), config, ["h.0.w", "h.1.w"], 1) == set()


@pytest.mark.parametrize(
    ("tower", "vision_config"),
    [
        ("visual.blocks", {"depth": 6}),
        ("vision_tower.layers", {"num_hidden_layers": 4}),
        ("encoder.blocks", {"num_hidden_layers": 6}),
    ],
)
def test_layers_of_a_vision_tower_are_kept(tower: str, vision_config: dict[str, int]):
    num_blocks = max(vision_config.values())
    names = [f"{tower}.{i}.w" for i in range(num_blocks)]
    names += [f"layers.{i}.w" for i in range(4)]
    config = {"num_hidden_layers": 4, "vision_config": vision_config}
    later = later_layers(verbatim_family({}), config, names, 2)
    assert later == {"layers.2.w", "layers.3.w"}


# Sources without a family: PyTorch files, torch distributed checkpoints, Flax files, and Orbax items of any tree


TREE: dict[str, Any] = {
    "params": {
        "layers_0": {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4)},
        "layers_1": {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4) + 1},
        "a/b": np.arange(3, dtype=np.int32),
    },
    "batch_stats": {"mean": np.arange(5, dtype=np.float16)},
}
TREE_BYTES = {
    "params.layers_0.kernel": TREE["params"]["layers_0"]["kernel"].tobytes(),
    "params.layers_1.kernel": TREE["params"]["layers_1"]["kernel"].tobytes(),
    "params.a/b": TREE["params"]["a/b"].tobytes(),
    "batch_stats.mean": TREE["batch_stats"]["mean"].tobytes(),
}


def exported_bytes(source: str) -> dict[str, bytes]:
    """Convert a source to Orbax and then to safetensors, and return the bytes of each tensor."""
    run_ok("save-init", source, "--mesh", "1,1,2", "--out", "init")
    run_ok("export", "init", "--out", "hf")
    return {name: data for name, (_, _, data) in safetensors_bytes(Path("hf")).items()}


def test_distributed_checkpoint_of_two_ranks_converts():
    expected = dict(VALUES) | {"model.v": VALUES["model.v"].astype(ml_dtypes.bfloat16)}
    assert exported_bytes(str(DCP_FOLDER)) == {name: v.tobytes() for name, v in expected.items()}
    shapes = {name: shape for name, (_, shape, _) in safetensors_bytes(Path("hf")).items()}
    assert shapes == {name: values.shape for name, values in expected.items()}
    run_ok("verify", "hf", str(DCP_FOLDER))
    run_ok("export", str(DCP_FOLDER), "--out", "direct")
    assert safetensors_bytes(Path("direct")) == safetensors_bytes(Path("hf"))


def test_distributed_checkpoint_is_inspected(capsys: Capture):
    assert main(["inspect", str(DCP_FOLDER), "--stats"]) == 0
    out = capsys.readouterr().out
    assert "torch distributed checkpoint, 2 files, 7 tensors" in out
    assert "step is not a tensor" in out


def test_distributed_checkpoint_without_metadata_is_rejected(capsys: Capture):
    shutil.copytree(DCP_FOLDER, "m")
    Path("m", METADATA_FILE).unlink()
    assert "is an incomplete torch distributed checkpoint" in run_failing(
        capsys, 1, "save-init", "./m"
    )


def test_cut_file_of_a_rank_is_rejected(capsys: Capture):
    shutil.copytree(DCP_FOLDER, "m")
    path = Path("m/__0_0.distcp")
    path.write_bytes(path.read_bytes()[:-100])
    message = run_failing(capsys, 1, "save-init", "./m")
    assert "m/__0_0.distcp is broken" in message
    assert "it is cut short" in message


def test_damaged_distributed_checkpoint_raises_one_error():
    name = "__0_0.distcp"
    shutil.copytree(DCP_FOLDER, "m")
    data = Path("m", name).read_bytes()
    rng = random.Random(0)
    n_refused = 0
    for _ in range(100):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        Path("m", name).write_bytes(damaged)
        try:
            read_dcp_folder(Path("m"))
        except PrepError:
            n_refused += 1
    assert n_refused > 0


def test_torch_file_without_config_converts():
    torch = pytest.importorskip("torch")
    tensors = {
        "h.0.w": torch.arange(6).reshape(2, 3).T,
        "h.1.w": torch.ones(3, 2, dtype=torch.int64),
    }
    Path("m").mkdir()
    torch.save(tensors, "m/pytorch_model.bin")
    assert exported_bytes("./m") == {
        name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()
    }


def test_flax_file_of_any_tree_converts():
    serialization = pytest.importorskip("flax.serialization")
    Path("m").mkdir()
    Path("m/flax_model.msgpack").write_bytes(serialization.msgpack_serialize(TREE))
    assert exported_bytes("./m") == TREE_BYTES


def test_orbax_item_of_any_tree_converts(capsys: Capture):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(Path("m").absolute(), {**TREE, "note": "text"})
    assert exported_bytes("./m") == TREE_BYTES
    assert main(["save-init", "./m", "--dry-run", "-v"]) == 0
    assert "dropped note: not an array" in capsys.readouterr().err


def test_orbax_item_with_int4_leaves_converts_to_orbax_only(capsys: Capture):
    values = np.array([[1, -8, 7], [2, 3, -1]], ml_dtypes.int4)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(Path("m").absolute(), {"x": values})
    run_ok("save-init", "./m", "--out", "init")
    run_ok("reshard", "init", "--out", "again")
    assert orbax_bytes(Path("again")) == {"x": values.tobytes()}
    loaded: dict[str, Any] = prep.load_params("again", dtype="keep")
    np.testing.assert_array_equal(np.asarray(loaded["x"]), values)
    assert "x is int4" in run_failing(capsys, 1, "export", "init")
