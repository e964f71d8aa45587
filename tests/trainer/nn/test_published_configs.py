"""Configs as published, with fields that transformers does not read, against its models of the equal plain configs."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.commands.testing.tiny_model import (
    model_logits,
    random_batch,
    random_tensors,
    tiny_transformer,
    torch_logits,
    torch_model,
)
from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonValue
from prepcli.models.registry import FAMILIES, family_of
from tests.helpers.config_fields import DEEP_YARN, DEEPSEEK, GROUPS, LATENT
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import LIVE

lazy_module("torch")
lazy_module("transformers")

LOCAL, GLOBAL = "sliding_attention", "full_attention"
LENGTHS = (40, 7)


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    """Return a config without some fields."""
    return {name: value for name, value in config.items() if name not in fields}


EXAONE4 = without(LIVE["exaone4"], "sliding_window_pattern") | {"num_hidden_layers": 5}
EXAONE_MOE = without(LIVE["exaone_moe"], "sliding_window_pattern") | {"num_hidden_layers": 4}
DEEPSEEK_V3 = DEEPSEEK | LATENT | GROUPS | {"model_type": "deepseek_v3", "rope_scaling": DEEP_YARN}
LAYERS_OF_LLG = [LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL]
LAYERS_OF_LLLG = [LOCAL, LOCAL, LOCAL, GLOBAL]
# Name -> config as published, and the config with the fields that transformers reads.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # The last layer is global.
    "exaone4, letters": (
        EXAONE4 | {"sliding_window_pattern": "LLG"},
        EXAONE4 | {"layer_types": LAYERS_OF_LLG},
    ),
    "exaone4, letters and layer types": (
        EXAONE4 | {"sliding_window_pattern": "LLLG", "layer_types": LAYERS_OF_LLG},
        EXAONE4 | {"layer_types": LAYERS_OF_LLG},
    ),
    "exaone4, no window": (
        EXAONE4 | {"sliding_window": None, "sliding_window_pattern": None},
        EXAONE4 | {"sliding_window": None, "layer_types": [GLOBAL] * 5},
    ),
    "exaone_moe": (
        EXAONE_MOE | {"sliding_window_pattern": "LLLG"},
        EXAONE_MOE | {"layer_types": LAYERS_OF_LLLG},
    ),
    "hunyuan_v1_dense": (
        LIVE["hunyuan_v1_dense"] | {"use_qk_norm": True, "use_cla": False},
        LIVE["hunyuan_v1_dense"],
    ),
    "hunyuan_v1_moe": (LIVE["hunyuan_v1_moe"] | {"use_qk_norm": True}, LIVE["hunyuan_v1_moe"]),
    "dots1": (LIVE["dots1"] | {"use_qk_norm": True}, LIVE["dots1"]),
    "hy_v3": (
        LIVE["hy_v3"] | {"use_qk_norm": True, "first_k_dense_replace": 1},
        LIVE["hy_v3"],
    ),
    "glm4_moe_lite": (LIVE["glm4_moe_lite"] | {"first_k_dense_replace": 1}, LIVE["glm4_moe_lite"]),
    "kimi_k2": (DEEPSEEK_V3 | {"model_type": "kimi_k2"}, DEEPSEEK_V3),
}
FAST = ("exaone4, letters", "hunyuan_v1_dense")


@pytest.mark.parametrize("name", slow_except(PUBLISHED, FAST))
def test_logits_of_published_config_match_transformers(name: str):
    published, plain = PUBLISHED[name]
    tensors = random_tensors(plain, seed=3)
    tiny = tiny_transformer(published)
    batch = random_batch(plain["vocab_size"], len(LENGTHS), max(LENGTHS), 4, has_source=False)
    logits = model_logits(tiny.model, tiny.params_from_tensors(tensors), batch)
    expected = torch_logits(torch_model(plain, tensors), batch, LENGTHS)
    for row, length in enumerate(LENGTHS):
        assert abs(logits[row, :length] - expected[row, :length]).max() <= 2e-5


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_has_the_plain_architecture(name: str):
    published, plain = PUBLISHED[name]
    family, plain_family = family_of(published), family_of(plain)
    assert family.sizes(published) == plain_family.sizes(plain)
    if "layer_types" not in plain:
        assert family.arch_config(published) == plain_family.arch_config(plain)


@pytest.mark.parametrize("pattern", ["", "LLX", "llg", None, 0, True, [4]])
def test_invalid_window_patterns_are_errors(pattern: JsonValue):
    for config in (EXAONE4, EXAONE_MOE):
        with pytest.raises(PrepError, match="sliding_window_pattern"):
            family_of(config).arch_config(config | {"sliding_window_pattern": pattern})


@pytest.mark.parametrize("name", ["gemma3_text", "cohere2"])
def test_other_families_have_no_letters(name: str):
    config = LIVE[name] | {"sliding_window_pattern": "LG"}
    with pytest.raises(PrepError, match="sliding_window_pattern"):
        family_of(config).arch_config(without(config, "layer_types"))


@pytest.mark.parametrize("name", ["glm4_moe_lite", "hy_v3"])
def test_contradictory_dense_layers_are_an_error(name: str):
    with pytest.raises(PrepError, match="first_k_dense_replace"):
        family_of(LIVE[name]).arch_config(LIVE[name] | {"first_k_dense_replace": 2})


def test_alias_of_a_model_type_is_not_listed():
    assert "kimi_k2" in FAMILIES
    assert "kimi_k2" not in list(FAMILIES)
    assert FAMILIES["kimi_k2"] is FAMILIES["deepseek_v3"]
