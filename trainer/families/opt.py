"""OPT: learned positions of which two rows are unused; norms before each part, or after as in its 350M, whose
embeddings are narrower than its layers."""

from __future__ import annotations

from trainer.table import Config, Family, Parameter, Tie, layer_norm, linear, size
from trainer.traits import ALL_BEFORE, Traits, activation, only_knows, positive

UNUSED_POSITIONS = 2
NORM_EPS = 1e-5  # torch's, no field says it


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; OPTConfig's defaults where a field is absent."""
    embed, heads = size(config, "hidden_size", 768), size(config, "num_attention_heads", 12)
    return {
        "vocab": size(config, "vocab_size", 50272),
        "positions": size(config, "max_position_embeddings", 2048) + UNUSED_POSITIONS,
        "layers": size(config, "num_hidden_layers", 12),
        "embed": embed,
        "word_embed": size(config, "word_embed_proj_dim", embed),
        "heads": heads,
        "head_dim": embed // heads,
        "mlp": size(config, "ffn_dim", 3072),
    }


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config)
    found = sizes(config)
    return Traits(
        norm="layer",
        norm_eps=NORM_EPS,
        activation=activation(config, "activation_function", "relu"),
        gated=False,
        residual="pre" if _norms_first(config) else "post",
        final_norm=_ends_with_norm(config),
        score_scale=found["head_dim"] ** -0.5,
        windows=(ALL_BEFORE,) * found["layers"],
        rope=None,
        positions=found["positions"] - UNUSED_POSITIONS,
        position_offset=UNUSED_POSITIONS,
        init_std=positive(config, "init_std", 0.02),
    )


def _norms_first(config: Config) -> bool:
    return bool(config.get("do_layer_norm_before", True))


def _ends_with_norm(config: Config) -> bool:
    return _norms_first(config) and not config.get("_remove_final_layer_norm")


def _has_biases(config: Config) -> bool:
    return bool(config.get("enable_bias", True))


def _norms_have_weights(config: Config) -> bool:
    return bool(config.get("layer_norm_elementwise_affine", True))


def _final_norm_has_weights(config: Config) -> bool:
    return _ends_with_norm(config) and _norms_have_weights(config)


def _projects(config: Config) -> bool:
    found = sizes(config)
    return found["word_embed"] != found["embed"]


FAMILY = Family(
    name="opt",
    prefix="model.",
    unprefixed=("lm_head.weight",),
    sizes=sizes,
    table={
        "embed.tokens": Parameter("vocab word_embed <- decoder.embed_tokens.weight: vocab word_embed"),
        "embed.positions": Parameter("positions embed <- decoder.embed_positions.weight: positions embed"),
        "project_in.weight": Parameter("embed word_embed <- decoder.project_in.weight: embed word_embed", _projects),
        **layer_norm(
            "layers.attn_norm",
            "layers embed <- decoder.layers.{layers}.self_attn_layer_norm.weight: embed",
            _norms_have_weights,
        ),
        **linear(
            "layers.attn.q",
            "layers heads head_dim embed <- decoder.layers.{layers}.self_attn.q_proj.weight: (heads head_dim) embed",
            _has_biases,
        ),
        **linear(
            "layers.attn.k",
            "layers heads head_dim embed <- decoder.layers.{layers}.self_attn.k_proj.weight: (heads head_dim) embed",
            _has_biases,
        ),
        **linear(
            "layers.attn.v",
            "layers heads head_dim embed <- decoder.layers.{layers}.self_attn.v_proj.weight: (heads head_dim) embed",
            _has_biases,
        ),
        **linear(
            "layers.attn.o",
            "layers embed heads head_dim <- decoder.layers.{layers}.self_attn.out_proj.weight: embed (heads head_dim)",
            _has_biases,
        ),
        **layer_norm(
            "layers.mlp_norm",
            "layers embed <- decoder.layers.{layers}.final_layer_norm.weight: embed",
            _norms_have_weights,
        ),
        **linear("layers.mlp.up", "layers mlp embed <- decoder.layers.{layers}.fc1.weight: mlp embed", _has_biases),
        **linear("layers.mlp.down", "layers embed mlp <- decoder.layers.{layers}.fc2.weight: embed mlp", _has_biases),
        **layer_norm("final_norm", "embed <- decoder.final_layer_norm.weight: embed", _final_norm_has_weights),
        "project_out.weight": Parameter("word_embed embed <- decoder.project_out.weight: word_embed embed", _projects),
        "head.weight": Parameter("vocab word_embed <- lm_head.weight: vocab word_embed"),
    },
    dropped={"decoder.version": "version of the format"},
    tie=Tie(leaf="head.weight", tensor="lm_head.weight", embedding="decoder.embed_tokens.weight", default=True),
    traits=traits,
)
