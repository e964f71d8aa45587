"""Common parts of DeepSeek's models and similar ones: latent attention, routers in groups, sizes. No I/O, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from prepcli.core.errors import invalid_config_error
from prepcli.models.architecture import ArchConfig, read_positive
from prepcli.models.families import _grouped_style, _llama_style, _moe_style
from prepcli.models.moe_config import Router
from prepcli.models.parameters import MAX_LAYERS, HFConfig, if_set, read_size
from prepcli.models.rope_config import read_rope, yarn_scores_scale
from prepcli.models.rows import Parameters, linear, matrix, rms_norm

# Fields of attention, router and shared experts that families of this style read.
LATENT_FIELDS = ("kv_lora_rank", "q_lora_rank", "rope_interleave", "attention_bias")
MOE_FIELDS = (
    "first_k_dense_replace",
    "n_routed_experts",
    "num_local_experts",
    "n_shared_experts",
    "routed_scaling_factor",
)
HAS_BIAS = if_set("attention_bias")
LATENT_NORM_EPS = 1e-6


def latent_sizes(
    config: HFConfig,
    axis_sizes: Mapping[str, int],
    *,
    kv_rank: int = 512,
    q_rank: int = 1536,
    key_dim: int = 128,
    value_dim: int = 128,
    rope_dim: int = 64,
    has_head_dim: bool = True,
) -> dict[str, int]:
    """Return the extents of latent attention.

    Args:
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom), as `_llama_style.sizes` returns it.
        kv_rank: Default of `kv_lora_rank`, like the following sizes.
        q_rank: Default of `q_lora_rank`.
        key_dim: Default of `qk_nope_head_dim`.
        value_dim: Default of `v_head_dim`.
        rope_dim: Default of `qk_rope_head_dim`.
        has_head_dim: Whether `head_dim` must be the number of rotated elements.

    Raises:
        PrepError: A size is invalid, or queries are grouped.
    """
    if axis_sizes["kv_heads"] != axis_sizes["heads"]:
        why = f"num_key_value_heads is {axis_sizes['kv_heads']}; latent attention has as many as query heads"
        raise invalid_config_error(f"{why}, {axis_sizes['heads']}")
    rope_dim = read_size(config, "qk_rope_head_dim", rope_dim)
    # transformers writes the number of rotated elements as `head_dim`.
    if has_head_dim and read_size(config, "head_dim", rope_dim) != rope_dim:
        why = f"head_dim is {config['head_dim']}, but qk_rope_head_dim is {rope_dim}"
        raise invalid_config_error(why)
    key_dim = read_size(config, "qk_nope_head_dim", key_dim)
    value_dim = read_size(config, "v_head_dim", value_dim)
    kv_rank = read_size(config, "kv_lora_rank", kv_rank)
    return {
        "head_dim": key_dim + rope_dim,
        "rope_dim": rope_dim,
        "value_dim": value_dim,
        "kv_dim": key_dim + value_dim,
        "kv_rank": kv_rank,
        # Rows of the fused tensor `kv_a_proj_with_mqa`
        "kv_latent": kv_rank + rope_dim,
        "q_rank": read_size(config, "q_lora_rank", q_rank),
    }


def latent_arch_config(
    config: HFConfig, axis_sizes: Mapping[str, int], *, max_positions: int, is_interleaved: bool
) -> ArchConfig:
    """Return the architecture of LLaMA with latent attention.

    Args:
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom), e.g. `{"embed": 768}`.
        max_positions: Default of `max_position_embeddings`.
        is_interleaved: Whether neighbouring elements rotate together.
    """
    max_positions = read_size(config, "max_position_embeddings", max_positions)
    rope = read_rope(config, axis_sizes["rope_dim"], max_positions=max_positions)
    scale = axis_sizes["head_dim"] ** -0.5
    return dataclasses.replace(
        _llama_style.arch_config(config, axis_sizes, max_positions=max_positions, rope=rope),
        rotary_pairs="interleaved" if is_interleaved else "half_split",
        attn_scale=scale * yarn_scores_scale(config),
        latent_key_dim=axis_sizes["head_dim"] - axis_sizes["rope_dim"],
        latent_norm_eps=LATENT_NORM_EPS,
    )


def has_query_latent(config: HFConfig) -> bool:
    """Return whether queries come from a latent. An absent field has a default, null means no latent."""
    return config.get("q_lora_rank", 1) is not None


def latent_attention(
    has_query_latent: Callable[[HFConfig], bool] = has_query_latent,
) -> Parameters:
    """Return the parameters of latent attention.

    Args:
        has_query_latent: Whether the queries of a config come from a latent.
    """

    def has_plain_queries(config: HFConfig) -> bool:
        return not has_query_latent(config)

    # The first rows of kv_a_proj_with_mqa are the latent, the last ones the shared rotated key.
    fused = "self_attn.kv_a_proj_with_mqa.weight"
    queries = "heads head_dim {0} <- self_attn.{1}.weight: (heads head_dim) {0}"
    query_latent = {
        **linear(
            "attn.q_down", "q_rank embed <- self_attn.q_a_proj.weight: q_rank embed", HAS_BIAS
        ),
        **rms_norm("attn.q_latent_norm", "q_rank <- self_attn.q_a_layernorm.weight: q_rank"),
        **matrix("attn.q_up", queries.format("q_rank", "q_b_proj")),
    }
    return {
        **matrix("attn.q", queries.format("embed", "q_proj"), condition=has_plain_queries),
        **_grouped_style.under_condition(query_latent, has_query_latent),
        **linear("attn.kv_down", f"kv_rank embed <- {fused}: (>kv_rank | rope_dim) embed", HAS_BIAS),
        **linear("attn.k_rope", f"rope_dim embed <- {fused}: (kv_rank | >rope_dim) embed", HAS_BIAS),
        **rms_norm("attn.kv_latent_norm", "kv_rank <- self_attn.kv_a_layernorm.weight: kv_rank"),
        **matrix(
            "attn.kv_up", "heads kv_dim kv_rank <- self_attn.kv_b_proj.weight: (heads kv_dim) kv_rank"
        ),
        **linear(
            "attn.o", "embed heads value_dim <- self_attn.o_proj.weight: embed (heads value_dim)", HAS_BIAS
        ),
    }  # fmt: skip


def grouped_router(
    config: HFConfig,
    experts: int,
    experts_per_token: int,
    *,
    groups: tuple[int, int],
    scale: float,
    is_normalized: bool = True,
) -> Router:
    """Return the router of DeepSeek-V3: sigmoid scores in groups, with a correction.

    Args:
        config: Content of a config.json.
        experts: Number of experts.
        experts_per_token: Number of experts per token.
        groups: Defaults of `n_group` and `topk_group`.
        scale: Default of `routed_scaling_factor`.
        is_normalized: Default of `norm_topk_prob`.

    Raises:
        PrepError: The groups do not fit the experts.
    """
    router = Router(
        "sigmoid",
        is_normalized=bool(config.get("norm_topk_prob", is_normalized)),
        scale=read_positive(config, "routed_scaling_factor", scale),
        num_groups=read_size(config, "n_group", groups[0]),
        groups_per_token=read_size(config, "topk_group", groups[1]),
        group_score="top_two",
        weight_sum_offset=1e-20,
    )
    router.check_experts(experts, experts_per_token)
    return router


def expert_sizes(
    config: HFConfig,
    axis_sizes: Mapping[str, int],
    dense: tuple[int, ...],
    *,
    width: int,
    experts: int,
    shared: int,
) -> dict[str, int]:
    """Return the extents of the layers with experts, of shared experts, and of dense layers.

    Args:
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom), as `_llama_style.sizes` returns it.
        dense: Numbers of the layers with a dense MLP.
        width: Default of `moe_intermediate_size`.
        experts: Number of experts.
        shared: Number of shared experts.
    """
    width = read_size(config, "moe_intermediate_size", width)
    return {
        **_moe_style.layer_sizes(axis_sizes["layers"], dense),
        "mlp": width,
        "dense_mlp": axis_sizes["mlp"],
        "shared_mlp": width * shared,
        "experts": experts,
        "gate_up": 2,
    }


CORRECTED_EXPERTS: Parameters = {
    **_moe_style.EXPERTS,
    "mlp.router.correction.bias": _moe_style.correction(
        "mlp.gate.e_score_correction_bias: experts"
    ),
    **_moe_style.shared_experts("mlp.shared_experts"),
}


def read_experts(config: HFConfig, default: int) -> int:
    """Return the number of experts. `num_local_experts` takes precedence over `n_routed_experts`."""
    return read_size(config, "num_local_experts", read_size(config, "n_routed_experts", default))


def first_dense_layers(config: HFConfig, *, layers: int, default: int) -> tuple[int, ...]:
    """Return the numbers of the dense layers.

    Args:
        config: Content of a config.json.
        layers: Default of `num_hidden_layers`.
        default: Default of `first_k_dense_replace`.
    """
    num_layers = read_size(config, "num_hidden_layers", layers, MAX_LAYERS)
    return _moe_style.read_first_dense_layers(config, num_layers, default)
