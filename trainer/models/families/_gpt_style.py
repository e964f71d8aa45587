"""What the relatives of GPT-2 share: names of config fields, choices of layers, buffers of old files. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.models.architecture import FULL_ATTENTION, ArchConfig, read_activation, read_positive
from trainer.models.errors import PrepError
from trainer.models.parameters import MAX_AXIS_SIZE, MAX_LAYERS, HFConfig, read_size

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
    """Atom -> extent, with a class's defaults where a field is absent; `names` are what the class calls the fields, of
    two names the newer one wins. An `mlp` of None is four times the width. PrepError where heads do not divide it."""

    def own(atom: str, newer: str, default: int, most: int = MAX_AXIS_SIZE) -> int:
        return read_size(config, newer, read_size(config, field_names.get(atom, newer), default, most), most)

    embed, heads = own("embed", "hidden_size", embed), own("heads", "num_attention_heads", heads)
    if embed % heads:
        raise PrepError(
            "config.json makes no sense", f"its width is {embed}, which {heads} attention heads do not divide"
        )
    return {
        "vocab": read_size(config, "vocab_size", vocab),
        "positions": own("positions", "max_position_embeddings", positions),
        "layers": own("layers", "num_hidden_layers", layers, MAX_LAYERS),
        "embed": embed,
        "qkv": 3,
        "heads": heads,
        "head_dim": embed // heads,
        "mlp": read_size(config, field_names["mlp"], mlp or 4 * embed),
    }


def arch_config(
    config: HFConfig, axis_sizes: Mapping[str, int], activation: tuple[str, str] = ("activation_function", "gelu_new")
) -> ArchConfig:
    """GPT-2's, for these sizes; `act`: the field that has the activation, and what it is where that does not say."""
    return ArchConfig(
        norm="layer",
        norm_eps=read_positive(config, "layer_norm_epsilon", 1e-5),
        activation=read_activation(config, *activation),
        has_gated_mlp=False,
        attn_scale=axis_sizes["head_dim"] ** -0.5,
        sliding_windows=(FULL_ATTENTION,) * axis_sizes["layers"],
        rope=None,
        max_positions=axis_sizes["positions"],
        init_std=read_positive(config, "initializer_range", 0.02),
    )


def mask_buffers(attention: str) -> dict[str, str]:
    """Buffers that old files keep in the module of attention."""
    return {f"{attention}.bias": "causal mask", f"{attention}.masked_bias": "value of masked scores"}
