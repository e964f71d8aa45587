"""Tiny configs of published models, their random tensors, and small checkpoints."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bench.published import PUBLISHED, published_config
from prepcli.commands.operations import model_outputs
from prepcli.commands.testing import tiny_config as module
from prepcli.commands.testing.checkpoints import read_checkpoint, write_checkpoint
from prepcli.commands.testing.tiny_config import scale_down
from prepcli.commands.testing.tiny_model import exact_log, random_tensors, tensor_shapes
from prepcli.core.errors import PrepError, UsageError
from prepcli.models.registry import FAMILIES, family_of
from tests.helpers.later_configs import LATER_FAMILIES
from tests.helpers.tiny_checkpoints import read_tensors, same_bits
from tests.helpers.tiny_configs import GPT_NEOX, ODD_HEADS, T5

CONFIGS = {name: published_config(name) for name in PUBLISHED}
BARE = {name: {"model_type": name} for name in FAMILIES}  # every field has its default
# Fields of ArchConfig that follow from sizes.
SCALES = {"attn_scale", "embed_scale", "init_std", "leaf_init_stds", "lm_head_input_scale"}
OPTIONAL_PARTS = {"encoder", "local_rope", "score_bias", "rope"}
SIZES = (
    SCALES
    | OPTIONAL_PARTS
    | {*("experts_per_token", "max_positions", "sliding_windows", "layers_without_rope")}
    | {
        "dense_layers",
        "mixer_layers",
        "reusing_layers",
        "shape_groups",
        "latent_key_dim",
        "chunked_layers",
        "residual_scale",
        "attention_chunk",
    }
)


def test_scale_down_shrinks_sizes_and_keeps_choices():
    for config in (*CONFIGS.values(), *BARE.values()):
        for num_heads in (3, 4):
            check_scaled_down(config, num_heads)


def check_scaled_down(config: dict, num_heads: int) -> None:
    """Assert that a config is scaled down to small sizes with the same choices."""
    family, tiny = family_of(config), scale_down(config, num_heads)
    sizes, original = family.sizes(tiny), family.sizes(config)
    assert module._num_elements(family, tiny) <= module.MAX_SCALED_ELEMENTS
    # Mamba-2 alone has no attention heads.
    if "heads" in sizes:
        assert sizes["heads"] % num_heads == 0
    if "mixer_groups" in sizes:
        assert sizes["mixer_groups"] * sizes["group_heads"] % num_heads == 0
        for name in ("mixer_groups", "group_heads"):
            assert (sizes[name] == 1) == (original[name] == 1)
    if "kv_heads" in sizes:
        assert (sizes["kv_heads"] == 1) == (original["kv_heads"] == 1)
        assert (sizes["kv_heads"] == sizes["heads"]) == (original["kv_heads"] == original["heads"])
    arch, original_arch = family.arch_config(tiny), family.arch_config(config)
    assert bool(arch.attention_layers) == bool(original_arch.attention_layers)
    choices, expected = dataclasses.asdict(arch), dataclasses.asdict(original_arch)
    different = {name for name, value in choices.items() if value != expected[name]}
    assert different <= SIZES
    for name in ("dense_layers", "mixer_layers", "reusing_layers", "latent_key_dim"):
        assert bool(choices[name]) == bool(expected[name])
    for name in OPTIONAL_PARTS:
        assert (choices[name] is None) == (expected[name] is None)


def test_scale_down_replaces_an_alias_of_the_model_type():
    # transformers, with which `check-family` compares, has no kimi_k2.
    config = {**BARE["deepseek_v3"], "model_type": "kimi_k2"}
    assert scale_down(config) == scale_down(BARE["deepseek_v3"])


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2"])
def test_scale_down_keeps_a_tiny_config(name: str):
    assert scale_down(ODD_HEADS[name]) == {"pad_token_id": None} | ODD_HEADS[name]


def test_scale_down_increases_too_few_learned_positions():
    assert (
        scale_down(ODD_HEADS["gpt2"] | {"n_positions": 16})["n_positions"]
        == module.CHECKED_POSITIONS
    )


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gpt-j-6b", "n_positions"),
        ("codegen-350m-mono", "n_positions"),
        ("mistral-7b", "max_position_embeddings"),
    ],
)
def test_scale_down_leaves_positions_for_every_check(name: str, field: str):
    # The rotations of GPT-J and CodeGen in transformers are a table with as many rows.
    assert scale_down(CONFIGS[name])[field] == module.CHECKED_POSITIONS


def test_scale_down_shrinks_positions_of_scaled_rotations():
    scaling = {"rope_type": "linear", "factor": 2.0}
    tiny = scale_down(CONFIGS["mistral-7b"] | {"rope_scaling": scaling})
    assert tiny["max_position_embeddings"] == module.POSITIONS


def test_scale_down_keeps_each_kind_of_layer():
    config = CONFIGS["gemma-3-1b"] | {
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5
    }
    config = {key: value for key, value in config.items() if key != "sliding_window_pattern"}
    tiny = scale_down(config | {"num_hidden_layers": 30})
    assert tiny["layer_types"] == ["sliding_attention", "full_attention"]
    assert tiny["num_hidden_layers"] == 2


def test_scale_down_keeps_layers_with_keys_of_earlier_ones():
    types = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    config = {
        **{"model_type": "gemma4_text", "num_hidden_layers": 35, "layer_types": types},
        **{"num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    }
    tiny = scale_down(config)
    assert tiny["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert tiny["num_kv_shared_layers"] == 2
    sizes = family_of(tiny).sizes(tiny)
    assert (sizes["head_dim"], sizes["full_head_dim"], sizes["layer_input"]) == (24, 48, 6)


QWEN3_NEXT = {"model_type": "qwen3_next", "full_attention_interval": 4, "mlp_only_layers": []}
BAMBA = {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_d_head": "auto"}
GRANITE_DENSE = {
    "model_type": "granitemoehybrid", "num_hidden_layers": 20, "layer_types": (["mamba"] * 9 + ["attention"]) * 2,
    "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 8192,
}  # fmt: skip
LFM2 = {"model_type": "lfm2", "block_ff_dim": 6656, "full_attn_idxs": [2, 5, 8]}
LFM2_MOE = {
    "model_type": "lfm2_moe", "num_hidden_layers": 8, "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
}  # fmt: skip

JAMBA = {"model_type": "jamba"}


@pytest.mark.parametrize("num_heads", [3, 4])
@pytest.mark.parametrize("config", [QWEN3_NEXT, BAMBA, GRANITE_DENSE, LFM2, LFM2_MOE, JAMBA])
def test_scale_down_keeps_mixers_beside_attention(config: dict, num_heads: int):
    tiny = scale_down(config, num_heads)
    arch_config = family_of(tiny).arch_config(tiny)
    assert (arch_config.mixer_layers, arch_config.attention_layers) == ((0,), (1,))
    assert arch_config.mixer == family_of(config).arch_config(config).mixer


def test_scale_down_keeps_the_sublayers_of_a_text():
    tiny = scale_down({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M*-M"})
    arch_config = family_of(tiny).arch_config(tiny)
    assert tiny["hybrid_override_pattern"] == "M-*"
    assert (arch_config.mixer_layers, arch_config.feed_forward_layers) == ((0,), (1,))


@pytest.mark.parametrize("family", ["mamba", "falcon_h1", "nemotron_h"])
def test_scale_down_accepts_the_defaults_of_mixers(family: str):
    tiny = scale_down({"model_type": family})
    assert family_of(tiny).arch_config(tiny).mixer_layers[0] == 0


def test_scale_down_keeps_the_kinds_of_both_layer_lists():
    config = {
        "model_type": "mellum",
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 7,
        "mlp_layer_types": ["dense"] + ["sparse"] * 27,
    }
    tiny = scale_down(config)
    assert tiny["layer_types"] == ["sliding_attention", "full_attention"]
    assert tiny["mlp_layer_types"] == ["dense", "sparse"]


def test_scale_down_keeps_layers_without_rotation():
    config = {"model_type": "smollm3", "num_hidden_layers": 36, "no_rope_layers": [1, 1, 1, 0] * 9}
    tiny = scale_down(config)
    assert (tiny["num_hidden_layers"], tiny["no_rope_layers"]) == (2, [1, 0])


def test_scale_down_removes_large_token_ids():
    tiny = scale_down(CONFIGS["phi-4"])
    assert (tiny["bos_token_id"], tiny["eos_token_id"], tiny["pad_token_id"]) == (0, 0, None)


def test_scale_down_removes_default_padding_of_config_class():
    """Gemma4TextConfig has the default 0. Torch computes no gradient for the embedding of this token."""
    tiny = dict(ODD_HEADS["gemma4_text"])
    del tiny["pad_token_id"]
    for config in (tiny, {"model_type": "gemma4_text"}, {"model_type": "gemma2"}):
        assert scale_down(config)["pad_token_id"] is None


def test_scale_down_keeps_padding_that_starts_a_decoder():
    config = {"model_type": "t5", "pad_token_id": 0, "decoder_start_token_id": 0}
    assert scale_down(config)["pad_token_id"] == 0


def test_unknown_size_field_is_a_usage_error(monkeypatch: pytest.MonkeyPatch):
    for axis in ("mlp", "dense_mlp"):
        monkeypatch.setitem(module.SIZE_FIELDS, axis, ())
    with pytest.raises(
        UsageError, match=r"this config cannot be scaled down - 3,\d+,\d+ elements remain"
    ):
        scale_down(CONFIGS["llama-7b"])


def test_exact_log_rounds_the_exact_logarithm():
    torch = pytest.importorskip("torch")
    values = np.arange(1, 5000, dtype=np.float32) / np.float32(7)
    with exact_log():
        logs = torch.log(torch.tensor(values))
    assert logs.dtype == torch.float32
    np.testing.assert_array_equal(
        logs.numpy(), np.array([math.log(value) for value in values], np.float32)
    )


def test_exact_log_restores_torch_log_after_an_error():
    torch = pytest.importorskip("torch")
    native_log = torch.log
    with pytest.raises(TypeError), exact_log():
        torch.log(torch.tensor(1.0), "no such argument")
    assert torch.log is native_log


@pytest.mark.parametrize(
    ("config", "head"), [(GPT_NEOX, "embed_out.weight"), (T5, "lm_head.weight")], ids=["neox", "t5"]
)
def test_untied_head_has_one_tensor(config: dict[str, Any], head: str):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    shapes = tensor_shapes(config | {"tie_word_embeddings": False})
    heads = [name for name in shapes if name in ("embed_out.weight", "lm_head.weight")]
    assert heads == [head]


def test_random_factors_of_the_residual_stream_are_around_one():
    # Factors around 0 would leave a residual stream of rounding errors.
    tensors = random_tensors(LATER_FAMILIES["doge"])
    factors = [tensor for name, tensor in tensors.items() if name.endswith("_residual")]
    assert len(factors) == 4
    for values in factors:
        assert abs(values.mean() - 1) < 0.2
        assert 0.1 < np.std(values) < 0.3


def test_missing_reference_packages_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_outputs, "find_spec", lambda name: None)
    with pytest.raises(PrepError) as caught:
        tensor_shapes(ODD_HEADS["gpt2"])
    assert caught.value.why == "torch and transformers not installed"
    assert caught.value.hint == "pip install 'prepcli[hf]' torch"


@pytest.mark.parametrize("files", [1, 3])
def test_read_checkpoint_returns_written_tensors(tmp_path: Path, files: int):
    rng = np.random.default_rng(0)
    tensors = {
        f"layers.{i}.weight": rng.standard_normal((3, 5)).astype(dtype)
        for i, dtype in enumerate(("float32", ml_dtypes.bfloat16, "float16"))
    }
    folder = write_checkpoint(tmp_path / "model", {"model_type": "llama"}, tensors, files)
    assert len(list(folder.glob("*.safetensors"))) == files
    for read in (read_checkpoint, read_tensors):
        assert read(folder).keys() == tensors.keys()
        assert all(same_bits(tensor, tensors[name]) for name, tensor in read(folder).items())
