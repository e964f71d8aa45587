"""Tiny configs of published models: valid, small, and of the same choices."""

from __future__ import annotations

import dataclasses

import pytest

from bench.published import PUBLISHED, published_config
from prepcli.errors import UsageError
from prepcli.testing import tiny_config as module
from prepcli.testing.tiny_config import scale_down
from tests.helpers.tiny_configs import ODD_HEADS
from trainer.models.registry import FAMILIES, family_of

CONFIGS = {name: published_config(name) for name in PUBLISHED}
BARE = {name: {"model_type": name} for name in FAMILIES}  # every field has its default
# Fields of ArchConfig that follow from sizes.
SCALES = {"attn_scale", "embed_scale", "init_std", "leaf_init_stds", "lm_head_input_scale"}
OPTIONAL_PARTS = {"encoder", "local_rope", "score_bias", "rope"}
SIZES = (
    SCALES
    | OPTIONAL_PARTS
    | {*("experts_per_token", "max_positions", "sliding_windows", "layers_without_rope")}
    | {"dense_layers", "latent_key_dim", "chunked_layers", "residual_scale", "attention_chunk"}
)


@pytest.mark.parametrize("num_heads", [3, 4])
@pytest.mark.parametrize("config", [*CONFIGS.values(), *BARE.values()], ids=[*CONFIGS, *BARE])
def test_scale_down_shrinks_sizes_and_keeps_choices(config: dict, num_heads: int):
    family, tiny = family_of(config), scale_down(config, num_heads)
    sizes, original = family.sizes(tiny), family.sizes(config)
    assert module._num_elements(family, tiny) <= module.MAX_SCALED_ELEMENTS
    assert sizes["heads"] % num_heads == 0
    if "kv_heads" in sizes:
        assert (sizes["kv_heads"] == 1) == (original["kv_heads"] == 1)
        assert (sizes["kv_heads"] == sizes["heads"]) == (original["kv_heads"] == original["heads"])
    choices, expected = (dataclasses.asdict(family.arch_config(c)) for c in (tiny, config))
    different = {name for name, value in choices.items() if value != expected[name]}
    assert different <= SIZES
    for name in ("dense_layers", "latent_key_dim"):
        assert bool(choices[name]) == bool(expected[name])
    for name in OPTIONAL_PARTS:
        assert (choices[name] is None) == (expected[name] is None)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2"])
def test_scale_down_keeps_a_tiny_config(name: str):
    assert scale_down(ODD_HEADS[name]) == ODD_HEADS[name]


def test_scale_down_increases_too_few_learned_positions():
    assert (
        scale_down(ODD_HEADS["gpt2"] | {"n_positions": 16})["n_positions"]
        == module.LEARNED_POSITIONS
    )


def test_scale_down_keeps_each_kind_of_layer():
    config = CONFIGS["gemma-3-1b"] | {
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5
    }
    config = {key: value for key, value in config.items() if key != "sliding_window_pattern"}
    tiny = scale_down(config | {"num_hidden_layers": 30})
    assert tiny["layer_types"] == ["sliding_attention", "full_attention"]
    assert tiny["num_hidden_layers"] == 2


def test_scale_down_removes_large_token_ids():
    tiny = scale_down(CONFIGS["phi-4"])
    assert (tiny["bos_token_id"], tiny["eos_token_id"], tiny["pad_token_id"]) == (0, 0, None)


def test_unknown_size_field_is_a_usage_error(monkeypatch: pytest.MonkeyPatch):
    for axis in ("mlp", "dense_mlp"):
        monkeypatch.setitem(module.SIZE_FIELDS, axis, ())
    with pytest.raises(
        UsageError, match=r"this config cannot be scaled down - 3,\d+,\d+ elements remain"
    ):
        scale_down(CONFIGS["llama-7b"])
