"""Persimmon, a family in a file of its own. No I/O, no jax."""

from __future__ import annotations

from prepcli.models.declaration import by_name, fused_qkv, layer_norm, linear, unless_false
from prepcli.models.families import _llama_style

QK_NORMS = unless_false("qk_layernorm")
LAYER = {
    **_llama_style.PRE_LAYER_NORMS,
    **fused_qkv("self_attn.query_key_value", "(heads qkv={} head_dim) embed"),
    **linear("attn.o", "embed heads head_dim <- self_attn.dense.weight: embed (heads head_dim)"),
    **layer_norm("attn.q_norm", "head_dim <- self_attn.q_layernorm.weight: head_dim", QK_NORMS),
    **layer_norm("attn.k_norm", "head_dim <- self_attn.k_layernorm.weight: head_dim", QK_NORMS),
    **linear("mlp.up", "mlp embed <- mlp.dense_h_to_4h.weight: mlp embed"),
    **linear("mlp.down", "embed mlp <- mlp.dense_4h_to_h.weight: embed mlp"),
}
FAMILIES = by_name(
    _llama_style.llama_like(
        "persimmon",
        "Persimmon: GPT-NeoX's fused queries, keys and values with norms, squared ReLU, and biases on all matrices.",
        layer=LAYER,
        defaults={"vocab": 262_144, "mlp": 16384, "layers": 36, "heads": 64},
        more_sizes=lambda config, sizes: (
            _llama_style.heads_that_fill_width(config, sizes)
            | {"kv_heads": sizes["heads"], "qkv": 3}
        ),
        positions=16384,
        rope=_llama_style.partial_rope(0.5, 16384),
        activation="relu2",
        norm_eps=1e-5,
        norm_eps_field="layer_norm_eps",
        choices={"norm": "layer", "has_gated_mlp": False},
        final_norm=layer_norm("final_norm", "embed <- final_layernorm.weight: embed"),
    )
)
