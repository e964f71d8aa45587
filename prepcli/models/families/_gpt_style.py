"""Parts that GPT-2 and similar families share: sizes, architecture, axis-map rows, old buffers. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Unpack

from prepcli.core.errors import invalid_config_error
from prepcli.models.architecture import FULL_ATTENTION, ArchConfig, read_activation, read_positive
from prepcli.models.declaration import Settings, Sizes, declare
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.parameters import (
    ALWAYS,
    MAX_AXIS_SIZE,
    MAX_LAYERS,
    Condition,
    Family,
    HFConfig,
    read_size,
)
from prepcli.models.rows import Parameters, embedding, fused_qkv, layer_norm, linear, matrix, stack

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


def mlp(up: str, down: str, bias: Condition | None = ALWAYS) -> Parameters:
    """Return the parameters of an MLP without a gate."""
    return {
        **linear("mlp.up", f"mlp embed <- {up}.weight: mlp embed", bias),
        **linear("mlp.down", f"embed mlp <- {down}.weight: embed mlp", bias),
    }


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


def multi_query_qkv(module: str, bias: Condition | None = ALWAYS) -> Parameters:
    """Return queries, keys and values of one tensor: all queries, then the keys and the values of one head."""
    parameters: Parameters = {}
    for number, (projection, heads) in enumerate(zip("qkv", ("heads", "kv_heads", "kv_heads"))):
        parts = ["heads head_dim", "kv_heads head_dim", "kv_heads head_dim"]
        parts[number] = f">{parts[number]}"
        row = f"{heads} head_dim embed <- {module}.weight: ({' | '.join(parts)}) embed"
        parameters |= linear(f"attn.{projection}", row, bias)
    return parameters


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


def positive(field: str, default: float) -> Callable[[HFConfig, Sizes], float]:
    """Return the reader of a config field with a positive number."""
    return lambda config, sizes: read_positive(config, field, default)
