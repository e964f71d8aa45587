"""What a family's layers compute, as choices by name; the same for every parameter and every mesh. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainer.models.errors import PrepError
from trainer.models.rope_config import Rope

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "silu", "swish", "relu")
FULL_ATTENTION = 0  # a window without an edge
MAX_WINDOW = 1 << 30  # window: wider ones see no more, and do not fit an int32
NO_SOFTCAP = 0.0
MAX_FLOAT32 = 3.4e38  # of float32
MAX_RELATIVE_DISTANCE = (
    1 << 20
)  # of distances that are told apart: beyond any sequence; keeps a wrong config from asking for memory
LAYER_TYPES = ("full_attention", "sliding_attention")  # in `layer_types`

ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")  # fields of a config
ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn", "feed_forward_proj")
EQUIVALENT_ACTIVATIONS = {
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "swish": "silu",
}  # activations by two names

# Fields that change what some decoder of transformers computes, and values of them that change nothing. Whoever reads
# one says so; in a config of any other family it is an error.
SEMANTIC_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "add_cross_attention", "alibi", "attention_bias", "attention_chunk_size", "attention_layers",
            "attention_types", "attn_logit_softcapping", "clip_qkv", "final_logit_softcapping", "first_k_dense_replace",
            "global_attn_every_n_layers", "is_encoder_decoder", "kv_lora_rank", "layer_rope_theta", "lm_head_bias",
            "mlp_bias", "mlp_only_layers", "moe_layer_start_index", "multi_query", "n_routed_experts",
            "n_shared_experts", "no_rope_layers", "num_experts", "num_kv_shared_layers", "num_local_experts",
            "num_shared_experts", "parallel_attn", "per_layer_config", "q_lora_rank", "qk_layernorm", "qkv_bias",
            "query_pre_attn_scalar", "rope_interleave", "rope_local_base_freq", "rope_parameters", "rope_scaling",
            "rope_theta", "router_jitter_noise", "scale_attn_by_inverse_layer_idx", "scale_embedding",
            "shared_intermediate_size", "sliding_window", "sliding_window_pattern", "use_attention_gate",
            "use_bidirectional_attention", "use_mup", "use_parallel_residual", "use_post_norm", "use_qk_norm",
            "use_sandwich_norm",
        ),
        (None, False, 0, [], {}),
    ),
    **dict.fromkeys(
        (
            "attention_multiplier", "embedding_multiplier", "lm_head_multiplier", "logit_scale", "logits_scaling",
            "partial_rotary_factor", "residual_multiplier", "rotary_pct", "routed_scaling_factor",
        ),
        (None, 1),
    ),
    "layer_types": (None,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RelativePositionBias:
    """A bias of scores by how far a key is: one for each of `buckets`, near distances each by itself, those from
    `farthest` on together. `both_ways`: keys after a query have half of the buckets."""

    num_buckets: int
    max_distance: int
    bidirectional: bool

    def __post_init__(self) -> None:
        """PrepError where there is nothing to tell apart."""
        exact = self.num_buckets // 2
        if self.num_buckets < 4 or not exact < self.max_distance <= MAX_RELATIVE_DISTANCE:
            why = f"{self.num_buckets} buckets of distances up to {self.max_distance}"
            raise PrepError(
                "config.json makes no sense", f"{why}: it takes 4 or more, and {exact + 1} to {MAX_RELATIVE_DISTANCE:,}"
            )


@dataclass(frozen=True, slots=True)
class ArchConfig:
    """The choices of a decoder, or of the encoder before it.

    windows: of each layer how many positions a token sees, itself included; ALL_BEFORE: all up to it. residual: what
    the blocks add and where norms stand; each form is a case of `layers.block`. Caps bound by cap * tanh(x / cap).
    """

    norm: Literal["layer", "rms", "rms_offset"]  # the last one scales by 1 + scale, all of it in float32
    norm_eps: float
    activation: str
    has_gated_mlp: bool
    attn_scale: float  # of query-key products
    sliding_windows: tuple[int, ...]
    rope: Rope | None  # None, and no `distances`: learned positions
    max_positions: int  # learned ones end there
    init_std: float
    block_type: Literal["pre", "post", "parallel", "parallel_one_norm", "sandwich"] = "pre"
    has_final_norm: bool = True
    local_rope: Rope | None = None  # in layers with a window, where that is another one
    rotary_pairs: Literal["halves", "neighbours"] = "halves"  # which elements of a head turn together
    position_offset: int = 0  # the row of the first learned position
    embed_scale: float = 1.0
    attn_logit_softcap: float = NO_SOFTCAP
    final_logit_softcap: float = NO_SOFTCAP
    experts_per_token: int = 0  # 0: one feed-forward part for all
    norm_topk_prob: bool = True  # the shares of those that a token has
    scale_attn_by_inverse_layer_idx: bool = False  # scores of layer i, from 1 on, are divided by i
    relative_position_bias: RelativePositionBias | None = None
    lm_head_input_scale: float = 1.0  # of hidden states before the head
    encoder: ArchConfig | None = None  # whose states the layers look at too; there each token sees all

    @property
    def has_learned_positions(self) -> bool:
        """Whether a table has a row for each position."""
        return self.rope is None and self.relative_position_bias is None

    def rope_for(self, window: int) -> Rope | None:
        """The rotation in layers with this window."""
        return self.local_rope if self.local_rope and window != FULL_ATTENTION else self.rope

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """All rotations that its layers use."""
        return tuple(dict.fromkeys(rope for rope in map(self.rope_for, self.sliding_windows) if rope))


def reject_unsupported_fields(config: Mapping[str, Any], *fields: str) -> None:
    """PrepError where a config sets a field that changes what is computed and is not among those that are read."""
    for field, harmless in SEMANTIC_FIELDS.items():
        value = config.get(field)
        same_layers = (
            field == "layer_types" and isinstance(value, list) and all(kind == LAYER_TYPES[0] for kind in value)
        )
        if field not in fields and not same_layers and not any(value == each for each in harmless):
            why = f"config.json says {value!r:.60}; it changes what a model computes, and this family does not have it"
            raise PrepError(f"`{field}` is not known", why)


def read_activation(config: Mapping[str, Any], key: str, default: str) -> str:
    """The activation that a config's field names; PrepError for one that is not known, and where the field that has it
    in other families says another one."""
    name = config.get(key) or default
    if name not in ACTIVATIONS:
        raise PrepError(f"activation `{name}` is not known", f"{key} of config.json; known: {', '.join(ACTIVATIONS)}")
    for field in ACTIVATION_FIELDS:
        said = config.get(field) or name
        if said != name and (
            not isinstance(said, str)
            or EQUIVALENT_ACTIVATIONS.get(said, said) != EQUIVALENT_ACTIVATIONS.get(name, name)
        ):
            why = f"config.json says {said!r:.60}; this family reads `{key}`, which makes it {name}"
            raise PrepError(f"`{field}` is not known", why)
    return name


def read_positive(config: Mapping[str, Any], key: str, default: float) -> float:
    """A number above 0 that a config gives; PrepError for anything else."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_FLOAT32:
        raise PrepError("config.json makes no sense", f"{key} is {value!r:.60}, it has to be a number above 0")
    return float(value)


def read_softcap(config: Mapping[str, Any], key: str, default: float | None) -> float:
    """A bound of scores or logits: null is none, an absent one is the default. PrepError unless it is above 0."""
    return NO_SOFTCAP if config.get(key, default) is None else read_positive(config, key, default or NO_SOFTCAP)


def read_sliding_windows(
    config: Mapping[str, Any], layers: int, window: int | None, slides: Callable[[int], bool]
) -> tuple[int, ...]:
    """The window of each layer: that of the layers that slide, by `layer_types` or else by number; None: no window.

    PrepError for a window that is no size, other words, and another number of layers.
    """
    width, kinds = _read_window(window), config.get("layer_types")
    if kinds is None:
        kinds = [LAYER_TYPES[window is not None and slides(layer)] for layer in range(layers)]
    elif window is None and isinstance(kinds, list) and LAYER_TYPES[1] in kinds:
        raise PrepError("config.json makes no sense", f"layer_types has {LAYER_TYPES[1]}, sliding_window is off")
    return windows_by_layer_type(kinds, LAYER_TYPES, layers, width, "layer_types")


def uniform_windows(layers: int, window: int | None) -> tuple[int, ...]:
    """Return the window of each layer of a family whose layers all have it, as transformers computes them whatever
    `layer_types` says. None is no window. Raise PrepError for a window that is not a size."""
    return (_read_window(window),) * layers


def _read_window(window: Any) -> int:
    if window is None:
        return FULL_ATTENTION
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise PrepError("config.json makes no sense", f"sliding_window is {window!r:.60}, not a number from 1 on")
    return min(window, MAX_WINDOW)


def windows_by_layer_type(kinds: Any, words: tuple[str, str], layers: int, window: int, field: str) -> tuple[int, ...]:
    """The window of each layer: of the second of two kinds, by the words for them. PrepError names the field that has
    other words, or another number of them."""
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in words for kind in kinds):
        why = f"{field} makes layers of {kinds!r:.80}, it has to be {layers} of {' and '.join(words)}"
        raise PrepError("config.json makes no sense", why)
    return tuple(window if kind == words[1] else FULL_ATTENTION for kind in kinds)


def window_period(windows: Sequence[int]) -> int:
    """After how many layers the pattern of windows begins anew; a last part of it may be missing."""
    lengths = range(1, len(windows) + 1)
    return next(n for n in lengths if all(a == b for a, b in zip(windows, windows[n:])))
