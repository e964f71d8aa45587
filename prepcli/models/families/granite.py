"""Granite and its kin: LLaMA with factors, and with windows and attention sinks. No I/O, no jax."""

from __future__ import annotations

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.json_values import HFConfig
from prepcli.models.architecture import (
    FULL_ATTENTION,
    read_positive,
    read_sliding_windows,
)
from prepcli.models.declaration import Choices, Sizes, by_name, changed, under_condition
from prepcli.models.families._llama_style import (
    BIASED_ATTENTION,
    BIASED_MLP,
    PRE_NORMS,
    llama_like,
    rms_norms,
)
from prepcli.models.parameters import Parameter, read_size
from prepcli.models.rope_config import Rope, read_rope, read_scaling
from prepcli.models.rows import (
    Parameters,
    unless_false,
)

# Without `attention_multiplier` the scores are not scaled. In other families they are.
GRANITE_FACTORS: Choices = {
    "attn_scale": lambda config, sizes: read_positive(config, "attention_multiplier", 1.0),
    "embed_scale": lambda config, sizes: read_positive(config, "embedding_multiplier", 1.0),
    "residual_scale": lambda config, sizes: read_positive(config, "residual_multiplier", 1.0),
    # The logits are divided by `logits_scaling`.
    "lm_head_input_scale": lambda config, sizes: 1 / read_positive(config, "logits_scaling", 1.0),
}
SINKS: Parameters = {"attn.sinks.bias": Parameter("heads <- self_attn.sinks: heads")}


def windows_and_sinks(max_positions: int) -> Choices:
    """Return the choices of Granite with windows: sinks, and a rotary base for each type of layer.

    Args:
        max_positions: Default of `max_position_embeddings`.
    """

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
        "sliding_windows": _granite_windows,
        "has_attention_sinks": True,
    }


def _granite_windows(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    window = config.get("sliding_window", 128)
    return read_sliding_windows(config, sizes["layers"], window, lambda layer: layer % 4 != 0)


def _thetas(config: HFConfig, sizes: Sizes, max_positions: int) -> list[float]:
    """Return the rotary base of each layer, 0 for a layer without rotation.

    Raises:
        PrepError: The list has another length or values below 0.
    """
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
    """Return the rotary bases of the layers with full attention (True) and of the layers with a window (False).

    Raises:
        PrepError: Layers of one type have different bases.
    """
    thetas = _thetas(config, sizes, max_positions)
    bases: dict[bool, set[float]] = {True: set(), False: set()}
    for theta, window in zip(thetas, _granite_windows(config, sizes)):
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
        "granite",
        "Granite: LLaMA with a factor each for embeddings, scores, outputs of sublayers, and logits.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **BIASED_MLP},
        choices=GRANITE_FACTORS,
    ),
    llama_like(
        "granite_swa",
        "Granite with sliding windows in three of four layers, attention sinks, and a rotary base per layer.",
        layer={**PRE_NORMS, **BIASED_ATTENTION, **SINKS, **BIASED_MLP},
        defaults={
            "vocab": 100_352,
            "embed": 2560,
            "mlp": 8192,
            "layers": 24,
            "heads": 20,
            "kv_heads": 4,
        },
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
            **under_condition(
                rms_norms(attn_post_norm="post_norm1", mlp_post_norm="post_norm2"), HAS_POST_NORMS
            ),
            **BIASED_ATTENTION,
            **BIASED_MLP,
        },
        choices={
            **GRANITE_FACTORS,
            "attn_scale": lambda config, sizes: read_positive(
                config, "attention_multiplier", sizes["head_dim"] ** -0.5
            ),
            # Granite divides the logits by this field.
            "lm_head_input_scale": lambda config, sizes: read_positive(
                config, "logits_scaling", 1.0
            ),
            "block_type": lambda config, sizes: "sandwich" if HAS_POST_NORMS(config) else "pre",
        },
    ),
)
