"""GPT-2 and its kin: learned positions, sines and cosines of positions, or ALiBi. No I/O, no jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Unpack

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import (
    FULL_ATTENTION,
    NO_CLIP,
    ArchConfig,
    read_activation,
    read_positive,
    windows_by_layer_type,
)
from prepcli.models.declaration import (
    Choices,
    Parameters,
    Settings,
    Sizes,
    attention,
    by_name,
    declare,
    embedding,
    fused_qkv,
    grouped_qkv,
    layer_norm,
    linear,
    matrix,
    plain_mlp,
    positive,
    rms_norm,
    stack,
    unless_false,
)
from prepcli.models.layer_config import Alibi, DropoutFields, alibi_slopes
from prepcli.models.parameters import (
    ALWAYS,
    MAX_AXIS_SIZE,
    MAX_LAYERS,
    NEVER,
    Condition,
    Family,
    HFConfig,
    read_size,
)

# --- Rows, from the names of modules


def embeddings(tokens: str, positions: str = "") -> Parameters:
    """Return the embedding of tokens, and with a second name that of positions."""
    parameters = embedding("tokens", f"vocab embed <- {tokens}.weight: vocab embed")
    if positions:
        row = f"positions embed <- {positions}.weight: positions embed"
        parameters |= embedding("positions", row)
    return parameters


def norm(path: str, module: str, condition: Condition = ALWAYS) -> Parameters:
    """Return the parameters of a layer norm."""
    return layer_norm(path, f"embed <- {module}.weight: embed", condition)


def outputs(final_norm: str, head: str = "lm_head", other_head: str = "") -> Parameters:
    """Return the norm after the last layer and the head, which some files have under another name."""
    row = "vocab embed <- {}.weight: vocab embed"
    alternate = row.format(other_head) if other_head else ""
    return norm("final_norm", final_norm) | matrix("head", row.format(head), alternate=alternate)


def attention_output(module: str, bias: Condition | None = ALWAYS) -> Parameters:
    """Return the output projection of attention."""
    return linear(
        "attn.o", f"embed heads head_dim <- {module}.weight: embed (heads head_dim)", bias
    )


def qkv_by_head(module: str, bias: Condition | None = ALWAYS) -> Parameters:
    """Return queries, keys and values of one tensor in which the rows of a head are together."""
    # With heads of 4 elements, rows 0 to 3 are the queries of head 0, 4 to 7 its keys, 8 to 11 its values, and
    # row 12 begins head 1.
    return fused_qkv(module, "(heads qkv={} head_dim) embed", bias)


# --- Buffers and dropout

ROTARY_BUFFER = "rotary frequencies, computed from the config"


def mask_buffers(attention: str) -> dict[str, str]:
    """Return the buffers of masks that old files store in the attention module of this name."""
    return {
        # Not a bias: the biases of the model have a projection in their names, e.g. attn.c_attn.bias.
        f"{attention}.bias": "causal mask",
        f"{attention}.masked_bias": "value of masked scores",
    }


def pdrop(rate: float) -> DropoutFields:
    """Return the dropout fields of GPT-2 with their default."""
    return DropoutFields(("attn_pdrop", rate), ("resid_pdrop", rate), ("embd_pdrop", rate))


# --- Sizes and architecture

GPT2_FIELDS = {
    "embed": "n_embd", "positions": "n_positions", "layers": "n_layer", "heads": "n_head", "mlp": "n_inner",
}  # fmt: skip
GPT2_INPUTS = embeddings("wte", "wpe")
GPT2_OUTPUTS = outputs("ln_f")


def gpt_like(
    name: str,
    title: str,
    *,
    layer: Parameters,
    defaults: Mapping[str, int],
    fields: Mapping[str, str] = GPT2_FIELDS,
    more_sizes: Callable[[HFConfig, Sizes], Mapping[str, int]] | None = None,
    activation: tuple[str, str] | str = ("activation_function", "gelu_new"),
    prefix: str = "transformer.",
    before: Parameters = GPT2_INPUTS,
    layers: str = "h.{layers}",
    after: Parameters = GPT2_OUTPUTS,
    **settings: Unpack[Settings],
) -> Family:
    """Return a family with the sizes, the architecture and the tensor names of GPT-2 by default.

    Args:
        name: `model_type` of its config.json.
        title: One line about the family, for lists.
        layer: Parameters of every layer.
        defaults: Sizes of the config class for absent fields. Without `mlp`, it is four times `embed`.
        fields: Size -> its field in the config class. Without `mlp`, no field sets the width of the MLP.
        more_sizes: Further sizes, and sizes that replace the ones of `defaults`. Raises PrepError for sizes that do not
            fit together.
        activation: Config field of the activation, and its default. Or an activation without a field.
        prefix: Prefix of its tensors in a file of the model with its head.
        before: Parameters before the layers.
        layers: Prefix of the tensors of a layer.
        after: Parameters after the layers.
        settings: See `Settings`. Without `tied`, the head is tied.
    """

    def sizes(config: HFConfig) -> dict[str, int]:
        found = _read_sizes(config, defaults, fields)
        return {**found, **more_sizes(config, found)} if more_sizes else found

    return declare(
        name,
        title,
        sizes=sizes,
        arch=partial(_read_arch, activation=activation),
        parameters={**before, **stack("layers", layers, layer), **after},
        prefix=prefix,
        layers=layers,
        **{"tied": True, **settings},
    )


def _read_sizes(
    config: HFConfig, defaults: Mapping[str, int], fields: Mapping[str, str]
) -> dict[str, int]:
    """Return the extent of each atom, from the common field (`hidden_size`) or else the one of the class (`n_embd`)."""

    def read(atom: str, common_name: str, maximum: int = MAX_AXIS_SIZE) -> int:
        # `attribute_map` of transformers makes the common name an alias. The class sets its own field
        # first and the alias after it, so the alias wins if a config has both.
        class_name = fields.get(atom, common_name)
        class_value = read_size(config, class_name, defaults[atom], maximum)
        return read_size(config, common_name, class_value, maximum)

    embed = read("embed", "hidden_size")
    heads = read("heads", "num_attention_heads")
    if embed % heads:
        raise invalid_config_error(f"{heads} attention heads do not divide the width {embed}")
    width = defaults.get("mlp", 4 * embed)
    if "mlp" in fields:
        width = read_size(config, fields["mlp"], width)
    return {
        "vocab": read_size(config, "vocab_size", defaults["vocab"]),
        "positions": read("positions", "max_position_embeddings"),
        "layers": read("layers", "num_hidden_layers", MAX_LAYERS),
        "embed": embed,
        # Number of parts of a fused tensor.
        "qkv": 3,
        "heads": heads,
        "head_dim": embed // heads,
        "mlp": width,
    }


def _read_arch(
    config: HFConfig, axis_sizes: Sizes, *, activation: tuple[str, str] | str
) -> ArchConfig:
    if isinstance(activation, tuple):
        activation = read_activation(config, *activation)
    return ArchConfig(
        norm="layer",
        norm_eps=read_positive(config, "layer_norm_epsilon", 1e-5),
        activation=activation,
        has_gated_mlp=False,
        attn_scale=axis_sizes["head_dim"] ** -0.5,
        sliding_windows=(FULL_ATTENTION,) * axis_sizes["layers"],
        rope=None,
        max_positions=axis_sizes["positions"],
        init_std=read_positive(config, "initializer_range", 0.02),
    )


def check_n_embed(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    """Raise PrepError if `n_embed`, an older name of `hidden_size`, has another value. There are no further sizes."""
    older = config.get("n_embed")
    width = config.get("hidden_size")
    if older is not None and width is not None and older != width:
        raise invalid_config_error(f"n_embed is {older!r:.60}, but hidden_size is {width!r:.60}")
    return {}


# --- GPT-2 and GPT-BigCode

HAS_MULTI_QUERY = unless_false("multi_query")


def _attn_scale(config: HFConfig, sizes: Sizes) -> float:
    return sizes["head_dim"] ** -0.5 if config.get("scale_attn_weights", True) else 1.0


def _init_stds(config: HFConfig, sizes: Sizes) -> tuple[tuple[str, float], ...]:
    """Return the standard deviations of the projections before a residual sum. A layer has two such sums."""
    std = read_positive(config, "initializer_range", 0.02) / math.sqrt(2 * sizes["layers"])
    return (("attn.o.weight", std), ("mlp.down.weight", std))


def _bigcode_qkv() -> Parameters:
    by_head = qkv_by_head("attn.c_attn")
    parameters: Parameters = {}
    for path, parameter in grouped_qkv("attn.c_attn").items():
        parameters[path] = dataclasses.replace(
            parameter, condition=HAS_MULTI_QUERY, else_row=by_head[path].row
        )
    return parameters


# --- Windows of GPT-Neo


def _neo_windows(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    """Return the windows. `attention_layers` overrides `attention_types`, as in transformers."""
    # The default of GPTNeoConfig: 2 kinds, 12 times, are its 24 layers.
    pattern: Any = config.get("attention_types") or [[["global", "local"], 12]]
    kinds = config.get("attention_layers")
    if not kinds:
        kinds = pattern
        # A malformed pattern stays as it is: `windows_by_layer_type` refuses it.
        with suppress(TypeError, ValueError):
            # The number of repeats may be huge in a broken config: build one layer too many at most.
            kinds = list(islice(_repeat_kinds(pattern), MAX_LAYERS + 1))
    window = read_size(config, "window_size", 256)
    return windows_by_layer_type(
        kinds, ("global", "local"), layers=sizes["layers"], window=window, field="attention_types"
    )


def _repeat_kinds(pattern: Any) -> Iterator[Any]:
    """Yield the kinds of a pattern, e.g. [[["global", "local"], 2]] -> global, local, global, local."""
    for kinds, repeats in pattern:
        if kinds:
            for _ in range(repeats):
                yield from kinds


# --- Layers and positions of fairseq: OPT, BioGPT and XGLM

# `OPTLearnedPositionalEmbedding` of transformers adds 2 to each position, as fairseq did: its positions begin after
# the padding id, which is 1. E.g. 2048 positions are stored as 2050 rows, and position 0 is row 2.
UNUSED_POSITIONS = 2
FAIRSEQ: Choices = {
    # The default of torch.nn.LayerNorm. Config fields have no effect.
    "norm_eps": 1e-5,
    "position_offset": UNUSED_POSITIONS,
}
FAIRSEQ_LEARNED: Choices = {
    **FAIRSEQ,
    "max_positions": lambda config, sizes: sizes["positions"] - UNUSED_POSITIONS,
}
HAS_PRE_NORM = unless_false("do_layer_norm_before")
HAS_BIAS = unless_false("enable_bias")
HAS_NORM_WEIGHTS = unless_false("layer_norm_elementwise_affine")


def _fairseq_layer(bias: Condition = ALWAYS, norm_weights: Condition = ALWAYS) -> Parameters:
    return {
        **norm("attn_norm", "self_attn_layer_norm", norm_weights),
        **attention("self_attn.{}_proj", out_name="out", bias=bias, out_bias=bias),
        **norm("mlp_norm", "final_layer_norm", norm_weights),
        **plain_mlp("fc1", "fc2", bias),
    }


def _stored_positions(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    return {"positions": sizes["positions"] + UNUSED_POSITIONS}


def _embed_scale(config: HFConfig, sizes: Sizes) -> float:
    return sizes["embed"] ** 0.5 if config.get("scale_embedding", True) else 1.0


def _opt_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    word_embed = read_size(config, "word_embed_proj_dim", sizes["embed"])
    return {**_stored_positions(config, sizes), "word_embed": word_embed}


def _projects_embeddings(config: HFConfig) -> bool:
    sizes = FAMILIES["opt"].sizes(config)
    return sizes["word_embed"] != sizes["embed"]


def _has_final_norm(config: HFConfig) -> bool:
    # transformers keeps this field for checkpoints that were fine-tuned before its version 4.20.1.
    return HAS_PRE_NORM(config) and not config.get("_remove_final_layer_norm")


def _check_sinusoids(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    """Raise PrepError if layers are too narrow for sines and cosines. There are no further sizes."""
    if sizes["embed"] < 4:
        raise invalid_config_error("sinusoidal positions need a d_model of 4 or more")
    return {}


def _check_padding(config: HFConfig, sizes: Sizes) -> None:
    padding = config.get("pad_token_id", 1)
    if padding not in (None, 0, 1):
        why = f"it is {padding!r:.60}, and transformers gives no embedding to the position of this number"
        raise unsupported_config_error("this `pad_token_id` is not supported for this family", why)


# --- ALiBi: BLOOM and MPT

ALIBI: Choices = {"score_bias": lambda config, sizes: Alibi(alibi_slopes(sizes["heads"]))}
# Field of MPT -> values that transformers computes. It ignores other values, which change the model.
FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "expansion_ratio": (4,), "no_bias": (True,), "embedding_fraction": (1, None),
    "norm_type": ("low_precision_layernorm", "layernorm", None),
}  # fmt: skip
FIXED_ATTENTION_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "alibi": (True,), "alibi_bias_max": (8,), "attn_type": ("multihead_attention",), "prefix_lm": (False, None),
    "qk_ln": (False, None), "attn_uses_sequence_id": (False, None),
}  # fmt: skip


def _check_residual(config: HFConfig, sizes: Sizes) -> None:
    field = "apply_residual_connection_post_layernorm"
    if config.get(field):
        why = "the residual connections of this model start after the norms"
        raise unsupported_config_error(f"`{field}` is not supported for this family", why)


def _attn_config(config: HFConfig) -> HFConfig:
    """Return the object with MPT's fields of attention."""
    fields = config.get("attn_config")
    if fields is None:
        return {}
    if not isinstance(fields, Mapping):
        raise invalid_config_error(f"attn_config is {fields!r:.60}, it must be an object")
    return fields


def _qkv_clip(config: HFConfig, sizes: Sizes) -> float:
    fields = _attn_config(config)
    return read_positive(fields, "clip_qkv", NO_CLIP) if fields.get("clip_qkv") else NO_CLIP


def _check_fixed_fields(config: HFConfig, sizes: Sizes) -> None:
    tables = ((config, FIXED_FIELDS), (_attn_config(config), FIXED_ATTENTION_FIELDS))
    for fields, allowed in tables:
        for name, values in allowed.items():
            if name in fields and fields[name] not in values:
                why = f"config.json has {fields[name]!r:.60}, which changes what the model computes"
                raise unsupported_config_error(f"`{name}` is not supported for this family", why)


FAMILIES = by_name(
    # `reorder_and_upcast_attn` asks for scores in float32, which the trainer always has.
    gpt_like(
        "gpt2",
        "GPT-2: learned positions, biases on all matrices, fused QKV. Matrices are stored as [in, out].",
        defaults={"vocab": 50257, "positions": 1024, "embed": 768, "layers": 12, "heads": 12},
        layer={
            **norm("attn_norm", "ln_1"),
            # The parts are consecutive. With 2 heads of 4 elements, columns 0 to 7 are the queries of both heads,
            # 8 to 15 the keys, and 16 to 23 the values.
            **fused_qkv("attn.c_attn", "embed (qkv={} heads head_dim)"),
            **linear("attn.o", "embed heads head_dim <- attn.c_proj.weight: (heads head_dim) embed"),
            **norm("mlp_norm", "ln_2"),
            **linear("mlp.up", "mlp embed <- mlp.c_fc.weight: embed mlp"),
            **linear("mlp.down", "embed mlp <- mlp.c_proj.weight: mlp embed"),
        },
        choices={
            "attn_scale": _attn_scale,
            "scale_attn_by_inverse_layer_idx": lambda config, _: bool(config.get("scale_attn_by_inverse_layer_idx")),
            "leaf_init_stds": _init_stds,
        },
        dropped=mask_buffers("h.{i}.attn"),
        dropout_fields=pdrop(0.1),
    ),
    gpt_like(
        "gpt_neo",
        "GPT-Neo: learned positions, alternating global and local attention, unscaled attention, no bias on QKV.",
        defaults={"vocab": 50257, "positions": 2048, "embed": 2048, "layers": 24, "heads": 16},
        fields={"layers": "num_layers", "heads": "num_heads", "mlp": "intermediate_size"},
        layer={
            **norm("attn_norm", "ln_1"),
            **attention("attn.attention.{}_proj", out_name="out", out_bias=ALWAYS),
            **norm("mlp_norm", "ln_2"),
            **plain_mlp("mlp.c_fc", "mlp.c_proj", ALWAYS),
        },
        choices={"attn_scale": 1.0, "sliding_windows": _neo_windows},
        dropped=mask_buffers("h.{i}.attn.attention"),
        dropout_fields=DropoutFields(residual=("resid_dropout", 0.0), embedding=("embed_dropout", 0.0)),
    ),
    # Without `multi_query`, the fused tensor is GPT-NeoX's.
    gpt_like(
        "gpt_bigcode",
        "GPT-BigCode (SantaCoder, StarCoder 1): GPT-2 with one head of keys and values for all query heads.",
        defaults={"vocab": 50257, "positions": 1024, "embed": 768, "layers": 12, "heads": 12},
        more_sizes=lambda config, sizes: {"kv_heads": 1 if HAS_MULTI_QUERY(config) else sizes["heads"]},
        activation=("activation_function", "gelu_pytorch_tanh"),
        layer={
            **norm("attn_norm", "ln_1"),
            **_bigcode_qkv(),
            **attention_output("attn.c_proj"),
            **norm("mlp_norm", "ln_2"),
            **plain_mlp("mlp.c_fc", "mlp.c_proj", ALWAYS),
        },
        choices={"attn_scale": _attn_scale},
        dropped=mask_buffers("h.{i}.attn"),
        dropout_fields=pdrop(0.1),
    ),
    gpt_like(
        "opt",
        "OPT: learned positions with two unused rows. Pre-norm, or post-norm with narrower embeddings (350M).",
        defaults={"vocab": 50272, "positions": 2048, "embed": 768, "layers": 12, "heads": 12, "mlp": 3072},
        fields={"mlp": "ffn_dim"},
        more_sizes=_opt_sizes,
        activation=("activation_function", "relu"),
        prefix="model.",
        before={
            **embedding("tokens", "vocab word_embed <- decoder.embed_tokens.weight: vocab word_embed"),
            **embedding("positions", "positions embed <- decoder.embed_positions.weight: positions embed"),
            **matrix(
                "project_in",
                "embed word_embed <- decoder.project_in.weight: embed word_embed",
                condition=_projects_embeddings,
            ),
        },
        layers="decoder.layers.{layers}",
        layer=_fairseq_layer(HAS_BIAS, HAS_NORM_WEIGHTS),
        after={
            **norm(
                "final_norm",
                "decoder.final_layer_norm",
                lambda config: _has_final_norm(config) and HAS_NORM_WEIGHTS(config),
            ),
            **matrix(
                "project_out",
                "word_embed embed <- decoder.project_out.weight: word_embed embed",
                condition=_projects_embeddings,
            ),
            **matrix("head", "vocab word_embed <- lm_head.weight: vocab word_embed"),
        },
        choices={
            **FAIRSEQ_LEARNED,
            "block_type": lambda config, _: "pre" if HAS_PRE_NORM(config) else "post",
            "has_final_norm": lambda config, _: _has_final_norm(config),
            "init_std": positive("init_std", 0.02),
        },
        dropped={"decoder.version": "version of the format"},
        dropout_fields=DropoutFields(residual=("dropout", 0.1)),
    ),
    gpt_like(
        "biogpt",
        "BioGPT: OPT's layers with scaled token embeddings and GELU.",
        defaults={"vocab": 42384, "positions": 1024, "embed": 1024, "layers": 24, "heads": 16, "mlp": 4096},
        fields={"mlp": "intermediate_size"},
        more_sizes=_stored_positions,
        activation=("hidden_act", "gelu"),
        prefix="biogpt.",
        before=embeddings("embed_tokens", "embed_positions"),
        layers="layers.{layers}",
        layer=_fairseq_layer(),
        after=outputs("layer_norm", "output_projection"),
        choices={**FAIRSEQ_LEARNED, "embed_scale": _embed_scale},
        dropout_fields=DropoutFields(
            attention=("attention_probs_dropout_prob", 0.1),
            residual=("hidden_dropout_prob", 0.1),
            embedding=("hidden_dropout_prob", 0.1),
        ),
    ),
    gpt_like(
        "xglm",
        "XGLM: BioGPT's layers with sines and cosines of positions.",
        defaults={"vocab": 256_008, "positions": 2048, "embed": 1024, "layers": 24, "heads": 16, "mlp": 4096},
        fields={"embed": "d_model", "layers": "num_layers", "heads": "attention_heads", "mlp": "ffn_dim"},
        more_sizes=_check_sinusoids,
        activation=("activation_function", "gelu"),
        prefix="model.",
        before=embeddings("embed_tokens"),
        layers="layers.{layers}",
        layer=_fairseq_layer(),
        after=outputs("layer_norm"),
        choices={
            **FAIRSEQ,
            "has_sinusoidal_positions": True,
            "embed_scale": _embed_scale,
            "init_std": positive("init_std", 0.02),
        },
        check=_check_padding,
        dropped={"embed_positions.weights": "sines and cosines, computed from the config"},
        dropout_fields=DropoutFields(
            attention=("attention_dropout", 0.1), residual=("dropout", 0.1), embedding=("dropout", 0.1)
        ),
    ),
    # No field sets the width of the MLP (transformers ignores `n_inner` of old configs too), its activation, or the
    # number of positions: ALiBi has no limit, and 2048 is the length in training.
    gpt_like(
        "bloom",
        "BLOOM: GPT-NeoX's blocks with ALiBi instead of rotation, and a norm of the embeddings.",
        defaults={"vocab": 250_880, "positions": 2048, "embed": 64, "layers": 2, "heads": 8},
        fields={"embed": "n_embed", "layers": "n_layer", "heads": "n_head"},
        more_sizes=check_n_embed,
        activation="gelu_new",
        before={**embeddings("word_embeddings"), **norm("embed_norm", "word_embeddings_layernorm")},
        layer={
            **norm("attn_norm", "input_layernorm"),
            **qkv_by_head("self_attention.query_key_value"),
            **attention_output("self_attention.dense"),
            **norm("mlp_norm", "post_attention_layernorm"),
            **plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", ALWAYS),
        },
        choices=ALIBI,
        check=_check_residual,
        dropout_fields=DropoutFields(residual=("hidden_dropout", 0.0)),
    ),
    # Layer norms without biases have the rows of RMS norms.
    gpt_like(
        "mpt",
        "MPT: ALiBi, layer norms without biases, no biases elsewhere, and optional bounds of queries, keys and values.",
        defaults={"vocab": 50368, "positions": 2048, "embed": 2048, "layers": 24, "heads": 16},
        fields={
            "embed": "d_model", "positions": "max_seq_len", "layers": "n_layers", "heads": "n_heads",
            "mlp": "mlp_width",
        },
        activation="gelu",
        before=embeddings("wte"),
        layers="blocks.{layers}",
        layer={
            **rms_norm("attn_norm", "embed <- norm_1.weight: embed"),
            **fused_qkv("attn.Wqkv", "(qkv={} heads head_dim) embed", NEVER),
            **attention_output("attn.out_proj", NEVER),
            **rms_norm("mlp_norm", "embed <- norm_2.weight: embed"),
            **plain_mlp("ffn.up_proj", "ffn.down_proj", NEVER),
        },
        after={
            **rms_norm("final_norm", "embed <- norm_f.weight: embed"),
            **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
        },
        choices={**ALIBI, "attn_scale": lambda config, sizes: read_positive(
                _attn_config(config), "softmax_scale", sizes["head_dim"] ** -0.5
            ), "qkv_clip": _qkv_clip},
        check=_check_fixed_fields,
        # The config has the dropout rates inside `attn_config`, not as top-level fields.
        dropout_fields=DropoutFields(attention=None),
    ),
)  # fmt: skip
