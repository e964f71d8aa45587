"""T5, T5 v1.1 and Flan-T5: an encoder and a decoder, with relative position biases instead of position embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import (
    FULL_ATTENTION,
    ArchConfig,
    read_activation,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.layouts import hf_flax_layout
from prepcli.models.parameters import (
    MAX_LAYERS,
    Condition,
    Family,
    HFConfig,
    TreeLayout,
    WeightTying,
    read_size,
)
from prepcli.models.position_bias import MAX_RELATIVE_DISTANCE, RelativePositionBias
from prepcli.models.rows import Parameters, attention, embedding, matrix, rms_norm, stack

# Atom -> config field and its default.
FIELDS = {
    "vocab": ("vocab_size", 32128), "embed": ("d_model", 512), "mlp": ("d_ff", 2048), "heads": ("num_heads", 8),
    "head_dim": ("d_kv", 64), "encoder_layers": ("num_layers", 6), "buckets": ("relative_attention_num_buckets", 32),
}  # fmt: skip
# Atom -> field that overrides the one above. The decoder's layers ignore `num_hidden_layers`.
FIELD_ALIASES = {
    "embed": "hidden_size", "heads": "num_attention_heads", "head_dim": "head_dim",
    "encoder_layers": "num_hidden_layers",
}  # fmt: skip


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of T5Config."""
    return read_sizes(config, FIELDS)


def read_sizes(config: HFConfig, fields: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """Return the extent of each atom.

    Args:
        config: Content of a config.json.
        fields: Atom -> config field and its default.
    """
    field_sizes = {
        atom: read_size(config, field, default) for atom, (field, default) in fields.items()
    }
    aliased_sizes = {
        atom: read_size(config, alias, field_sizes[atom]) for atom, alias in FIELD_ALIASES.items()
    }
    axis_sizes = field_sizes | aliased_sizes
    # A check only: layers have a lower limit than other sizes, and the loops above use one limit.
    read_size(axis_sizes, "encoder_layers", 1, MAX_LAYERS)
    # The default is `num_layers`, not its alias: T5Config of transformers 4 sets it before the alias.
    layers = read_size(config, "num_decoder_layers", field_sizes["encoder_layers"], MAX_LAYERS)
    return axis_sizes | {"layers": layers}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    axis_sizes = sizes(config)
    # A tied head is the embedding, with a standard deviation of about 1. The factor embed^-0.5 keeps
    # the logits near 1.
    scale = axis_sizes["embed"] ** -0.5 if _scales_decoder_output(config) else 1.0
    return encoder_decoder_arch(config, axis_sizes, lm_head_input_scale=scale)


def encoder_decoder_arch(
    config: HFConfig,
    axis_sizes: Mapping[str, int],
    *,
    lm_head_input_scale: float,
    feed_forward: str = "relu",
) -> ArchConfig:
    """Return the architecture of T5 or a similar family.

    Args:
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom), e.g. `{"embed": 768}`.
        lm_head_input_scale: Factor of the decoder's output before the head.
        feed_forward: Default of `feed_forward_proj`.

    Raises:
        PrepError: The config is invalid or not supported.
    """
    reject_unsupported_fields(config, "is_encoder_decoder")
    if not config.get("is_encoder_decoder", True):
        what = "`is_encoder_decoder` false is not supported for this family"
        raise unsupported_config_error(what, "it needs its encoder")
    activation_field = "dense_act_fn" if config.get("dense_act_fn") else "feed_forward_proj"
    causal_bias = RelativePositionBias(
        axis_sizes["buckets"],
        read_size(config, "relative_attention_max_distance", 128, MAX_RELATIVE_DISTANCE),
        bidirectional=False,
    )
    decoder = ArchConfig(
        norm="rms",
        norm_eps=read_positive(config, "layer_norm_epsilon", 1e-6),
        activation=read_activation(
            {activation_field: _read_feed_forward(config, feed_forward)[1]}, activation_field, ""
        ),
        has_gated_mlp=is_gated(config, feed_forward),
        # T5 does not divide scores by sqrt(head_dim). Its initial queries are that much smaller instead.
        attn_scale=1.0,
        sliding_windows=(FULL_ATTENTION,) * axis_sizes["layers"],
        rope=None,
        score_bias=causal_bias,
        max_positions=0,
        init_std=read_positive(config, "initializer_factor", 1.0) * axis_sizes["embed"] ** -0.5,
    )
    decoder = dataclasses.replace(decoder, leaf_init_stds=_leaf_init_stds(config, axis_sizes))
    encoder = dataclasses.replace(
        decoder,
        sliding_windows=(FULL_ATTENTION,) * axis_sizes["encoder_layers"],
        score_bias=dataclasses.replace(causal_bias, bidirectional=True),
    )
    return dataclasses.replace(decoder, encoder=encoder, lm_head_input_scale=lm_head_input_scale)


def _leaf_init_stds(
    config: HFConfig, axis_sizes: Mapping[str, int]
) -> tuple[tuple[str, float], ...]:
    """Return the standard deviations of Mesh TensorFlow's T5. Those of queries include the scale of attention."""
    factor = read_positive(config, "initializer_factor", 1.0)
    embed = axis_sizes["embed"]
    return (
        ("embed.tokens", factor),
        ("head.weight", factor),
        (".q.weight", factor * (embed * axis_sizes["head_dim"]) ** -0.5),
        (".o.weight", factor * (axis_sizes["heads"] * axis_sizes["head_dim"]) ** -0.5),
        ("mlp.down.weight", factor * axis_sizes["mlp"] ** -0.5),
    )


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


def is_gated(config: HFConfig, feed_forward: str = "relu") -> bool:
    """Return whether the MLP is gated. `feed_forward` is the default of `feed_forward_proj`."""
    return bool(config.get("is_gated_act", _read_feed_forward(config, feed_forward)[0]))


def _scales_decoder_output(config: HFConfig) -> bool:
    """Return whether the hidden states are scaled before the head. By default a tied head needs it."""
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False))


def _stored_head_unties(config: HFConfig) -> bool:
    """Return whether a stored head overrides `tie_word_embeddings`.

    Transformers 5 writes true for every T5 model, so a model without scaled outputs has a head of
    its own. A null has no effect.
    """
    return not _scales_decoder_output(config) or config.get("tie_word_embeddings", True) is None


def _attention_sublayer(path: str, number: int, module: str) -> Parameters:
    """Return the parameters of an attention sublayer and of the norm before it.

    Args:
        path: Path of the attention in the tree.
        number: Index of the sublayer in its layer.
        module: Name of its module.
    """
    parameters = attention(f"{number}.{module}.{{}}", out_name="o")
    return {
        **rms_norm(f"{path}_norm", f"embed <- {number}.layer_norm.weight: embed"),
        **{name.replace("attn.", f"{path}."): parameter for name, parameter in parameters.items()},
    }


def _stack_parameters(
    stack_name: str,
    layers: str,
    *attention_sublayers: Parameters,
    gate_condition: Condition,
    has_bias_per_layer: bool,
) -> Parameters:
    """Return the parameters of the encoder or the decoder.

    Args:
        stack_name: "encoder" or "decoder", in paths and tensor names.
        layers: Atom of its layers.
        attention_sublayers: Parameters of the sublayers before the MLP.
        gate_condition: When the MLP is gated.
        has_bias_per_layer: Whether each layer has a position bias. Otherwise all share that of the
            first.
    """
    mlp_index = len(attention_sublayers)
    first_attention = f"{stack_name}.block.0.layer.0.SelfAttention"
    # T5 v1.1 computes wo(act(wi_0 x) * wi_1 x). T5 1.0 computes wo(act(wi x)) without a gate.
    gate, up, ungated_up = (
        f"mlp embed <- {mlp_index}.DenseReluDense.{name}.weight: mlp embed"
        for name in ("wi_0", "wi_1", "wi")
    )
    mlp = {
        **rms_norm("mlp_norm", f"embed <- {mlp_index}.layer_norm.weight: embed"),
        **matrix("mlp.gate", gate, condition=gate_condition),
        **matrix("mlp.up", up, condition=gate_condition, else_row=ungated_up),
        **matrix("mlp.down", f"embed mlp <- {mlp_index}.DenseReluDense.wo.weight: embed mlp"),
    }
    layer: Parameters = {}
    for sublayer in (*attention_sublayers, mlp):
        layer |= sublayer
    bias_row = "buckets heads <- {}.relative_attention_bias.weight: buckets heads"
    shared_bias: Parameters = {}
    if has_bias_per_layer:
        layer |= matrix("relative_positions", bias_row.format("0.SelfAttention"))
    else:
        shared_bias = matrix(f"{stack_name}.relative_positions", bias_row.format(first_attention))
    return {
        **stack(f"{stack_name}.layers", f"{stack_name}.block.{{{layers}}}.layer", layer),
        **shared_bias,
        **rms_norm(
            f"{stack_name}.final_norm", f"embed <- {stack_name}.final_layer_norm.weight: embed"
        ),
    }


def build_parameters(
    gate_condition: Condition = is_gated, has_bias_per_layer: bool = False
) -> Parameters:
    """Return the parameters of a model, with the options of `_stack_parameters`."""
    self_attention = _attention_sublayer("attn", 0, "SelfAttention")
    cross_attention = _attention_sublayer("cross", 1, "EncDecAttention")
    build_stack = partial(
        _stack_parameters, gate_condition=gate_condition, has_bias_per_layer=has_bias_per_layer
    )
    return {
        **embedding("tokens", "vocab embed <- shared.weight: vocab embed"),
        **build_stack("encoder", "encoder_layers", self_attention),
        **build_stack("decoder", "layers", self_attention, cross_attention),
        **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
    }


def build_family(
    name: str,
    sizes: Callable[[HFConfig], dict[str, int]],
    arch_config: Callable[[HFConfig], ArchConfig],
    parameters: Parameters,
    layouts: Mapping[str, TreeLayout],
    stored_head_unties: Callable[[HFConfig], bool],
    untied_fields: Callable[[HFConfig], HFConfig],
) -> Family:
    """Return a family with an encoder, a decoder and T5's tensor names. See `Family` for the arguments."""
    return Family(
        name=name,
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
        arch_config=arch_config,
        layouts=layouts,
        # The encoder and the decoder share one embedding. Some files store it again under both names.
        duplicates={
            f"{stack_name}.embed_tokens.weight": "shared.weight"
            for stack_name in ("encoder", "decoder")
        },
        dropout_fields=DropoutFields(
            attention=("dropout_rate", 0.1),
            residual=("dropout_rate", 0.1),
            embedding=("dropout_rate", 0.1),
        ),
    )


PARAMETERS = build_parameters()
FAMILY = build_family(
    name="t5",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    layouts=hf_flax_layout(
        PARAMETERS,
        prefix="",
        norm_name="weight",
        allows_tied_head=True,
        ignored_fields=("scale_decoder_outputs",),
    ),
    stored_head_unties=_stored_head_unties,
    untied_fields=lambda config: {"scale_decoder_outputs": _scales_decoder_output(config)},
)
