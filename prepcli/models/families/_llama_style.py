"""Parts that LLaMA and similar families share: sizes, architecture, axis-map rows, old buffers. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Unpack

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models import rows
from prepcli.models.architecture import (
    FULL_ATTENTION,
    ArchConfig,
    read_activation,
    read_positive,
    read_sliding_windows,
    uniform_windows,
)
from prepcli.models.declaration import (
    AliasedConfig,
    Choices,
    Settings,
    Sizes,
    changed,
    declare,
)
from prepcli.models.parameters import (
    MAX_LAYERS,
    NEVER,
    Condition,
    Family,
    HFConfig,
    Parameter,
    if_set,
    read_count,
    read_size,
)
from prepcli.models.rope_config import Rope, read_rope
from prepcli.models.rows import (
    Parameters,
    embedding,
    layer_norm,
    linear,
    matrix,
    rms_norm,
    stack,
)

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
        config = AliasedConfig(config, aliases) if aliases else config
        found = sizes(config, **defaults)
        return {**found, **more_sizes(config, found)} if more_sizes else found

    def read_arch(config: HFConfig, axis_sizes: Sizes) -> ArchConfig:
        config = AliasedConfig(config, aliases) if aliases else config
        return arch_config(
            config,
            axis_sizes,
            max_positions=positions,
            rope_theta=rope_theta,
            rope=rope(config, axis_sizes) if rope else None,
            activation=(activation_field, activation) if activation_field else activation,
            norm_eps=(norm_eps_field, norm_eps),
            init_std=init_std,
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

    Args:
        config: Content of a config.json.
        vocab: Default of the config class, like the following sizes.
        embed: Width of the layers.
        mlp: Width of the MLP.
        layers: Number of layers.
        heads: Number of attention heads.
        kv_heads: Number of key and value heads. If it is None, or the config has null, there are as
            many as heads.
        head_dim: Width of a head. If it is None, or the config has null, it is `embed // heads`.

    Raises:
        PrepError: A size is invalid.
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


def arch_config(
    config: HFConfig,
    axis_sizes: Mapping[str, int],
    max_positions: int,
    rope_theta: float = 10_000.0,
    rope: Rope | None = None,
    activation: tuple[str, str] | str = ("hidden_act", "silu"),
    norm_eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    init_std: float = 0.02,
) -> ArchConfig:
    """Return the architecture of LLaMA.

    Args:
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom), e.g. `{"embed": 768}`.
        max_positions: Default of `max_position_embeddings`.
        rope_theta: Default of the rotary base.
        rope: Rotary embedding, if the family has read it already.
        activation: Config field of the activation, and its default. Or an activation without a field.
        norm_eps: Config field of the epsilon of norms, and its default.
        init_std: Default of `initializer_range`.

    Raises:
        PrepError: The config is invalid, or the key and value heads do not divide the query heads.
    """
    check_kv_heads(axis_sizes)
    max_positions = read_size(config, "max_position_embeddings", max_positions)
    if isinstance(activation, tuple):
        activation = read_activation(config, *activation)
    return ArchConfig(
        norm="rms",
        norm_eps=read_positive(config, *norm_eps),
        activation=activation,
        has_gated_mlp=True,
        attn_scale=axis_sizes["head_dim"] ** -0.5,
        sliding_windows=(FULL_ATTENTION,) * axis_sizes["layers"],
        rope=rope
        or read_rope(
            config, axis_sizes["head_dim"], max_positions=max_positions, default_theta=rope_theta
        ),
        max_positions=max_positions,
        init_std=read_positive(config, "initializer_range", init_std),
    )


def check_kv_heads(axis_sizes: Mapping[str, int]) -> None:
    """Raise PrepError if the key and value heads do not divide the query heads."""
    heads = axis_sizes["heads"]
    kv_heads = axis_sizes["kv_heads"]
    if heads % kv_heads:
        why = f"num_key_value_heads is {kv_heads}, it must divide num_attention_heads, which is {heads}"
        raise invalid_config_error(why)


def read_partial_rope(
    config: HFConfig,
    head_dim: int,
    *,
    default_share: float,
    max_positions: int,
    default_theta: float = 10_000.0,
) -> Rope:
    """Read the rotary embedding of a family that rotates a part of each head.

    Args:
        config: Content of a config.json.
        head_dim: Width of a head.
        default_share: Share of a head that rotates if the config has no `partial_rotary_factor`.
        max_positions: Default of `max_position_embeddings`.
        default_theta: Default of the rotary base.
    """
    return read_rope(
        changed(config, partial_rotary_factor=config.get("partial_rotary_factor", default_share)),
        head_dim,
        max_positions=read_size(config, "max_position_embeddings", max_positions),
        default_theta=default_theta,
        allow_partial=True,
    )


def read_upper_layer_windows(config: HFConfig, layers: int) -> tuple[int, ...]:
    """Return the windows of a Qwen model: layers from `max_window_layers` on slide if `use_sliding_window` is true.

    Raises:
        PrepError: A field is invalid.
    """
    # 4096 is the default of Qwen2Config and Qwen3Config.
    window = config.get("sliding_window", 4096)
    if not config.get("use_sliding_window"):
        window = None
    first = read_max_window_layers(config)
    return read_sliding_windows(config, layers, window, lambda layer: layer >= first)


def read_max_window_layers(config: HFConfig, default: int = 28) -> int:
    """Return the layer at which the windows of a Qwen model change.

    Args:
        config: Content of a config.json.
        default: Default of the config class, 28 in those of Qwen.

    Raises:
        PrepError: `max_window_layers` is not a number of layers.
    """
    return read_count(config, "max_window_layers", default)


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
    """Return the parameters of attention, with the conditions of `rows.attention`."""
    return rows.attention(
        "self_attn.{}_proj", out_name="o", kv_heads="kv_heads", bias=bias, out_bias=out_bias
    )


def gated_mlp(
    bias: Condition | None = NEVER,
    module: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    mlp: str = "mlp",
) -> Parameters:
    """Return the parameters of a gated MLP.

    Args:
        bias: When its matrices have a bias.
        module: Name of its module.
        names: Names of gate, up and down in the module.
        mlp: Atom of its hidden units.
    """
    gate, up, down = (f"{module}.{name}.weight" for name in names)
    return {
        **linear("mlp.gate", f"{mlp} embed <- {gate}: {mlp} embed", bias),
        **linear("mlp.up", f"{mlp} embed <- {up}: {mlp} embed", bias),
        **linear("mlp.down", f"embed {mlp} <- {down}: embed {mlp}", bias),
    }


def plain_mlp(bias: Condition | None = NEVER) -> Parameters:
    """Return the parameters of an MLP without a gate, whose matrices have a bias under the condition."""
    return {
        **linear("mlp.up", "mlp embed <- mlp.up_proj.weight: mlp embed", bias),
        **linear("mlp.down", "embed mlp <- mlp.down_proj.weight: embed mlp", bias),
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


def experts(gate: str, up: str, down: str, router: str) -> Parameters:
    """Return the parameters of an MoE layer.

    The alternates are the fused tensors of transformers 5: one per matrix for all experts, gate
    before up.

    Args:
        gate: Name of an expert's gate matrix, with `{experts}` in place of its index.
        up: Name of its up matrix.
        down: Name of its down matrix.
        router: Name of the router's matrix.
    """
    # transformers 5 names the router `mlp.gate` in both families with experts.
    row, fused_row = (
        f"experts embed <- {name}: experts embed" for name in (router, "mlp.gate.weight")
    )
    # E.g. with mlp 4 the fused tensor has 8 rows per expert: 0 to 3 are the gate, 4 to 7 are up.
    fused = "experts mlp embed <- mlp.experts.gate_up_proj: experts (gate_up={} mlp) embed"
    return {
        # An alternate with the same tensor would look like a parameter that is stored in two forms.
        **matrix("mlp.router", row, alternate="" if row == fused_row else fused_row),
        **matrix("mlp.gate", f"experts mlp embed <- {gate}: mlp embed", alternate=fused.format(0)),
        **matrix("mlp.up", f"experts mlp embed <- {up}: mlp embed", alternate=fused.format(1)),
        **matrix(
            "mlp.down",
            f"experts embed mlp <- {down}: embed mlp",
            alternate="experts embed mlp <- mlp.experts.down_proj: experts embed mlp",
        ),
    }


def read_rotating_layers(config: HFConfig, layers: int) -> list[bool]:
    """Return whether the queries and keys of each layer rotate: those with a 1 in `no_rope_layers`.

    Without the list, every `no_rope_layer_interval`-th layer does not rotate.

    Raises:
        PrepError: The list has another length or other values.
    """
    listed = config.get("no_rope_layers")
    # Published configs of Llama 4 have an empty list.
    if not listed:
        interval = read_size(config, "no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(value not in (0, 1) for value in listed)
    ):
        why = f"no_rope_layers is {listed!r:.80}, it must give {layers} of 0 and 1"
        raise invalid_config_error(why)
    return [value == 1 for value in listed]


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


def partial_rope(share: float, positions: int) -> Callable[[HFConfig, Sizes], Rope]:
    """Return the reader of the rotary embedding of a family that rotates a part of each head.

    Args:
        share: Share of a head that rotates if the config has no `partial_rotary_factor`.
        positions: Default of `max_position_embeddings`.
    """

    def read(config: HFConfig, axis_sizes: Sizes) -> Rope:
        return read_partial_rope(
            config, axis_sizes["head_dim"], default_share=share, max_positions=positions
        )

    return read
