"""LLaMA 1, 2, 3, 3.1 and 3.2: rotary positions, grouped key and value heads, a gated feed-forward."""

from __future__ import annotations

from trainer.rope import read_rope
from trainer.table import Config, Family, Parameter, Tie, size
from trainer.traits import ALL_BEFORE, Traits, activation, positive


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; LlamaConfig's defaults where a field is absent."""
    embed, heads = size(config, "hidden_size", 4096), size(config, "num_attention_heads", 32)
    return {
        "vocab": size(config, "vocab_size", 32000),
        "layers": size(config, "num_hidden_layers", 32),
        "embed": embed,
        "heads": heads,
        "kv_heads": size(config, "num_key_value_heads", heads),
        "head_dim": size(config, "head_dim", embed // heads),
        "mlp": size(config, "intermediate_size", 11008),
    }


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    found = sizes(config)
    positions = size(config, "max_position_embeddings", 2048)
    return Traits(
        norm="rms",
        norm_eps=positive(config, "rms_norm_eps", 1e-6),
        activation=activation(config, "hidden_act", "silu"),
        gated=True,
        score_scale=found["head_dim"] ** -0.5,
        windows=(ALL_BEFORE,) * found["layers"],
        rope=read_rope(config, found["head_dim"], positions),
        positions=positions,
        init_std=positive(config, "initializer_range", 0.02),
    )


FAMILY = Family(
    name="llama",
    prefix="model.",
    unprefixed=("lm_head.weight",),
    sizes=sizes,
    table={
        "embed.tokens": Parameter("vocab embed <- embed_tokens.weight: vocab embed"),
        "layers.attn_norm.scale": Parameter("layers embed <- layers.{layers}.input_layernorm.weight: embed"),
        "layers.attn.q.weight": Parameter(
            "layers heads head_dim embed <- layers.{layers}.self_attn.q_proj.weight: (heads head_dim) embed"
        ),
        "layers.attn.q.bias": Parameter(
            "layers heads head_dim <- layers.{layers}.self_attn.q_proj.bias: (heads head_dim)", when="attention_bias"
        ),
        "layers.attn.k.weight": Parameter(
            "layers kv_heads head_dim embed <- layers.{layers}.self_attn.k_proj.weight: (kv_heads head_dim) embed"
        ),
        "layers.attn.k.bias": Parameter(
            "layers kv_heads head_dim <- layers.{layers}.self_attn.k_proj.bias: (kv_heads head_dim)",
            when="attention_bias",
        ),
        "layers.attn.v.weight": Parameter(
            "layers kv_heads head_dim embed <- layers.{layers}.self_attn.v_proj.weight: (kv_heads head_dim) embed"
        ),
        "layers.attn.v.bias": Parameter(
            "layers kv_heads head_dim <- layers.{layers}.self_attn.v_proj.bias: (kv_heads head_dim)",
            when="attention_bias",
        ),
        "layers.attn.o.weight": Parameter(
            "layers embed heads head_dim <- layers.{layers}.self_attn.o_proj.weight: embed (heads head_dim)"
        ),
        "layers.attn.o.bias": Parameter(
            "layers embed <- layers.{layers}.self_attn.o_proj.bias: embed", when="attention_bias"
        ),
        "layers.mlp_norm.scale": Parameter("layers embed <- layers.{layers}.post_attention_layernorm.weight: embed"),
        "layers.mlp.gate.weight": Parameter("layers mlp embed <- layers.{layers}.mlp.gate_proj.weight: mlp embed"),
        "layers.mlp.gate.bias": Parameter("layers mlp <- layers.{layers}.mlp.gate_proj.bias: mlp", when="mlp_bias"),
        "layers.mlp.up.weight": Parameter("layers mlp embed <- layers.{layers}.mlp.up_proj.weight: mlp embed"),
        "layers.mlp.up.bias": Parameter("layers mlp <- layers.{layers}.mlp.up_proj.bias: mlp", when="mlp_bias"),
        "layers.mlp.down.weight": Parameter("layers embed mlp <- layers.{layers}.mlp.down_proj.weight: embed mlp"),
        "layers.mlp.down.bias": Parameter("layers embed <- layers.{layers}.mlp.down_proj.bias: embed", when="mlp_bias"),
        "final_norm.scale": Parameter("embed <- norm.weight: embed"),
        "head.weight": Parameter("vocab embed <- lm_head.weight: vocab embed"),
    },
    dropped={"layers.{i}.self_attn.rotary_emb.inv_freq": "rotary frequencies, computed from the config"},
    tie=Tie(leaf="head.weight", tensor="lm_head.weight", embedding="embed_tokens.weight", default=False),
    traits=traits,
)
