"""What a family's layers compute, as choices by name; the same for every parameter and every mesh. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.errors import PrepError
from trainer.rope import Rope

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "silu", "swish", "relu")
ALL_BEFORE = 0  # a window without an edge
NO_CAP = 0.0
KINDS = ("full_attention", "sliding_attention")  # in `layer_types`

# Fields that change what some decoder of transformers computes, and values of them that change nothing. Whoever reads
# one says so; in a config of any other family it is an error.
CHANGES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "add_cross_attention", "alibi", "attention_bias", "attention_chunk_size", "attn_logit_softcapping",
            "clip_qkv", "final_logit_softcapping", "is_encoder_decoder", "mlp_bias", "mlp_only_layers",
            "moe_layer_start_index", "n_shared_experts", "no_rope_layers", "num_experts", "num_local_experts",
            "num_shared_experts", "parallel_attn", "qk_layernorm", "qkv_bias", "query_pre_attn_scalar",
            "rope_local_base_freq", "router_jitter_noise", "scale_attn_by_inverse_layer_idx", "scale_embedding",
            "shared_intermediate_size", "sliding_window", "sliding_window_pattern", "use_bidirectional_attention",
            "use_mup", "use_parallel_residual", "use_qk_norm",
        ),
        (None, False, 0, []),
    ),
    **dict.fromkeys(
        (
            "attention_multiplier", "embedding_multiplier", "logit_scale", "logits_scaling", "partial_rotary_factor",
            "residual_multiplier", "rotary_pct",
        ),
        (None, 1),
    ),
    "layer_types": (None,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Traits:
    """The choices of a decoder.

    windows: of each layer how many positions a token sees, itself included; ALL_BEFORE: all up to it. residual: what
    the blocks add and where norms stand; each form is a case of `layers.block`. Caps bound by cap * tanh(x / cap).
    """

    norm: Literal["layer", "rms", "rms_offset"]  # the last one scales by 1 + scale, all of it in float32
    norm_eps: float
    activation: str
    gated: bool
    score_scale: float  # of query-key products
    windows: tuple[int, ...]
    rope: Rope | None  # None: learned positions
    positions: int  # learned ones end there
    init_std: float
    residual: Literal["pre", "post", "parallel", "parallel_one_norm", "sandwich"] = "pre"
    final_norm: bool = True
    local_rope: Rope | None = None  # in layers with a window, where that is another one
    rotary_pairs: Literal["halves", "neighbours"] = "halves"  # which elements of a head turn together
    position_offset: int = 0  # the row of the first learned position
    embed_scale: float = 1.0
    score_cap: float = NO_CAP
    logit_cap: float = NO_CAP
    experts_per_token: int = 0  # 0: one feed-forward part for all
    experts_sum_to_one: bool = True  # the shares of those that a token has

    def rope_of(self, window: int) -> Rope | None:
        """The rotation in layers with this window."""
        return self.local_rope if self.local_rope and window != ALL_BEFORE else self.rope


def only_knows(config: Mapping[str, Any], *fields: str) -> None:
    """PrepError where a config sets a field that changes what is computed and is not among those that are read."""
    for field, harmless in CHANGES.items():
        value = config.get(field)
        same_layers = field == "layer_types" and isinstance(value, list) and all(kind == KINDS[0] for kind in value)
        if field not in fields and not same_layers and not any(value == each for each in harmless):
            why = f"config.json says {value!r:.60}; it changes what a model computes, and this family does not have it"
            raise PrepError(f"`{field}` is not known", why)


def activation(config: Mapping[str, Any], key: str, default: str) -> str:
    """An activation that a config names; PrepError for one that is not known."""
    name = config.get(key) or default
    if name not in ACTIVATIONS:
        raise PrepError(f"activation `{name}` is not known", f"{key} of config.json; known: {', '.join(ACTIVATIONS)}")
    return name


def positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number above 0 that a config gives; PrepError for anything else."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise PrepError("config.json makes no sense", f"{key} is {value!r:.60}, it has to be a number above 0")
    return float(value)


def cap(config: Mapping[str, Any], key: str, default: float | None) -> float:
    """A bound of scores or logits: null is none, an absent one is the default. PrepError unless it is above 0."""
    return NO_CAP if config.get(key, default) is None else positive(config, key, default or NO_CAP)


def sliding_windows(
    config: Mapping[str, Any], layers: int, window: int | None, slides: Callable[[int], bool]
) -> tuple[int, ...]:
    """The window of each layer: that of the layers that slide, by `layer_types` or else by number; None: no window.

    PrepError for a window that is no size, other words, and another number of layers.
    """
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise PrepError("config.json makes no sense", f"sliding_window is {window!r:.60}, not a number from 1 on")
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if window and slides(layer) else ALL_BEFORE for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in KINDS for kind in kinds):
        why = f"layer_types is {kinds!r:.80}, it has to be {layers} of {' and '.join(KINDS)}"
        raise PrepError("config.json makes no sense", why)
    if window is None and KINDS[1] in kinds:
        raise PrepError("config.json makes no sense", f"layer_types has {KINDS[1]}, sliding_window is off")
    return tuple(window if window and kind == KINDS[1] else ALL_BEFORE for kind in kinds)


def period(windows: Sequence[int]) -> int:
    """After how many layers the pattern of windows begins anew; a last part of it may be missing."""
    lengths = range(1, len(windows) + 1)
    return next(n for n in lengths if all(a == b for a, b in zip(windows, windows[n:])))
