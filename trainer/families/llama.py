"""LLaMA 1, 2, 3, 3.1 and 3.2: rotary positions, grouped key and value heads, a gated feed-forward."""

from __future__ import annotations

from trainer import llama_like
from trainer.table import Config, Family, Layout, Parameter
from trainer.traits import Traits, only_knows


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; LlamaConfig's defaults where a field is absent."""
    found = llama_like.sizes(config)
    # dims of a head that are turned together: HF has them `half` apart, EasyLM side by side
    return {**found, "two": 2, "half": found["head_dim"] // 2}


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, "attention_bias", "mlp_bias")
    return llama_like.traits(config, sizes(config), positions=2048)


HF_FLAX = Layout(
    {
        "model.embed_tokens.embedding": Parameter("vocab embed <- embed_tokens.weight: vocab embed"),
        "model.layers.{layers}.input_layernorm.weight": Parameter(
            "embed <- layers.{layers}.input_layernorm.weight: embed"
        ),
        "model.layers.{layers}.self_attn.q_proj.kernel": Parameter(
            "embed (heads head_dim) <- layers.{layers}.self_attn.q_proj.weight: (heads head_dim) embed"
        ),
        "model.layers.{layers}.self_attn.q_proj.bias": Parameter(
            "(heads head_dim) <- layers.{layers}.self_attn.q_proj.bias: (heads head_dim)", when="attention_bias"
        ),
        "model.layers.{layers}.self_attn.k_proj.kernel": Parameter(
            "embed (kv_heads head_dim) <- layers.{layers}.self_attn.k_proj.weight: (kv_heads head_dim) embed"
        ),
        "model.layers.{layers}.self_attn.k_proj.bias": Parameter(
            "(kv_heads head_dim) <- layers.{layers}.self_attn.k_proj.bias: (kv_heads head_dim)", when="attention_bias"
        ),
        "model.layers.{layers}.self_attn.v_proj.kernel": Parameter(
            "embed (kv_heads head_dim) <- layers.{layers}.self_attn.v_proj.weight: (kv_heads head_dim) embed"
        ),
        "model.layers.{layers}.self_attn.v_proj.bias": Parameter(
            "(kv_heads head_dim) <- layers.{layers}.self_attn.v_proj.bias: (kv_heads head_dim)", when="attention_bias"
        ),
        "model.layers.{layers}.self_attn.o_proj.kernel": Parameter(
            "(heads head_dim) embed <- layers.{layers}.self_attn.o_proj.weight: embed (heads head_dim)"
        ),
        "model.layers.{layers}.self_attn.o_proj.bias": Parameter(
            "embed <- layers.{layers}.self_attn.o_proj.bias: embed", when="attention_bias"
        ),
        "model.layers.{layers}.post_attention_layernorm.weight": Parameter(
            "embed <- layers.{layers}.post_attention_layernorm.weight: embed"
        ),
        "model.layers.{layers}.mlp.gate_proj.kernel": Parameter(
            "embed mlp <- layers.{layers}.mlp.gate_proj.weight: mlp embed"
        ),
        "model.layers.{layers}.mlp.up_proj.kernel": Parameter(
            "embed mlp <- layers.{layers}.mlp.up_proj.weight: mlp embed"
        ),
        "model.layers.{layers}.mlp.down_proj.kernel": Parameter(
            "mlp embed <- layers.{layers}.mlp.down_proj.weight: embed mlp"
        ),
        "model.norm.weight": Parameter("embed <- norm.weight: embed"),
        "lm_head.kernel": Parameter("embed vocab <- lm_head.weight: vocab embed"),
    }
)

EASYLM = Layout(
    {
        "transformer.wte.embedding": Parameter("vocab embed <- embed_tokens.weight: vocab embed"),
        "transformer.h.{layers}.attention_norm.kernel": Parameter(
            "embed <- layers.{layers}.input_layernorm.weight: embed"
        ),
        "transformer.h.{layers}.attention.wq.kernel": Parameter(
            "embed (heads half two) <- layers.{layers}.self_attn.q_proj.weight: (heads two half) embed"
        ),
        "transformer.h.{layers}.attention.wk.kernel": Parameter(
            "embed (kv_heads half two) <- layers.{layers}.self_attn.k_proj.weight: (kv_heads two half) embed"
        ),
        "transformer.h.{layers}.attention.wv.kernel": Parameter(
            "embed (kv_heads head_dim) <- layers.{layers}.self_attn.v_proj.weight: (kv_heads head_dim) embed"
        ),
        "transformer.h.{layers}.attention.wo.kernel": Parameter(
            "(heads head_dim) embed <- layers.{layers}.self_attn.o_proj.weight: embed (heads head_dim)"
        ),
        "transformer.h.{layers}.ffn_norm.kernel": Parameter(
            "embed <- layers.{layers}.post_attention_layernorm.weight: embed"
        ),
        "transformer.h.{layers}.feed_forward.w1.kernel": Parameter(
            "embed mlp <- layers.{layers}.mlp.gate_proj.weight: mlp embed"
        ),
        "transformer.h.{layers}.feed_forward.w3.kernel": Parameter(
            "embed mlp <- layers.{layers}.mlp.up_proj.weight: mlp embed"
        ),
        "transformer.h.{layers}.feed_forward.w2.kernel": Parameter(
            "mlp embed <- layers.{layers}.mlp.down_proj.weight: embed mlp"
        ),
        "transformer.ln_f.kernel": Parameter("embed <- norm.weight: embed"),
        "lm_head.kernel": Parameter("embed vocab <- lm_head.weight: vocab embed"),
    },
    stacked="scan_decoder",
    spellings={"lm_head.lm_head.kernel": "lm_head.kernel"},  # with its head computed in chunks
)

FAMILY = Family(
    name="llama",
    prefix=llama_like.PREFIX,
    unprefixed=llama_like.UNPREFIXED,
    sizes=sizes,
    table={
        **llama_like.EMBEDDING,
        **llama_like.NORMS,
        **llama_like.attention(bias="attention_bias", out_bias="attention_bias"),
        **llama_like.gated(bias="mlp_bias"),
        **llama_like.END,
    },
    dropped={**llama_like.OLD_BUFFERS, "rope.freqs": "rotary frequencies of Meta's files, computed from the config"},
    tie=llama_like.tie(default=False),
    traits=traits,
    layouts={"hf-flax": HF_FLAX, "easylm": EASYLM},
)
