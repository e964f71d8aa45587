"""Random tiny configs of each family, determined by family, seed and number.

A sample starts from a valid config and changes a few fields: fields of the config class of transformers, their aliases,
fields of older versions, and sometimes a field of another family or a value of another type.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prepcli.models.architecture import LAYER_TYPES, SEMANTIC_FIELDS
from prepcli.models.registry import FAMILIES
from tests.helpers.tiny_configs import DENSE_FAMILIES, GPT2, GPT_NEO, LLAMA, NEWER_FAMILIES

SEQ_LENGTH = 20  # longer than most windows and positions below
CHANGE_COUNTS = (1, 1, 1, 2, 2, 2, 3, 3, 4, 6)  # numbers of fields that a sample changes
# Probabilities per change. The last one is per sample.
LEFT_OUT_SHARE, WRONG_TYPE_SHARE, FOREIGN_SHARE = (0.12, 0.04, 0.03)

BASE_CONFIGS: Mapping[str, dict[str, Any]] = {"gpt2": GPT2, "gpt_neo": GPT_NEO, "llama": LLAMA} | {
    name: config for name, config in (NEWER_FAMILIES | DENSE_FAMILIES).items() if name in FAMILIES
}
ACTIVATIONS = (
    "gelu",
    "gelu_new",
    "gelu_pytorch_tanh",
    "gelu_fast",
    "quick_gelu",
    "silu",
    "swish",
    "relu",
    "mish",
)
ROPE_TYPES = ("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope")
INVALID_VALUES = (
    None,
    "no such thing",
    -1,
    0,
    1,
    [],
    {},
    2.5,
    True,
    False,
    [0],
    {"rope_type": 3},
    10**400,
    1e-300,
)
ValueSampler = Callable[[random.Random, Mapping[str, Any]], Any]


def one_of(*values: Any) -> ValueSampler:
    """Return a sampler of values; repeated values are more likely."""
    return lambda rng, config: copy.deepcopy(rng.choice(values))


def layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of layers in a config, or 2 if it has no usable number."""
    keys = ("num_hidden_layers", "n_layer", "num_layers")
    counts = [config[key] for key in keys if isinstance(config.get(key), int)]
    return counts[0] if counts and 0 <= counts[0] < 9 else 2


def head_size(config: Mapping[str, Any]) -> int:
    """Return the width of a head, or a plausible width if the config is invalid."""
    width, heads = (config.get(key) for key in ("hidden_size", "num_attention_heads"))
    head_dim = config.get("head_dim")
    if isinstance(head_dim, int) and 0 < head_dim < 99:
        return head_dim
    return (
        width // heads
        if isinstance(width, int) and isinstance(heads, int) and 0 < heads < 99
        else 8
    )


def layer_types(*names: str) -> ValueSampler:
    """Return a sampler of lists with one name per layer, sometimes one too many."""

    def sample(rng: random.Random, config: Mapping[str, Any]) -> Any:
        count = layer_count(config) + rng.choice((0, 0, 0, 0, 0, 0, 0, 0, 0, 1))
        return rng.choice(([rng.choice(names) for _ in range(count)], [names[0]] * count, None))

    return sample


def random_attn_config(rng: random.Random, config: Mapping[str, Any]) -> Any:
    """Return `attn_config` of MPT."""
    optional = {
        "clip_qkv": (0.5, 6, 0, None), "softmax_scale": (0.3, None), "attn_pdrop": (0, 0), "prefix_lm": (False,),
        "alibi": (True, True, False), "qk_ln": (False, True), "attn_impl": ("torch", "flash"), "alibi_bias_max": (8, 5),
    }  # fmt: skip
    keys = rng.sample(sorted(optional), rng.choice((0, 1, 2)))
    return rng.choice(({key: rng.choice(optional[key]) for key in keys}, None))


def family_layer_types(rng: random.Random, config: Mapping[str, Any]) -> Any:
    """Return a list with one layer type per layer, of the types in the config if it lists any."""
    listed = config.get("layer_types", config.get("layers_block_type"))
    names = LAYER_TYPES
    if isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        names = (*dict.fromkeys((*listed, "full_attention")),)
    return layer_types(*names)(rng, config)


def random_layers(rng: random.Random, config: Mapping[str, Any]) -> Any:
    """Return a list of the numbers of some layers."""
    numbers = range(layer_count(config))
    return rng.choice(([number for number in numbers if rng.random() < 0.5], [], None))


def random_flags(rng: random.Random, config: Mapping[str, Any]) -> Any:
    """Return a list with 0 or 1 for each layer."""
    return rng.choice(([rng.randrange(2) for _ in range(layer_count(config))], None))


def random_thetas(rng: random.Random, config: Mapping[str, Any]) -> Any:
    """Return a rotary base for each layer, 0 for a layer without rotation."""
    return rng.choice(([rng.choice((0, 0, 300.0, 5000)) for _ in range(layer_count(config))], None))


def random_attention_types(rng: random.Random, config: Mapping[str, Any]) -> Any:
    """Return `attention_types` of GPT-Neo, mostly for the right number of layers."""
    layers = layer_count(config)
    names = [rng.choice(("global", "local")) for _ in range(layers)]
    return rng.choice(
        ([[names, 1]], [[["global"], layers]], [[["local"], 1], [["global"], layers - 1]], None, [])
    )


def random_rope(rng: random.Random, config: Mapping[str, Any]) -> Any:
    """Return a rope scaling in the form of transformers 4 or 5; most have the fields that their type needs."""
    rope_type = rng.choice(ROPE_TYPES)
    scaling: dict[str, Any] = {rng.choice(("rope_type", "rope_type", "type")): rope_type}
    if rope_type != "default":
        scaling |= {"factor": rng.choice((1.0, 2.0, 4, 8.0, 0.5))}
    if rope_type == "llama3":
        scaling |= {
            "low_freq_factor": rng.choice((1.0, 2)),
            "high_freq_factor": rng.choice((4.0, 8.0)),
        }
    if rope_type == "longrope":
        share = config.get("partial_rotary_factor")
        # An earlier change may have replaced it by an invalid value.
        if not isinstance(share, int | float) or not 0 < share <= 1:
            share = 1
        pairs = int(head_size(config) * share) // 2
        scaling |= {
            key: [round(rng.uniform(1, 5), 2) for _ in range(pairs)]
            for key in ("short_factor", "long_factor")
        }
    if rope_type in ("llama3", "longrope", "yarn"):
        scaling |= rng.choice(
            ({}, {"original_max_position_embeddings": rng.choice((1, 8, 16, 64))})
        )
    optional = {
        "rope_theta": (100.0, 5000, 5e5), "partial_rotary_factor": (0.5, 1.0, 0.75), "truncate": (True, False),
        "attention_factor": (0.9, 1.3, None), "beta_fast": (8.0, 64, 0, None), "beta_slow": (0.5, 2, None),
        "mscale": (0.7, 1.0, 0, None), "mscale_all_dim": (0.4, 1.0, None), "factor": (3.0, None),
    }  # fmt: skip
    counts = (0, 1, 1, 2, 5) if rope_type == "yarn" else (0, 0, 1, 1)
    for key in rng.sample(sorted(optional), rng.choice(counts)):
        scaling[key] = rng.choice(optional[key])
    if rng.random() < 0.05:
        scaling.pop(rng.choice(sorted(scaling)))
    return rng.choice((scaling, scaling, scaling, scaling, scaling, {}, None))


def random_nested_rope(rng: random.Random, config: Mapping[str, Any]) -> Any:
    """Return rope parameters per layer type, in the form of transformers 5."""
    parameters: dict[str, Any] = {
        name: random_rope(rng, config) for name in LAYER_TYPES if rng.random() < 0.9
    }
    if rng.random() < 0.1:
        parameters["truncate"] = rng.choice((True, False))
    return rng.choice(
        (parameters, parameters, parameters, parameters, random_rope(rng, config), None)
    )


FLAG, DROPOUT, TOKEN = (
    one_of(*(True, False) * 5, None),
    one_of(*(0.0, 0.1) * 5, None),
    one_of(*(0, 1, 28, None) * 3, 29),
)
WIDTH, COUNT, THETA = one_of(16, 24, 32), one_of(1, 2, 3), one_of(100.0, 5000, 5e5, 1e6)
EPS, WINDOW, ACT = (
    one_of(1e-6, 1e-5, 1e-3, 0.1, 0.5),
    one_of(1, 3, 5, 8, 64, None, 4096),
    one_of(*ACTIVATIONS),
)
INNER, SOFTCAP, STD = one_of(12, 20, 28), one_of(None, 0.7, 1.5, 30.0, 2), one_of(0.02, 0.1, 1.0)

VALUES: Mapping[str, ValueSampler] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "n_embed", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), COUNT
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
        one_of(1, 2, 2, 4, 3),
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "moe_intermediate_size"), INNER
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), one_of(20, 24, 64, 300)),
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn"), ACT
    ),
    **dict.fromkeys(
        (
            "layer_norm_epsilon",
            "layer_norm_eps",
            "rms_norm_eps",
            "norm_eps",
            "norm_epsilon",
            "mixer_rms_eps",
        ),
        EPS,
    ),
    **dict.fromkeys(("attention_multiplier", "residual_multiplier"), one_of(0.3, 0.5, 1.0, 2)),
    **dict.fromkeys(("embedding_multiplier", "logits_scaling"), one_of(0.5, 1.0, 4, 12.0)),
    "attn_config": random_attn_config,
    "expansion_ratio": one_of(4, 4, 4, 2),
    "no_bias": one_of(True, True, True, False),
    "embedding_fraction": one_of(1.0, 1.0, 0.5),
    "norm_type": one_of("low_precision_layernorm", "layernorm", "rmsnorm"),
    "max_seq_len": one_of(20, 64, 300),
    "num_ln_in_parallel_attn": one_of(None, 1, 2),
    "num_kv_heads": one_of(1, 3, None),
    "activation": ACT,
    "ffn_hidden_size": INNER,
    "logit_scale": one_of(0.25, 0.5, 1.0, 1),
    "clip_qkv": one_of(0.5, 1.0, 8, None),
    "no_rope_layers": random_flags,
    "no_rope_layer_interval": one_of(1, 2, 3, 4),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base"), THETA),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), one_of(0.25, 0.5, 0.75, 1.0, None)),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), random_rope),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), SOFTCAP),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), one_of(1, 2, 3, 6)),
    **dict.fromkeys(("initializer_range", "init_std", "initializer_factor"), STD),
    **dict.fromkeys(("num_experts", "num_local_experts"), one_of(1, 3, 5)),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), TOKEN),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "is_encoder_decoder"), one_of(False)
    ),
    "eos_token_id": one_of(0, 1, [0, 1], None),
    **dict.fromkeys(("layer_types", "layers_block_type"), family_layer_types),
    **dict.fromkeys(("full_attn_idxs", "attn_layer_indices"), random_layers),
    "num_kv_shared_layers": one_of(0, 1, 2, 3),
    "vocab_size_per_layer_input": one_of(29, 31, 31),
    "hidden_size_per_layer_input": one_of(0, 4, 6),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), one_of(2, 4, 8, 12)),
    "use_bidirectional_attention": one_of(None, "vision", "all"),
    **dict.fromkeys(("enable_moe_block", "attention_k_eq_v", "use_double_wide_mlp"), FLAG),
    "top_k_experts": one_of(1, 2),
    **dict.fromkeys(("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv"), one_of(1, 2, 3, 4)),
    "conv_kernel": one_of(1, 2, 3, 4),
    "block_multiple_of": one_of(1, 8, 256),
    "block_ffn_dim_multiplier": one_of(0.7, 1, 1.5, None),
    "num_dense_layers": one_of(0, 1, 2, 3),
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "mamba_n_groups"), one_of(1, 1, 2, 2, 3)),
    "linear_num_value_heads": one_of(1, 2, 4, 6),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), one_of(2, 4, 5, 8)),
    **dict.fromkeys(("state_size", "mamba_d_state", "time_step_rank"), one_of(2, 4, 5)),
    **dict.fromkeys(("expand", "mamba_expand"), one_of(1, 2, 2, 3)),
    "mamba_n_heads": one_of(2, 4, 4, 6),
    "mamba_d_head": one_of("auto", "auto", 12, 8, None),
    "time_step_limit": one_of((0.0, float("inf")), [0.0, 0.5], [0.2, 0.9], None),
    "time_step_min": one_of(0.001, 0.01),
    "time_step_max": one_of(0.01, 0.1),
    "time_step_floor": one_of(0.0, 0.001, 0.1),
    "mamba_num_heads": one_of(2, 4, 4, 6),
    "mamba_head_dim": one_of(3, 5, 8),
    **dict.fromkeys(("mlp_hidden_act", "mamba_hidden_act"), ACT),
    **dict.fromkeys(("ssm_state_size", "moe_shared_expert_intermediate_size"), one_of(2, 4, 5)),
    "moe_latent_size": one_of(None, None, None, 8),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), one_of(1, 2, 2, 3)),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), one_of(0, 1, 1)),
    "mamba_dt_rank": one_of(2, 3, "auto"),
    "time_step_scale": one_of(1.0),
    "time_step_init_scheme": one_of("random", "constant"),
    "mtp_layers_block_type": one_of(None, ["full_attention"]),
    "mamba_d_ssm": one_of(24, 12, 20, None),
    "mlp_multipliers": one_of([0.5, 2.0], [1.0, 1.5], None),
    "ssm_multipliers": one_of([0.5, 2.0, 0.7, 1.0, 1.3], None),
    **dict.fromkeys(
        (
            "attention_in_multiplier",
            "attention_out_multiplier",
            "key_multiplier",
            "lm_head_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        ),
        one_of(0.5, 0.7, 1.0, 2),
    ),
    "position_embedding_type": one_of("rope", "rope", None, "nope"),
    "full_attention_interval": one_of(1, 2, 4),
    "num_logits_to_keep": one_of(1),
    "z_loss_coefficient": one_of(0.0, 0.1),
    "attention_layers": layer_types("global", "local"),
    "attention_types": random_attention_types,
    "head_dim": one_of(4, 6, 10, 16, None),
    "d_kv": one_of(4, 6, 10),
    "vocab_size": one_of(29, 31),
    "num_key_value_heads": one_of(1, 2, 3, 4, None),
    "num_experts_per_tok": one_of(1, 2, 3),
    **dict.fromkeys(("n_routed_experts", "moe_num_experts"), one_of(3, 6, 6, 12)),
    **dict.fromkeys(
        ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), one_of(1, 2, 2, 0)
    ),
    "moe_topk": one_of(1, 2, 3, [2, 2], [2, 3]),
    "layer_rope_theta": random_thetas,
    **dict.fromkeys(("kv_lora_rank", "shared_expert_intermediate_size"), one_of(8, 12, 16)),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), one_of(4, 6, 8)),
    **dict.fromkeys(("routed_scaling_factor", "swiglu_alpha", "swiglu_limit"), one_of(0.5, 1.0, 2)),
    **dict.fromkeys(("num_mtp_layers", "num_nextn_predict_layers"), one_of(0, 1)),
    "n_group": one_of(1, 3, 3, 2),
    "topk_group": one_of(1, 1, 2),
    "moe_k": one_of(1, 2, 3),
    "topk_method": one_of("greedy", "group_limited_greedy", "noaux_tc"),
    "first_k_dense_replace": one_of(0, 1, 1, 2),
    "mlp_layer_types": layer_types("sparse", "dense"),
    "moe_layer_start_index": one_of(0, 1, 2),
    "moe_layer_end_index": one_of(-1, 2, 5),
    "moe_layer_interval": one_of(1, 2),
    "moe_norm_min": one_of(1e-12, 0.5),
    "q_lora_rank": one_of(6, 11, None),
    "qk_rope_head_dim": one_of(2, 4, 6),
    "shared_intermediate_size": one_of(0, 8, 12),
    "mlp_only_layers": one_of([], [0], [1], [7], None),
    "decoder_sparse_step": one_of(1, 1, 2, 3),
    "rotary_dim": one_of(2, 4, 8, 8, 16, 64, None),
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "max_window_layers": one_of(0, 1, 2, 28),
    "query_pre_attn_scalar": one_of(7, 16, 256, 144),
    "original_max_position_embeddings": one_of(8, 16, 64, 4096),
    "feed_forward_proj": one_of("relu", "gated-gelu", "gated-silu", "gelu", "gated-relu", "silu"),
    "relative_attention_num_buckets": one_of(4, 8, 9, 32, 36, 17),
    "relative_attention_max_distance": one_of(20, 40, 50, 128, 27),
    "dtype": one_of("float32", "bfloat16", None),
    "pretraining_tp": one_of(1, 2, None),
    "chunk_size_feed_forward": one_of(0, 4),
    "problem_type": one_of(None, "regression"),
    "architectures": one_of(None, ["NoSuchModel"]),
    "transformers_version": one_of("4.57.1", "5.23.0"),
    "id2label": one_of(None, {"0": "a", "1": "b"}),
    "label2id": one_of(None, {"a": 0}),
    "summary_type": one_of("cls_index", "mean"),
    "summary_activation": one_of(None, "tanh"),
    "router_aux_loss_coef": one_of(0.001, 0.5),
    "router_jitter_noise": one_of(0.0, 0.1),
    "per_layer_config": one_of({"0": {"intermediate_size": 8}}, {"1": {"sliding_window": 2}}, None),
}
ROPE_FIELDS = (
    "rope_theta",
    "rope_scaling",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
)
ROTARY_FAMILIES = [
    name
    for name, config in DENSE_FAMILIES.items()
    # Mamba has no attention, and so no rotary embeddings. CodeGen has no fields for theirs.
    if name == config["model_type"] and name not in ("mamba", "mamba2", "falcon_mamba", "codegen")
]
# Config fields that the config class lacks or names differently.
EXTRA_FIELDS: Mapping[str, Sequence[str]] = {
    "gpt_neo": ("attention_layers",),
    "gpt_neox": (*ROPE_FIELDS, "rotary_pct", "rotary_emb_base", "original_max_position_embeddings"),
    "gemma3_text": (
        *ROPE_FIELDS,
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "rope_local_base_freq",
    ),
    "t5": (
        "tie_word_embeddings",
        "scale_decoder_outputs",
        "dense_act_fn",
        "is_gated_act",
        "decoder_start_token_id",
    ),
    "mt5": ("tie_word_embeddings", "dense_act_fn", "is_gated_act"),
    "umt5": ("tie_word_embeddings", "scale_decoder_outputs", "dense_act_fn", "is_gated_act"),
    "mistral": (*ROPE_FIELDS, "layer_types"),
    "mixtral": (*ROPE_FIELDS, "layer_types"),
    "qwen3_moe": (*ROPE_FIELDS, "layer_types", "head_dim"),
    "phi3": (*ROPE_FIELDS, "layer_types", "head_dim"),
    "qwen2": (*ROPE_FIELDS, "head_dim"),
    **dict.fromkeys(
        ("llama", "qwen3", "gemma", "gemma2", *ROTARY_FAMILIES),
        (*ROPE_FIELDS, "original_max_position_embeddings"),
    ),
}
SIZE_FIELD_PARTS = (  # parts of the names of fields whose default makes a large model
    "hidden", "embd", "d_model", "d_ff", "inner", "interm", "layer", "vocab", "ffn", "num_exp", "position", "proj_d",
)  # fmt: skip
INERT_FIELD_PARTS = (  # parts of the names of fields that do not change logits
    "label", "summary", "drop", "_token_id", "dtype", "version", "archi", "problem", "output_", "chunk_size", "range",
)  # fmt: skip
# These fields control how transformers is called, not what it computes.
SKIPPED_FIELDS = {"return_dict", "use_cache", "is_decoder"}


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """A config, the names of its changed fields, and (for T5) whether the file stores a head."""

    config: dict[str, Any]
    changed: tuple[str, ...]
    has_stored_head: bool


def fields_to_change(family: str) -> list[str]:
    """Return the fields of a family's configs; fields that may change logits are listed four times."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[family]
    class_fields = [field.name for field in dataclasses.fields(config_class)]
    fields = (*class_fields, *config_class.attribute_map, *EXTRA_FIELDS.get(family, ()))
    names = [name for name in fields if name not in SKIPPED_FIELDS]
    return names + 3 * [
        name for name in names if not any(part in name for part in INERT_FIELD_PARTS)
    ]


def make_sample(family: str, seed: int, number: int) -> Sample:
    """Return the sample of a family, seed and number."""
    rng = random.Random(f"{family} {seed} {number}")
    config, names = copy.deepcopy(BASE_CONFIGS[family]), fields_to_change(family)
    changed = [rng.choice(names) for _ in range(rng.choice(CHANGE_COUNTS))]
    for name in changed:
        _change(config, name, rng, family)
    if rng.random() < FOREIGN_SHARE:
        name = rng.choice(sorted(SEMANTIC_FIELDS))
        config[name] = rng.choice((True, 2, 0.5, False, None))
        changed.append(name)
    return Sample(config, tuple(changed), family.endswith("t5") and rng.random() < 0.4)


def _change(config: dict[str, Any], name: str, rng: random.Random, family: str) -> None:
    """Change a field, or remove it, unless its default would make the model large."""
    if rng.random() < LEFT_OUT_SHARE and not any(part in name for part in SIZE_FIELD_PARTS):
        config.pop(name, None)
    elif rng.random() < WRONG_TYPE_SHARE:
        config[name] = copy.deepcopy(rng.choice(INVALID_VALUES))
    elif name == "rope_parameters" and family in ("gemma3_text", "gemma4_text", "olmo3", "mellum"):
        config[name] = random_nested_rope(rng, config)
    else:
        config[name] = VALUES.get(name, DROPOUT if "drop" in name else FLAG)(rng, config)
