"""StableLM: LLaMA with layer norms and a rotated quarter of each head. Some have QK norms and parallel blocks."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import unsupported_config_error
from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, Parameter, if_set
from prepcli.models.rows import Parameters, layer_norm

MAX_POSITIONS = 4096
# One layer norm without bias for each head of a layer.
QK_NORMS: Parameters = {
    f"attn.{projection}_norm.scale": Parameter(
        f"{heads} head_dim <- self_attn.{projection}_layernorm.norms.{{{heads}}}.weight: head_dim",
        condition=if_set("qk_layernorm"),
    )
    for projection, heads in (("q", "heads"), ("k", "kv_heads"))
}


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of StableLmConfig."""
    axis_sizes = _llama_style.sizes(config, vocab=50304, embed=2560, mlp=6912, kv_heads=32)
    if axis_sizes["heads"] * axis_sizes["head_dim"] != axis_sizes["embed"]:
        why = f"{axis_sizes['heads']} heads of {axis_sizes['head_dim']} elements, width {axis_sizes['embed']}"
        raise unsupported_config_error(
            "num_attention_heads * head_dim != hidden_size is not supported", why
        )
    return axis_sizes


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(
        config, *ROPE_FIELDS, "partial_rotary_factor", "qk_layernorm", "use_parallel_residual"
    )
    axis_sizes = sizes(config)
    rope = _llama_style.read_partial_rope(
        config, axis_sizes["head_dim"], default_share=0.25, max_positions=MAX_POSITIONS
    )
    return dataclasses.replace(
        _llama_style.arch_config(
            config, axis_sizes, MAX_POSITIONS, rope=rope, norm_eps=("layer_norm_eps", 1e-5)
        ),
        norm="layer",
        block_type="parallel_one_norm" if config.get("use_parallel_residual") else "pre",
    )


def _has_mlp_norm(config: HFConfig) -> bool:
    return not config.get("use_parallel_residual")


FAMILY = _llama_style.build_family(
    name="stablelm",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **layer_norm("attn_norm", "embed <- input_layernorm.weight: embed"),
        **_llama_style.attention(bias=if_set("use_qkv_bias")),
        **QK_NORMS,
        **layer_norm("mlp_norm", "embed <- post_attention_layernorm.weight: embed", _has_mlp_norm),
        **_llama_style.gated_mlp(),
    },
    final_norm=_llama_style.FINAL_LAYER_NORM,
)
