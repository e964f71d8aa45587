"""`save-init --layers N`: the first layers of a model of every family and of none, with a config that fits them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.testing.checkpoints import write_checkpoint
from prepcli.core.json_values import JsonObject, JsonValue
from prepcli.models.registry import family_of
from prepcli.models.truncation import later_layers, truncate_config
from prepcli.models.verbatim import verbatim_family
from tests.golden.make_architectures import FOLDER
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import StoredTensor, safetensors_bytes, write_safetensors
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


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


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
FAST_FAMILIES = ("gpt2", "gpt_neo", "gemma3_text", "mixtral", "deepseek_v3", "t5")


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


def test_dense_layers_of_moe_model_are_not_a_model(capsys: pytest.CaptureFixture[str]):
    config = next(config for config in ALL_CONFIGS if config["model_type"] == "deepseek_v3")
    make_checkpoint(Path("m"), config, legacy=False)
    message = run_failing(capsys, 1, "save-init", "./m", "--layers", "1")
    assert "`--layers 1` leaves a model that is not supported" in message
    assert "all 1 layers are dense" in message


@pytest.mark.parametrize("options", [(), ("--verbatim",)], ids=["family", "verbatim"])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_layers_of_multi_token_prediction_are_removed(model_type: str, options: tuple[str, ...]):
    """Layer 3 follows the 3 layers of the model, as layer 61 follows layer 60 in DeepSeek-V3."""
    config = FAMILY_CONFIGS[model_type] | {"num_nextn_predict_layers": 1}
    tensors = checkpoint_tensors(config, "float32", tied=False, legacy=False)
    tensors["model.layers.3.enorm.weight"] = np.ones(8, np.float32)
    write_checkpoint(Path("m"), config, tensors)
    run_ok("save-init", "./m", "--layers", "2", *options)
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


@pytest.mark.parametrize(
    ("config", "layers", "num_shared"),
    [(GEMMA4, 1, 0), (GEMMA4_SHARED, 4, 2), (GEMMA4_SHARED, 2, 0)],
    ids=["without_shared", "with_shared", "before_shared"],
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


def test_first_layers_of_gemma_4_may_not_change_their_attention(
    capsys: pytest.CaptureFixture[str],
):
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


def test_damaged_columns_of_later_layers_are_found(capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"), GEMMA4, legacy=False)
    run_ok("save-init", "./m")
    run_ok("export", "m-init", "--out", "hf")
    path = Path("hf/model.safetensors")
    name = "model.embed_tokens_per_layer.weight"
    last_row = read_tensors(Path("hf"))[name][-1].tobytes()
    # The last value belongs to the last layer.
    data = bytearray(path.read_bytes())
    data[data.index(last_row) + len(last_row) - 1] ^= 1
    path.write_bytes(data)
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


def test_model_with_a_tensor_of_the_last_layer_is_not_cut(capsys: pytest.CaptureFixture[str]):
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


@pytest.mark.parametrize(
    ("model_type", "section"), [("deepseek_v3", ""), ("gemma3", "text_config")]
)
def test_verbatim_model_keeps_its_first_layers(model_type: str, section: str):
    tensors = write_golden(model_type)
    run_ok("save-init", "./m", "--verbatim", "--layers", "2")
    run_ok("export", "m-init", "--out", "hf")
    expected = {name: tensor for name, tensor in tensors.items() if layer_of(name) < 2}
    exported = safetensors_bytes(Path("hf"))
    if model_type == "deepseek_v3":
        assert exported == expected
    assert {name for name in exported if "language_model.layers.2" in name} == set()
    config = json.loads(Path("hf/config.json").read_text())
    config = config[section] if section else config
    assert config["num_hidden_layers"] == 2
    assert len(config.get("layer_types") or [0, 0]) == 2


@pytest.mark.parametrize(
    ("config", "layers", "message"),
    [
        ({"model_type": "x", "num_hidden_layers": 2}, "2", "removes no layer"),
        ({}, "1", "needs the number of layers"),
    ],
)
def test_layers_that_cannot_be_truncated_are_an_error(
    capsys: pytest.CaptureFixture[str], config: dict[str, Any], layers: str, message: str
):
    Path("m").mkdir()
    write_safetensors(
        Path("m/model.safetensors"), {f"h.{i}.w": ("U8", (1,), b"1") for i in range(2)}
    )
    Path("m/config.json").write_text(json.dumps(config))
    code = 2 if config else 1
    assert message in run_failing(capsys, code, "save-init", "./m", "--layers", layers)


def test_pattern_of_layer_types_is_repeated_before_it_is_cut():
    config = {"num_layers": 4, "attention_types": [[["global", "local"], 2]]}
    assert truncate_config(config, 3) == {
        "num_layers": 3,
        "attention_types": [[["global", "local", "global"], 1]],
    }


@pytest.mark.parametrize(
    "pattern", [[1], [["a", "b"], ["c"]], [[["a"], -1]], [[["a"], 1, 1]]], ids=str
)
def test_other_lists_of_layer_types_are_kept(pattern: list[Any]):
    config = {"num_layers": 5, "attention_types": pattern}
    assert truncate_config(config, 1) == {"num_layers": 1, "attention_types": pattern}


def test_other_lists_with_as_many_entries_are_kept():
    kept = {
        "eos_token_id": [1, 2],
        "time_step_limit": [0.0, 1.0],
        "mlp_multipliers": [0.5, 2.0],
        "image_grid_pinpoints": [[336, 672], [672, 336]],
        "moe_intermediate_size": [96, 32],
    }
    assert truncate_config({"num_hidden_layers": 2, **kept}, 1) == {"num_hidden_layers": 1, **kept}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("layer_types", ["a", "b", "a"]),
        ("mlp_layer_types", ["dense", "sparse", "sparse"]),
        ("no_rope_layers", [1, 0, 1]),
        ("layer_rope_theta", [1e4, 0, 1e4]),
        ("intermediate_size", [8, 16, 16]),
        ("num_key_value_heads_per_layer", [1, 2, 2]),
        ("moe_topk", [8, 8, 4]),
        ("num_experts", [64, 32, 64]),
        ("swiglu_limits", [0.0, 7.0, 7.0]),
        ("hybrid_override_pattern", "M*-"),
    ],
)
def test_entries_of_later_layers_are_removed(field: str, values: Any):
    config = {"num_hidden_layers": 3, field: values}
    assert truncate_config(config, 2) == {"num_hidden_layers": 2, field: values[:2]}


def test_entries_of_layers_for_speculative_decoding_are_removed():
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "a", "b"]}
    assert truncate_config(config, 2) == {"num_hidden_layers": 2, "layer_types": ["a", "b"]}


def test_sections_of_later_layers_are_removed():
    sections: dict[str, JsonValue] = {"0": {"a": 1}, "2": {"a": 2}}
    config: JsonObject = {"num_hidden_layers": 3, "per_layer_config": sections}
    assert truncate_config(config, 2) == {
        "num_hidden_layers": 2,
        "per_layer_config": {"0": {"a": 1}},
    }


def test_section_with_other_keys_than_numbers_is_kept():
    config: JsonObject = {"num_hidden_layers": 3, "per_layer_config": {"full_attention": {"a": 1}}}
    assert truncate_config(config, 2) == config | {"num_hidden_layers": 2}


def test_size_of_all_layers_is_kept():
    config = {"num_hidden_layers": 3, "intermediate_size": 8, "moe_layer_freq": 2}
    assert truncate_config(config, 2) == config | {"num_hidden_layers": 2}


def test_numbers_of_later_layers_are_removed():
    config = {"num_hidden_layers": 4, "moe_layers": [1, 3], "mlp_only_layers": [0, 1, 2, 3]}
    assert truncate_config(config, 2) == {
        "num_hidden_layers": 2,
        "moe_layers": [1],
        "mlp_only_layers": [0, 1],
    }


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
