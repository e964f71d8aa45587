"""GPT-NeoX and Pythia: attention and feed-forward side by side under a norm each, or in turn; a part of each head
rotates; queries, keys and values of a head are stored together."""

from __future__ import annotations

from trainer.rope import read_rope
from trainer.table import Config, Family, Parameter, Tie, layer_norm, linear, size
from trainer.traits import ALL_BEFORE, Traits, activation, only_knows, positive


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GPTNeoXConfig's defaults where a field is absent."""
    embed, heads = size(config, "hidden_size", 6144), size(config, "num_attention_heads", 64)
    return {
        "vocab": size(config, "vocab_size", 50432),
        "layers": size(config, "num_hidden_layers", 44),
        "embed": embed,
        "qkv": 3,
        "heads": heads,
        "head_dim": embed // heads,
        "mlp": size(config, "intermediate_size", 24576),
    }


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, "attention_bias", "use_parallel_residual", "rotary_pct")
    found = sizes(config)
    positions = size(config, "max_position_embeddings", 2048)
    rotary = {"partial_rotary_factor": config.get("rotary_pct", 0.25), "rope_theta": config.get("rotary_emb_base", 1e4)}
    return Traits(
        norm="layer",
        norm_eps=positive(config, "layer_norm_eps", 1e-5),
        activation=activation(config, "hidden_act", "gelu"),
        gated=False,
        residual="parallel" if config.get("use_parallel_residual", True) else "pre",
        score_scale=found["head_dim"] ** -0.5,
        windows=(ALL_BEFORE,) * found["layers"],
        rope=read_rope({**config, **rotary}, found["head_dim"], positions, partial=True),
        positions=positions,
        init_std=positive(config, "initializer_range", 0.02),
    )


def _has_biases(config: Config) -> bool:
    return bool(config.get("attention_bias", True))


FAMILY = Family(
    name="gpt_neox",
    prefix="gpt_neox.",
    unprefixed=("embed_out.weight", "lm_head.weight"),
    sizes=sizes,
    table={
        "embed.tokens": Parameter("vocab embed <- embed_in.weight: vocab embed"),
        **layer_norm("layers.attn_norm", "layers embed <- layers.{layers}.input_layernorm.weight: embed"),
        **linear(
            "layers.attn.q",
            "layers heads head_dim embed <- layers.{layers}.attention.query_key_value.weight:"
            " (heads qkv=0 head_dim) embed",
            _has_biases,
        ),
        **linear(
            "layers.attn.k",
            "layers heads head_dim embed <- layers.{layers}.attention.query_key_value.weight:"
            " (heads qkv=1 head_dim) embed",
            _has_biases,
        ),
        **linear(
            "layers.attn.v",
            "layers heads head_dim embed <- layers.{layers}.attention.query_key_value.weight:"
            " (heads qkv=2 head_dim) embed",
            _has_biases,
        ),
        **linear(
            "layers.attn.o",
            "layers embed heads head_dim <- layers.{layers}.attention.dense.weight: embed (heads head_dim)",
            _has_biases,
        ),
        **layer_norm("layers.mlp_norm", "layers embed <- layers.{layers}.post_attention_layernorm.weight: embed"),
        **linear("layers.mlp.up", "layers mlp embed <- layers.{layers}.mlp.dense_h_to_4h.weight: mlp embed"),
        **linear("layers.mlp.down", "layers embed mlp <- layers.{layers}.mlp.dense_4h_to_h.weight: embed mlp"),
        **layer_norm("final_norm", "embed <- final_layer_norm.weight: embed"),
        "head.weight": Parameter(
            "vocab embed <- embed_out.weight: vocab embed",
            other="vocab embed <- lm_head.weight: vocab embed",
        ),
    },
    dropped={
        "layers.{i}.attention.bias": "causal mask",
        "layers.{i}.attention.masked_bias": "value of masked scores",
        "layers.{i}.attention.rotary_emb.inv_freq": "rotary frequencies, computed from the config",
    },
    tie=Tie(leaf="head.weight", tensor="embed_out.weight", embedding="embed_in.weight", default=False),
    traits=traits,
)
