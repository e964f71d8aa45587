"""Gemma: scaled embeddings, norms that scale by 1 + weight, tanh GELU, and a tied head. No I/O, no jax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from prepcli.algebra.axis_map import (
    FULL_LAYERS,
    NARROW_LAYERS,
    REUSING_FULL_LAYERS,
    REUSING_SLIDING_LAYERS,
    SLIDING_LAYERS,
    WIDE_LAYERS,
)
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.formatting import parse_decimal
from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.models.architecture import (
    FULL_ATTENTION,
    LAYER_TYPES,
    read_activation,
    read_positive,
    read_sliding_windows,
    read_softcap,
    reject_unsupported_fields,
)
from prepcli.models.declaration import (
    ALWAYS,
    Choices,
    Condition,
    LayerGroup,
    Parameters,
    Sizes,
    by_name,
    changed,
    embedding,
    linear,
    matrix,
    partial_groups,
    rms_norm,
    under_condition,
)
from prepcli.models.families._llama_style import (
    BIASED_ATTENTION,
    PRE_NORMS,
    QK_NORMS,
    SANDWICH_NORMS,
    gated_mlp,
    layer_rope,
    llama_like,
    pattern_windows,
    rms_norms,
    windows,
)
from prepcli.models.layer_config import Router
from prepcli.models.parameters import Parameter, if_set, read_size
from prepcli.models.rope_config import Rope, read_proportional_rope, read_rope

FULL_TYPE = LAYER_TYPES[0]
SLIDING_TYPE = LAYER_TYPES[1]
TANH_GELU = "gelu_pytorch_tanh"

# --- Gemma 1 to 3


def _root_of_width(config: HFConfig, sizes: Sizes) -> float:
    """Return the factor of embeddings. The embedding is also the head (arXiv:1706.03762, section 3.4)."""
    return sizes["embed"] ** 0.5


def _read_attn_scale(config: HFConfig, sizes: Sizes) -> float:
    """Return a scale of its own. Gemma 2 27B divides by sqrt(144), and its heads have 128 elements."""
    return read_positive(config, "query_pre_attn_scalar", 256) ** -0.5


def _softcap(field: str, default: float | None) -> Callable[[HFConfig, Sizes], float]:
    """Return the reader of a softcap."""
    return lambda config, sizes: read_softcap(config, field, default)


def _read_gemma_activation(config: HFConfig, sizes: Sizes) -> str:
    # The first configs of Gemma say "gelu" for the tanh form of GELU.
    if config.get("hidden_act") == "gelu":
        config = changed(config, hidden_act=TANH_GELU)
    return read_activation(config, "hidden_act", TANH_GELU)


def _scalar_size(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    """Return a size that no axis has: MaxText divides the kernel of the queries by its square root."""
    scalar = read_positive(config, "query_pre_attn_scalar", 256)
    # A fraction has no layout.
    return {"query_pre_attn_scalar": int(scalar)} if scalar == int(scalar) else {}


GEMMA2_SIZES = {"embed": 2304, "mlp": 9216, "heads": 8, "kv_heads": 4, "head_dim": 256}
GEMMA: Choices = {"norm": "rms_offset", "embed_scale": _root_of_width}
GEMMA2: Choices = {
    **GEMMA,
    "attn_scale": _read_attn_scale,
    "sliding_windows": windows(4096, lambda layer: layer % 2 == 0),
    "attn_logit_softcap": _softcap("attn_logit_softcapping", 50.0),
    "final_logit_softcap": _softcap("final_logit_softcapping", 30.0),
}
_gemma_like = partial(
    llama_like, activation=TANH_GELU, activation_field="hidden_activation", tied=True
)
_gemma2_like = partial(
    _gemma_like,
    defaults={**GEMMA2_SIZES, "vocab": 256_000, "layers": 26},
    more_sizes=_scalar_size,
    positions=8192,
)

# --- Gemma 4: sizes and choices

GEMMA4_POSITIONS = 131_072
# Every sixth layer has full attention.
GEMMA4_PATTERN = 6
GEMMA4_ROPE: JsonObject = {
    FULL_TYPE: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING_TYPE: {"rope_type": "default", "rope_theta": 1e4},
}
HEAD_FIELDS = ("head_dim", "num_key_value_heads")
# Width of the inputs of layers. Each layer has its own embedding of a token.
LAYER_INPUT = 256


def _gemma4_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    full_heads = _read_full_heads(config, sizes)
    added = {
        "full_head_dim": read_size(full_heads, "head_dim", sizes["head_dim"]),
        "full_kv_heads": read_size(full_heads, "num_key_value_heads", sizes["kv_heads"]),
        "wide_mlp": 2 * sizes["mlp"],
    }
    if _has_experts(config):
        added["experts"] = _read_required_size(config, "num_experts")
        added["expert_mlp"] = _read_required_size(config, "moe_intermediate_size")
        added["gate_up"] = 2
    if _has_layer_inputs(config):
        added["input_layers"] = sizes["layers"]
        added["layer_vocab"] = read_size(config, "vocab_size_per_layer_input", 262_144)
        added["layer_input"] = read_size(config, "hidden_size_per_layer_input", LAYER_INPUT)
    return added


def _has_layer_inputs(config: HFConfig) -> bool:
    return config.get("hidden_size_per_layer_input", LAYER_INPUT) != 0


def _has_experts(config: HFConfig) -> bool:
    """Return whether each layer has experts and an MLP."""
    return bool(config.get("enable_moe_block"))


def _has_values(config: HFConfig) -> bool:
    """Return whether layers with full attention have a projection of values."""
    return not config.get("attention_k_eq_v")


def _read_required_size(config: HFConfig, field: str) -> int:
    """Return a size that a model with experts has to state."""
    if config.get(field) is None:
        raise invalid_config_error(f"enable_moe_block is set, but there is no {field}")
    return read_size(config, field, 1)


def _read_full_heads(config: HFConfig, sizes: Sizes) -> HFConfig:
    """Return the fields of the heads of layers with full attention.

    Transformers 5 writes `per_layer_config`, e.g. {"05": {"head_dim": 512}}. Published configs have other fields.
    """
    if "per_layer_config" not in config:
        heads: dict[str, Any] = {"head_dim": read_size(config, "global_head_dim", 512)}
        if not _has_values(config):
            heads["num_key_value_heads"] = config.get("num_global_key_value_heads")
        return heads
    stored: Any = config["per_layer_config"] or {}
    if not isinstance(stored, dict):
        raise invalid_config_error(f"per_layer_config is {stored!r:.60}, it must be an object")
    sections = {parse_decimal(number): section for number, section in stored.items()}
    windows = _read_gemma4_windows(config, sizes["layers"])
    full = [layer for layer, window in enumerate(windows) if window == FULL_ATTENTION]
    first = sections.get(full[0], {})
    is_uniform = all(sections.get(layer, {}) == first for layer in full)
    has_other_layers = not {*sections} <= {*full}
    has_heads_only = isinstance(first, dict) and {*first} <= {*HEAD_FIELDS}
    if not is_uniform or has_other_layers or not has_heads_only:
        why = f"it must give all layers with full attention the same {' and '.join(HEAD_FIELDS)}"
        raise unsupported_config_error("this `per_layer_config` is not supported", why)
    return first


def _read_gemma4_windows(config: HFConfig, layers: int) -> tuple[int, ...]:
    windows = read_sliding_windows(
        config,
        layers,
        config.get("sliding_window", 512),
        lambda layer: (layer + 1) % GEMMA4_PATTERN != 0 and layer + 1 != layers,
    )
    if windows[-1] != FULL_ATTENTION:
        raise invalid_config_error(f"the last of {layers} layer_types must be {FULL_TYPE}")
    return windows


def _read_gemma4_rope(layer_type: str, head_dim: str, config: HFConfig, sizes: Sizes) -> Rope:
    """Read the rotary embedding of a layer type, by the atom of the elements of its heads."""
    parameters: Any = config.get("rope_parameters") or GEMMA4_ROPE
    scaling: Any = parameters.get(layer_type) if isinstance(parameters, dict) else None
    if not isinstance(scaling, dict):
        why = f"rope_parameters is {parameters!r:.60}, it must have an object for {layer_type}"
        raise invalid_config_error(why)
    max_positions = read_size(config, "max_position_embeddings", GEMMA4_POSITIONS)
    if scaling.get("rope_type") == "proportional":
        return read_proportional_rope(scaling, sizes[head_dim], max_positions=max_positions)
    return read_rope({"rope_parameters": scaling}, sizes[head_dim], max_positions=max_positions)


def _read_reusing_layers(config: HFConfig, layers: int) -> tuple[int, ...]:
    """Return the layers that attend to the keys and values of an earlier layer: the last `num_kv_shared_layers`."""
    windows = _read_gemma4_windows(config, layers)
    count = config.get("num_kv_shared_layers", 0)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < layers:
        why = f"num_kv_shared_layers is {count!r:.60}, it must be an integer from 0 to {layers - 1}"
        raise invalid_config_error(why)
    first = layers - count
    if not {*windows[first:]} <= {*windows[:first]}:
        why = f"no layer before layer {first} has the attention of a layer from {first} on"
        raise invalid_config_error(f"num_kv_shared_layers is {count}, but {why}")
    return tuple(range(first, layers))


def _read_experts_per_token(config: HFConfig, sizes: Sizes) -> int:
    """Return the number of experts per token, or 0 without experts."""
    if not _has_experts(config):
        return 0
    count = _read_required_size(config, "top_k_experts")
    if count > sizes["experts"]:
        why = f"top_k_experts is {count}, but there are {sizes['experts']} experts"
        raise invalid_config_error(why)
    return count


def _check_gemma4(config: HFConfig, sizes: Sizes) -> None:
    # With "vision", only the tokens of images attend to later ones.
    if config.get("use_bidirectional_attention") not in (None, "vision"):
        why = f"config.json has {config['use_bidirectional_attention']!r:.60}"
        what = "`use_bidirectional_attention` is not supported for this family"
        raise unsupported_config_error(what, why)
    # Its rotary embeddings are in `rope_parameters` only.
    other_fields = ("rope_scaling", "rope_theta")
    reject_unsupported_fields({field: config.get(field) for field in other_fields})
    if sizes["heads"] % sizes["full_kv_heads"]:
        why = f"{sizes['full_kv_heads']} key and value heads of layers with full attention"
        raise invalid_config_error(f"{why} do not divide {sizes['heads']} query heads")


# --- Gemma 4: parameters

BIAS = if_set("attention_bias")


def _queries(head_dim: str) -> Parameters:
    """Return the parameters of queries and of the output, by the atom of the elements of a head."""
    query = f"heads {head_dim} embed <- self_attn.q_proj.weight: (heads {head_dim}) embed"
    output = f"embed heads {head_dim} <- self_attn.o_proj.weight: embed (heads {head_dim})"
    return {
        **linear("attn.q", query, BIAS),
        **linear("attn.o", output, BIAS),
        **rms_norm("attn.q_norm", f"{head_dim} <- self_attn.q_norm.weight: {head_dim}"),
    }


def _attention(kv_heads: str, head_dim: str, has_values: Condition = ALWAYS) -> Parameters:
    """Return the parameters of attention with keys and values of its own, by the atoms of their heads."""
    row = (
        f"{kv_heads} {head_dim} embed <- self_attn.{{}}_proj.weight: ({kv_heads} {head_dim}) embed"
    )
    return {
        **_queries(head_dim),
        **linear("attn.k", row.format("k"), BIAS),
        **under_condition(linear("attn.v", row.format("v"), BIAS), has_values),
        **rms_norm("attn.k_norm", f"{head_dim} <- self_attn.k_norm.weight: {head_dim}"),
    }


def _group_numbers(group: str, config: HFConfig, layers: int) -> tuple[int, ...]:
    """Return the numbers of the layers of a group."""
    reusing = _read_reusing_layers(config, layers)
    wide = reusing if config.get("use_double_wide_mlp") else ()
    numbers: list[int] = []
    for layer, window in enumerate(_read_gemma4_windows(config, layers)):
        mlp = WIDE_LAYERS if layer in wide else NARROW_LAYERS
        is_full = window == FULL_ATTENTION
        if layer in reusing:
            heads = REUSING_FULL_LAYERS if is_full else REUSING_SLIDING_LAYERS
        else:
            heads = FULL_LAYERS if is_full else SLIDING_LAYERS
        if group in (mlp, heads):
            numbers.append(layer)
    return tuple(numbers)


def _group(name: str, parameters: Parameters, may_be_all: bool = False) -> dict[str, LayerGroup]:
    return {name: LayerGroup(parameters, partial(_group_numbers, name), may_be_all)}


GEMMA4_GROUPS = {
    **_group(SLIDING_LAYERS, _attention("kv_heads", "head_dim")),
    **_group(
        FULL_LAYERS, _attention("full_kv_heads", "full_head_dim", _has_values), may_be_all=True
    ),
    **_group(REUSING_SLIDING_LAYERS, _queries("head_dim")),
    **_group(REUSING_FULL_LAYERS, _queries("full_head_dim")),
    **_group(NARROW_LAYERS, gated_mlp(), may_be_all=True),
    **_group(WIDE_LAYERS, gated_mlp(mlp="wide_mlp")),
}
GATE_UP = "experts expert_mlp embed <- experts.gate_up_proj: experts (gate_up={} expert_mlp) embed"
EXPERTS: Parameters = {
    **matrix("moe.router", "experts embed <- router.proj.weight: experts embed"),
    **matrix("moe.router.input_scale", "embed <- router.scale: embed"),
    **matrix("moe.router.expert_scale", "experts <- router.per_expert_scale: experts"),
    **matrix("moe.gate", GATE_UP.format(0)),
    **matrix("moe.up", GATE_UP.format(1)),
    **matrix("moe.down", "experts embed expert_mlp <- experts.down_proj: experts embed expert_mlp"),
    **rms_norms(
        mlp_branch_norm="post_feedforward_layernorm_1",
        moe_norm="pre_feedforward_layernorm_2",
        moe_post_norm="post_feedforward_layernorm_2",
    ),
}
# A row of each tensor has the parts of all layers, one after another.
PARTS = "(input_layers layer_input)"
TABLE = "input_layers layer_vocab layer_input <- embed_tokens_per_layer.weight: layer_vocab"
PROJECTION = "input_layers layer_input embed <- per_layer_model_projection.weight:"
LAYER_INPUTS: Parameters = {
    **embedding("layer_tokens", f"{TABLE} {PARTS}"),
    **matrix("layer_inputs.projection", f"{PROJECTION} {PARTS} embed"),
    **rms_norm("layer_inputs.norm", "layer_input <- per_layer_projection_norm.weight: layer_input"),
}
# Each layer adds its input to the residual stream.
LAYER_INPUT_GATE: Parameters = {
    **matrix("layer_input_gate.gate", "layer_input embed <- per_layer_input_gate.weight: layer_input embed"),
    **matrix("layer_input_gate.output", "embed layer_input <- per_layer_projection.weight: embed layer_input"),
    **rms_norms(**{"layer_input_gate.output_norm": "post_per_layer_input_norm"}),
}  # fmt: skip

FAMILIES = by_name(
    _gemma_like(
        "gemma",
        "Gemma 1: LLaMA with scaled embeddings, norms that scale by 1 + weight, tanh GELU, and a tied head.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **gated_mlp()},
        # 16 heads of 256 elements are 4096, more than the width 3072.
        defaults={
            **{"vocab": 256_000, "embed": 3072, "mlp": 24576, "layers": 28},
            **{"heads": 16, "kv_heads": 16, "head_dim": 256},
        },
        positions=8192,
        activation_field=None,
        choices={**GEMMA, "activation": _read_gemma_activation},
    ),
    _gemma2_like(
        "gemma2",
        "Gemma 2: Gemma 1 with norms before and after each sublayer, softcaps, and windows in every other layer.",
        layer={**SANDWICH_NORMS, **BIASED_ATTENTION, **gated_mlp()},
        choices={**GEMMA2, "block_type": "sandwich"},
    ),
    _gemma2_like(
        "vaultgemma",
        "VaultGemma: Gemma 2 without norms after the sublayers.",
        layer={
            **rms_norms(attn_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm"),
            **BIASED_ATTENTION,
            **gated_mlp(),
        },
        choices=GEMMA2,
    ),
    _gemma_like(
        "gemma3_text",
        "Gemma 3 (text model): Gemma 2 with QK norms, no softcap of scores, local rotary embeddings in sliding layers.",
        layer={**SANDWICH_NORMS, **BIASED_ATTENTION, **QK_NORMS, **gated_mlp()},
        defaults={**GEMMA2_SIZES, "vocab": 262_208, "layers": 26},
        positions=131_072,
        rope=layer_rope(FULL_TYPE, 131_072, 1e6, "rope_theta"),
        choices={
            **GEMMA,
            "block_type": "sandwich",
            "attn_scale": _read_attn_scale,
            # With a pattern of 6, layers 0 to 4 slide, layer 5 does not, 6 to 10 slide, and so on.
            "sliding_windows": pattern_windows(4096, 6),
            "local_rope": layer_rope(SLIDING_TYPE, 131_072, 1e4, "rope_local_base_freq"),
            "final_logit_softcap": _softcap("final_logit_softcapping", None),
        },
        ignores=("sliding_window_pattern",),
    ),
    _gemma_like(
        "gemma4_text",
        "Gemma 4 (text model): Gemma 3 with wider heads in full attention, inputs of layers, keys of earlier layers.",
        layer={
            **SANDWICH_NORMS,
            **under_condition(LAYER_INPUT_GATE, _has_layer_inputs),
            **under_condition(EXPERTS, _has_experts),
            "output.scale": Parameter(" <- layer_scalar: 1"),
        },
        groups=GEMMA4_GROUPS,
        shared=under_condition(LAYER_INPUTS, _has_layer_inputs),
        defaults={**GEMMA2_SIZES, "vocab": 262_144, "layers": 30},
        more_sizes=_gemma4_sizes,
        positions=GEMMA4_POSITIONS,
        rope=partial(_read_gemma4_rope, FULL_TYPE, "full_head_dim"),
        choices={
            "block_type": "sandwich_input",
            "embed_scale": _root_of_width,
            "attn_scale": 1.0,
            "sliding_windows": lambda config, sizes: _read_gemma4_windows(config, sizes["layers"]),
            "local_rope": partial(_read_gemma4_rope, SLIDING_TYPE, "head_dim"),
            "has_plain_value_norm": True,
            "has_key_values": lambda config, sizes: not _has_values(config),
            "has_layer_inputs": lambda config, sizes: _has_layer_inputs(config),
            "experts_per_token": _read_experts_per_token,
            "router": Router(has_own_norm=True),
            "reusing_layers": lambda config, sizes: _read_reusing_layers(config, sizes["layers"]),
            "shape_groups": lambda config, sizes: tuple(partial_groups(GEMMA4_GROUPS, config, sizes["layers"]).items()),
            "final_logit_softcap": _softcap("final_logit_softcapping", None),
        },
        check=_check_gemma4,
    ),
)  # fmt: skip
