"""Parts that families with experts share: rows of dense and MoE layers, shared experts, and routers. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prepcli.algebra.axis_map import DENSE_LAYERS, LAYERS, SPARSE_LAYERS
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models import rows
from prepcli.models.architecture import ArchConfig
from prepcli.models.dropout_config import ATTENTION_DROPOUT, DropoutFields
from prepcli.models.families import _grouped_style, _llama_style
from prepcli.models.families._grouped_style import LayerGroup, LayerNumbers, Sizes
from prepcli.models.parameters import (
    Family,
    HFConfig,
    Parameter,
    read_count,
    read_size,
)
from prepcli.models.rows import Parameters, matrix

# Values in `mlp_layer_types`.
MLP_LAYER_TYPES = ("dense", "sparse")


def build_family(
    name: str,
    sizes: Sizes,
    arch_config: Callable[[HFConfig], ArchConfig],
    *,
    layer: Parameters,
    moe: Parameters,
    dense_layers: LayerNumbers | None = None,
    dense_mlp: Parameters | None = None,
    tokens: str = "embed_tokens.weight",
    tied_by_default: bool = False,
    dropped: Mapping[str, str] = _llama_style.LEGACY_BUFFERS,
    dropout_fields: DropoutFields = ATTENTION_DROPOUT,
    default_prediction_layers: int = 0,
) -> Family:
    """Return a family with LLaMA's tensor names, and experts in some or all layers.

    If all layers have experts, their parameters are in `layers.mlp`. Otherwise they are in
    `sparse_layers.mlp` and `dense_layers.mlp`.

    Args:
        name: `model_type` of its config.json.
        sizes: Atom -> extent.
        arch_config: The architecture.
        layer: Parameters of a layer except its MLP.
        moe: Parameters of the MLP of an MoE layer.
        dense_layers: Numbers of the layers with a dense MLP. None if all layers have experts.
        dense_mlp: Parameters of the MLP of a dense layer. None means DENSE_MLP.
        tokens: Tensor of the token embeddings.
        tied_by_default: Whether the head is tied if the config does not say.
        dropped: Pattern of tensors to ignore -> their description.
        dropout_fields: Fields of the config with dropout rates.
        default_prediction_layers: Number of layers for multi-token prediction if the config does not state it.
    """
    layer_groups: dict[str, LayerGroup] = {}
    if dense_layers is None:
        layer = {**layer, **moe}
    else:
        sparse_layers = partial(_sparse_layers, sizes, dense_layers)
        layer_groups = {
            DENSE_LAYERS: LayerGroup(dense_mlp or DENSE_MLP, dense_layers, may_be_all=False),
            SPARSE_LAYERS: LayerGroup(moe, sparse_layers),
        }
    return _grouped_style.build_family(
        name,
        sizes,
        arch_config,
        layer=layer,
        groups=layer_groups,
        tokens=tokens,
        tied_by_default=tied_by_default,
        dropped=dropped,
        dropout_fields=dropout_fields,
        default_prediction_layers=default_prediction_layers,
    )


def _sparse_layers(sizes: Sizes, dense_layers: LayerNumbers, config: HFConfig) -> tuple[int, ...]:
    """Return the numbers of the layers with experts."""
    dense = frozenset(dense_layers(config))
    return tuple(layer for layer in range(sizes(config)[LAYERS]) if layer not in dense)


def dense_layer_mlp(module: str) -> Parameters:
    """Return the parameters of the MLP of a dense layer in a model with experts, by the name of its module."""
    return {
        **matrix("mlp.gate", f"dense_mlp embed <- {module}.gate_proj.weight: dense_mlp embed"),
        **matrix("mlp.up", f"dense_mlp embed <- {module}.up_proj.weight: dense_mlp embed"),
        **matrix("mlp.down", f"embed dense_mlp <- {module}.down_proj.weight: embed dense_mlp"),
    }


DENSE_MLP = dense_layer_mlp("mlp")


def layer_sizes(layers: int, dense: tuple[int, ...]) -> dict[str, int]:
    """Return the number of layers of each kind.

    Raises:
        PrepError: No layer has experts.
    """
    if not dense:
        return {}
    if len(dense) == layers:
        raise invalid_config_error(f"all {layers} layers are dense, so that none has experts")
    return {DENSE_LAYERS: len(dense), SPARSE_LAYERS: layers - len(dense)}


def read_first_dense_layers(config: HFConfig, layers: int, default: int) -> tuple[int, ...]:
    """Return the dense layers of DeepSeek's config: the first `first_k_dense_replace` ones.

    Raises:
        PrepError: The field is not a number of layers.
    """
    count = read_count(config, "first_k_dense_replace", default)
    return tuple(range(min(count, layers)))


def read_dense_layers_by_step(config: HFConfig, layers: int) -> tuple[int, ...]:
    """Return the dense layers of Qwen's config, by `mlp_only_layers` and `decoder_sparse_step`.

    Raises:
        PrepError: A field is invalid.
    """
    listed = config.get("mlp_only_layers") or []
    step = read_size(config, "decoder_sparse_step", 1)
    if not isinstance(listed, list):
        why = f"mlp_only_layers is {listed!r:.60}, it must be a list of layers"
        raise invalid_config_error(why)
    # The condition of Qwen3MoeDecoderLayer. E.g. a step of 2 gives layers 1, 3 and 5 experts, and
    # layers 0, 2 and 4 a dense MLP.
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)


def read_dense_layers_by_type(
    config: HFConfig, layers: int, default: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the dense layers of a config with the type of each MLP in `mlp_layer_types`.

    Args:
        config: Content of a config.json.
        layers: Number of layers.
        default: The dense layers if the field is absent or null.

    Raises:
        PrepError: The list has another length or other names.
    """
    layer_types = config.get("mlp_layer_types")
    if layer_types is None:
        return default
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != layers
        or any(name not in MLP_LAYER_TYPES for name in layer_types)
    ):
        why = f"mlp_layer_types is {layer_types!r:.80}, it must give {layers} of dense and sparse"
        raise invalid_config_error(why)
    return tuple(layer for layer, name in enumerate(layer_types) if name == MLP_LAYER_TYPES[0])


def check_first_dense_layers(config: HFConfig, dense_layers: tuple[int, ...]) -> None:
    """Raise PrepError if `first_k_dense_replace` contradicts the dense layers of the class.

    transformers reads only `mlp_layer_types`. Published files of such models have the number too.
    """
    first = config.get("first_k_dense_replace")
    if first is not None and first != len(dense_layers):
        why = f"config.json has {first!r:.60}, and its mlp_layer_types make {len(dense_layers)} layers dense"
        raise unsupported_config_error("this `first_k_dense_replace` is not supported", why)


EXPERTS = _llama_style.experts(
    gate="mlp.experts.{experts}.gate_proj.weight",
    up="mlp.experts.{experts}.up_proj.weight",
    down="mlp.experts.{experts}.down_proj.weight",
    router="mlp.gate.weight",
)


def correction(tensor: str) -> Parameter:
    """Return the parameter of the correction of a router's scores. It has no gradient.

    Args:
        tensor: Name and dims of its tensor.
    """
    return Parameter(f"experts <- {tensor}")


def shared_experts(module: str, condition: rows.Condition = rows.ALWAYS) -> Parameters:
    """Return the parameters of shared experts, which are one gated MLP.

    Args:
        module: Name of the module.
        condition: When they exist.
    """
    row = "{} <- {}.{}_proj.weight: {}"
    wide = "shared_mlp embed"
    narrow = "embed shared_mlp"
    return {
        **matrix("mlp.shared.gate", row.format(wide, module, "gate", wide), condition=condition),
        **matrix("mlp.shared.up", row.format(wide, module, "up", wide), condition=condition),
        **matrix(
            "mlp.shared.down", row.format(narrow, module, "down", narrow), condition=condition
        ),
    }


# Experts of Qwen2-MoE: shared experts are scaled by the sigmoid of a gate.
GATED_SHARED_EXPERTS: Parameters = {
    **EXPERTS,
    **shared_experts("mlp.shared_expert"),
    **matrix("mlp.shared_gate", "embed <- mlp.shared_expert_gate.weight: 1 embed"),
}
