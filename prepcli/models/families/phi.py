"""Phi-1, 1.5 and 2: attention and MLP of one normalized input, a rotated half of each head, biases everywhere."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _llama_style
from prepcli.models.parameters import ALWAYS, HFConfig, if_set
from prepcli.models.rows import layer_norm, linear, separate_qkv

MAX_POSITIONS = 2048
HAS_QK_NORMS = if_set("qk_layernorm")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of PhiConfig."""
    return _llama_style.sizes(config, vocab=51200, embed=2048, mlp=8192, layers=24)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "partial_rotary_factor", "qk_layernorm")
    axis_sizes = sizes(config)
    rope = _llama_style.read_partial_rope(
        config, axis_sizes["head_dim"], default_share=0.5, max_positions=MAX_POSITIONS
    )
    return dataclasses.replace(
        _llama_style.arch_config(
            config,
            axis_sizes,
            MAX_POSITIONS,
            rope=rope,
            activation=("hidden_act", "gelu_new"),
            norm_eps=("layer_norm_eps", 1e-5),
        ),
        norm="layer",
        has_gated_mlp=False,
        block_type="parallel_one_norm",
    )


FAMILY = _llama_style.build_family(
    name="phi",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **layer_norm("attn_norm", "embed <- input_layernorm.weight: embed"),
        **separate_qkv("self_attn.{}_proj", kv_heads="kv_heads", bias=ALWAYS),
        **linear(
            "attn.o", "embed heads head_dim <- self_attn.dense.weight: embed (heads head_dim)"
        ),
        **layer_norm(
            "attn.q_norm", "head_dim <- self_attn.q_layernorm.weight: head_dim", HAS_QK_NORMS
        ),
        **layer_norm(
            "attn.k_norm", "head_dim <- self_attn.k_layernorm.weight: head_dim", HAS_QK_NORMS
        ),
        **linear("mlp.up", "mlp embed <- mlp.fc1.weight: mlp embed"),
        **linear("mlp.down", "embed mlp <- mlp.fc2.weight: embed mlp"),
    },
    final_norm=layer_norm("final_norm", "embed <- final_layernorm.weight: embed"),
    head=linear("head", "vocab embed <- lm_head.weight: vocab embed"),
    dropout_fields=DropoutFields(residual=("resid_pdrop", 0.0), embedding=("embd_pdrop", 0.0)),
)
