"""T5 and its kin: an encoder, a decoder, and relative position biases. No I/O, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import FULL_ATTENTION, ArchConfig, read_activation, read_positive
from prepcli.models.declaration import (
    Choices,
    Parameters,
    Sizes,
    attention,
    by_name,
    embedding,
    matrix,
    rms_norm,
    stack,
    supporting,
)
from prepcli.models.layer_config import MAX_RELATIVE_DISTANCE, DropoutFields, RelativePositionBias
from prepcli.models.parameters import (
    MAX_LAYERS,
    Condition,
    Family,
    HFConfig,
    WeightTying,
    read_size,
)

# --- Sizes

# Atom -> config field and its default.
T5_SIZES = {
    "vocab": ("vocab_size", 32128), "embed": ("d_model", 512), "mlp": ("d_ff", 2048), "heads": ("num_heads", 8),
    "head_dim": ("d_kv", 64), "encoder_layers": ("num_layers", 6), "buckets": ("relative_attention_num_buckets", 32),
}  # fmt: skip
MT5_SIZES = T5_SIZES | {
    "vocab": ("vocab_size", 250_112), "mlp": ("d_ff", 1024), "heads": ("num_heads", 6),
    "encoder_layers": ("num_layers", 8),
}  # fmt: skip
# Atom -> field that overrides the one above. The decoder's layers ignore `num_hidden_layers`.
SIZE_ALIASES = {
    "embed": "hidden_size", "heads": "num_attention_heads", "head_dim": "head_dim",
    "encoder_layers": "num_hidden_layers",
}  # fmt: skip


def _read_sizes(config: HFConfig, *, fields: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for atom, (field, default) in fields.items():
        sizes[atom] = read_size(config, field, default)
    num_layers = sizes["encoder_layers"]
    for atom, alias in SIZE_ALIASES.items():
        sizes[atom] = read_size(config, alias, sizes[atom])
    # A check only: layers have a lower limit than other sizes, and the loops above use one limit.
    read_size(sizes, "encoder_layers", 1, MAX_LAYERS)
    # The default is `num_layers`, not its alias: T5Config of transformers 4 sets it before the alias.
    layers = read_size(config, "num_decoder_layers", num_layers, MAX_LAYERS)
    return {**sizes, "layers": layers}


# --- Architecture


def _read_arch(config: HFConfig, sizes: Sizes, *, feed_forward: str) -> ArchConfig:
    """Return the architecture of the decoder, with that of the encoder. `feed_forward` is the default of the field."""
    if not config.get("is_encoder_decoder", True):
        what = "`is_encoder_decoder` false is not supported for this family"
        raise unsupported_config_error(what, "it needs its encoder")
    activation_field = "dense_act_fn" if config.get("dense_act_fn") else "feed_forward_proj"
    _, activation = _read_feed_forward(config, feed_forward)
    factor = read_positive(config, "initializer_factor", 1.0)
    max_distance = read_size(config, "relative_attention_max_distance", 128, MAX_RELATIVE_DISTANCE)
    causal_bias = RelativePositionBias(sizes["buckets"], max_distance, bidirectional=False)
    decoder = ArchConfig(
        norm="rms",
        norm_eps=read_positive(config, "layer_norm_epsilon", 1e-6),
        activation=read_activation({activation_field: activation}, activation_field, ""),
        has_gated_mlp=_is_gated(config, feed_forward=feed_forward),
        # T5 does not divide scores by sqrt(head_dim). Its initial queries are that much smaller instead.
        attn_scale=1.0,
        sliding_windows=(FULL_ATTENTION,) * sizes["layers"],
        rope=None,
        score_bias=causal_bias,
        max_positions=0,
        init_std=factor * sizes["embed"] ** -0.5,
        # Those of Mesh TensorFlow's T5. Those of queries include the scale of attention.
        leaf_init_stds=(
            ("embed.tokens", factor),
            ("head.weight", factor),
            (".q.weight", factor * (sizes["embed"] * sizes["head_dim"]) ** -0.5),
            (".o.weight", factor * (sizes["heads"] * sizes["head_dim"]) ** -0.5),
            ("mlp.down.weight", factor * sizes["mlp"] ** -0.5),
        ),
    )
    encoder = dataclasses.replace(
        decoder,
        sliding_windows=(FULL_ATTENTION,) * sizes["encoder_layers"],
        score_bias=dataclasses.replace(causal_bias, bidirectional=True),
    )
    return dataclasses.replace(decoder, encoder=encoder)


def _read_feed_forward(config: HFConfig, default: str) -> tuple[bool, str]:
    """Return whether `feed_forward_proj` asks for a gate, and the activation, which `dense_act_fn` overrides."""
    text = str(config.get("feed_forward_proj", default))
    gate, _, name = text.rpartition("-")
    if gate not in ("", "gated"):
        why = f"feed_forward_proj is {text!r:.60}, it must be `ACT` or `gated-ACT`"
        raise invalid_config_error(why)
    # T5Config reads this one text as gelu_new, the tanh form. After "gated-", other names keep their
    # meaning.
    if text == "gated-gelu":
        name = "gelu_new"
    return bool(gate), str(config.get("dense_act_fn") or name)


def _is_gated(config: HFConfig, *, feed_forward: str) -> bool:
    return bool(config.get("is_gated_act", _read_feed_forward(config, feed_forward)[0]))


# --- Scale of the decoder's output, and the head


def _scales_output(config: HFConfig) -> bool:
    # Without the field, which newer files have, a tied head means that the output is scaled.
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False))


def _output_scale(config: HFConfig, sizes: Sizes) -> float:
    # A tied head is the embedding, with a standard deviation of about 1. The factor embed^-0.5 keeps
    # the logits near 1.
    return sizes["embed"] ** -0.5 if _scales_output(config) else 1.0


def _has_head_if_stored(config: HFConfig) -> bool:
    # Transformers 5 writes `tie_word_embeddings` true for every T5 model, so a model without scaled outputs has a head
    # of its own. A null has no effect.
    return not _scales_output(config) or config.get("tie_word_embeddings", True) is None


# --- Parameters


def _sublayer(number: int, path: str, parameters: Parameters) -> Parameters:
    """Return the parameters of a sublayer and of the norm before it, from its index in its layer."""
    return rms_norm(f"{path}_norm", f"embed <- {number}.layer_norm.weight: embed") | parameters


def _attention(number: int, path: str, module: str) -> Parameters:
    parameters: Parameters = {}
    for name, parameter in attention(f"{number}.{module}.{{}}", out_name="o").items():
        parameters[name.replace("attn.", f"{path}.")] = parameter
    return _sublayer(number, path, parameters)


def _mlp(number: int, is_gated: Condition) -> Parameters:
    # T5 v1.1 computes wo(act(wi_0 x) * wi_1 x). T5 1.0 computes wo(act(wi x)) without a gate.
    module = f"{number}.DenseReluDense"
    up = f"mlp embed <- {module}.{{}}.weight: mlp embed"
    parameters = {
        **matrix("mlp.gate", up.format("wi_0"), condition=is_gated),
        **matrix("mlp.up", up.format("wi_1"), condition=is_gated, else_row=up.format("wi")),
        **matrix("mlp.down", f"embed mlp <- {module}.wo.weight: embed mlp"),
    }
    return _sublayer(number, "mlp", parameters)


def _stack_parameters(
    name: str, layers: str, layer: Parameters, has_bias_per_layer: bool
) -> Parameters:
    """Return the parameters of the encoder or the decoder. Its layers share the bias of the first or have their own."""
    row = "buckets heads <- {}.relative_attention_bias.weight: buckets heads"
    shared_bias: Parameters = {}
    if has_bias_per_layer:
        layer = layer | matrix("relative_positions", row.format("0.SelfAttention"))
    else:
        first_row = row.format(f"{name}.block.0.layer.0.SelfAttention")
        shared_bias = matrix(f"{name}.relative_positions", first_row)
    return {
        **stack(f"{name}.layers", f"{name}.block.{{{layers}}}.layer", layer),
        **shared_bias,
        **rms_norm(f"{name}.final_norm", f"embed <- {name}.final_layer_norm.weight: embed"),
    }


def t5_like(
    name: str,
    title: str,
    *,
    fields: Mapping[str, tuple[str, int]],
    feed_forward: str,
    choices: Choices,
    stored_head_unties: Callable[[HFConfig], bool] = lambda config: True,
    untied_fields: Callable[[HFConfig], HFConfig] = lambda config: {},
    has_bias_per_layer: bool = False,
) -> Family:
    """Return a family with an encoder, a decoder and T5's tensor names.

    Args:
        name: `model_type` of its config.json.
        title: One line about the family, for lists.
        fields: Atom -> config field and its default.
        feed_forward: Default of `feed_forward_proj`.
        choices: Fields of the architecture that differ.
        stored_head_unties: Whether a stored head overrides `tie_word_embeddings`. By default it does: transformers
            sets the field for every model, and only the file shows whether it is true.
        untied_fields: Config fields to set when a tied head becomes a separate parameter.
        has_bias_per_layer: Whether each layer has a position bias. Otherwise all share the one of the first.
    """
    sizes = partial(_read_sizes, fields=fields)
    is_gated = partial(_is_gated, feed_forward=feed_forward)
    self_attention = _attention(0, "attn", "SelfAttention")
    cross_attention = _attention(1, "cross", "EncDecAttention")
    encoder_layer = self_attention | _mlp(1, is_gated)
    decoder_layer = self_attention | cross_attention | _mlp(2, is_gated)
    parameters = {
        **embedding("tokens", "vocab embed <- shared.weight: vocab embed"),
        **_stack_parameters("encoder", "encoder_layers", encoder_layer, has_bias_per_layer),
        **_stack_parameters("decoder", "layers", decoder_layer, has_bias_per_layer),
        **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
    }
    arch = partial(_read_arch, feed_forward=feed_forward)
    rate = ("dropout_rate", 0.1)
    return Family(
        name=name,
        title=title,
        prefix="",
        unprefixed=(),
        sizes=sizes,
        parameters=parameters,
        dropped={
            # transformers lists it in `_keys_to_ignore_on_load_unexpected`: cross-attention has no positions.
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": "bias that nothing uses"
        },
        tying=WeightTying(
            head_leaf="head.weight",
            head_tensor="lm_head.weight",
            embedding_tensor="shared.weight",
            tied_by_default=True,
            stored_head_unties=stored_head_unties,
            untied_fields=untied_fields,
        ),
        arch_config=supporting(sizes, arch, parameters, choices),
        # The encoder and the decoder share one embedding. Some files store it again under both names.
        duplicates={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
        },
        dropout_fields=DropoutFields(attention=rate, residual=rate, embedding=rate),
    )


FAMILIES = by_name(
    t5_like(
        "t5",
        "T5, T5 v1.1 and Flan-T5: an encoder and a decoder, with relative position biases instead of position "
        "embeddings.",
        fields=T5_SIZES,
        feed_forward="relu",
        choices={"lm_head_input_scale": _output_scale},
        stored_head_unties=_has_head_if_stored,
        untied_fields=lambda config: {"scale_decoder_outputs": _scales_output(config)},
    ),
    t5_like(
        "mt5",
        "mT5: T5 v1.1 for 101 languages, with a head of its own and outputs that are not scaled.",
        fields=MT5_SIZES,
        feed_forward="gated-gelu",
        choices={},
    ),
    t5_like(
        "umt5",
        "UMT5: mT5 with a relative position bias in each layer.",
        fields=MT5_SIZES,
        feed_forward="gated-gelu",
        choices={"lm_head_input_scale": _output_scale},
        has_bias_per_layer=True,
    ),
)
