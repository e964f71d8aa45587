"""Configs of Gemma 4: heads by layer type, layers with the keys of earlier ones, and inputs of layers."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.commands.testing.tiny_model import random_tensors, tiny_transformer
from prepcli.core.errors import PrepError
from prepcli.models.architecture import FULL_ATTENTION, ArchConfig
from prepcli.models.registry import FAMILIES
from prepcli.models.truncation import later_layers, tensors_of_all_layers, truncate_config
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
