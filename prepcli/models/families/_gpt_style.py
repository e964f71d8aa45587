"""Parts that GPT-2 and similar families share: sizes, architecture, and buffers of old files. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Mapping

from prepcli.core.errors import invalid_config_error
from prepcli.models.architecture import FULL_ATTENTION, ArchConfig, read_activation, read_positive
from prepcli.models.parameters import MAX_AXIS_SIZE, MAX_LAYERS, HFConfig, read_size

GPT2_FIELD_NAMES = {
    "embed": "n_embd", "positions": "n_positions", "layers": "n_layer", "heads": "n_head", "mlp": "n_inner",
}  # fmt: skip


def sizes(
    config: HFConfig,
    vocab: int,
    positions: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int | None = None,
    field_names: Mapping[str, str] = GPT2_FIELD_NAMES,
) -> dict[str, int]:
    """Return the extent of each atom (named axis).

    A size is read from the common field name (`hidden_size`), or else from the name in the
    config class (`n_embd`).

    Args:
        config: Content of a config.json.
        vocab: Default of the config class, like the following sizes.
        positions: Maximum sequence length.
        embed: Width of the layers.
        layers: Number of layers.
        heads: Number of attention heads.
        mlp: Width of the MLP. None is four times `embed`.
        field_names: Atom -> name of its field in the config class. Without `mlp`, no field sets the width of the
            MLP.

    Raises:
        PrepError: A size is invalid, or the heads do not divide the width.
    """

    def read(atom: str, common_name: str, default: int, maximum: int = MAX_AXIS_SIZE) -> int:
        # `attribute_map` of transformers makes the common name an alias. The class sets its own field
        # first and the alias after it, so the alias wins if a config has both.
        class_value = read_size(config, field_names.get(atom, common_name), default, maximum)
        return read_size(config, common_name, class_value, maximum)

    embed = read("embed", "hidden_size", embed)
    heads = read("heads", "num_attention_heads", heads)
    if embed % heads:
        raise invalid_config_error(f"{heads} attention heads do not divide the width {embed}")
    mlp = mlp or 4 * embed
    if "mlp" in field_names:
        mlp = read_size(config, field_names["mlp"], mlp)
    return {
        "vocab": read_size(config, "vocab_size", vocab),
        "positions": read("positions", "max_position_embeddings", positions),
        "layers": read("layers", "num_hidden_layers", layers, MAX_LAYERS),
        "embed": embed,
        # Number of parts of a fused tensor. Families that store queries, keys and values apart
        # have no row with this atom.
        "qkv": 3,
        "heads": heads,
        "head_dim": embed // heads,
        "mlp": mlp,
    }


def check_n_embed(config: HFConfig) -> None:
    """Raise PrepError if `n_embed`, an older name of `hidden_size` in BLOOM and Falcon, has another value."""
    older = config.get("n_embed")
    width = config.get("hidden_size")
    if older is not None and width is not None and older != width:
        raise invalid_config_error(f"n_embed is {older!r:.60}, but hidden_size is {width!r:.60}")


def arch_config(
    config: HFConfig,
    axis_sizes: Mapping[str, int],
    activation: tuple[str, str] | str = ("activation_function", "gelu_new"),
) -> ArchConfig:
    """Return the architecture of GPT-2.

    Args:
        config: Content of a config.json.
        axis_sizes: Size of each named axis (atom), e.g. `{"embed": 768}`.
        activation: Config field of the activation, and its default. Or an activation without a field.
    """
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


def mask_buffers(attention: str) -> dict[str, str]:
    """Return the buffers of masks that old files store in the attention module of this name."""
    return {
        # Not a bias: the biases of the model have a projection in their names, e.g. attn.c_attn.bias.
        f"{attention}.bias": "causal mask",
        f"{attention}.masked_bias": "value of masked scores",
    }
