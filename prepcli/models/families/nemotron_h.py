"""Nemotron-H: layers of one sublayer each (Mamba-2, attention, an MLP or experts), and squared ReLU."""

from __future__ import annotations

import math

from prepcli.algebra.axis_map import ATTENTION_LAYERS, DENSE_LAYERS, MIXER_LAYERS, SPARSE_LAYERS
from prepcli.core.errors import unsupported_config_error
from prepcli.core.json_values import JsonValue
from prepcli.models.architecture import (
    FULL_ATTENTION,
    ROPE_FIELDS,
    ArchConfig,
    read_activation,
    read_positive,
    reject_unsupported_fields,
)
from prepcli.models.families import (
    _grouped_style,
    _hybrid_style,
    _llama_style,
    _moe_style,
)
from prepcli.models.families._grouped_style import LayerGroup, LayerNumbers
from prepcli.models.families._hybrid_style import layers_of_type
from prepcli.models.mixer_config import Mixer
from prepcli.models.parameters import HFConfig, if_set, read_size
from prepcli.models.rows import Parameters, attention, linear, matrix, unless_false

MAMBA = "linear_attention"
ATTENTION = "full_attention"
MLP = "mlp"
MOE = "moe"
LAYER_TYPES = (MAMBA, ATTENTION, MLP, MOE)
DEFAULT_TYPES: list[JsonValue] = [MAMBA, MOE, ATTENTION, MLP]
# Layer types by the character in `hybrid_override_pattern`.
PATTERN_TYPES = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": MOE}
MOE_FIELDS = (
    "n_routed_experts",
    "num_local_experts",
    "n_shared_experts",
    "routed_scaling_factor",
)
# Fields of a choice that prep does not have -> values without it.
NEUTRAL_VALUES = {
    "mamba_proj_bias": (None, False),
    "moe_latent_size": (None,),
    "n_shared_experts": (1,),
    "tie_word_embeddings": (None, False),
}
# Names of fields in the first versions of the config class, which override the present ones.
OLD_FIELDS = ("mamba_n_groups", "mamba_d_conv", "mamba_conv_bias", "mamba_dt_min")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of NemotronHConfig."""
    axis_sizes = _llama_style.sizes(config, vocab=131072, mlp=21504, kv_heads=8, head_dim=128)
    width = read_size(config, "mamba_num_heads", 128) * read_size(config, "mamba_head_dim", 64)
    return {
        **axis_sizes,
        "layers": len(layer_types(config)),
        **_hybrid_style.read_mamba2_sizes(
            config,
            embed=width,
            heads=("mamba_num_heads", 128),
            head_dim=("mamba_head_dim", 64),
            groups=("n_groups", 8),
            state=("ssm_state_size", 128),
            kernel=("conv_kernel", 4),
        ),
        "mlp": read_size(config, "moe_intermediate_size", 7688),
        "dense_mlp": axis_sizes["mlp"],
        "shared_mlp": read_size(config, "moe_shared_expert_intermediate_size", 7688),
        "experts": _moe_style.read_experts(config, 8),
    }


def layer_types(config: HFConfig) -> tuple[str, ...]:
    """Return the type of each layer, from a list or from a text with a character per layer."""
    # The alias overrides.
    listed: JsonValue = config.get("layer_types", config.get("layers_block_type"))
    pattern = config.get("hybrid_override_pattern")
    if listed is None and isinstance(pattern, str):
        listed = [PATTERN_TYPES.get(character, character) for character in pattern]
    count = read_size(config, "num_hidden_layers", len(listed) if isinstance(listed, list) else 1)
    # As in transformers, the default list does not depend on the number.
    if listed is None:
        listed = DEFAULT_TYPES
        count = len(DEFAULT_TYPES)
    return _hybrid_style.read_layer_types(
        {"layer_types": listed},
        count,
        LAYER_TYPES,
        lambda layer: MAMBA,
    )


def numbers_of(*names: str) -> LayerNumbers:
    """Return a function from a config to the numbers of its layers of some types."""

    def layer_numbers(config: HFConfig) -> tuple[int, ...]:
        types = layer_types(config)
        return tuple(sorted(layer for name in names for layer in layers_of_type(types, name)))

    return layer_numbers


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    # Attention does not rotate, whatever the config has.
    reject_unsupported_fields(
        config, *ROPE_FIELDS, "partial_rotary_factor", "layer_types", "mlp_bias", *MOE_FIELDS
    )
    _reject_other_choices(config)
    axis_sizes = sizes(config)
    _llama_style.check_kv_heads(axis_sizes)
    experts_per_token = _llama_style.read_experts_per_token(
        config, axis_sizes["experts"], default=2
    )
    router = _moe_style.grouped_router(
        config, axis_sizes["experts"], experts_per_token, groups=(1, 1), scale=1.0
    )
    return ArchConfig(
        norm="rms",
        norm_eps=read_positive(config, "layer_norm_epsilon", 1e-5),
        activation=read_activation(config, "mlp_hidden_act", "relu2"),
        has_gated_mlp=False,
        attn_scale=axis_sizes["head_dim"] ** -0.5,
        sliding_windows=(FULL_ATTENTION,) * axis_sizes["layers"],
        rope=None,
        max_positions=read_size(config, "max_position_embeddings", 4096),
        init_std=read_positive(config, "initializer_range", 0.02),
        block_type="single",
        mixer=_read_mixer(config),
        mixer_layers=numbers_of(MAMBA)(config),
        feed_forward_layers=numbers_of(MLP, MOE)(config),
        dense_layers=numbers_of(MLP)(config),
        experts_per_token=experts_per_token if MOE in layer_types(config) else 0,
        router=router,
    )


def _reject_other_choices(config: HFConfig) -> None:
    """Raise PrepError if the config makes a choice that prep does not have."""
    for field, neutral in NEUTRAL_VALUES.items():
        value = config.get(field, neutral[0])
        if value not in neutral:
            what = f"`{field}` is not supported for this family"
            raise unsupported_config_error(what, f"config.json has {value!r:.60}")
    # A field that is only refused is not read: `fields_read` must not list it.
    names = {*config}
    for field in OLD_FIELDS:
        if field in names:
            raise unsupported_config_error(
                f"`{field}` is not supported for this family", "it is an old name of another field"
            )
    types = layer_types(config)
    if MAMBA not in types:
        why = "no layer is of the type linear_attention"
        raise unsupported_config_error("models without Mamba-2 are not supported", why)


def _read_mixer(config: HFConfig) -> Mixer:
    """Return Mamba-2 with a lower limit of its steps: the smallest step of the initial values."""
    return Mixer(
        "mamba2",
        activation=read_activation(config, "mamba_hidden_act", "silu"),
        dt_limits=(read_positive(config, "time_step_min", 0.001), math.inf),
        initial_steps=_hybrid_style.read_initial_steps(config),
    )


def _experts() -> Parameters:
    """Return the parameters of an MoE layer. The alternates are the fused tensors of transformers 5."""
    up = "experts mlp embed <- mixer.experts.{experts}.up_proj.weight: mlp embed"
    down = "experts embed mlp <- mixer.experts.{experts}.down_proj.weight: embed mlp"
    fused_up = "experts mlp embed <- mixer.experts.up_proj: experts mlp embed"
    fused_down = "experts embed mlp <- mixer.experts.down_proj: experts embed mlp"
    shared = "mixer.shared_experts"
    correction = "mixer.gate.e_score_correction_bias: experts"
    return {
        **matrix("mlp.router", "experts embed <- mixer.gate.weight: experts embed"),
        "mlp.router.correction.bias": _moe_style.correction(correction),
        **matrix("mlp.up", up, alternate=fused_up),
        **matrix("mlp.down", down, alternate=fused_down),
        **linear("mlp.shared.up", f"shared_mlp embed <- {shared}.up_proj.weight: shared_mlp embed", MLP_BIAS),
        **linear("mlp.shared.down", f"embed shared_mlp <- {shared}.down_proj.weight: embed shared_mlp", MLP_BIAS),
    }  # fmt: skip


MLP_BIAS = if_set("mlp_bias")
DENSE_MLP: Parameters = {
    **linear("mlp.up", "dense_mlp embed <- mixer.up_proj.weight: dense_mlp embed", MLP_BIAS),
    **linear("mlp.down", "embed dense_mlp <- mixer.down_proj.weight: embed dense_mlp", MLP_BIAS),
}
MIXER: Parameters = _hybrid_style.mamba2(
    "mixer",
    bias=if_set("use_bias"),
    out_bias=if_set("use_bias"),
    conv_bias=unless_false("use_conv_bias"),
)

FAMILY = _grouped_style.build_family(
    name="nemotron_h",
    sizes=sizes,
    arch_config=arch_config,
    prefix="backbone.",
    tokens="embeddings.weight",
    layer=_llama_style.rms_norms(norm="norm"),
    groups={
        ATTENTION_LAYERS: LayerGroup(
            attention("mixer.{}_proj", out_name="o", kv_heads="kv_heads"),
            numbers_of(ATTENTION),
            may_be_all=False,
        ),
        MIXER_LAYERS: LayerGroup(MIXER, numbers_of(MAMBA)),
        DENSE_LAYERS: LayerGroup(DENSE_MLP, numbers_of(MLP), may_be_all=False),
        SPARSE_LAYERS: LayerGroup(_experts(), numbers_of(MOE), may_be_all=False),
    },
    final_norm=_llama_style.rms_norms(final_norm="norm_f"),
    dropped={},
)
