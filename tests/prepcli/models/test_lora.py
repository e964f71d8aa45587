"""Adapters: their leaves, the names of their tensors, their targets, and patterns of module names."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError, UsageError
from prepcli.models.lora import (
    build_adapters,
    lora_family,
    module_settings,
    projections,
    select_targets,
    with_named_patterns,
)
from prepcli.models.lora_config import DEFAULT_TARGETS, LoraConfig, find_pattern, lora_from_manifest
from prepcli.models.parameters import parameter_rows
from prepcli.models.peft_names import module_suffixes
from prepcli.models.registry import FAMILIES
from tests.helpers.tiny_checkpoints import ALL_CONFIGS, FAMILY_CONFIGS, GPT2, LLAMA
from tests.helpers.tiny_configs import GOLDEN

LORA = LoraConfig(4, 8.0)


def tensor_shapes(config: dict[str, Any], lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the adapters of a model, by bare name."""
    family = lora_family(FAMILIES[config["model_type"]], config, lora)
    rows = (bind_row(row, family.sizes(config)) for row in parameter_rows(family, config).values())
    return {name: row.source_shape for row in rows for name, _ in row.tensors()}


@pytest.mark.parametrize(
    "config", ALL_CONFIGS, ids=[config["model_type"] for config in ALL_CONFIGS]
)
def test_every_family_has_the_default_targets(config: dict[str, Any]):
    family = FAMILIES[config["model_type"]]
    names = {projection.name for projection in select_targets(family, config, DEFAULT_TARGETS)}
    expected = {*DEFAULT_TARGETS}
    if "kv_lora_rank" in config:
        has_query_latent = config.get("q_lora_rank", 1) is not None
        expected = {"attn.q_up" if has_query_latent else "attn.q", "attn.kv_up"}
    assert expected <= names
    leaves = build_adapters(family, config, LORA).leaves
    assert all(leaf.extent("lora_rank") == 4 for leaf in leaves.values())


@pytest.mark.parametrize(
    ("q_lora_rank", "modules"), [(8, ["kv_b_proj", "q_b_proj"]), (None, ["kv_b_proj", "q_proj"])]
)
def test_default_targets_select_latent_projections(q_lora_rank: int | None, modules: list[str]):
    config = FAMILY_CONFIGS["deepseek_v3"] | {"q_lora_rank": q_lora_rank}
    assert module_suffixes(FAMILIES["deepseek_v3"], config, LORA) == modules


@pytest.mark.parametrize("name", GOLDEN)
def test_adapters_have_the_dims_of_their_weights(name: str):
    config = GOLDEN[name]
    family = FAMILIES[config["model_type"]]
    sizes, rows = family.sizes(config), parameter_rows(family, config)
    lora = LoraConfig(4, 8.0, ("*",))
    leaves = build_adapters(family, config, lora)
    for projection in projections(family, config):
        weight = bind_row(rows[f"{projection.path}.weight"], sizes).leaf_shape
        a = leaves.leaves[leaves.shared.get(path := f"{projection.path}.lora_a", path)].shape
        b = leaves.leaves[f"{projection.path}.lora_b"].shape
        assert weight == (*b[:-1], *a[2:])
        assert (a[1], b[-1]) == (4, 4)


def test_adapter_tensors_have_the_names_of_peft():
    shapes = tensor_shapes(LLAMA, LORA)
    layers = {f"layers.{number}.self_attn.{name}_proj" for number in range(3) for name in "qv"}
    assert shapes.keys() == {f"{layer}.lora_{matrix}.weight" for layer in layers for matrix in "AB"}
    assert shapes["layers.0.self_attn.v_proj.lora_A.weight"] == (4, 32)
    assert shapes["layers.0.self_attn.v_proj.lora_B.weight"] == (16, 4)


def test_adapters_have_heads_in_shards():
    # 8 heads of 5 elements in 4 shards, each with queries, values and keys.
    config = GOLDEN["codegen"]
    leaves = build_adapters(FAMILIES["codegen"], config, LORA).leaves
    assert leaves["layers.attn.v.lora_b"].shape == (2, 8, 5, 4)
    assert leaves["layers.attn.v.lora_b"].extent("heads") == 8
    shapes = tensor_shapes(config, LORA)
    assert shapes["h.0.attn.qkv_proj.lora_B.weight"] == (120, 4)


def test_projections_in_one_tensor_share_an_adapter():
    shapes = tensor_shapes(GPT2, LORA)
    assert shapes["h.0.attn.c_attn.lora_A.weight"] == (4, 32)
    assert shapes["h.0.attn.c_attn.lora_B.weight"] == (96, 4)
    adapters = build_adapters(FAMILIES["gpt2"], GPT2, LORA)
    assert adapters.shared == {
        f"layers.attn.{name}.lora_a": "layers.attn.q.lora_a" for name in "kv"
    }
    assert "layers.attn.k.lora_a" not in adapters.leaves


def test_adapters_of_unstacked_layers_share_within_a_layer():
    shared = build_adapters(FAMILIES["gpt2"], GPT2, LORA, scan=False).shared
    assert shared["layers.2.attn.v.lora_a"] == "layers.2.attn.q.lora_a"
    assert len(shared) == 6


@pytest.mark.parametrize(
    ("config", "targets", "suffixes"),
    [
        (LLAMA, ("attn.q", "mlp.*"), ["down_proj", "gate_proj", "q_proj", "up_proj"]),
        (GPT2, DEFAULT_TARGETS, ["c_attn"]),
        (GPT2, ("attn.o",), ["attn.c_proj"]),
        (GPT2, ("attn.o", "mlp.down"), ["c_proj"]),
        (FAMILY_CONFIGS["t5"], DEFAULT_TARGETS, ["SelfAttention.q", "SelfAttention.v"]),
    ],
)
def test_module_suffixes_select_only_the_targets(
    config: dict[str, Any], targets: tuple[str, ...], suffixes: list[str]
):
    lora = LoraConfig(4, 8.0, targets)
    assert module_suffixes(FAMILIES[config["model_type"]], config, lora) == suffixes


def test_unknown_target_is_an_error_with_the_known_ones():
    with pytest.raises(
        UsageError, match=r"'mlp.gate'.*attn.q, attn.k, attn.v, attn.o, mlp.up, mlp.down"
    ):
        build_adapters(FAMILIES["gpt2"], GPT2, LoraConfig(4, 8.0, ("attn.q", "mlp.gate")))


def test_experts_have_no_adapters():
    config = FAMILY_CONFIGS["mixtral"]
    assert {p.name for p in projections(FAMILIES["mixtral"], config)} == {
        f"attn.{name}" for name in "qkvo"
    }


def test_scaling_divides_alpha_by_the_rank_or_its_root():
    assert LoraConfig(16, 8.0).scaling == 0.5
    assert LoraConfig(16, 8.0, use_rslora=True).scaling == 2.0


@pytest.mark.parametrize(
    ("target", "meant"),
    [("v_porj", "attn.v"), ("q_proj", "attn.q"), ("atn.o", "attn.o"), ("gate_prj", "mlp.gate")],
)
def test_unknown_target_error_suggests_the_similar_one(target: str, meant: str):
    with pytest.raises(UsageError) as caught:
        select_targets(FAMILIES["llama"], LLAMA, ["attn.q", target])
    assert repr(target) in caught.value.what
    assert "attn.q, attn.k" in caught.value.why
    assert caught.value.hint == f"did you mean `{meant}`?"


VALID_SETTINGS = {"rank": 2, "alpha": 1.0, "targets": ["attn.q"], "use_rslora": False}


@pytest.mark.parametrize(
    "lora",
    [
        3,
        {},
        VALID_SETTINGS | {"rank": 0},
        VALID_SETTINGS | {"rank": 2.5},
        VALID_SETTINGS | {"alpha": 10**400},
        VALID_SETTINGS | {"alpha": float("nan")},
        VALID_SETTINGS | {"alpha": "1"},
        VALID_SETTINGS | {"targets": [1]},
        VALID_SETTINGS | {"use_rslora": "false"},
    ],
)
def test_invalid_settings_in_a_manifest_are_errors(lora: Any):
    with pytest.raises(PrepError, match="invalid settings of adapters"):
        lora_from_manifest({"lora": lora})


@pytest.mark.parametrize(
    ("config", "pattern", "named"),
    [
        (LLAMA, "q_proj", ["attn.q"]),
        # Projections in one tensor have one module.
        (GPT2, "c_attn", ["attn.q"]),
        (FAMILY_CONFIGS["phi3"], "gate_up_proj", ["mlp.gate"]),
        # Another stack of layers has a projection of the same name.
        (FAMILY_CONFIGS["t5"], "encoder.*.q", [r"^encoder\.layers\.\d+\.attn\.q"]),
        (FAMILY_CONFIGS["t5"], "EncDecAttention.q", ["cross.q"]),
    ],
)
def test_patterns_of_a_file_keep_their_modules(
    config: dict[str, Any], pattern: str, named: list[str]
):
    family = FAMILIES[config["model_type"]]
    lora = LoraConfig(
        4, 8.0, ("all-linear",), rank_pattern={pattern: 2}, alpha_pattern={pattern: 3}
    )
    renamed = with_named_patterns(family, config, lora)
    assert renamed.rank_pattern == dict.fromkeys(named, 2)
    assert renamed.alpha_pattern == dict.fromkeys(named, 3)
    settings = module_settings(family, config, lora)
    assert len({module.rank for module in settings.values()}) == 2
    assert module_settings(family, config, renamed) == settings


def test_patterns_of_projections_in_one_tensor_agree():
    family = FAMILIES["gpt2"]
    lora = LoraConfig(4, 8.0, rank_pattern={"attn.q": 2, "attn.k": 2})
    (module,) = module_settings(family, GPT2, lora).values()
    assert module.rank == 2
    lora = LoraConfig(4, 8.0, rank_pattern={"attn.q": 2, "attn.k": 3})
    with pytest.raises(UsageError, match="have the value of an earlier key"):
        module_settings(family, GPT2, lora)


NAMES = ["model.layers.0.self_attn.q_proj", "layers.11.mlp.down_proj", "q_proj"]
TOKENS = [
    *("q_proj", "layers", "mlp", ".", r"\.", "[0-9]", r"\d", "+", "*", "?", "|", "(", ")"),
    *("^", "$", ".*", "0", "{1,2}", "[^a]", "(?:"),
]


@given(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=7).map("".join))
def test_patterns_match_as_in_python(pattern: str):
    try:
        found = [find_pattern([pattern], [name]) is not None for name in NAMES]
    except PrepError:
        return
    rule = re.compile(rf"(.*\.)?({pattern})$")
    assert found == [rule.match(name) is not None for name in NAMES]


def test_first_matching_pattern_counts():
    names = ["model.layers.0.self_attn.q_proj", "layers.0.attn.q"]
    assert find_pattern(["k_proj", "attn.q", "q_proj"], names) == "attn.q"
    assert find_pattern(["proj", "attn.k"], names) is None


@pytest.mark.parametrize("pattern", ["(a*)*b", "((a|b)*a)*c", "a{0,90}" * 90 + "b"])
def test_hostile_patterns_end_in_bounded_time(pattern: str):
    assert find_pattern([pattern], ["a" * 200]) is None


@pytest.mark.parametrize("pattern", ["(?i)q", r"(a)\1", "((a*)*)*b", "a" * 1001, "(" * 60, "[a"])
def test_other_syntax_is_an_error(pattern: str):
    with pytest.raises(PrepError, match="is not supported"):
        find_pattern([pattern], ["a"])
