"""Families with several kinds of layers: heads by layer type in Gemma 4, and recurrent mixers."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.commands.testing.tiny_model import random_tensors, tiny_transformer
from prepcli.core.errors import PrepError
from prepcli.core.json_values import HFConfig, JsonValue
from prepcli.models.architecture import FULL_ATTENTION, ArchConfig
from prepcli.models.registry import FAMILIES, family_of
from prepcli.models.truncation import later_layers, tensors_of_all_layers, truncate_config
from tests.helpers.hybrid_configs import HYBRID_FAMILIES
from tests.helpers.later_configs import GEMMA4, GEMMA4_EXPERTS
from trainer.generation.decode import init_kv_cache
from trainer.nn.model_spec import ForwardConfig

FULL = "full_attention"
SLIDING = "sliding_attention"
P_ROPE = {"rope_type": "proportional"}
FAMILY = FAMILIES["gemma4_text"]
# Layers 0 and 1 have their own keys, layers 2 and 3 those of layers 1 and 0.
SHARED_TYPES = [FULL, SLIDING, SLIDING, FULL]


def arch_config_of(**changes: Any) -> ArchConfig:
    return FAMILY.arch_config(GEMMA4 | changes)


def test_last_layer_with_own_keys_shares_them():
    roles = [kind.key_values for kind in arch_config_of().layer_kinds]
    assert roles == ["stored", "stored", "reused", "reused"]
    types = [FULL, SLIDING, SLIDING, FULL, SLIDING, FULL]
    arch_config = arch_config_of(num_hidden_layers=6, layer_types=types, num_kv_shared_layers=2)
    roles = [kind.key_values for kind in arch_config.layer_kinds]
    assert roles == ["own", "own", "stored", "stored", "reused", "reused"]


def test_layers_of_each_shape_have_a_stack():
    groups = dict(arch_config_of().shape_groups)
    assert groups == {
        "full_layers": (0,),
        "sliding_layers": (1,),
        "reusing_sliding_layers": (2,),
        "reusing_full_layers": (3,),
        "narrow_layers": (0, 1),
        "wide_layers": (2, 3),
    }
    assert arch_config_of(layer_types=[FULL] * 4, num_kv_shared_layers=0).shape_groups == ()


def test_saved_heads_equal_published_ones():
    published = {"attention_k_eq_v": True, "num_global_key_value_heads": 3}
    saved = {str(layer): {"head_dim": 12, "num_key_value_heads": 3} for layer in (0, 3)}
    without_width = {key: value for key, value in GEMMA4.items() if key != "global_head_dim"}
    config = without_width | {"attention_k_eq_v": True, "per_layer_config": saved}
    assert FAMILY.sizes(config) == FAMILY.sizes(GEMMA4 | published)
    assert FAMILY.sizes(without_width)["full_head_dim"] == 512


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": [FULL, SLIDING, FULL, SLIDING]}, "last of 4 layer_types must be full"),
        ({"layer_types": [FULL] * 3 + ["chunked"]}, "layer_types gives the layers"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4, it must be"),
        ({"num_kv_shared_layers": True}, "num_kv_shared_layers is True"),
        ({"num_kv_shared_layers": 3}, "no layer before layer 1 has the attention"),
        ({"use_bidirectional_attention": "all"}, "config.json has 'all'"),
        ({"per_layer_config": {"0": {"head_dim": 12}}}, "the same head_dim"),
        ({"per_layer_config": {"1": {"head_dim": 12}}}, "the same head_dim"),
        ({"per_layer_config": [1]}, "it must be an object"),
        ({"num_global_key_value_heads": 2, "attention_k_eq_v": True}, "do not divide 3 query"),
        ({"rope_parameters": {FULL: {"rope_type": "default"}}}, "an object for sliding"),
        (
            {"rope_parameters": {FULL: P_ROPE, SLIDING: P_ROPE}},
            "rope_theta of the rope scaling is None",
        ),
        ({"enable_moe_block": True}, "there is no num_experts"),
        (GEMMA4_EXPERTS | {"top_k_experts": 9}, "top_k_experts is 9, but there are 4 experts"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
    ],
)
def test_arch_config_rejects_unsupported_config(changes: dict[str, Any], reason: str):
    with pytest.raises(PrepError) as caught:
        arch_config_of(**changes)
    assert reason in caught.value.why


def test_layers_with_keys_of_others_have_no_cache():
    cache = init_kv_cache(tiny_transformer(GEMMA4).model, (2, 9), ForwardConfig())
    shapes = {window: stack.keys.shape for window, stack in cache.stacks.items()}
    assert shapes == {FULL_ATTENTION: (1, 2, 9, 1, 12), 5: (1, 2, 5, 1, 8)}


@pytest.mark.parametrize(("num_layers", "num_reusing"), [(4, 2), (3, 1), (2, 0), (1, 0)])
def test_truncated_config_has_fewer_layers_without_keys(num_layers: int, num_reusing: int):
    config = GEMMA4 | {"layer_types": [FULL] * 4, "hidden_size_per_layer_input": 0}
    shorter = truncate_config(config, num_layers)
    assert shorter["num_kv_shared_layers"] == num_reusing
    names = {name.removeprefix(FAMILY.prefix) for name in random_tensors(config)}
    kept = names - later_layers(FAMILY, config, names, num_layers)
    assert kept == {name.removeprefix(FAMILY.prefix) for name in random_tensors(shorter)}


def test_inputs_of_all_layers_are_in_shared_tensors():
    assert tensors_of_all_layers(FAMILY, GEMMA4) == {
        "embed_tokens_per_layer.weight": 1,
        "per_layer_model_projection.weight": 0,
    }
    assert tensors_of_all_layers(FAMILY, GEMMA4 | {"hidden_size_per_layer_input": 0}) == {}


KINDS = {
    "lfm2": ("attention_layers", "mixer_layers"),
    "lfm2_moe": ("attention_layers", "mixer_layers", "dense_layers", "sparse_layers"),
    "qwen3_next": ("attention_layers", "mixer_layers", "dense_layers", "sparse_layers"),
    "mamba2": (),
    "falcon_h1": (),
    "mamba": (),
    "jamba": ("attention_layers", "mixer_layers", "dense_layers", "sparse_layers"),
    "nemotron_h": ("attention_layers", "mixer_layers", "dense_layers", "sparse_layers"),
}


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_first_layers_have_the_tensors_of_a_shorter_model(name: str):
    config = HYBRID_FAMILIES[name]
    family = family_of(config)
    for num_layers in (1, 2):
        shorter = truncate_config(config, num_layers)
        if name in ("lfm2_moe", "qwen3_next") and num_layers == 1:
            with pytest.raises(PrepError, match="all 1 layers are dense"):
                family.arch_config(shorter)
            continue
        names = {tensor.removeprefix(family.prefix) for tensor in random_tensors(config)}
        kept = names - later_layers(family, config, names, num_layers)
        expected = {tensor.removeprefix(family.prefix) for tensor in random_tensors(shorter)}
        assert kept == expected


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_layer_has_its_own_stack(name: str):
    leaves = tiny_transformer(HYBRID_FAMILIES[name]).model.leaves
    stacks = {path.partition(".")[0] for path in leaves} - {"layers", "embed", "head", "final_norm"}
    assert stacks == {*KINDS[name]}


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_recurrent_states_do_not_grow_with_the_number_of_tokens(name: str):
    model = tiny_transformer(HYBRID_FAMILIES[name]).model
    short, long = (
        init_kv_cache(model, (2, slots), ForwardConfig()).recurrent for slots in (8, 4096)
    )
    assert short is not None
    assert long is not None
    shapes = {state: array.shape for state, array in short.states.items()}
    assert shapes == {state: array.shape for state, array in long.states.items()}
    num_mixers = len(model.arch_config.mixer_layers)
    assert {shape[:2] for shape in shapes.values()} == {(num_mixers, 2)}


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_rescaled_output_projections_are_refused(name: str):
    config = HYBRID_FAMILIES[name] | {"rescale_prenorm_residual": True}
    with pytest.raises(PrepError, match="rescale_prenorm_residual=true is not supported"):
        family_of(config).arch_config(config)


def test_nemotron_h_reads_its_layers_from_the_alias_first():
    layer_types: list[JsonValue] = ["linear_attention"] * 4
    config = {**HYBRID_FAMILIES["nemotron_h"], "layer_types": layer_types}
    assert family_of(config).arch_config(config).mixer_layers == (0, 1, 2, 3)


def test_nemotron_h_refuses_experts_with_a_latent():
    config = HYBRID_FAMILIES["nemotron_h"] | {"moe_latent_size": 8}
    with pytest.raises(PrepError, match="`moe_latent_size` is not supported"):
        family_of(config).arch_config(config)


def test_granite_attention_without_rotation_is_refused():
    layer_types: list[JsonValue] = ["attention"] * 3
    config: HFConfig = {**HYBRID_FAMILIES["granitemoehybrid"], "layer_types": layer_types}
    family = family_of(config)
    with pytest.raises(PrepError, match="layers without Mamba-2 and without rotation"):
        family.arch_config(config)
    arch_config = family.arch_config({**config, "position_embedding_type": "rope"})
    assert arch_config.mixer is None
    assert arch_config.rope is not None
