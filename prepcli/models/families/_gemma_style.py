"""Parts that Gemma 3n and Gemma 4 share: inputs of layers, heads, and keys of earlier layers. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prepcli.core.errors import invalid_config_error
from prepcli.models.families import _grouped_style
from prepcli.models.parameters import ALWAYS, HFConfig, Parameter, read_size
from prepcli.models.rows import Condition, Parameters, linear, matrix, rms_norm

# Defaults of the config classes for per-layer embeddings: each layer has its own embedding of a token.
LAYER_VOCAB = 262144
LAYER_INPUT = 256


def layer_input_sizes(config: HFConfig, layers: int) -> dict[str, int]:
    """Return the sizes of the per-layer embeddings (layer inputs), by axis name.

    Raises:
        PrepError: A size is invalid.
    """
    return {
        "input_layers": layers,
        "layer_vocab": read_size(config, "vocab_size_per_layer_input", LAYER_VOCAB),
        "layer_input": read_size(config, "hidden_size_per_layer_input", LAYER_INPUT),
    }


def layer_inputs(condition: Condition = ALWAYS) -> Parameters:
    """Return the parameters outside of layers that layer inputs are computed from.

    Args:
        condition: When the model has layer inputs.
    """
    # A row of each tensor has the parts of all layers, one after another.
    parts = "(input_layers layer_input)"
    table = "input_layers layer_vocab layer_input <- embed_tokens_per_layer.weight: layer_vocab {}"
    projection = "input_layers layer_input embed <- per_layer_model_projection.weight: {} embed"
    norm = "layer_input <- per_layer_projection_norm.weight: layer_input"
    return {
        "embed.layer_tokens": Parameter(table.format(parts), condition),
        **matrix("layer_inputs.projection", projection.format(parts), condition=condition),
        "layer_inputs.norm.scale": Parameter(norm, condition),
    }


def layer_input_gate(condition: Condition = ALWAYS) -> Parameters:
    """Return the parameters of a layer that add its input to the residual stream.

    Args:
        condition: When the model has layer inputs.
    """
    gate = "layer_input embed <- per_layer_input_gate.weight: layer_input embed"
    output = "embed layer_input <- per_layer_projection.weight: embed layer_input"
    norm = "embed <- post_per_layer_input_norm.weight: embed"
    return {
        **matrix("layer_input_gate.gate", gate, condition=condition),
        **matrix("layer_input_gate.output", output, condition=condition),
        "layer_input_gate.output_norm.scale": Parameter(norm, condition),
    }


def queries(bias: Condition, head_dim: str = "head_dim") -> Parameters:
    """Return the parameters of the query projection, the query norm and the output projection.

    Args:
        bias: When projections have a bias.
        head_dim: Atom of the elements of a head.
    """
    query = f"heads {head_dim} embed <- self_attn.q_proj.weight: (heads {head_dim}) embed"
    output = f"embed heads {head_dim} <- self_attn.o_proj.weight: embed (heads {head_dim})"
    return {
        **linear("attn.q", query, bias),
        **linear("attn.o", output, bias),
        **rms_norm("attn.q_norm", f"{head_dim} <- self_attn.q_norm.weight: {head_dim}"),
    }


def keys_and_values(
    bias: Condition,
    kv_heads: str = "kv_heads",
    head_dim: str = "head_dim",
    has_values: Callable[[HFConfig], bool] | None = None,
) -> Parameters:
    """Return the parameters of the key projection, the key norm and the value projection.

    Args:
        bias: When projections have a bias.
        kv_heads: Atom of the key and value heads.
        head_dim: Atom of the elements of a head.
        has_values: When values have a projection. None means always.
    """
    row = "{heads} embed <- self_attn.{name}_proj.weight: ({heads}) embed"
    heads = f"{kv_heads} {head_dim}"
    values = linear("attn.v", row.format(heads=heads, name="v"), bias)
    if has_values is not None:
        values = _grouped_style.under_condition(values, has_values)
    return {
        **linear("attn.k", row.format(heads=heads, name="k"), bias),
        **values,
        **rms_norm("attn.k_norm", f"{head_dim} <- self_attn.k_norm.weight: {head_dim}"),
    }


def gated_mlp(mlp: str = "mlp") -> Parameters:
    """Return the parameters of a gated MLP, by the atom of its hidden units."""
    return {
        **matrix("mlp.gate", f"{mlp} embed <- mlp.gate_proj.weight: {mlp} embed"),
        **matrix("mlp.up", f"{mlp} embed <- mlp.up_proj.weight: {mlp} embed"),
        **matrix("mlp.down", f"embed {mlp} <- mlp.down_proj.weight: embed {mlp}"),
    }


def read_reusing_layers(config: HFConfig, windows: Sequence[int], default: int) -> tuple[int, ...]:
    """Return the layers that attend to the keys and values of an earlier layer: the last `num_kv_shared_layers`.

    Args:
        config: Content of a config.json.
        windows: Sliding window of each layer.
        default: Number of these layers if the config does not say.

    Raises:
        PrepError: The number is invalid, or no earlier layer has the window of one of these layers.
    """
    count = config.get("num_kv_shared_layers", default)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < len(windows):
        why = f"num_kv_shared_layers is {count!r:.60}, it must be an integer from 0 to {len(windows) - 1}"
        raise invalid_config_error(why)
    first = len(windows) - count
    if not {*windows[first:]} <= {*windows[:first]}:
        why = f"no layer before layer {first} has the attention of a layer from {first} on"
        raise invalid_config_error(f"num_kv_shared_layers is {count}, but {why}")
    return tuple(range(first, len(windows)))
