"""OPT: learned positions of which two rows are unused; norms before each part, or after as in its 350M, whose
embeddings are narrower than its layers."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import Traits, only_knows, positive
from trainer.models.families import _gpt_style
from trainer.models.layouts import hf_flax
from trainer.models.parameters import Config, size
from trainer.models.rows import attention, embedding, family, layer_norm, linear, matrix, stack, unless_off

UNUSED_POSITIONS = 2
NORM_EPS = 1e-5  # torch's, no field says it
NORMS_FIRST, BIASES = unless_off("do_layer_norm_before"), unless_off("enable_bias")
AFFINE = unless_off("layer_norm_elementwise_affine")


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; OPTConfig's defaults where a field is absent."""
    names = {"mlp": "ffn_dim"}
    found = _gpt_style.sizes(config, 50272, positions=2048, embed=768, layers=12, heads=12, mlp=3072, names=names)
    positions, word_embed = found["positions"] + UNUSED_POSITIONS, size(config, "word_embed_proj_dim", found["embed"])
    return {**found, "positions": positions, "word_embed": word_embed}


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config)
    found = sizes(config)
    return dataclasses.replace(
        _gpt_style.traits(config, found, act=("activation_function", "relu")),
        norm_eps=NORM_EPS,
        residual="pre" if NORMS_FIRST(config) else "post",
        final_norm=_ends_with_norm(config),
        positions=found["positions"] - UNUSED_POSITIONS,
        position_offset=UNUSED_POSITIONS,
        init_std=positive(config, "init_std", 0.02),
    )


def _ends_with_norm(config: Config) -> bool:
    return NORMS_FIRST(config) and not config.get("_remove_final_layer_norm")


def _final_norm_has_weights(config: Config) -> bool:
    return _ends_with_norm(config) and AFFINE(config)


def _projects(config: Config) -> bool:
    found = sizes(config)
    return found["word_embed"] != found["embed"]


TABLE = {
    **embedding("tokens", "vocab word_embed <- decoder.embed_tokens.weight: vocab word_embed"),
    **embedding("positions", "positions embed <- decoder.embed_positions.weight: positions embed"),
    **matrix("project_in", "embed word_embed <- decoder.project_in.weight: embed word_embed", when=_projects),
    **stack("layers", "decoder.layers.{layers}", {
        **layer_norm("attn_norm", "embed <- self_attn_layer_norm.weight: embed", AFFINE),
        **attention("self_attn.{}_proj", out="out", bias=BIASES, out_bias=BIASES),
        **layer_norm("mlp_norm", "embed <- final_layer_norm.weight: embed", AFFINE),
        **linear("mlp.up", "mlp embed <- fc1.weight: mlp embed", BIASES),
        **linear("mlp.down", "embed mlp <- fc2.weight: embed mlp", BIASES),
    }),
    **layer_norm("final_norm", "embed <- decoder.final_layer_norm.weight: embed", _final_norm_has_weights),
    **matrix("project_out", "word_embed embed <- decoder.project_out.weight: word_embed embed", when=_projects),
    **matrix("head", "vocab word_embed <- lm_head.weight: vocab word_embed"),
}  # fmt: skip
BUFFERS = {"decoder.version": "version of the format"}
FLAX = hf_flax(TABLE, "model.", ties=True, fixed={BIASES: True, AFFINE: True})
FAMILY = family("opt", "model.", sizes, traits, TABLE, tied=True, dropped=BUFFERS, layouts=FLAX)
