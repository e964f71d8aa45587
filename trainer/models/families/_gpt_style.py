"""What the relatives of GPT-2 share: names of config fields, choices of layers, buffers of old files. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.models.architecture import ALL_BEFORE, Traits, activation, positive
from trainer.models.errors import PrepError
from trainer.models.parameters import LARGEST, MOST_LAYERS, Config, size

GPT2_NAMES = {
    "embed": "n_embd", "positions": "n_positions", "layers": "n_layer", "heads": "n_head", "mlp": "n_inner",
}  # fmt: skip


def sizes(
    config: Config,
    vocab: int,
    positions: int,
    embed: int,
    layers: int,
    heads: int,
    mlp: int | None = None,
    names: Mapping[str, str] = GPT2_NAMES,
) -> dict[str, int]:
    """Atom -> extent, with a class's defaults where a field is absent; `names` are what the class calls the fields, of
    two names the newer one wins. An `mlp` of None is four times the width. PrepError where heads do not divide it."""

    def own(atom: str, newer: str, default: int, most: int = LARGEST) -> int:
        return size(config, newer, size(config, names.get(atom, newer), default, most), most)

    embed, heads = own("embed", "hidden_size", embed), own("heads", "num_attention_heads", heads)
    if embed % heads:
        raise PrepError(
            "config.json makes no sense", f"its width is {embed}, which {heads} attention heads do not divide"
        )
    return {
        "vocab": size(config, "vocab_size", vocab),
        "positions": own("positions", "max_position_embeddings", positions),
        "layers": own("layers", "num_hidden_layers", layers, MOST_LAYERS),
        "embed": embed,
        "qkv": 3,
        "heads": heads,
        "head_dim": embed // heads,
        "mlp": size(config, names["mlp"], mlp or 4 * embed),
    }


def traits(
    config: Config, found: Mapping[str, int], act: tuple[str, str] = ("activation_function", "gelu_new")
) -> Traits:
    """GPT-2's, for these sizes; `act`: the field that has the activation, and what it is where that does not say."""
    return Traits(
        norm="layer",
        norm_eps=positive(config, "layer_norm_epsilon", 1e-5),
        activation=activation(config, *act),
        gated=False,
        score_scale=found["head_dim"] ** -0.5,
        windows=(ALL_BEFORE,) * found["layers"],
        rope=None,
        positions=found["positions"],
        init_std=positive(config, "initializer_range", 0.02),
    )


def masks(attention: str) -> dict[str, str]:
    """Buffers that old files keep in the module of attention."""
    return {f"{attention}.bias": "causal mask", f"{attention}.masked_bias": "value of masked scores"}
