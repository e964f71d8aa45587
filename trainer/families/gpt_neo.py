"""GPT-Neo: learned positions, global and local attention in turn, no scale and no bias on queries, keys and values."""

from __future__ import annotations

from trainer.errors import PrepError
from trainer.table import Config, Family, Layout, Parameter, Tie, size
from trainer.traits import ALL_BEFORE, Traits, activation, only_knows, positive


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GPTNeoConfig's defaults where a field is absent."""
    embed, heads = size(config, "hidden_size", 2048), size(config, "num_heads", 16)
    return {
        "vocab": size(config, "vocab_size", 50257),
        "positions": size(config, "max_position_embeddings", 2048),
        "layers": size(config, "num_layers", 24),
        "embed": embed,
        "heads": heads,
        "head_dim": embed // heads,
        "mlp": size(config, "intermediate_size", 4 * embed),
    }


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config)
    found = sizes(config)
    return Traits(
        norm="layer",
        norm_eps=positive(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, "activation_function", "gelu_new"),
        gated=False,
        score_scale=1.0,
        windows=_windows(config, found["layers"]),
        rope=None,
        positions=found["positions"],
        init_std=positive(config, "initializer_range", 0.02),
    )


def _windows(config: Config, layers: int) -> tuple[int, ...]:
    """Of each layer; `attention_layers` wins over `attention_types`, as in transformers."""
    try:
        pattern = config.get("attention_types") or [[["global", "local"], 12]]
        kinds = list(config.get("attention_layers") or [kind for kinds, times in pattern for kind in kinds * times])
    except (TypeError, ValueError):
        why = f"attention_types is {config.get('attention_types')!r:.60}, not a list of [kinds, times]"
        raise PrepError("config.json makes no sense", why) from None
    if len(kinds) != layers or not {*map(str, kinds)} <= {"global", "local"}:
        why = f"attention_types gives {len(kinds)} layers of {sorted({*map(str, kinds)})!s:.60}, num_layers is {layers}"
        raise PrepError("config.json makes no sense", why)
    window = size(config, "window_size", 256)
    return tuple(window if kind == "local" else ALL_BEFORE for kind in kinds)


HF_FLAX = Layout(
    {
        "transformer.wte.embedding": Parameter("vocab embed <- wte.weight: vocab embed"),
        "transformer.wpe.embedding": Parameter("positions embed <- wpe.weight: positions embed"),
        "transformer.h.{layers}.ln_1.scale": Parameter("embed <- h.{layers}.ln_1.weight: embed"),
        "transformer.h.{layers}.ln_1.bias": Parameter("embed <- h.{layers}.ln_1.bias: embed"),
        "transformer.h.{layers}.attn.attention.q_proj.kernel": Parameter(
            "embed (heads head_dim) <- h.{layers}.attn.attention.q_proj.weight: (heads head_dim) embed"
        ),
        "transformer.h.{layers}.attn.attention.k_proj.kernel": Parameter(
            "embed (heads head_dim) <- h.{layers}.attn.attention.k_proj.weight: (heads head_dim) embed"
        ),
        "transformer.h.{layers}.attn.attention.v_proj.kernel": Parameter(
            "embed (heads head_dim) <- h.{layers}.attn.attention.v_proj.weight: (heads head_dim) embed"
        ),
        "transformer.h.{layers}.attn.attention.out_proj.kernel": Parameter(
            "(heads head_dim) embed <- h.{layers}.attn.attention.out_proj.weight: embed (heads head_dim)"
        ),
        "transformer.h.{layers}.attn.attention.out_proj.bias": Parameter(
            "embed <- h.{layers}.attn.attention.out_proj.bias: embed"
        ),
        "transformer.h.{layers}.ln_2.scale": Parameter("embed <- h.{layers}.ln_2.weight: embed"),
        "transformer.h.{layers}.ln_2.bias": Parameter("embed <- h.{layers}.ln_2.bias: embed"),
        "transformer.h.{layers}.mlp.c_fc.kernel": Parameter("embed mlp <- h.{layers}.mlp.c_fc.weight: mlp embed"),
        "transformer.h.{layers}.mlp.c_fc.bias": Parameter("mlp <- h.{layers}.mlp.c_fc.bias: mlp"),
        "transformer.h.{layers}.mlp.c_proj.kernel": Parameter("mlp embed <- h.{layers}.mlp.c_proj.weight: embed mlp"),
        "transformer.h.{layers}.mlp.c_proj.bias": Parameter("embed <- h.{layers}.mlp.c_proj.bias: embed"),
        "transformer.ln_f.scale": Parameter("embed <- ln_f.weight: embed"),
        "transformer.ln_f.bias": Parameter("embed <- ln_f.bias: embed"),
        "lm_head.kernel": Parameter("embed vocab <- lm_head.weight: vocab embed"),
    },
    ties=True,
)

FAMILY = Family(
    name="gpt_neo",
    prefix="transformer.",
    unprefixed=("lm_head.weight",),
    sizes=sizes,
    table={
        "embed.tokens": Parameter("vocab embed <- wte.weight: vocab embed"),
        "embed.positions": Parameter("positions embed <- wpe.weight: positions embed"),
        "layers.attn_norm.scale": Parameter("layers embed <- h.{layers}.ln_1.weight: embed"),
        "layers.attn_norm.bias": Parameter("layers embed <- h.{layers}.ln_1.bias: embed"),
        "layers.attn.q.weight": Parameter(
            "layers heads head_dim embed <- h.{layers}.attn.attention.q_proj.weight: (heads head_dim) embed"
        ),
        "layers.attn.k.weight": Parameter(
            "layers heads head_dim embed <- h.{layers}.attn.attention.k_proj.weight: (heads head_dim) embed"
        ),
        "layers.attn.v.weight": Parameter(
            "layers heads head_dim embed <- h.{layers}.attn.attention.v_proj.weight: (heads head_dim) embed"
        ),
        "layers.attn.o.weight": Parameter(
            "layers embed heads head_dim <- h.{layers}.attn.attention.out_proj.weight: embed (heads head_dim)"
        ),
        "layers.attn.o.bias": Parameter("layers embed <- h.{layers}.attn.attention.out_proj.bias: embed"),
        "layers.mlp_norm.scale": Parameter("layers embed <- h.{layers}.ln_2.weight: embed"),
        "layers.mlp_norm.bias": Parameter("layers embed <- h.{layers}.ln_2.bias: embed"),
        "layers.mlp.up.weight": Parameter("layers mlp embed <- h.{layers}.mlp.c_fc.weight: mlp embed"),
        "layers.mlp.up.bias": Parameter("layers mlp <- h.{layers}.mlp.c_fc.bias: mlp"),
        "layers.mlp.down.weight": Parameter("layers embed mlp <- h.{layers}.mlp.c_proj.weight: embed mlp"),
        "layers.mlp.down.bias": Parameter("layers embed <- h.{layers}.mlp.c_proj.bias: embed"),
        "final_norm.scale": Parameter("embed <- ln_f.weight: embed"),
        "final_norm.bias": Parameter("embed <- ln_f.bias: embed"),
        "head.weight": Parameter("vocab embed <- lm_head.weight: vocab embed"),
    },
    dropped={
        "h.{i}.attn.attention.bias": "causal mask",
        "h.{i}.attn.attention.masked_bias": "value of masked scores",
    },
    tie=Tie(leaf="head.weight", tensor="lm_head.weight", embedding="wte.weight", default=True),
    traits=traits,
    layouts={"hf-flax": HF_FLAX},
)
