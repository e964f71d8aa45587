"""T5, T5 v1.1 and Flan-T5: an encoder and a decoder, with a bias of scores by distance instead of positions."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import (
    FULL_ATTENTION,
    MAX_RELATIVE_DISTANCE,
    ArchConfig,
    RelativePositionBias,
    read_activation,
    read_positive,
    reject_unsupported_fields,
)
from trainer.models.errors import PrepError
from trainer.models.layouts import hf_flax_layout
from trainer.models.parameters import MAX_LAYERS, Family, HFConfig, WeightTying, read_size
from trainer.models.rows import Parameters, attention, embedding, matrix, rms_norm, stack

FIELD_ALIASES = {  # of fields, which win over them; the decoder has as many layers as `num_layers` says by its own name
    "embed": "hidden_size", "heads": "num_attention_heads", "head_dim": "head_dim",
    "encoder_layers": "num_hidden_layers",
}  # fmt: skip


def sizes(config: HFConfig) -> dict[str, int]:
    """Atom -> extent; T5Config's defaults where a field is absent."""
    fields = {
        "vocab": ("vocab_size", 32128), "embed": ("d_model", 512), "mlp": ("d_ff", 2048), "heads": ("num_heads", 8),
        "head_dim": ("d_kv", 64), "encoder_layers": ("num_layers", 6),
        "buckets": ("relative_attention_num_buckets", 32),
    }  # fmt: skip
    own = {atom: read_size(config, field, default) for atom, (field, default) in fields.items()}
    found = {atom: read_size(config, FIELD_ALIASES.get(atom, ""), default) for atom, default in own.items()}
    read_size(found, "encoder_layers", 1, MAX_LAYERS)
    return found | {"layers": read_size(config, "num_decoder_layers", own["encoder_layers"], MAX_LAYERS)}


def arch_config(config: HFConfig) -> ArchConfig:
    """What its layers compute; PrepError where the config asks for something else."""
    reject_unsupported_fields(config, "is_encoder_decoder")
    if not config.get("is_encoder_decoder", True):
        raise PrepError("`is_encoder_decoder` is false", "config.json says it; prep knows T5 with both of its halves")
    found, key = sizes(config), "dense_act_fn" if config.get("dense_act_fn") else "feed_forward_proj"
    near = RelativePositionBias(
        found["buckets"],
        read_size(config, "relative_attention_max_distance", 128, MAX_RELATIVE_DISTANCE),
        bidirectional=False,
    )
    common = ArchConfig(
        norm="rms",
        norm_eps=read_positive(config, "layer_norm_epsilon", 1e-6),
        activation=read_activation({key: _read_feed_forward(config)[1]}, key, ""),
        has_gated_mlp=_is_gated(config),
        attn_scale=1.0,
        sliding_windows=(FULL_ATTENTION,) * found["layers"],
        rope=None,
        relative_position_bias=near,
        max_positions=0,
        init_std=read_positive(config, "initializer_factor", 1.0) * found["embed"] ** -0.5,
    )
    windows, both_ways = (FULL_ATTENTION,) * found["encoder_layers"], dataclasses.replace(near, bidirectional=True)
    encoder = dataclasses.replace(common, sliding_windows=windows, relative_position_bias=both_ways)
    return dataclasses.replace(
        common, encoder=encoder, lm_head_input_scale=found["embed"] ** -0.5 if _scales_decoder_output(config) else 1.0
    )


def _read_feed_forward(config: HFConfig) -> tuple[bool, str]:
    """Whether the feed-forward part has a gate, unless another field says it, and its activation, where one may win."""
    text = str(config.get("feed_forward_proj", "relu"))
    gate, _, name = text.rpartition("-")
    if gate not in ("", "gated"):
        raise PrepError("config.json makes no sense", f"feed_forward_proj is {text!r:.60}, not `ACT` or `gated-ACT`")
    return bool(gate), config.get("dense_act_fn") or ("gelu_new" if text == "gated-gelu" else name)


def _is_gated(config: HFConfig) -> bool:
    return bool(config.get("is_gated_act", _read_feed_forward(config)[0]))


def _scales_decoder_output(config: HFConfig) -> bool:
    """Whether hidden states are scaled before the head: where that is the embedding, unless the config says."""
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False))


def _stored_head_unties(config: HFConfig) -> bool:
    """Whether the file alone says if the head is the embedding: transformers 5 writes of each T5 that it is tied, and
    a null says nothing."""
    return not _scales_decoder_output(config) or config.get("tie_word_embeddings", True) is None


def _attention_sublayer(ours: str, number: int, theirs: str) -> Parameters:
    """Attention, part `number` of a layer, after its norm."""
    rows = attention(f"{number}.{theirs}.{{}}", "o")
    return {
        **rms_norm(f"{ours}_norm", f"embed <- {number}.layer_norm.weight: embed"),
        **{path.replace("attn.", f"{ours}."): row for path, row in rows.items()},
    }


def _stack_parameters(half: str, layers: str, *looks: Parameters) -> Parameters:
    """The encoder or the decoder; all of its layers use the bias of the first."""
    last, bias = len(looks), f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    gate, up, both = (f"mlp embed <- {last}.DenseReluDense.{name}.weight: mlp embed" for name in ("wi_0", "wi_1", "wi"))
    feed = {
        **rms_norm("mlp_norm", f"embed <- {last}.layer_norm.weight: embed"),
        **matrix("mlp.gate", gate, condition=_is_gated),
        **matrix("mlp.up", up, condition=_is_gated, else_row=both),
        **matrix("mlp.down", f"embed mlp <- {last}.DenseReluDense.wo.weight: embed mlp"),
    }
    layer = {path: row for part in (*looks, feed) for path, row in part.items()}
    return {
        **stack(f"{half}.layers", f"{half}.block.{{{layers}}}.layer", layer),
        **matrix(f"{half}.relative_positions", f"buckets heads <- {bias}: buckets heads"),
        **rms_norm(f"{half}.final_norm", f"embed <- {half}.final_layer_norm.weight: embed"),
    }


SELF_ATTENTION, CROSS_ATTENTION = (
    _attention_sublayer("attn", 0, "SelfAttention"),
    _attention_sublayer("cross", 1, "EncDecAttention"),
)
PARAMETERS = {
    **embedding("tokens", "vocab embed <- shared.weight: vocab embed"),
    **_stack_parameters("encoder", "encoder_layers", SELF_ATTENTION),
    **_stack_parameters("decoder", "layers", SELF_ATTENTION, CROSS_ATTENTION),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}
FAMILY = Family(
    name="t5",
    prefix="",
    unprefixed=(),
    sizes=sizes,
    parameters=PARAMETERS,
    dropped={"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": "bias that nothing uses"},
    tying=WeightTying(
        head_leaf="head.weight",
        head_tensor="lm_head.weight",
        embedding_tensor="shared.weight",
        tied_by_default=True,
        stored_head_unties=_stored_head_unties,
        untied_fields=lambda config: {"scale_decoder_outputs": _scales_decoder_output(config)},
    ),
    arch_config=arch_config,
    layouts=hf_flax_layout(
        PARAMETERS, prefix="", norm_name="weight", allows_tied_head=True, ignored_fields=("scale_decoder_outputs",)
    ),
    duplicates={f"{half}.embed_tokens.weight": "shared.weight" for half in ("encoder", "decoder")},
)
