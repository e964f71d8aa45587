"""Parts that LLaMA and similar families share: sizes, architecture, axis-map rows, old buffers. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Unpack

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.json_values import JsonObject, JsonValue
from prepcli.models.architecture import (
    FULL_ATTENTION,
    LAYER_TYPES,
    ArchConfig,
    is_in_window_pattern,
    read_activation,
    read_positive,
    read_sliding_windows,
    uniform_windows,
)
from prepcli.models.declaration import (
    Choices,
    Parameters,
    Settings,
    Sizes,
    changed,
    declare,
    embedding,
    layer_norm,
    linear,
    matrix,
    rms_norm,
    stack,
    with_aliases,
)
from prepcli.models.declaration import attention as attention_rows
from prepcli.models.parameters import (
    MAX_LAYERS,
    NEVER,
    Condition,
    Family,
    HFConfig,
    Parameter,
    if_set,
    read_size,
)
from prepcli.models.rope_config import Rope, read_layer_rope, read_rope

TENSOR_PREFIX = "model."
# Old versions of transformers saved this buffer with the weights. Later ones compute it on load.
LEGACY_BUFFERS = {
    "layers.{i}.self_attn.rotary_emb.inv_freq": "rotary frequencies, computed from the config"
}
FINAL_RMS_NORM = rms_norm("final_norm", "embed <- norm.weight: embed")
FINAL_LAYER_NORM = layer_norm("final_norm", "embed <- norm.weight: embed")
HEAD = matrix("head", "vocab embed <- lm_head.weight: vocab embed")


def llama_like(
    name: str,
    title: str,
    *,
    layer: Parameters,
    defaults: Mapping[str, int] = MappingProxyType({}),
    more_sizes: Callable[[HFConfig, Sizes], Mapping[str, int]] | None = None,
    positions: int = 2048,
    rope_theta: float = 10_000.0,
    rope: Callable[[HFConfig, Sizes], Rope] | None = None,
    activation: str = "silu",
    activation_field: str | None = "hidden_act",
    norm_eps: float = 1e-6,
    norm_eps_field: str = "rms_norm_eps",
    init_std: float = 0.02,
    aliases: Mapping[str, str] = MappingProxyType({}),
    prefix: str = TENSOR_PREFIX,
    tokens: str = "embed_tokens.weight",
    layers: str = "layers.{layers}",
    shared: Mapping[str, Parameter] = MappingProxyType({}),
    final_norm: Parameters = FINAL_RMS_NORM,
    head: Parameters = HEAD,
    **settings: Unpack[Settings],
) -> Family:
    """Return a family with the sizes, the architecture and the tensor names of LLaMA by default.

    Args:
        name: `model_type` of its config.json.
        title: One line about the family, for lists.
        layer: Parameters of every layer.
        defaults: Sizes of the config class for absent fields, as in `sizes`.
        more_sizes: Further sizes, and sizes that replace the ones of the config class.
        positions: Default of `max_position_embeddings`.
        rope_theta: Default of the rotary base.
        rope: Reader of the rotary embedding. Default: `read_rope` with `positions` and `rope_theta`.
        activation: Default of the activation.
        activation_field: Its config field, or None if the family has one activation.
        norm_eps: Default of the epsilon of norms.
        norm_eps_field: Its config field.
        init_std: Default of the standard deviation of initial values.
        aliases: Name of a field in published files, which overrides -> name in the config class.
        prefix: Prefix of its tensors in a file of the model with its head.
        tokens: Tensor of the token embeddings.
        layers: Prefix of the tensors of a layer.
        shared: Parameters outside of layers, other than the token embedding, the last norm and the head.
        final_norm: Parameters of the norm after the last layer.
        head: Parameters of the output head.
        settings: See `Settings`. Without `dropped`, buffers of old files are ignored.
    """

    def read_sizes(config: HFConfig) -> dict[str, int]:
        config = with_aliases(config, aliases)
        found = sizes(config, **defaults)
        return {**found, **more_sizes(config, found)} if more_sizes else found

    def read_arch(config: HFConfig, axis_sizes: Sizes) -> ArchConfig:
        config = with_aliases(config, aliases)
        check_kv_heads(axis_sizes)
        return ArchConfig(
            norm="rms",
            norm_eps=read_positive(config, norm_eps_field, norm_eps),
            activation=read_activation(config, activation_field, activation)
            if activation_field
            else activation,
            has_gated_mlp=True,
            attn_scale=axis_sizes["head_dim"] ** -0.5,
            sliding_windows=(FULL_ATTENTION,) * axis_sizes["layers"],
            rope=(rope or rope_reader(positions, rope_theta))(config, axis_sizes),
            max_positions=read_size(config, "max_position_embeddings", positions),
            init_std=read_positive(config, "initializer_range", init_std),
        )

    return declare(
        name,
        title,
        sizes=read_sizes,
        arch=read_arch,
        parameters={
            **embedding("tokens", f"vocab embed <- {tokens}: vocab embed"),
            **shared,
            **stack("layers", layers, layer),
            **final_norm,
            **head,
        },
        prefix=prefix,
        layers=layers,
        **{"dropped": LEGACY_BUFFERS, **settings},
    )


def sizes(
    config: HFConfig,
    vocab: int = 32000,
    embed: int = 4096,
    mlp: int = 11008,
    layers: int = 32,
    heads: int = 32,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> dict[str, int]:
    """Return the extent of each atom (named axis).

    The arguments are the defaults of the config class. If `kv_heads` is None, or the config has null, there are as
    many as heads. In the same cases `head_dim` is `embed // heads`.
    """
    embed = read_size(config, "hidden_size", embed)
    heads = read_size(config, "num_attention_heads", heads)
    if embed < heads and config.get("head_dim") is None:
        why = f"hidden_size {embed} is too small for {heads} num_attention_heads"
        raise invalid_config_error(why)
    # `read_size` returns the default for a null as well. In transformers a null means as many as
    # heads, and only an absent field has the default of the class, e.g. 8 in MistralConfig.
    kv_default = heads if kv_heads is None or "num_key_value_heads" in config else kv_heads
    dim_default = embed // heads if head_dim is None or "head_dim" in config else head_dim
    kv_heads = read_size(config, "num_key_value_heads", kv_default)
    return {
        "vocab": read_size(config, "vocab_size", vocab),
        "layers": read_size(config, "num_hidden_layers", layers, MAX_LAYERS),
        "embed": embed,
        "heads": heads,
        "kv_heads": kv_heads,
        # Query heads for each head of keys and values. Trees of Levanter have this axis.
        "query_group": max(1, heads // kv_heads),
        "head_dim": read_size(config, "head_dim", dim_default),
        "mlp": read_size(config, "intermediate_size", mlp),
    }


def check_kv_heads(axis_sizes: Mapping[str, int]) -> None:
    """Raise PrepError if the key and value heads do not divide the query heads."""
    heads = axis_sizes["heads"]
    kv_heads = axis_sizes["kv_heads"]
    if heads % kv_heads:
        why = f"num_key_value_heads is {kv_heads}, it must divide num_attention_heads, which is {heads}"
        raise invalid_config_error(why)


def read_experts_per_token(config: HFConfig, experts: int, default: int) -> int:
    """Return the number of experts per token. Raise PrepError if the model has fewer experts."""
    count = read_size(config, "num_experts_per_tok", default)
    if count > experts:
        why = f"num_experts_per_tok is {count}, but there are {experts} experts"
        raise invalid_config_error(why)
    return count


def rms_norms(**module_names: str) -> Parameters:
    """Return the parameters of norms, from their paths in the tree and the names of their modules."""
    parameters: Parameters = {}
    for path, module_name in module_names.items():
        parameters |= rms_norm(path, f"embed <- {module_name}.weight: embed")
    return parameters


PRE_NORMS = rms_norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")
SANDWICH_NORMS = rms_norms(
    attn_norm="input_layernorm",
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
OUTPUT_NORMS = rms_norms(
    attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"
)
# One norm for all heads of a layer, over the elements of a head, before the rotation.
QK_NORMS = {
    **rms_norm("attn.q_norm", "head_dim <- self_attn.q_norm.weight: head_dim"),
    **rms_norm("attn.k_norm", "head_dim <- self_attn.k_norm.weight: head_dim"),
}


# One norm over the elements of all heads of a layer.
ALL_HEADS_QK_NORMS = {
    **rms_norm("attn.q_norm", "heads head_dim <- self_attn.q_norm.weight: (heads head_dim)"),
    **rms_norm("attn.k_norm", "kv_heads head_dim <- self_attn.k_norm.weight: (kv_heads head_dim)"),
}
PRE_LAYER_NORMS = {
    **layer_norm("attn_norm", "embed <- input_layernorm.weight: embed"),
    **layer_norm("mlp_norm", "embed <- post_attention_layernorm.weight: embed"),
}


def attention(bias: Condition | None = NEVER, out_bias: Condition | None = NEVER) -> Parameters:
    """Return the parameters of attention, with the conditions of `declaration.attention`."""
    return attention_rows(
        "self_attn.{}_proj", out_name="o", kv_heads="kv_heads", bias=bias, out_bias=out_bias
    )


def gated_mlp(
    bias: Condition | None = NEVER,
    module: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    path: str = "mlp",
    mlp: str = "mlp",
) -> Parameters:
    """Return the parameters of a gated MLP.

    `names` has gate, up and down. `mlp` is the atom of the hidden units.
    """
    gate, up, down = (f"{module}.{name}.weight" for name in names)
    return {
        **linear(f"{path}.gate", f"{mlp} embed <- {gate}: {mlp} embed", bias),
        **linear(f"{path}.up", f"{mlp} embed <- {up}: {mlp} embed", bias),
        **linear(f"{path}.down", f"embed {mlp} <- {down}: embed {mlp}", bias),
    }


# Biases on all four matrices of attention, and on those of the MLP, if the config says so.
BIASED_ATTENTION = attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias"))
BIASED_MLP = gated_mlp(bias=if_set("mlp_bias"))

# The gate is the first half of the fused matrix. Their sizes have `gate_up`: 2.
FUSED_GATED_MLP = {
    **matrix("mlp.gate", "mlp embed <- mlp.gate_up_proj.weight: (gate_up=0 mlp) embed"),
    **matrix("mlp.up", "mlp embed <- mlp.gate_up_proj.weight: (gate_up=1 mlp) embed"),
    **matrix("mlp.down", "embed mlp <- mlp.down_proj.weight: embed mlp"),
}


def read_layers_without_rope(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    """Return the layers without rotation of queries and keys, which have a 0 in `no_rope_layers`.

    Without the list, every `no_rope_layer_interval`-th layer does not rotate.
    """
    layers = sizes["layers"]
    listed = config.get("no_rope_layers")
    # Published configs of Llama 4 have an empty list.
    if not listed:
        interval = read_size(config, "no_rope_layer_interval", 4)
        return tuple(range(layers))[interval - 1 :: interval]
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(value not in (0, 1) for value in listed)
    ):
        why = f"no_rope_layers is {listed!r:.80}, it must give {layers} of 0 and 1"
        raise invalid_config_error(why)
    return tuple(layer for layer, value in enumerate(listed) if value != 1)


def layer_rope(
    layer_type: str, positions: int, theta: float, theta_field: str = ""
) -> Callable[[HFConfig, Sizes], Rope]:
    """Return the reader of the rotary embedding of one of two layer types. The numbers are defaults.

    `theta_field` has the base in configs of transformers 4.
    """
    return lambda config, sizes: read_layer_rope(
        config,
        layer_type,
        layer_types=LAYER_TYPES,
        theta=config.get(theta_field, theta) if theta_field else theta,
        head_dim=sizes["head_dim"],
        max_positions=read_size(config, "max_position_embeddings", positions),
    )


def rope_reader(
    positions: int, theta: float, scaling: JsonObject | None = None
) -> Callable[[HFConfig, Sizes], Rope]:
    """Return the reader of a rotary embedding of all layers. The arguments are defaults, also the scaling."""

    def read(config: HFConfig, axis_sizes: Sizes) -> Rope:
        if scaling is not None and config.get("rope_parameters") is None:
            config = changed(config, rope_parameters=scaling)
        return read_rope(
            config,
            axis_sizes["head_dim"],
            max_positions=read_size(config, "max_position_embeddings", positions),
            default_theta=theta,
        )

    return read


def windows(
    default: int | None, is_sliding: Callable[[int], bool]
) -> Callable[[HFConfig, Sizes], tuple[int, ...]]:
    """Return the reader of the windows of layers, by `layer_types` or by the number of a layer.

    `default` is the window of the config class. `is_sliding` decides if a config has no `layer_types`.
    """
    return lambda config, sizes: read_sliding_windows(
        config, sizes["layers"], config.get("sliding_window", default), is_sliding
    )


def pattern_windows(
    default: int | None, pattern: int
) -> Callable[[HFConfig, Sizes], tuple[int, ...]]:
    """Return the reader of windows in all but each n-th layer. The arguments are the defaults of the config class."""
    return lambda config, sizes: read_sliding_windows(
        config,
        sizes["layers"],
        config.get("sliding_window", default),
        lambda layer: is_in_window_pattern(config, layer, pattern),
    )


def full_layers(
    read_windows: Callable[[HFConfig, Sizes], tuple[int, ...]],
) -> Callable[[HFConfig, Sizes], tuple[int, ...]]:
    """Return the reader of the layers without a window."""
    return lambda config, sizes: tuple(
        layer for layer, width in enumerate(read_windows(config, sizes)) if width == FULL_ATTENTION
    )


def read_qwen_window(config: HFConfig) -> JsonValue:
    """Return the window of Qwen's config. The field has an effect with `use_sliding_window` only."""
    window = config.get("sliding_window", 4096)
    return window if config.get("use_sliding_window") else None


def uniform_window(default: int | None) -> Choices:
    """Return the choice of one window in all layers. A null turns it off. `default` is that of the class."""
    return {
        "sliding_windows": lambda config, sizes: uniform_windows(
            sizes["layers"], config.get("sliding_window", default)
        )
    }


def heads_that_fill_width(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    """Raise PrepError if the heads together are wider or narrower than the layers. There are no further sizes."""
    if sizes["heads"] * sizes["head_dim"] != sizes["embed"]:
        why = f"{sizes['heads']} heads of {sizes['head_dim']} elements, width {sizes['embed']}"
        what = "num_attention_heads * head_dim != hidden_size is not supported"
        raise unsupported_config_error(what, why)
    return {}


def partial_rope(
    share: float, positions: int, theta: float = 10_000.0
) -> Callable[[HFConfig, Sizes], Rope]:
    """Return the reader of the rotary embedding of a family that rotates a part of each head.

    `share` of a head rotates if the config has no `partial_rotary_factor`. `positions` and `theta` are defaults as
    well.
    """

    def read(config: HFConfig, axis_sizes: Sizes) -> Rope:
        return read_rope(
            changed(config, partial_rotary_factor=config.get("partial_rotary_factor", share)),
            axis_sizes["head_dim"],
            max_positions=read_size(config, "max_position_embeddings", positions),
            default_theta=theta,
            allow_partial=True,
        )

    return read
