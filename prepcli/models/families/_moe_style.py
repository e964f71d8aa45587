"""Parts that families with experts share: the groups of their layers, rows of experts, and routers. No I/O, no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from prepcli.algebra.axis_map import DENSE_LAYERS, SPARSE_LAYERS
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import read_positive
from prepcli.models.declaration import (
    NO_CHOICES,
    Choices,
    LayerGroup,
    LayerNumbers,
    Parameters,
    Sizes,
    matrix,
)
from prepcli.models.families._llama_style import gated_mlp, llama_like, read_experts_per_token
from prepcli.models.layer_config import Router
from prepcli.models.parameters import (
    ALWAYS,
    Condition,
    Family,
    HFConfig,
    Parameter,
    read_count,
    read_size,
)

# Config and sizes -> a size.
ReadSize = Callable[[HFConfig, Sizes], int]
# Values in `mlp_layer_types`.
MLP_LAYER_TYPES = ("dense", "sparse")


# --- Rows


def expert_matrices(module: str, names: tuple[str, str, str], fused_module: str) -> Parameters:
    """Return the matrices of numbered experts.

    The alternates are the fused tensors of transformers 5: one per matrix for all experts, gate before up.

    Args:
        module: Module of the experts.
        names: Names of gate, up and down in an expert.
        fused_module: Module of the fused tensors.
    """
    gate, up, down = (f"{module}.{{experts}}.{name}.weight" for name in names)
    # E.g. with mlp 4 the fused tensor has 8 rows per expert: 0 to 3 are the gate, 4 to 7 are up.
    fused = f"experts mlp embed <- {fused_module}.gate_up_proj: experts (gate_up={{}} mlp) embed"
    fused_down = f"experts embed mlp <- {fused_module}.down_proj: experts embed mlp"
    return {
        **matrix("mlp.gate", f"experts mlp embed <- {gate}: mlp embed", alternate=fused.format(0)),
        **matrix("mlp.up", f"experts mlp embed <- {up}: mlp embed", alternate=fused.format(1)),
        **matrix("mlp.down", f"experts embed mlp <- {down}: embed mlp", alternate=fused_down),
    }


def experts(
    router: str = "mlp.gate.weight",
    module: str = "mlp.experts",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Parameters:
    """Return the parameters of an MoE layer. transformers 5 gives its tensors the names of the module `mlp`."""
    row = "experts embed <- {}: experts embed"
    # An alternate with the same tensor would look like a parameter that is stored in two forms.
    alternate = "" if router == "mlp.gate.weight" else row.format("mlp.gate.weight")
    return {
        **matrix("mlp.router", row.format(router), alternate=alternate),
        **expert_matrices(module, names, "mlp.experts"),
    }


def fused_experts(
    gate_up: str = "input_linear.weight",
    down: str = "output_linear.weight",
    router: str = "router.layer.weight",
) -> Parameters:
    """Return the parameters of Granite's experts, one tensor per matrix of all of them. The gate comes before up."""
    row = f"experts mlp embed <- block_sparse_moe.{gate_up}: experts (gate_up={{}} mlp) embed"
    return {
        **matrix("mlp.router", f"experts embed <- block_sparse_moe.{router}: experts embed"),
        **matrix("mlp.gate", row.format(0)),
        **matrix("mlp.up", row.format(1)),
        **matrix("mlp.down", f"experts embed mlp <- block_sparse_moe.{down}: experts embed mlp"),
    }


def correction(tensor: str, alternate: str = "") -> Parameter:
    """Return the parameter of the correction of a router's scores. It has no gradient.

    `alternate` is the tensor in other files, or "". Both are a name with dims.
    """
    return Parameter(
        f"experts <- {tensor}", alternate=f"experts <- {alternate}" if alternate else ""
    )


def shared_experts(module: str, condition: Condition = ALWAYS) -> Parameters:
    """Return the parameters of shared experts, which are one gated MLP."""
    parameters = gated_mlp(module=module, path="mlp.shared", mlp="shared_mlp")
    for path, parameter in parameters.items():
        parameters[path] = dataclasses.replace(parameter, condition=condition)
    return parameters


def granite_shared_mlp(path: str, mlp: str, condition: Condition = ALWAYS) -> Parameters:
    """Return the parameters of Granite's shared MLP, by the atom of its hidden units. The gate comes before up."""
    gate_up = f"{mlp} embed <- shared_mlp.input_linear.weight: (gate_up={{}} {mlp}) embed"
    down = f"embed {mlp} <- shared_mlp.output_linear.weight: embed {mlp}"
    return {
        **matrix(f"{path}.gate", gate_up.format(0), condition=condition),
        **matrix(f"{path}.up", gate_up.format(1), condition=condition),
        **matrix(f"{path}.down", down, condition=condition),
    }


DENSE_MLP = gated_mlp(mlp="dense_mlp")
EXPERTS = experts()
# Experts of Mixtral: w2(silu(w1 x) * w3 x), so that w3 is the up projection.
NUMBERED_EXPERTS = experts(
    "block_sparse_moe.gate.weight", "block_sparse_moe.experts", ("w1", "w3", "w2")
)
# Experts of Qwen2-MoE: shared experts are scaled by the sigmoid of a gate.
GATED_SHARED_EXPERTS: Parameters = {
    **EXPERTS,
    **shared_experts("mlp.shared_expert"),
    **matrix("mlp.shared_gate", "embed <- mlp.shared_expert_gate.weight: 1 embed"),
}
# Experts of DeepSeek-V3.
CORRECTION = "mlp.router.correction.bias"
CORRECTED_EXPERTS: Parameters = {
    **EXPERTS,
    CORRECTION: correction("mlp.gate.e_score_correction_bias: experts"),
    **shared_experts("mlp.shared_experts"),
}


# --- Sizes


def read_experts(
    config: HFConfig,
    default: int,
    fields: tuple[str, ...] = ("num_local_experts", "n_routed_experts"),
) -> int:
    """Return the number of experts, from the first of the fields that the config has."""
    count = default
    for field in reversed(fields):
        count = read_size(config, field, count)
    return count


def shared_width(default: int) -> ReadSize:
    """Return the reader of `shared_expert_intermediate_size`."""
    return lambda config, sizes: read_size(config, "shared_expert_intermediate_size", default)


def shared_count(field: str, default: int) -> ReadSize:
    """Return the reader of the width of as many experts as a field says."""
    return lambda config, sizes: sizes["mlp"] * read_size(config, field, default)


# --- Dense layers


def first_dense_layers(default: int) -> LayerNumbers:
    """Return the reader of DeepSeek's dense layers: the first `first_k_dense_replace` ones."""

    def read(config: HFConfig, layers: int) -> tuple[int, ...]:
        return tuple(range(min(read_count(config, "first_k_dense_replace", default), layers)))

    return read


def read_dense_layers_by_step(config: HFConfig, layers: int) -> tuple[int, ...]:
    """Return the dense layers of Qwen's config, by `mlp_only_layers` and `decoder_sparse_step`."""
    listed = config.get("mlp_only_layers") or []
    step = read_size(config, "decoder_sparse_step", 1)
    if not isinstance(listed, list):
        why = f"mlp_only_layers is {listed!r:.60}, it must be a list of layers"
        raise invalid_config_error(why)
    # The condition of Qwen3MoeDecoderLayer. E.g. a step of 2 gives layers 1, 3 and 5 experts, and
    # layers 0, 2 and 4 a dense MLP.
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)


def read_dense_layers_by_type(
    config: HFConfig, layers: int, default: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return the dense layers of a config with the type of each MLP in `mlp_layer_types`.

    They are the `default` ones if the field is absent or null.
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


def read_listed_or_first_layer(config: HFConfig, layers: int) -> tuple[int, ...]:
    """Return the dense layers by `mlp_layer_types`, by default the first layer."""
    return read_dense_layers_by_type(config, layers, default=(0,))


def check_first_dense_layers(config: HFConfig, sizes: Sizes) -> None:
    """Raise PrepError if `first_k_dense_replace` contradicts the dense layers of `read_listed_or_first_layer`.

    transformers reads only `mlp_layer_types`. Published files of such models have the number too.
    """
    first = config.get("first_k_dense_replace")
    dense_layers = read_listed_or_first_layer(config, sizes["layers"])
    if first is not None and first != len(dense_layers):
        why = f"config.json has {first!r:.60}, and its mlp_layer_types make {len(dense_layers)} layers dense"
        raise unsupported_config_error("this `first_k_dense_replace` is not supported", why)


# --- Routers


def normalized_router(default: bool, **fields: Any) -> Choices:
    """Return the choice of a router whose weights are normalized if `norm_topk_prob` is true.

    `default` is the default of the field. `fields` are other fields of the router.
    """
    return {
        "router": lambda config, sizes: Router(
            is_normalized=bool(config.get("norm_topk_prob", default)), **fields
        )
    }


def grouped_router(
    config: HFConfig,
    experts: int,
    experts_per_token: int,
    *,
    groups: tuple[int, int],
    scale: float,
    is_normalized: bool = True,
) -> Router:
    """Return the router of DeepSeek-V3: sigmoid scores in groups, with a correction.

    `groups` has the defaults of `n_group` and `topk_group`, `scale` the one of `routed_scaling_factor`, and
    `is_normalized` the one of `norm_topk_prob`.
    """
    router = Router(
        "sigmoid",
        is_normalized=bool(config.get("norm_topk_prob", is_normalized)),
        scale=read_positive(config, "routed_scaling_factor", scale),
        num_groups=read_size(config, "n_group", groups[0]),
        groups_per_token=read_size(config, "topk_group", groups[1]),
        group_score="top_two",
        weight_sum_offset=1e-20,
    )
    router.check_experts(experts, experts_per_token)
    return router


# --- Declarations


def moe_like(
    name: str,
    title: str,
    *,
    layer: Parameters,
    num_experts: int,
    experts_per_token: int | ReadSize,
    moe: Parameters = EXPERTS,
    count_fields: tuple[str, ...] = ("num_local_experts", "num_experts"),
    expert_mlp: int | None = None,
    shared_mlp: ReadSize | None = None,
    more_sizes: Callable[[HFConfig, Sizes], dict[str, int]] | None = None,
    dense_layers: LayerNumbers | None = None,
    dense_mlp: Parameters = DENSE_MLP,
    choices: Choices = NO_CHOICES,
    **settings: Any,
) -> Family:
    """Return a family like LLaMA with experts in all layers, or in all but the dense layers.

    Args:
        name: `model_type` of its config.json.
        title: One line about the family, for lists.
        layer: Parameters of every layer, without its MLP.
        num_experts: Default of the number of experts.
        experts_per_token: Default of `num_experts_per_tok`, or a reader of the number.
        moe: Parameters of the MLP of a layer with experts.
        count_fields: Fields of the number of experts, in the order in which transformers uses them.
        expert_mlp: Default of `moe_intermediate_size`. None if `intermediate_size` is the width of an expert.
        shared_mlp: Reader of the width of shared experts, from the sizes with the width of an expert as `mlp`.
        more_sizes: Further sizes, and sizes that replace the ones of the config class.
        dense_layers: Numbers of the layers with a dense MLP, or None.
        dense_mlp: Parameters of the MLP of a dense layer.
        choices: Fields of the architecture that differ.
        settings: Arguments of `llama_like`.
    """

    def expert_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
        axis_sizes = dict(sizes)
        if expert_mlp is not None:
            axis_sizes["dense_mlp"] = sizes["mlp"]
            axis_sizes["mlp"] = read_size(config, "moe_intermediate_size", expert_mlp)
        if shared_mlp is not None:
            axis_sizes["shared_mlp"] = shared_mlp(config, axis_sizes)
        axis_sizes["experts"] = read_experts(config, num_experts, count_fields)
        axis_sizes["gate_up"] = 2
        if more_sizes is not None:
            axis_sizes |= more_sizes(config, axis_sizes)
        return axis_sizes

    def read_count_per_token(config: HFConfig, sizes: Sizes) -> int:
        if callable(experts_per_token):
            return experts_per_token(config, sizes)
        return read_experts_per_token(config, sizes["experts"], experts_per_token)

    moe_choices: dict[str, Any] = {"experts_per_token": read_count_per_token}
    groups: dict[str, LayerGroup] = {}
    if dense_layers is None:
        layer = {**layer, **moe}
    else:
        groups = dense_and_sparse_layers(dense_layers, moe, dense_mlp)
        moe_choices["dense_layers"] = lambda config, sizes: dense_layers(config, sizes["layers"])
    return llama_like(
        name,
        title,
        layer=layer,
        groups=groups,
        more_sizes=expert_sizes,
        choices={**moe_choices, **choices},
        **settings,
    )


DEEPSEEK_SHARED_MLP = shared_count("n_shared_experts", 1)


def deepseek_like(
    name: str,
    title: str,
    *,
    experts_per_token: int,
    moe: Parameters = CORRECTED_EXPERTS,
    count_fields: tuple[str, ...] = ("num_local_experts", "n_routed_experts"),
    shared_mlp: ReadSize = DEEPSEEK_SHARED_MLP,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    is_normalized: bool = True,
    choices: Choices = NO_CHOICES,
    **settings: Any,
) -> Family:
    """Return a family with the experts of DeepSeek-V3: sigmoid scores in groups with a correction, and shared experts.

    Args:
        name: `model_type` of its config.json.
        title: One line about the family, for lists.
        experts_per_token: Default of `num_experts_per_tok`.
        moe: Parameters of the MLP of a layer with experts. See `moe_like`, like the following two arguments.
        count_fields: Fields of the number of experts.
        shared_mlp: Reader of the width of shared experts.
        groups: Defaults of `n_group` and `topk_group`.
        scale: Default of `routed_scaling_factor`.
        is_normalized: Default of `norm_topk_prob`.
        choices: Fields of the architecture that differ.
        settings: Arguments of `moe_like`.
    """

    def read_router(config: HFConfig, sizes: Sizes) -> Router:
        num_experts = sizes["experts"]
        return grouped_router(
            config,
            num_experts,
            read_experts_per_token(config, num_experts, experts_per_token),
            groups=groups,
            scale=scale,
            is_normalized=is_normalized,
        )

    return moe_like(
        name,
        title,
        moe=moe,
        count_fields=count_fields,
        experts_per_token=experts_per_token,
        shared_mlp=shared_mlp,
        choices={"router": read_router, **choices},
        **settings,
    )


def dense_and_sparse_layers(
    dense_layers: LayerNumbers, moe: Parameters, dense_mlp: Parameters = DENSE_MLP
) -> dict[str, LayerGroup]:
    """Return the group of layers with a dense MLP, and the group of layers with experts.

    A config in which all layers are dense is refused.
    """

    def dense(config: HFConfig, layers: int) -> tuple[int, ...]:
        listed = dense_layers(config, layers)
        if len(listed) == layers:
            raise invalid_config_error(f"all {layers} layers are dense, so that none has experts")
        return listed

    def sparse(config: HFConfig, layers: int) -> tuple[int, ...]:
        listed = frozenset(dense(config, layers))
        return tuple(layer for layer in range(layers) if layer not in listed)

    return {
        DENSE_LAYERS: LayerGroup(dense_mlp, dense, may_be_all=False),
        SPARSE_LAYERS: LayerGroup(moe, sparse),
    }
