"""GPT-J: attention and feed-forward side by side under one norm, rotary positions of neighbours, a head with a bias."""

from __future__ import annotations

from trainer.rope import Rope
from trainer.table import Config, Family, Parameter, Tie, layer_norm, linear, size
from trainer.traits import ALL_BEFORE, Traits, activation, only_knows, positive


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; GPTJConfig's defaults where a field is absent. Of two names for a field the newer one wins."""
    embed = size(config, "hidden_size", size(config, "n_embd", 4096))
    heads = size(config, "num_attention_heads", size(config, "n_head", 16))
    return {
        "vocab": size(config, "vocab_size", 50400),
        "layers": size(config, "num_hidden_layers", size(config, "n_layer", 28)),
        "embed": embed,
        "heads": heads,
        "head_dim": embed // heads,
        "mlp": size(config, "n_inner", 4 * embed),
    }


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config)
    found = sizes(config)
    positions = size(config, "max_position_embeddings", size(config, "n_positions", 2048))
    return Traits(
        norm="layer",
        norm_eps=positive(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, "activation_function", "gelu_new"),
        gated=False,
        residual="parallel_one_norm",
        score_scale=found["head_dim"] ** -0.5,
        windows=(ALL_BEFORE,) * found["layers"],
        rope=Rope(size(config, "rotary_dim", 64), 10_000.0, positions),
        rotary_pairs="neighbours",
        positions=positions,
        init_std=positive(config, "initializer_range", 0.02),
    )


FAMILY = Family(
    name="gptj",
    prefix="transformer.",
    unprefixed=("lm_head.weight", "lm_head.bias"),
    sizes=sizes,
    table={
        "embed.tokens": Parameter("vocab embed <- wte.weight: vocab embed"),
        **layer_norm("layers.attn_norm", "layers embed <- h.{layers}.ln_1.weight: embed"),
        "layers.attn.q.weight": Parameter(
            "layers heads head_dim embed <- h.{layers}.attn.q_proj.weight: (heads head_dim) embed"
        ),
        "layers.attn.k.weight": Parameter(
            "layers heads head_dim embed <- h.{layers}.attn.k_proj.weight: (heads head_dim) embed"
        ),
        "layers.attn.v.weight": Parameter(
            "layers heads head_dim embed <- h.{layers}.attn.v_proj.weight: (heads head_dim) embed"
        ),
        "layers.attn.o.weight": Parameter(
            "layers embed heads head_dim <- h.{layers}.attn.out_proj.weight: embed (heads head_dim)"
        ),
        **linear("layers.mlp.up", "layers mlp embed <- h.{layers}.mlp.fc_in.weight: mlp embed"),
        **linear("layers.mlp.down", "layers embed mlp <- h.{layers}.mlp.fc_out.weight: embed mlp"),
        **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
        **linear("head", "vocab embed <- lm_head.weight: vocab embed"),
    },
    dropped={"h.{i}.attn.bias": "causal mask", "h.{i}.attn.masked_bias": "value of masked scores"},
    tie=Tie(leaf="head.weight", tensor="lm_head.weight", embedding="wte.weight", default=False),
    traits=traits,
)
