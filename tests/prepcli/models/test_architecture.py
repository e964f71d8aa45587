"""Architectures read from configs, and rejected config fields."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.models.architecture import (
    FULL_ATTENTION,
    MAX_WINDOW,
    NO_SOFTCAP,
    ArchConfig,
    LayerKind,
)
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import FAMILIES
from prepcli.models.rope_config import QueryScale
from tests.helpers.tiny_configs import GEMMA2, GPT2, GPT_NEO, LLAMA, MISTRAL, QWEN2


def arch_config_of(config: dict[str, Any]) -> ArchConfig:
    return FAMILIES[config["model_type"]].arch_config(config)


def test_attn_scale_uses_head_dim_of_config():
    assert arch_config_of(LLAMA | {"head_dim": 4}).attn_scale == 0.5


def test_gpt2_scale_attn_weights_false_disables_scale():
    assert arch_config_of(GPT2 | {"scale_attn_weights": False}).attn_scale == 1.0


def test_gpt2_rejects_cross_attention():
    assert arch_config_of(GPT2 | {"add_cross_attention": False}) == arch_config_of(GPT2)
    with pytest.raises(PrepError, match="`add_cross_attention` is not supported"):
        arch_config_of(GPT2 | {"add_cross_attention": True})


def test_gpt2_scales_scores_by_inverse_layer_idx():
    by_depth = {"scale_attn_by_inverse_layer_idx": True}
    assert arch_config_of(GPT2 | by_depth) == dataclasses.replace(
        arch_config_of(GPT2), scale_attn_by_inverse_layer_idx=True
    )


def test_attention_layers_override_attention_types():
    arch = arch_config_of(GPT_NEO | {"attention_layers": ["local", "global", "local"]})
    assert arch.sliding_windows == (3, FULL_ATTENTION, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_types": [[["global", "local"], 2]]},
        {"attention_types": [[["global", "sliding"], 1], [["global"], 1]]},
        {"attention_types": [[[["global"]], 3]]},
        {"attention_types": [["global", 3]]},
        {"attention_types": [[["global"], "3"]]},
        {"attention_types": 3},
        {"attention_types": [3]},
        {"attention_layers": [["global"], ["local"], 3]},
        {"window_size": 0},
        {"layer_norm_epsilon": 0},
        {"layer_norm_epsilon": "1e-5"},
        {"initializer_range": float("inf")},
        {"activation_function": "mish"},
        {"activation_function": ["gelu"]},
    ],
)
def test_gpt_neo_rejects_invalid_config(changes: dict[str, Any]):
    with pytest.raises(PrepError):
        arch_config_of(GPT_NEO | changes)


def test_read_activation_rejects_unsupported_name():
    with pytest.raises(PrepError, match="activation `mish` is not supported"):
        arch_config_of(LLAMA | {"hidden_act": "mish"})


FULL, SLIDING = "full_attention", "sliding_attention"


def test_sliding_windows_follow_config_of_each_family():
    assert arch_config_of(MISTRAL).sliding_windows == (5, 5)
    assert arch_config_of({"model_type": "mistral"}).sliding_windows == (4096,) * 32
    assert (
        arch_config_of(MISTRAL | {"sliding_window": None}).sliding_windows == (FULL_ATTENTION,) * 2
    )
    assert arch_config_of({"model_type": "mixtral"}).sliding_windows == (FULL_ATTENTION,) * 32
    assert arch_config_of({"model_type": "phi3"}).sliding_windows == (FULL_ATTENTION,) * 32
    upper = {
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    }
    assert arch_config_of(QWEN2 | upper).sliding_windows == (FULL_ATTENTION, 9, 9)
    assert (
        arch_config_of(QWEN2 | upper | {"use_sliding_window": False}).sliding_windows
        == (FULL_ATTENTION,) * 3
    )
    assert arch_config_of(
        QWEN2 | upper | {"layer_types": [SLIDING, FULL, FULL]}
    ).sliding_windows == (
        9,
        FULL_ATTENTION,
        FULL_ATTENTION,
    )
    assert arch_config_of(GEMMA2).sliding_windows == (5, FULL_ATTENTION, 5)
    assert arch_config_of(
        {"model_type": "gemma3_text", "num_hidden_layers": 7}
    ).sliding_windows == (
        *[4096] * 5,
        FULL_ATTENTION,
        4096,
    )


@pytest.mark.parametrize("name", ["mistral", "mixtral", "phi3", "qwen3_moe"])
@pytest.mark.parametrize("kinds", [[FULL, FULL], [SLIDING, FULL], [SLIDING, SLIDING]])
def test_uniform_windows_ignore_layer_types(name: str, kinds: list[str]):
    config = {
        "model_type": name,
        "num_hidden_layers": 2,
        "sliding_window": 5,
        "use_sliding_window": True,
    }
    assert arch_config_of(config | {"layer_types": kinds}).sliding_windows == (5, 5)


def test_sliding_window_is_bounded_below_int32():
    assert arch_config_of(MISTRAL | {"sliding_window": 10**12}).sliding_windows == (MAX_WINDOW,) * 2
    assert arch_config_of(GEMMA2 | {"sliding_window": 10**12}).sliding_windows == (
        MAX_WINDOW,
        FULL_ATTENTION,
        MAX_WINDOW,
    )


def test_gemma3_has_global_and_local_rope():
    arch = arch_config_of(
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    )
    assert arch.rope
    assert arch.local_rope
    assert (arch.rope.theta, arch.rope.rope_type, arch.rope.factor) == (1e6, "linear", 8.0)
    assert (arch.local_rope.theta, arch.local_rope.rope_type) == (1e4, "default")
    local, full = (LayerKind(4096, arch.local_rope), LayerKind(FULL_ATTENTION, arch.rope))
    assert arch.layer_kinds[4:7] == (local, full, local)
    assert arch.ropes == (arch.local_rope, arch.rope)
    mistral = arch_config_of(MISTRAL)
    assert mistral.layer_kinds == (LayerKind(5, mistral.rope),) * 2


def test_layers_without_rope_may_have_a_query_scale():
    scale = QueryScale(beta=0.1, step_length=8192, offset=1)
    llama = arch_config_of(LLAMA)
    arch = dataclasses.replace(llama, layers_without_rope=(1,), query_scale=scale)
    rotated, unrotated = arch.layer_kinds
    assert rotated.rope == llama.rope
    assert unrotated.rope is not None
    assert (unrotated.rope.rotary_dim, unrotated.rope.query_scale) == (0, scale)


def test_read_softcap_distinguishes_null_from_absent():
    plain = arch_config_of({"model_type": "gemma2"})
    assert (
        plain.attn_logit_softcap,
        plain.final_logit_softcap,
        plain.attn_scale,
        plain.embed_scale,
    ) == (
        50.0,
        30.0,
        256**-0.5,
        48.0,
    )
    uncapped = arch_config_of(
        GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    )
    assert (uncapped.attn_logit_softcap, uncapped.final_logit_softcap) == (NO_SOFTCAP, NO_SOFTCAP)
    assert arch_config_of({"model_type": "gemma3_text"}).final_logit_softcap == NO_SOFTCAP


UNSUPPORTED_FIELDS = (
    "clip_qkv",
    "use_qk_norm",
    "alibi",
    "no_rope_layers",
    "use_bidirectional_attention",
)
SUPPORTED = {
    *(("olmo", "clip_qkv"), ("cohere", "use_qk_norm"), ("smollm3", "no_rope_layers")),
    ("glm4_moe", "use_qk_norm"),
    *(("llama4_text", "use_qk_norm"), ("llama4_text", "no_rope_layers")),
    ("sarvam_moe", "use_qk_norm"),
    # Published files have the field. The classes always have the norms.
    *(("hunyuan_v1_dense", "use_qk_norm"), ("hunyuan_v1_moe", "use_qk_norm")),
    *(("qwen3", "use_qk_norm"), ("qwen3_moe", "use_qk_norm"), ("dots1", "use_qk_norm")),
    *(("hy_v3", "use_qk_norm"), ("minimax_m2", "use_qk_norm")),
}


def test_every_family_rejects_unsupported_fields():
    for name in FAMILIES:
        plain = {"model_type": name}
        expected = arch_config_of(plain)
        for field in UNSUPPORTED_FIELDS:
            assert arch_config_of(plain | {field: None}) == expected, name
            if (name, field) in SUPPORTED:
                continue
            with pytest.raises(PrepError, match=f"`{field}` is not supported"):
                arch_config_of(plain | {field: 4})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (LLAMA | {"sliding_window": 4}, "sliding_window"),
        (LLAMA | {"layer_types": [FULL, SLIDING]}, "layer_types"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA | {"embedding_multiplier": 12.0}, "embedding_multiplier"),
        (GPT2 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        (GPT2 | {"attention_types": [[["global", "local"], 1]]}, "attention_types"),
        (
            {"model_type": "gptj", "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_parameters",
        ),
        ({"model_type": "opt", "rope_theta": 500.0}, "rope_theta"),
        (GPT2 | {"hidden_act": "relu"}, "hidden_act"),
        (LLAMA | {"activation_function": "gelu"}, "activation_function"),
        (GEMMA2 | {"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "gemma", "hidden_activation": "gelu"}, "hidden_activation"),
        (
            {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": ["gelu"]},
            "hidden_activation",
        ),
        (MISTRAL | {"attention_bias": True}, "attention_bias"),
        (QWEN2 | {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        (GEMMA2 | {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (GEMMA2 | {"layer_types": [SLIDING, "chunked_attention", FULL]}, "layer_types"),
        (GEMMA2 | {"layer_types": [SLIDING]}, "layer_types"),
        (GEMMA2 | {"sliding_window": "4"}, "sliding_window"),
        (GEMMA2 | {"sliding_window": None, "layer_types": [SLIDING, FULL, SLIDING]}, "layer_types"),
        (GEMMA2 | {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            },
            "rope_parameters",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 3}},
            "rope_parameters",
        ),
        ({"model_type": "gemma3_text", "rope_scaling": "linear"}, "rope_scaling"),
        (QWEN2 | {"max_window_layers": "2"}, "max_window_layers"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope type `linear` is not supported",
        ),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 25},
            "all 24 layers are dense, so that none has experts",
        ),
        ({"model_type": "qwen2_moe", "max_window_layers": "no"}, "an integer from 0 to"),
        ({"model_type": "gpt_oss", "swiglu_limit": 0}, "swiglu_limit is 0"),
        ({"model_type": "deepseek_v3", "n_group": 7}, "256 experts cannot be cut into 7"),
        ({"model_type": "deepseek_v3", "num_key_value_heads": 8}, "as many as query heads"),
        ({"model_type": "deepseek_v3", "head_dim": 128}, "but qk_rope_head_dim is 64"),
        ({"model_type": "deepseek_v3", "first_k_dense_replace": -1}, "an integer from 0 to"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, "'noaux_tc' is not supported"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "treat differently"),
        ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"]}, "it must give 47 of"),
        ({"model_type": "ernie4_5_moe", "use_bias": True}, "adds a bias to all projections"),
        ({"model_type": "ernie4_5_moe", "moe_num_shared_experts": -1}, "an integer from 0 to"),
        ({"model_type": "ernie4_5_moe", "moe_layer_end_index": None}, "they must be integers"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "no"}, "it must be a list of layers"),
        (LLAMA | {"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
        (
            {"model_type": "gptj", "n_embd": 64, "n_head": 8, "rotary_dim": 16},
            "rotary_dim rotates 16 elements of a head",
        ),
        (
            LLAMA | {"num_key_value_heads": 3},
            "num_key_value_heads is 3, it must divide num_attention_heads",
        ),
        (LLAMA | {"num_key_value_heads": 4}, "num_key_value_heads is 4"),
        (LLAMA | {"hidden_size": 1, "head_dim": None}, "hidden_size 1 is too small for 2"),
        (GPT2 | {"n_head": 3}, "3 attention heads do not divide"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        (LLAMA | {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        (LLAMA | {"hidden_size": 10**400}, "hidden_size"),
        (GPT_NEO | {"attention_types": [[["global"], 10**12]]}, "attention_types"),
        (GPT_NEO | {"attention_types": [[[], 10**12]]}, "attention_types"),
        ({"model_type": "qwen3_moe", "num_experts": 3}, "num_experts_per_tok"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"model_type": "gptj", "activation_function": "mish"}, "activation_function"),
        ({"model_type": "gpt_neox", "rotary_pct": 0.01}, "rotary embeddings"),
        ({"model_type": "t5", "is_encoder_decoder": False}, "is_encoder_decoder"),
        ({"model_type": "t5", "feed_forward_proj": "gated-silu-2"}, "feed_forward_proj"),
        ({"model_type": "t5", "feed_forward_proj": "double-relu"}, "feed_forward_proj"),
        ({"model_type": "t5", "feed_forward_proj": "gated-mish"}, "feed_forward_proj"),
        ({"model_type": "t5", "feed_forward_proj": None}, "feed_forward_proj"),
        ({"model_type": "t5", "dense_act_fn": "mish"}, "dense_act_fn"),
        ({"model_type": "t5", "relative_attention_num_buckets": 3}, "3 buckets"),
        ({"model_type": "t5", "relative_attention_max_distance": 16}, "distances up to 16"),
        ({"model_type": "t5", "relative_attention_max_distance": 1 << 40}, "to 1,048,576"),
        (
            {"model_type": "t5", "relative_attention_max_distance": "128"},
            "relative_attention_max_distance",
        ),
    ],
)
def test_arch_config_error_names_field(config: dict[str, Any], field: str):
    with pytest.raises(PrepError, match=field):
        arch_config_of(config)


def test_layer_types_with_full_attention_are_accepted():
    assert arch_config_of(
        LLAMA | {"layer_types": [FULL, FULL], "logit_scale": 1.0}
    ) == arch_config_of(LLAMA)


def test_read_activation_accepts_equivalent_name():
    assert arch_config_of(GPT2 | {"hidden_act": "gelu_pytorch_tanh"}) == arch_config_of(GPT2)
    gemma = {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
    assert arch_config_of(gemma) == arch_config_of({"model_type": "gemma"})
    assert (
        arch_config_of(LLAMA | {"hidden_act": "swish", "activation_function": None}).activation
        == "swish"
    )


# Fields of the config classes of transformers that do not change the logits
HARMLESS = {
    *(
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "is_decoder",
        "label2id",
    ),
    *(
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
    ),
    *(
        "return_dict",
        "transformers_version",
        "use_cache",
        "chunk_size_feed_forward",
        "router_aux_loss_coef",
    ),
    *(
        "activation_dropout",
        "attention_dropout",
        "attn_pdrop",
        "classifier_dropout",
        "dropout",
        "dropout_rate",
    ),
    *("embd_pdrop", "embed_dropout", "hidden_dropout", "layerdrop", "resid_dropout", "resid_pdrop"),
    *("residual_dropout", "embedding_dropout", "eod_token_id", "emb_pdrop", "init_device"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob"),
    # The trainer always computes the softmax in float32, and sums of tensor-parallel slices as one.
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "slow_but_exact"),
    "enable_moe_fp32_combine",  # the precision of the sum of routed and shared experts
    "input_jitter_noise",  # noise in training only, like dropout
    "learned_pos_emb",  # transformers never reads it
    *("decoder_start_token_id", "sep_token_id"),  # generation and tokenizers read them
    *(
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ),
    "_sliding_window_pattern",  # transformers writes it but never reads it
    "qk_head_dim",  # derived from two other fields
    # layers that the base model does not run
    *("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    *("chunk_size", "mamba_chunk_size"),  # the tokens that one step of a scan computes
    # initial values of Mamba-2
    *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
    "time_step_rank",  # transformers reads it in Mamba-2 without using it
    *(
        "mtp_layers_block_type",
        "moe_shared_expert_overlap",
    ),  # layers that do not run, and the order of kernels
    *("use_mamba_kernels", "mamba_ssm_cache_dtype"),  # the kernel, and the precision of its cache
    *("use_mambapy", "use_associative_scan"),  # other ways to compute a selective scan
    *("time_step_scale", "time_step_init_scheme"),  # initial values of Mamba
    "residual_in_fp32",  # the precision of a sum
    "num_logits_to_keep",  # generation reads it
    "z_loss_coefficient",  # the recipe sets the loss
    "pretraining_tp",  # the number of slices of a matrix product
    "reorder_and_upcast_attn",  # scores in float32; the trainer always computes them so
}
INERT_ALONE = {  # fields that change nothing unless another field is set
    ("phi3", "original_max_position_embeddings"),
    ("qwen3_moe", "intermediate_size"),
    ("qwen2_moe", "max_window_layers"),
    ("deepseek_v2", "n_group"),
    ("deepseek_v2", "topk_group"),
    ("dots1", "sliding_window"),
    ("dots1", "max_window_layers"),
    ("ernie4_5_moe", "moe_layer_end_index"),
    ("falcon", "num_kv_heads"),
    ("gpt_bigcode", "num_key_value_heads"),
    ("biogpt", "layer_norm_eps"),
    ("codegen", "n_ctx"),
    ("doge", "keep_window_size"),
    ("doge", "num_experts"),
    ("doge", "num_experts_per_tok"),
    ("doge", "norm_topk_prob"),
    ("gemma4_text", "moe_intermediate_size"),
    ("gemma4_text", "top_k_experts"),
    ("gemma4_text", "use_double_wide_mlp"),
    ("mellum", "sliding_window"),
    ("lfm2", "block_multiple_of"),
    ("lfm2", "conv_bias"),
    ("lfm2_moe", "conv_bias"),
    ("bamba", "attention_bias"),
    ("falcon_h1", "mamba_expand"),
    ("falcon_h1", "mamba_norm_before_gate"),
    ("nemotron_h", "time_step_limit"),  # transformers limits by `time_step_min`
    ("nemotron_h", "expand"),  # the heads give the width
    ("nemotron_h", "num_hidden_layers"),  # the list of layers gives the number
    ("granitemoehybrid", "attention_bias"),
    ("granitemoehybrid", "position_embedding_type"),
    ("sarvam_mla", "head_dim"),  # transformers derives it from `qk_rope_head_dim`
}


def interpret(config: dict[str, Any]) -> object:
    """Return everything that prep derives from a config, or None if it rejects the config."""
    family = FAMILIES[config["model_type"]]
    try:
        return (
            family.sizes(config),
            family.arch_config(config),
            family.is_tied(config),
            [*parameter_rows(family, config)],
        )
    except PrepError:
        return None


def changed_value(value: Any) -> Any:
    """Return another value, of the same type where it has one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 3
    return 4 if value is None else "no such thing"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_transformers_field_is_read_or_rejected(name: str):
    configs = pytest.importorskip("transformers").AutoConfig
    written = json.loads(configs.for_model(name).to_json_string(use_diff=False))
    plain: dict[str, Any] = {"model_type": name, "use_sliding_window": True}
    if name == "glm4_moe":
        # Half of the class's default width of 42 elements is no whole number of pairs.
        written = json.loads(configs.for_model(name, head_dim=128).to_json_string(use_diff=False))
    assert interpret(written) == interpret({"model_type": name}) is not None
    changed = {
        field: {**plain, field: changed_value(value)}
        for field, value in written.items()
        if field not in plain
    }
    unchanged = interpret(plain)
    ignored = {field for field, config in changed.items() if interpret(config) == unchanged}
    assert ignored - {field for family, field in INERT_ALONE if family == name} <= HARMLESS
