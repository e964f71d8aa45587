"""GPT-NeoX and Pythia: attention and feed-forward side by side under a norm each, or in turn; a part of each head
rotates; queries, keys and values of a head are stored together."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ROPE, Traits, only_knows, positive
from trainer.models.families import _gpt_style
from trainer.models.parameters import Config
from trainer.models.rope_config import read_rope
from trainer.models.rows import embedding, family, fused_qkv, layer_norm, linear, matrix, stack, unless_off

NAMES = {"mlp": "intermediate_size"}
BIASES = unless_off("attention_bias")


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GPTNeoXConfig's defaults where a field is absent."""
    return _gpt_style.sizes(
        config, vocab=50432, positions=2048, embed=6144, layers=44, heads=64, mlp=24576, names=NAMES
    )  # fmt: skip


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else.

    `rotary_pct` and `rotary_emb_base` decide, not `partial_rotary_factor` and `rope_theta`, which transformers 4.57
    writes beside them.
    """
    only_knows(config, *ROPE, "attention_bias", "use_parallel_residual", "rotary_pct", "partial_rotary_factor")
    found = sizes(config)
    rotary = {"partial_rotary_factor": config.get("rotary_pct", 0.25), "rope_theta": config.get("rotary_emb_base", 1e4)}
    return dataclasses.replace(
        _gpt_style.traits(config, found, act=("hidden_act", "gelu")),
        norm_eps=positive(config, "layer_norm_eps", 1e-5),
        residual="parallel" if config.get("use_parallel_residual", True) else "pre",
        rope=read_rope({**config, **rotary}, found["head_dim"], found["positions"], partial=True),
    )


TABLE = {
    **embedding("tokens", "vocab embed <- embed_in.weight: vocab embed"),
    **stack("layers", "layers.{layers}", {
        **layer_norm("attn_norm", "embed <- input_layernorm.weight: embed"),
        **fused_qkv("attention.query_key_value", "(heads qkv={} head_dim) embed", BIASES),
        **linear("attn.o", "embed heads head_dim <- attention.dense.weight: embed (heads head_dim)", BIASES),
        **layer_norm("mlp_norm", "embed <- post_attention_layernorm.weight: embed"),
        **linear("mlp.up", "mlp embed <- mlp.dense_h_to_4h.weight: mlp embed"),
        **linear("mlp.down", "embed mlp <- mlp.dense_4h_to_h.weight: embed mlp"),
    }),
    **layer_norm("final_norm", "embed <- final_layer_norm.weight: embed"),
    **matrix("head", "vocab embed <- embed_out.weight: vocab embed", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
OLD_BUFFERS = {
    **_gpt_style.masks("layers.{i}.attention"),
    "layers.{i}.attention.rotary_emb.inv_freq": "rotary frequencies, computed from the config",
}
FAMILY = family("gpt_neox", "gpt_neox.", sizes, traits, TABLE, tied=False, dropped=OLD_BUFFERS)
