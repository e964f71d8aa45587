"""The architecture of a model: named choices for its layers, read from a Hugging Face config.

The choices do not depend on parameter values or on the device mesh. A function that reads a config raises PrepError for
a value that is invalid, or that prep does not support. No I/O, no jax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from prepcli.algebra.axis_map import ATTENTION_LAYERS, DENSE_LAYERS, MIXER_LAYERS, SPARSE_LAYERS
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.core.json_values import HFConfig, JsonValue
from prepcli.models.layer_config import (
    SOFTMAX_ROUTER,
    Alibi,
    ClampedSwiglu,
    LayerSchedule,
    Mixer,
    RelativePositionBias,
    Router,
    group_indices,
    layer_schedule,
)
from prepcli.models.rope_config import MAX_FLOAT32, QueryScale, Rope

ACTIVATIONS = (
    "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "silu", "swish", "relu", "relu2",
)  # fmt: skip
# Activation with parameters of its own. Only the families that have them support it.
XIELU = "xielu"
# A sliding window without a limit.
FULL_ATTENTION = 0
# Wider windows are reduced to this size. It fits into int32 and is longer than any sequence.
MAX_WINDOW = 1 << 30
# Attention without chunks.
NO_CHUNK = 0
NO_SOFTCAP = 0.0
NO_CLIP = 0.0
# Residual connections and norms of a layer. `trainer.nn.block` has a function for each.
BlockType = Literal[
    "pre",
    "post",
    "parallel",
    "parallel_one_norm",
    "sandwich",
    "sandwich_input",
    "output_norm",
    "single",
]
# Keys and values of a layer: its own, its own that later layers attend to as well, or those of an earlier layer.
KeyValueRole = Literal["own", "stored", "reused"]
# Path of the factor of a layer's output in blocks of the type "sandwich_input". Transformers does not train it either.
OUTPUT_SCALE = "layers.output.scale"
# Ends of the paths of the constants of xIELU.
XIELU_CONSTANTS = ("mlp.xielu_beta.scale", "mlp.xielu_eps.scale")
# Names of the vectors of differential attention among the weights of attention.
LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
# Values in `layer_types`.
LAYER_TYPES = ("full_attention", "sliding_attention")

ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta")
ACTIVATION_FIELDS = (
    "hidden_act", "hidden_activation", "activation_function", "dense_act_fn", "feed_forward_proj",
)  # fmt: skip
# Three names of one formula, 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), and silu is swish.
EQUIVALENT_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}

# Config fields with an effect on some decoder of transformers -> values without effect. A family lists the fields it
# supports; another field of this table with another value is an error.
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


class LayerKind(NamedTuple):
    """The choices that differ between the layers of a stack."""

    # Number of visible positions, including the token's own position, or FULL_ATTENTION.
    window: int
    # Rotary embedding, with `rotary_dim` 0 if only queries have a factor by position. None if neither queries nor keys
    # depend on the position.
    rope: Rope | None
    chunk: int = NO_CHUNK  # Number of positions of a chunk, or NO_CHUNK.
    key_values: KeyValueRole = "own"  # Whether the layer has its own keys and values.


@dataclass(frozen=True, slots=True)
class ArchConfig:
    """The architecture of a decoder, or of the encoder before it."""

    # Type of the norms. The "offset" types scale by 1 + weight, all of it in float32. "rms_plain" has no parameters.
    norm: Literal["layer", "layer_offset", "rms", "rms_offset", "rms_plain"]
    norm_eps: float  # Epsilon of the norms.
    activation: str  # Activation of the MLP, one of ACTIVATIONS.
    has_gated_mlp: bool  # Whether the MLP has a gate matrix.
    attn_scale: float  # Factor of the query-key products.
    # Window of each layer: a number of positions, that of the token included, or FULL_ATTENTION.
    sliding_windows: tuple[int, ...]
    # Rotary embedding. If it and `score_bias` are None, the model has learned positions.
    rope: Rope | None
    max_positions: int  # Number of positions of the config. A model may compute longer sequences.
    init_std: float  # Standard deviation of the initial matrices and embeddings.
    block_type: BlockType = "pre"  # Residual connections and norms of a layer.
    has_final_norm: bool = True  # Whether a norm follows the last layer.
    # Rotary embedding of layers with a sliding window, if it differs from `rope`.
    local_rope: Rope | None = None
    # Indices of the layers without rotation in a model with `rope` (NoPE, arXiv:2305.19466).
    layers_without_rope: tuple[int, ...] = ()
    query_scale: QueryScale | None = None  # Factor of the queries of these layers. None means 1.
    # Number n of positions of a chunk (Llama 4): a token attends to the earlier tokens of its chunk, which are the
    # positions floor(p / n) n to p. NO_CHUNK means no chunks.
    attention_chunk: int = NO_CHUNK
    chunked_layers: tuple[int, ...] = ()  # Indices of the layers with chunks.
    # The elements of a head that rotate together: element i of each half, or neighbouring elements.
    rotary_pairs: Literal["half_split", "interleaved"] = "half_split"
    # Whether fixed sines and cosines of the position are added to the token embeddings (arXiv:1706.03762, section 3.5)
    # instead of learned ones.
    has_sinusoidal_positions: bool = False
    # Row of the first learned position, or number added to sinusoidal ones.
    position_offset: int = 0
    embed_scale: float = 1.0  # Factor of the token embeddings.
    # Whether the input of the first layer has a norm without parameters.
    has_plain_embed_norm: bool = False
    # Factor of the outputs of attention and MLP before they are added to the residual stream.
    residual_scale: float = 1.0
    # Elements under one norm of queries or keys: of one head, or of all heads together.
    qk_norm_axes: Literal["head", "all_heads"] = "head"
    # Whether the norms of queries and keys follow their rotation.
    rotates_before_qk_norm: bool = False
    # Whether queries and keys with rotation have an RMS norm without a scale.
    has_plain_qk_norm: bool = False
    # Whether the values of a head have an RMS norm without a scale (Gemma 4).
    has_plain_value_norm: bool = False
    # Whether a layer without a projection of values has its keys, before their norm and rotation, as values (Gemma 4).
    has_key_values: bool = False
    # Numbers of the layers that attend to the keys and values of the last earlier layer with their window and keys and
    # values of its own (cross-layer attention, arXiv:2405.12981).
    reusing_layers: tuple[int, ...] = ()
    # Groups of layers with parameters of other shapes than other layers -> numbers of their layers.
    shape_groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # Whether each layer has an input from the tokens of its own (`trainer.nn.projections`).
    has_layer_inputs: bool = False
    qkv_clip: float = NO_CLIP  # Bound of the elements of queries, keys and values, or NO_CLIP.
    # Bound c of attention scores as c * tanh(x / c), or NO_SOFTCAP.
    attn_logit_softcap: float = NO_SOFTCAP
    final_logit_softcap: float = NO_SOFTCAP  # Bound of the logits, in the same form.
    experts_per_token: int = 0  # Number of experts per token, or 0 for a dense MLP.
    router: Router = SOFTMAX_ROUTER  # Selection of the experts and their weights.
    # Numbers of the layers with a dense MLP in a model with experts, or with block type "single".
    dense_layers: tuple[int, ...] = ()
    # Numbers of the layers with an MLP or experts and nothing else. Only with block type "single", where the other
    # layers have no MLP.
    feed_forward_layers: tuple[int, ...] = ()
    mixer: Mixer | None = None  # Recurrent mixer of some or all layers.
    mixer_layers: tuple[int, ...] = ()  # Numbers of the layers with the mixer.
    # Whether these layers have attention on the same input too.
    has_attention_beside_mixer: bool = False
    attn_input_scale: float = 1.0  # Factor of the normed input of attention.
    attn_output_scale: float = 1.0  # Factor of the output of attention.
    gate_scale: float = 1.0  # Factor of the gate of the MLP before the activation.
    mlp_output_scale: float = 1.0  # Factor of the output of the MLP.
    # Gating of the experts in place of `activation`, with a bound.
    clamped_swiglu: ClampedSwiglu | None = None
    # Elements of a key that come from the latent of multi-head latent attention, or 0 for attention with a projection
    # of keys.
    latent_key_dim: int = 0
    latent_norm_eps: float = 1e-6  # Epsilon of the norms of latents.
    # Whether the attention of one head of each pair is subtracted from the other's (DiffLlama).
    has_differential_attention: bool = False
    # Whether each head has a sink, a key without a value in its softmax.
    has_attention_sinks: bool = False
    # Whether attention scores of layer i, counted from 1, are divided by i.
    scale_attn_by_inverse_layer_idx: bool = False
    # Bias of attention scores by relative position.
    score_bias: RelativePositionBias | Alibi | None = None
    # Whether keys have scores from their values, which attention scores include (Doge).
    has_key_scores: bool = False
    lm_head_input_scale: float = 1.0  # Factor of the hidden states before the head.
    # Architecture of the encoder. The layers attend to its output. Its attention is bidirectional.
    encoder: ArchConfig | None = None
    # End of a leaf's path -> its standard deviation, for leaves with another one.
    leaf_init_stds: tuple[tuple[str, float], ...] = ()

    @property
    def has_learned_positions(self) -> bool:
        """Whether the model adds a learned embedding of each position."""
        has_other_order = self.score_bias is not None or self.mixer is not None
        return self.rope is None and not has_other_order and not self.has_sinusoidal_positions

    @property
    def has_limited_positions(self) -> bool:
        """Whether a sequence longer than `max_positions` cannot be computed."""
        return self.has_learned_positions or self.has_key_scores

    @property
    def values_per_head(self) -> int:
        """Number of heads with values that the attention of one head reads."""
        return 2 if self.has_differential_attention else 1

    @property
    def norm_scale_offset(self) -> float:
        """Number added to the scale of a norm before its multiplication."""
        return 1.0 if self.norm in ("layer_offset", "rms_offset") else 0.0

    def leaf_init_std(self, path: str) -> float:
        """Return the standard deviation of the initial values of a matrix or an embedding."""
        return next(
            (std for suffix, std in self.leaf_init_stds if path.endswith(suffix)), self.init_std
        )

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        layers_without_rope = frozenset(self.layers_without_rope)
        chunked_layers = frozenset(self.chunked_layers)
        roles = self._key_value_roles()
        kinds: list[LayerKind] = []
        for layer, window in enumerate(self.sliding_windows):
            rope = self.rope
            if layer in layers_without_rope:
                rope = self._unrotated_rope()
            elif self.local_rope is not None and window != FULL_ATTENTION:
                rope = self.local_rope
            chunk = self.attention_chunk if layer in chunked_layers else NO_CHUNK
            kinds.append(LayerKind(window, rope, chunk, roles.get(layer, "own")))
        return tuple(kinds)

    def _key_value_roles(self) -> dict[int, KeyValueRole]:
        """Return the roles of keys and values: layer -> role, without the layers of role "own"."""
        roles: dict[int, KeyValueRole] = dict.fromkeys(self.reusing_layers, "reused")
        last_layers: dict[int, int] = {}
        last_own_layers: dict[int, int] = {}
        for layer, window in enumerate(self.sliding_windows):
            last_layers[window] = layer
            if layer not in roles:
                last_own_layers[window] = layer
        # The last layer with a window before all that reuse keys and values stores its own for them.
        for window, layer in last_own_layers.items():
            if last_layers[window] != layer:
                roles[layer] = "stored"
        return roles

    def _unrotated_rope(self) -> Rope | None:
        """Return the rotary embedding of layers without rotation. None if their queries have no factor either."""
        if self.rope is None or self.query_scale is None:
            return None
        return replace(self.rope, rotary_dim=0, rope_type="default", query_scale=self.query_scale)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with attention."""
        if self.has_attention_beside_mixer:
            return self._remaining_layers(())
        return self._remaining_layers((*self.mixer_layers, *self.feed_forward_layers))

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts in a model with experts."""
        if not self.feed_forward_layers:
            return self._remaining_layers(self.dense_layers)
        dense_layers = frozenset(self.dense_layers)
        return tuple(layer for layer in self.feed_forward_layers if layer not in dense_layers)

    @property
    def caching_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with keys and values of their own."""
        return tuple(layer for layer in self.attention_layers if layer not in self.reusing_layers)

    @property
    def layer_groups(self) -> dict[str, tuple[int, ...]]:
        """Groups of layers with parameters that other layers do not have -> numbers of their layers."""
        groups = {
            DENSE_LAYERS: self.dense_layers,
            SPARSE_LAYERS: self.sparse_layers,
            ATTENTION_LAYERS: self.attention_layers,
            MIXER_LAYERS: self.mixer_layers,
        }
        num_layers = len(self.sliding_windows)
        partial = {
            group: layers for group, layers in groups.items() if 0 < len(layers) < num_layers
        }
        return partial | dict(self.shape_groups)

    def _remaining_layers(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        excluded = frozenset(layers)
        return tuple(layer for layer in range(len(self.sliding_windows)) if layer not in excluded)

    @property
    def group_indices(self) -> tuple[dict[str, int], ...]:
        """For each layer the groups that have its weights, and its index in each of them."""
        return group_indices(len(self.sliding_windows), self.layer_groups)

    @property
    def layer_schedule(self) -> LayerSchedule:
        """The order in which layers are scanned. Layers of the same kind and groups are equal."""
        return layer_schedule(list(zip(self.layer_kinds, map(tuple, self.group_indices))))

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """All rotary embeddings of the layers, without repetition."""
        ropes = (kind.rope for kind in self.layer_kinds)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))


def reject_unsupported_fields(config: HFConfig, *supported_fields: str) -> None:
    """Raise PrepError if a config sets a semantic field without support in the family."""
    for field, neutral_values in SEMANTIC_FIELDS.items():
        value = config.get(field)
        is_full_attention = (
            field == "layer_types"
            and isinstance(value, list)
            and all(layer_type == LAYER_TYPES[0] for layer_type in value)
        )
        if (
            field not in supported_fields
            and not is_full_attention
            and not any(value == v for v in neutral_values)
        ):
            why = f"config.json has {value!r:.60}, which changes what the model computes"
            raise unsupported_config_error(f"`{field}` is not supported for this family", why)


def read_activation(config: HFConfig, key: str, default: str) -> str:
    """Return the activation in a config field, one of ACTIVATIONS, or the default if the field is absent or null."""
    name = config.get(key) or default
    if name not in ACTIVATIONS:
        why = f"{key} of config.json; supported: {', '.join(ACTIVATIONS)}"
        raise unsupported_config_error(f"activation `{name}` is not supported", why)
    for field in ACTIVATION_FIELDS:
        value = config.get(field) or name
        if value != name and (
            not isinstance(value, str) or canonical_activation(value) != canonical_activation(name)
        ):
            why = f"config.json has {value!r:.60}; this family reads `{key}`, which is {name}"
            raise unsupported_config_error(f"`{field}` is not supported for this family", why)
    return name


def canonical_activation(name: str) -> str:
    """Return one name for all names of an activation, e.g. `gelu_pytorch_tanh` -> `gelu_new`."""
    return EQUIVALENT_ACTIVATIONS.get(name, name)


def read_positive(config: HFConfig, key: str, default: float) -> float:
    """Return the number in a config field, or the default if the field is absent or null."""
    value = config.get(key)
    value = default if value is None else value
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not 0 < value <= MAX_FLOAT32
    ):
        raise invalid_config_error(f"{key} is {value!r:.60}, it must be a number above 0")
    return float(value)


def read_softcap(config: HFConfig, key: str, default: float | None) -> float:
    """Return the softcap in a config field: NO_SOFTCAP if it is null, the default if the field is absent."""
    if config.get(key, default) is None:
        return NO_SOFTCAP
    return read_positive(config, key, default or NO_SOFTCAP)


def read_sliding_windows(
    config: HFConfig, layers: int, window: JsonValue, is_sliding: Callable[[int], bool]
) -> tuple[int, ...]:
    """Return the sliding window of each layer, from `layer_types` or from the layer's index.

    `window` is the width of the layers with a sliding window, or None if no layer has one. `is_sliding` decides by
    the index of a layer if there are no `layer_types`. The result has FULL_ATTENTION for the other layers.
    """
    width = _read_window(window)
    layer_types = config.get("layer_types")
    if layer_types is None:
        layer_types = [
            LAYER_TYPES[window is not None and is_sliding(layer)] for layer in range(layers)
        ]
    elif window is None and isinstance(layer_types, list) and LAYER_TYPES[1] in layer_types:
        raise invalid_config_error(
            f"layer_types has {LAYER_TYPES[1]}, but there is no sliding_window"
        )
    return windows_by_layer_type(
        layer_types, LAYER_TYPES, layers=layers, window=width, field="layer_types"
    )


def is_in_window_pattern(config: HFConfig, layer: int, default: int) -> bool:
    """Return whether a layer has a sliding window by `sliding_window_pattern`: all but each n-th layer.

    transformers reads the pattern only without `layer_types`.
    """
    pattern = config.get("sliding_window_pattern", default)
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise invalid_config_error(
            f"sliding_window_pattern is {pattern!r:.60}, it must be a positive integer"
        )
    return (layer + 1) % pattern != 0


def uniform_windows(layers: int, window: JsonValue) -> tuple[int, ...]:
    """Return the same sliding window for each layer.

    In some families Transformers ignores `layer_types` and uses one window in all layers.
    """
    return (_read_window(window),) * layers


def _read_window(window: JsonValue) -> int:
    """Return the sliding window of a config.json as a number of tokens."""
    if window is None:
        return FULL_ATTENTION
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise invalid_config_error(
            f"sliding_window is {window!r:.60}, it must be a positive integer"
        )
    return min(window, MAX_WINDOW)


def windows_by_layer_type(
    layer_types: Any, type_names: tuple[str, str], *, layers: int, window: int, field: str
) -> tuple[int, ...]:
    """Return the sliding window of each layer from a list of layer types.

    `type_names` are the types with full attention and with a sliding window. `field` names the list in errors.
    """
    is_list = isinstance(layer_types, list)
    if (
        not is_list
        or len(layer_types) != layers
        or any(name not in type_names for name in layer_types)
    ):
        why = f"{field} gives the layers {layer_types!r:.80}, it must give {layers} of {' and '.join(type_names)}"
        raise invalid_config_error(why)
    return tuple(window if name == type_names[1] else FULL_ATTENTION for name in layer_types)
