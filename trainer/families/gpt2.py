"""GPT-2: learned positions, biases everywhere; its matrices are stored [in, out], queries, keys and values as one."""

from __future__ import annotations

from trainer.errors import PrepError
from trainer.table import Config, Family, Layout, Parameter, Tie, size
from trainer.traits import ALL_BEFORE, Traits, activation, only_knows, positive


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GPT2Config's defaults where a field is absent. Of two names for a field the newer one wins."""
    embed = size(config, "hidden_size", size(config, "n_embd", 768))
    heads = size(config, "num_attention_heads", size(config, "n_head", 12))
    return {
        "vocab": size(config, "vocab_size", 50257),
        "positions": size(config, "max_position_embeddings", size(config, "n_positions", 1024)),
        "layers": size(config, "num_hidden_layers", size(config, "n_layer", 12)),
        "embed": embed,
        "qkv": 3,
        "heads": heads,
        "head_dim": embed // heads,
        "mlp": size(config, "n_inner", 4 * embed),
    }


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else.

    `reorder_and_upcast_attn` asks for scores in float32, which they always are here.
    """
    for field in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if config.get(field):
            raise PrepError(f"`{field}` is not known", "config.json sets it; prep computes the published GPT-2")
    only_knows(config)
    found = sizes(config)
    return Traits(
        norm="layer",
        norm_eps=positive(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, "activation_function", "gelu_new"),
        gated=False,
        score_scale=found["head_dim"] ** -0.5 if config.get("scale_attn_weights", True) else 1.0,
        windows=(ALL_BEFORE,) * found["layers"],
        rope=None,
        positions=found["positions"],
        init_std=positive(config, "initializer_range", 0.02),
    )


HF_FLAX = Layout(
    {
        "transformer.wte.embedding": Parameter("vocab embed <- wte.weight: vocab embed"),
        "transformer.wpe.embedding": Parameter("positions embed <- wpe.weight: positions embed"),
        "transformer.h.{layers}.ln_1.scale": Parameter("embed <- h.{layers}.ln_1.weight: embed"),
        "transformer.h.{layers}.ln_1.bias": Parameter("embed <- h.{layers}.ln_1.bias: embed"),
        "transformer.h.{layers}.attn.c_attn.kernel": Parameter(
            "(qkv heads head_dim) embed <- h.{layers}.attn.c_attn.weight: embed (qkv heads head_dim)"
        ),
        "transformer.h.{layers}.attn.c_attn.bias": Parameter(
            "(qkv heads head_dim) <- h.{layers}.attn.c_attn.bias: (qkv heads head_dim)"
        ),
        "transformer.h.{layers}.attn.c_proj.kernel": Parameter(
            "embed (heads head_dim) <- h.{layers}.attn.c_proj.weight: (heads head_dim) embed"
        ),
        "transformer.h.{layers}.attn.c_proj.bias": Parameter("embed <- h.{layers}.attn.c_proj.bias: embed"),
        "transformer.h.{layers}.ln_2.scale": Parameter("embed <- h.{layers}.ln_2.weight: embed"),
        "transformer.h.{layers}.ln_2.bias": Parameter("embed <- h.{layers}.ln_2.bias: embed"),
        "transformer.h.{layers}.mlp.c_fc.kernel": Parameter("mlp embed <- h.{layers}.mlp.c_fc.weight: embed mlp"),
        "transformer.h.{layers}.mlp.c_fc.bias": Parameter("mlp <- h.{layers}.mlp.c_fc.bias: mlp"),
        "transformer.h.{layers}.mlp.c_proj.kernel": Parameter("embed mlp <- h.{layers}.mlp.c_proj.weight: mlp embed"),
        "transformer.h.{layers}.mlp.c_proj.bias": Parameter("embed <- h.{layers}.mlp.c_proj.bias: embed"),
        "transformer.ln_f.scale": Parameter("embed <- ln_f.weight: embed"),
        "transformer.ln_f.bias": Parameter("embed <- ln_f.bias: embed"),
        "lm_head.kernel": Parameter("embed vocab <- lm_head.weight: vocab embed"),
    },
    ties=True,
)

FAMILY = Family(
    name="gpt2",
    prefix="transformer.",
    unprefixed=("lm_head.weight",),
    sizes=sizes,
    table={
        "embed.tokens": Parameter("vocab embed <- wte.weight: vocab embed"),
        "embed.positions": Parameter("positions embed <- wpe.weight: positions embed"),
        "layers.attn_norm.scale": Parameter("layers embed <- h.{layers}.ln_1.weight: embed"),
        "layers.attn_norm.bias": Parameter("layers embed <- h.{layers}.ln_1.bias: embed"),
        "layers.attn.q.weight": Parameter(
            "layers heads head_dim embed <- h.{layers}.attn.c_attn.weight: embed (qkv=0 heads head_dim)"
        ),
        "layers.attn.q.bias": Parameter("layers heads head_dim <- h.{layers}.attn.c_attn.bias: (qkv=0 heads head_dim)"),
        "layers.attn.k.weight": Parameter(
            "layers heads head_dim embed <- h.{layers}.attn.c_attn.weight: embed (qkv=1 heads head_dim)"
        ),
        "layers.attn.k.bias": Parameter("layers heads head_dim <- h.{layers}.attn.c_attn.bias: (qkv=1 heads head_dim)"),
        "layers.attn.v.weight": Parameter(
            "layers heads head_dim embed <- h.{layers}.attn.c_attn.weight: embed (qkv=2 heads head_dim)"
        ),
        "layers.attn.v.bias": Parameter("layers heads head_dim <- h.{layers}.attn.c_attn.bias: (qkv=2 heads head_dim)"),
        "layers.attn.o.weight": Parameter(
            "layers embed heads head_dim <- h.{layers}.attn.c_proj.weight: (heads head_dim) embed"
        ),
        "layers.attn.o.bias": Parameter("layers embed <- h.{layers}.attn.c_proj.bias: embed"),
        "layers.mlp_norm.scale": Parameter("layers embed <- h.{layers}.ln_2.weight: embed"),
        "layers.mlp_norm.bias": Parameter("layers embed <- h.{layers}.ln_2.bias: embed"),
        "layers.mlp.up.weight": Parameter("layers mlp embed <- h.{layers}.mlp.c_fc.weight: embed mlp"),
        "layers.mlp.up.bias": Parameter("layers mlp <- h.{layers}.mlp.c_fc.bias: mlp"),
        "layers.mlp.down.weight": Parameter("layers embed mlp <- h.{layers}.mlp.c_proj.weight: mlp embed"),
        "layers.mlp.down.bias": Parameter("layers embed <- h.{layers}.mlp.c_proj.bias: embed"),
        "final_norm.scale": Parameter("embed <- ln_f.weight: embed"),
        "final_norm.bias": Parameter("embed <- ln_f.bias: embed"),
        "head.weight": Parameter("vocab embed <- lm_head.weight: vocab embed"),
    },
    dropped={"h.{i}.attn.bias": "causal mask", "h.{i}.attn.masked_bias": "value of masked scores"},
    tie=Tie(leaf="head.weight", tensor="lm_head.weight", embedding="wte.weight", default=True),
    traits=traits,
    layouts={"hf-flax": HF_FLAX},
)
