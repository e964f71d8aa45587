"""LLaMA with factors, sinks, other activations, or parameters that are fused or named otherwise. No I/O, no jax."""

from __future__ import annotations

from typing import Any

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.models.architecture import (
    FULL_ATTENTION,
    LAMBDA_VECTORS,
    XIELU,
    read_positive,
)
from prepcli.models.declaration import (
    Choices,
    Parameters,
    Sizes,
    by_name,
    changed,
    grouped_qkv,
    linear,
    matrix,
    plain_mlp,
    positive,
    rms_norm,
    separate_qkv,
    under_condition,
    unless_false,
)
from prepcli.models.families._llama_style import (
    BIASED_ATTENTION,
    BIASED_MLP,
    FUSED_GATED_MLP,
    PRE_NORMS,
    QK_NORMS,
    gated_mlp,
    llama_like,
    rms_norms,
    rope_reader,
    uniform_window,
    windows,
)
from prepcli.models.layer_config import DropoutFields
from prepcli.models.parameters import NEVER, Parameter, if_set, read_size
from prepcli.models.rope_config import Rope, read_rope, read_scaling

APERTUS_ROPE: JsonObject = {
    "rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
# "su" and "yarn" are names of longrope in older Phi-3 configs.
PHI3_ROPE_TYPES = {
    "default": "default",
    "longrope": "longrope",
    "su": "longrope",
    "yarn": "longrope",
}


def _read_phi3_rope(config: HFConfig, sizes: Sizes) -> Rope:
    # Phi3Config keeps the original positions beside `rope_scaling`, not in it, with a default of 4096.
    original = read_size(config, "original_max_position_embeddings", 4096)
    return read_rope(
        changed(config, original_max_position_embeddings=original),
        sizes["head_dim"],
        max_positions=read_size(config, "max_position_embeddings", 4096),
        # Phi-4-mini rotates three quarters of each head.
        allow_partial=True,
        rope_types=PHI3_ROPE_TYPES,
    )


def read_static_rope(config: HFConfig, sizes: Sizes, max_positions: int = 2048) -> Rope:
    """Return the rotary embedding of Hunyuan, with a base of frequencies in place of `alpha`.

    Files call this scaling dynamic, but its base does not depend on the length:
    theta * alpha^(head_dim / (head_dim - 2)).
    """
    head_dim = sizes["head_dim"]
    scaling: Any = config.get("rope_scaling") or config.get("rope_parameters")
    is_dynamic = isinstance(scaling, dict) and (
        scaling.get("rope_type", scaling.get("type")) == "dynamic"
    )
    if is_dynamic and scaling.get("alpha") and head_dim > 2:
        theta = read_positive({"rope_theta": 10_000.0, **config, **scaling}, "rope_theta", 10_000.0)
        alpha = read_positive(scaling, "alpha", 1.0)
        base = theta * alpha ** (head_dim / (head_dim - 2))
        static = {"rope_type": "default", "rope_theta": base}
        config = changed(config, rope_scaling=None, rope_parameters=static)
    max_positions = read_size(config, "max_position_embeddings", max_positions)
    return read_rope(config, head_dim, max_positions=max_positions)


# --- Checks


def _check_norm_fits(config: HFConfig, sizes: Sizes) -> None:
    """Raise PrepError if the norm of BitNet's norm of all heads has another width than the layers."""
    width = sizes["heads"] * sizes["head_dim"]
    if width != sizes["embed"]:
        why = f"the norm of {width} elements of heads has the hidden_size, {sizes['embed']}"
        raise invalid_config_error(why)


def _check_xielu(config: HFConfig, sizes: Sizes) -> None:
    activation = config.get("hidden_act", XIELU)
    if activation != XIELU:
        why = f"hidden_act of config.json; supported: {XIELU}"
        raise unsupported_config_error(f"activation `{activation!s:.60}` is not supported", why)


def _check_pairs_of_heads(config: HFConfig, sizes: Sizes) -> None:
    kv_heads = sizes["kv_heads"]
    if kv_heads % 2:
        why = f"num_key_value_heads is {kv_heads}, and differential attention needs pairs of them"
        raise invalid_config_error(why)
    # Transformers refuses it too.
    if config.get("attention_dropout"):
        why = "differential attention has no dropout of probabilities"
        raise unsupported_config_error("`attention_dropout` is not supported for this family", why)


def _lambda_stds(config: HFConfig, sizes: Sizes) -> tuple[tuple[str, float], ...]:
    std = read_positive(config, "lambda_std_dev", 0.1)
    return tuple((f"attn.{name}.weight", std) for name in LAMBDA_VECTORS)


def _check_all_keys_kept(config: HFConfig, sizes: Sizes) -> None:
    if config.get("is_moe"):
        why = "in transformers its router mixes the scores of different tokens"
        raise unsupported_config_error("`is_moe` is not supported for this family", why)
    positions = read_size(config, "max_position_embeddings", 2048)
    num_kept = read_size(config, "keep_window_size", 2048)
    if num_kept < positions:
        why = f"the model has {positions} positions, and drops keys beyond {num_kept}"
        what = f"keep_window_size {num_kept} is not supported for this family"
        raise unsupported_config_error(what, why)


# --- Rows

EXAONE_LAYER: Parameters = {
    **rms_norms(attn_norm="ln_1", mlp_norm="ln_2"),
    **separate_qkv("attn.attention.{}_proj", kv_heads="kv_heads", bias=if_set("attention_bias")),
    **linear(
        "attn.o",
        "embed heads head_dim <- attn.attention.out_proj.weight: embed (heads head_dim)",
        if_set("attention_bias"),
    ),
    **gated_mlp(if_set("mlp_bias"), names=("c_fc_0", "c_fc_1", "c_proj")),
}
PHI3_ATTENTION: Parameters = {
    **grouped_qkv("self_attn.qkv_proj", NEVER),
    **matrix("attn.o", "embed heads head_dim <- self_attn.o_proj.weight: embed (heads head_dim)"),
}
XIELU_SCALARS: Parameters = {
    **matrix("mlp.xielu_alpha_p", " <- mlp.act_fn.alpha_p: 1"),
    **matrix("mlp.xielu_alpha_n", " <- mlp.act_fn.alpha_n: 1"),
    "mlp.xielu_beta.scale": Parameter(" <- mlp.act_fn.beta:"),
    "mlp.xielu_eps.scale": Parameter(" <- mlp.act_fn.eps:"),
}
# Four vectors of a layer give the factor of the second attention.
LAMBDAS: Parameters = {
    f"attn.{name}.weight": Parameter(f"head_dim <- self_attn.{name}: head_dim")
    for name in LAMBDA_VECTORS
}
DOGE_SCORES: Parameters = {
    **linear(
        "attn.score_step",
        "score_heads kv_heads head_dim <- self_attn.dt_proj.weight: score_heads (kv_heads head_dim)",
        if_set("attention_bias"),
    ),
    **matrix("attn.score_rate", "score_heads <- self_attn.A: score_heads"),
    **matrix("attn_residual", "embed <- input_residual: embed"),
    **matrix("mlp_residual", "embed <- post_attention_residual: embed"),
}


# --- Granite: factors, windows and attention sinks

# Without `attention_multiplier` the scores are not scaled. In other families they are.
GRANITE_FACTORS: Choices = {
    "attn_scale": positive("attention_multiplier", 1.0),
    "embed_scale": positive("embedding_multiplier", 1.0),
    "residual_scale": positive("residual_multiplier", 1.0),
    # The logits are divided by `logits_scaling`.
    "lm_head_input_scale": lambda config, sizes: 1 / read_positive(config, "logits_scaling", 1.0),
}
SINKS: Parameters = {"attn.sinks.bias": Parameter("heads <- self_attn.sinks: heads")}


def windows_and_sinks(max_positions: int) -> Choices:
    """Return the choices of Granite with windows: sinks, and a rotary base for each type of layer."""

    def rope_of(is_full: bool, config: HFConfig, sizes: Sizes) -> Rope:
        bases = _bases(config, sizes, max_positions)
        (theta,) = bases[is_full] or bases[not is_full] or {_rope(config, sizes).theta}
        scaling = {**read_scaling(config), "rope_theta": theta}
        return _rope(changed(config, rope_scaling=None, rope_parameters=scaling), sizes)

    def _rope(config: HFConfig, sizes: Sizes) -> Rope:
        positions = read_size(config, "max_position_embeddings", max_positions)
        return read_rope(config, sizes["head_dim"], max_positions=positions)

    return {
        "rope": lambda config, sizes: rope_of(True, config, sizes),
        "local_rope": lambda config, sizes: rope_of(False, config, sizes),
        "layers_without_rope": lambda config, sizes: tuple(
            layer for layer, theta in enumerate(_thetas(config, sizes, max_positions)) if not theta
        ),
        "sliding_windows": GRANITE_WINDOWS,
        "has_attention_sinks": True,
    }


GRANITE_WINDOWS = windows(128, lambda layer: layer % 4 != 0)


def _thetas(config: HFConfig, sizes: Sizes, max_positions: int) -> list[float]:
    """Return the rotary base of each layer, 0 for a layer without rotation."""
    layers = sizes["layers"]
    listed = config.get("layer_rope_theta")
    if listed is None:
        positions = read_size(config, "max_position_embeddings", max_positions)
        return [read_rope(config, sizes["head_dim"], max_positions=positions).theta] * layers
    thetas: list[float] = []
    if isinstance(listed, list):
        thetas = [theta for theta in listed if isinstance(theta, int | float) and theta >= 0]
    if not isinstance(listed, list) or not len(thetas) == len(listed) == layers:
        why = f"layer_rope_theta is {listed!r:.80}, it must give {layers} numbers from 0 on"
        raise invalid_config_error(why)
    return thetas


def _bases(config: HFConfig, sizes: Sizes, max_positions: int) -> dict[bool, set[float]]:
    """Return the rotary bases of the layers with full attention (True) and of the layers with a window (False)."""
    thetas = _thetas(config, sizes, max_positions)
    bases: dict[bool, set[float]] = {True: set(), False: set()}
    for theta, window in zip(thetas, GRANITE_WINDOWS(config, sizes)):
        # A base of 0 stands for a layer without rotation.
        if theta:
            bases[window == FULL_ATTENTION].add(theta)
    if any(len(found) > 1 for found in bases.values()):
        what = "different rotary bases in layers of one type are not supported"
        raise unsupported_config_error(what, f"layer_rope_theta is {thetas!r:.80}")
    return bases


HAS_POST_NORMS = unless_false("use_post_norm")


FAMILIES = by_name(
    llama_like(
        "bitnet",
        "BitNet b1.58: LLaMA with norms before the last matrix of attention and of the MLP, and squared ReLU.",
        layer={
            **PRE_NORMS,
            **BIASED_ATTENTION,
            **rms_norm("attn.o_norm", "heads head_dim <- self_attn.attn_sub_norm.weight: (heads head_dim)"),
            **gated_mlp(),
            **rms_norm("mlp.down_norm", "mlp <- mlp.ffn_sub_norm.weight: mlp"),
        },
        defaults={"vocab": 128_256, "embed": 2560, "mlp": 6912, "layers": 30, "heads": 20, "kv_heads": 5},
        rope_theta=500_000.0,
        activation="relu2",
        norm_eps=1e-5,
        check=_check_norm_fits,
    ),
    llama_like(
        "apertus",
        "Apertus: LLaMA with norms of queries and keys, and an MLP of two matrices with xIELU.",
        layer={
            **rms_norms(attn_norm="attention_layernorm", mlp_norm="feedforward_layernorm"),
            **BIASED_ATTENTION,
            **QK_NORMS,
            **plain_mlp(),
            **XIELU_SCALARS,
        },
        defaults={"vocab": 131_072, "mlp": 14336},
        positions=65536,
        rope=rope_reader(65536, 12e6, APERTUS_ROPE),
        activation=XIELU,
        activation_field=None,
        norm_eps=1e-5,
        choices={"has_gated_mlp": False},
        check=_check_xielu,
    ),
    llama_like(
        "diffllama",
        "DiffLlama: LLaMA with differential attention, the difference of the attentions of two heads.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **LAMBDAS, **gated_mlp()},
        defaults={"embed": 2048, "mlp": 8192, "layers": 16},
        norm_eps=1e-5,
        choices={"has_differential_attention": True, "leaf_init_stds": _lambda_stds},
        check=_check_pairs_of_heads,
        dropout_fields=DropoutFields(attention=None),
    ),
    llama_like(
        "doge",
        "Doge: LLaMA with norms of queries and keys, scores of keys from their values, and weighted residual "
        "connections.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **QK_NORMS, **DOGE_SCORES, **BIASED_MLP},
        defaults={"vocab": 32768, "embed": 1024, "mlp": 2048, "heads": 8},
        more_sizes=lambda config, sizes: {"score_heads": sizes["kv_heads"]},
        choices={"has_key_scores": True, **uniform_window(None)},
        check=_check_all_keys_kept,
        # It has a default, and no effect without `is_moe`.
        ignores=("num_experts",),
        dropout_fields=DropoutFields(residual=("hidden_dropout", 0.0)),
    ),
    llama_like(
        "exaone",
        "EXAONE 3 and 3.5: the layers of LLaMA under the names of GPT-2.",
        layer=EXAONE_LAYER,
        defaults={"vocab": 102_400, "mlp": 14336, "kv_heads": 8},
        positions=4096,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        aliases={
            "num_layers": "num_hidden_layers",
            "layer_norm_epsilon": "rms_norm_eps",
            "activation_function": "hidden_act",
        },
        prefix="transformer.",
        tokens="wte.weight",
        layers="h.{layers}",
        final_norm=rms_norm("final_norm", "embed <- ln_f.weight: embed"),
        dropped={"rotary.inv_freq": "rotary frequencies, computed from the config"},
    ),
    llama_like(
        "phi3",
        "Phi-3, 3.5 and 4-mini: LLaMA with fused QKV, and gate and up fused in one matrix.",
        layer={**PRE_NORMS, **PHI3_ATTENTION, **FUSED_GATED_MLP},
        defaults={"vocab": 32064, "embed": 3072, "mlp": 8192},
        more_sizes=lambda config, sizes: {"gate_up": 2},
        positions=4096,
        rope=_read_phi3_rope,
        norm_eps=1e-5,
        choices=uniform_window(None),
        ignores=("layer_types",),
        dropout_fields=DropoutFields(residual=("resid_pdrop", 0.0)),
    ),
    llama_like(
        "hunyuan_v1_dense",
        "Hunyuan V1 (dense): LLaMA with norms of queries and keys after their rotation.",
        layer={
            **PRE_NORMS,
            **BIASED_ATTENTION,
            **rms_norm("attn.q_norm", "head_dim <- self_attn.query_layernorm.weight: head_dim"),
            **rms_norm("attn.k_norm", "head_dim <- self_attn.key_layernorm.weight: head_dim"),
            **gated_mlp(),
        },
        defaults={"vocab": 290_943},
        rope=read_static_rope,
        norm_eps=1e-5,
        choices={"rotates_before_qk_norm": True},
        # Published files have the field. The class always has the norms.
        ignores=("use_qk_norm",),
    ),
    llama_like(
        "granite",
        "Granite: LLaMA with a factor each for embeddings, scores, outputs of sublayers, and logits.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **BIASED_MLP},
        choices=GRANITE_FACTORS,
    ),
    llama_like(
        "granite_swa",
        "Granite with sliding windows in three of four layers, attention sinks, and a rotary base per layer.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **SINKS, **BIASED_MLP},
        defaults={"vocab": 100_352, "embed": 2560, "mlp": 8192, "layers": 24, "heads": 20, "kv_heads": 4},
        positions=8192,
        norm_eps=1e-5,
        choices={**GRANITE_FACTORS, **windows_and_sinks(8192)},
        tied=True,
    ),
    llama_like(
        "hyperclovax",
        "HyperCLOVA X SEED: Granite with optional norms after each sublayer, and logits times a factor.",
        layer={
            **PRE_NORMS,
            **under_condition(rms_norms(attn_post_norm="post_norm1", mlp_post_norm="post_norm2"), HAS_POST_NORMS),
            **BIASED_ATTENTION,
            **BIASED_MLP,
        },
        choices={
            **GRANITE_FACTORS,
            "attn_scale": lambda config, sizes: read_positive(
                config, "attention_multiplier", sizes["head_dim"] ** -0.5
            ),
            # Granite divides the logits by this field.
            "lm_head_input_scale": positive("logits_scaling", 1.0),
            "block_type": lambda config, sizes: "sandwich" if HAS_POST_NORMS(config) else "pre",
        },
    ),
)  # fmt: skip
