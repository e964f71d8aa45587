"""The parts of layers that only some families have: groups of layers, recurrent mixers, experts, position biases. Pure.

In a model with both dense and MoE layers the MLPs of each group are stacked: `dense_layers.mlp.up.weight` has one
entry per dense layer, and `sparse_layers.mlp.up.weight` one per MoE layer. In the same way `attention_layers` and
`mixer_layers` have the attention and the recurrent mixers of a model with both. All other parameters are in `layers`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeGuard

from prepcli.algebra.axis_map import LAYERS
from prepcli.core.errors import invalid_config_error, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.core.json_values import HFConfig


class LayerSchedule(NamedTuple):
    """The order of a scan: some first layers, then periods of layers, then the layers of an incomplete period."""

    num_first: int  # Layers before the first period.
    period: int  # Layers of a period.
    num_periods: int  # Number of whole periods.

    @property
    def num_scanned(self) -> int:
        """Number of layers in whole periods."""
        return self.period * self.num_periods

    @property
    def stop(self) -> int:
        """Number of the layer after the last whole period."""
        return self.num_first + self.num_scanned


def layer_schedule(kinds: Sequence[object]) -> LayerSchedule:
    """Return the schedule with the fewest different layers to compile.

    The first layers are none, or all at the start of the same kind as layer 0. For example the kinds of 3 dense
    layers and 58 MoE layers are compiled as 3 single layers and one period of 1 layer. Layers of equal `kinds` run
    the same computation.
    """
    num_leading = 0
    while num_leading < len(kinds) and kinds[num_leading] == kinds[0]:
        num_leading += 1
    schedules = [_schedule_after(kinds, num_first) for num_first in (0, num_leading)]
    return min(schedules, key=lambda schedule: _num_compiled(schedule, len(kinds)))


def _schedule_after(kinds: Sequence[object], num_first: int) -> LayerSchedule:
    """Return a schedule with `num_first` single layers before the periods."""
    period = repeating_period(kinds[num_first:])
    return LayerSchedule(num_first, period, (len(kinds) - num_first) // period)


def _num_compiled(schedule: LayerSchedule, num_layers: int) -> int:
    """Return the number of layers that a schedule compiles."""
    # A single period is no loop.
    if schedule.num_periods < 2:
        return num_layers
    return num_layers - schedule.num_scanned + schedule.period


def repeating_period(kinds: Sequence[object]) -> int:
    """Return the period of a pattern, in layers. The last period may be incomplete."""
    # A pattern with period n equals itself shifted by n, e.g. [4, 0, 4, 0, 4]: its shift by 2 is
    # [4, 0, 4], the first 3 kinds. The shift by all kinds is empty, so the loop finds one.
    period = 1
    while kinds[period:] != kinds[: len(kinds) - period]:
        period += 1
    return period


def group_indices(
    num_layers: int, groups: Mapping[str, Collection[int]]
) -> tuple[dict[str, int], ...]:
    """Return for each layer its groups, and its index in each of them.

    With 3 layers and layer 0 in `dense_layers`, layer 2 is layer 2 of `layers` and layer 1 of `sparse_layers`.
    """
    counts = dict.fromkeys(groups, 0)
    group_members = {group: frozenset(members) for group, members in groups.items()}
    indices: list[dict[str, int]] = []
    for layer in range(num_layers):
        layer_indices = {LAYERS: layer}
        for group, members in group_members.items():
            if layer in members:
                layer_indices[group] = counts[group]
                counts[group] += 1
        indices.append(layer_indices)
    return tuple(indices)


# The recurrent mixers of layers: sublayers with a state of fixed size in place of keys and values. Pure.
#
# A mixer reads the earlier tokens of a row through its state. `trainer.nn.mixers` computes them. Each conv(x) is causal
# and has one filter of L taps per channel: conv(x)_t = sum_d w_d x_(t-d) + b, with d from 0 to L - 1. `act` is
# `ArchConfig.activation`.


class InitialSteps(NamedTuple):
    """The initial steps dt of Mamba-2: log-uniform from `minimum` to `maximum`, and at least `floor`."""

    minimum: float
    maximum: float
    floor: float


@dataclass(frozen=True, slots=True)
class Mixer:
    """The recurrent mixer of a model.

    "short_conv" is a convolution between two gates (LFM2, arXiv:2511.23404):

        b, c, v   = x W_b, x W_c, x W_v
        mixer(x)  = (c * conv(b * v)) W_o

    "gated_delta" is the gated delta net (arXiv:2412.06464, equation 10), with one state S per head:

        q, k, v   = act(conv(x W_q)), act(conv(x W_k)), act(conv(x W_v))
        decay_t   = exp(-exp(a_log) softplus(x W_dt + b_dt)), beta_t = sigmoid(x W_beta)
        S_t       = decay_t S_(t-1) + k_t (beta_t (v_t - decay_t S_(t-1)^T k_t))^T
        mixer(x)  = (rms_norm(S_t^T q_t) * silu(x W_z)) W_o

    q and k have length 1, and q is divided by the square root of its width.

    "mamba2" is Mamba-2 in its dual form as linear attention (arXiv:2405.21060, sections 5 and 7), where q, k and v are
    C, B and X of the paper:

        q, k, v   = act(conv(x W_q)), act(conv(x W_k)), act(conv(x W_v))
        dt_t      = clip(softplus(x W_dt + b_dt), dt_limits)
        S_t       = exp(-exp(a_log) dt_t) S_(t-1) + k_t (dt_t v_t)^T
        mixer(x)  = rms_norm((S_t^T q_t + d v_t) * silu(x W_z)) W_o

    The norm has its mean over the heads that share queries and keys. It follows the gate, precedes it, or is absent.

    Falcon-H1 (arXiv:2507.22448, `FalconH1Mixer` of transformers) multiplies x by `input_scale`, the outputs of W_q,
    W_k, W_v, W_z and W_dt by a factor each, and the output of the mixer by `output_scale`.

    "mamba" is Mamba (arXiv:2312.00752, section 3.2), where q, k and v are C, B and x of the paper. Each of its channels
    has a state h with rates of its own:

        v         = act(conv(x W_v)), q = v W_q, k = v W_k
        dt_t      = softplus(v W_dt_down W_dt_up + b_dt)
        h_t       = exp(-exp(a_log) dt_t) h_(t-1) + dt_t v_t k_t
        mixer(x)  = ((h_t . q_t + d v_t) * silu(x W_z)) W_o

    Jamba has RMS norms of q, k and v W_dt_down (arXiv:2403.19887, section 6.4). Those of Falcon Mamba have no scales
    (arXiv:2410.05355, `FalconMambaMixer` of transformers).
    """

    kind: Literal["short_conv", "gated_delta", "mamba2", "mamba"]  # The equations.
    activation: str | None = None  # Activation of the convolutions in place of `act`.
    dt_limits: tuple[float, float] = (0.0, math.inf)  # Smallest and largest step of Mamba-2.
    # Place of the norm of Mamba-2.
    norm_place: Literal["after_gate", "before_gate", "none"] = "after_gate"
    input_scale: float = 1.0  # Factor of the normed input.
    # Name of a projection -> factor of its output. Other outputs have the factor 1.
    projection_scales: tuple[tuple[str, float], ...] = ()
    output_scale: float = 1.0  # Factor of the output.
    # Epsilon of RMS norms without scales of q, k and v W_dt_down. If it is None, only those with scales exist.
    plain_norm_eps: float | None = None
    # Initial softplus(b_dt) of Mamba and Mamba-2. If it is None, b_dt starts at 0 and 1.
    initial_steps: InitialSteps | None = None

    @property
    def convolutions(self) -> tuple[str, ...]:
        """Names of its convolutions."""
        if self.kind in ("short_conv", "mamba"):
            return ("v_conv",)
        return ("q_conv", "k_conv", "v_conv")

    @property
    def has_state(self) -> bool:
        """Whether the mixer has matrices as a state in addition to the last inputs of its convolutions."""
        return self.kind != "short_conv"


# End of the path of a correction. Only the choice of experts depends on it, so its gradient is 0.
CORRECTION = "router.correction.bias"


@dataclass(frozen=True, slots=True)
class Router:
    """The selection of the experts of a token, and their weights.

    With z = x W_router + b, one logit per expert, and s = softmax(z) or sigmoid(z):

        choice    s + c, with a correction c per expert that balances their loads (arXiv:2408.15664)
        groups    the experts in equal groups; only the best groups of a token keep their experts
                  (DeepSeek-V2, arXiv:2405.04434, section 2.2.2)
        experts   the k experts of largest choice
        weights   s of these experts, divided by their sum if `is_normalized`, times `scale`

    SparseMixer (arXiv:2409.12136) has another weight, as Phi-3.5-MoE evaluates it. The k-th expert e of a
    token has the weight softmax(z)_e over the experts f that are not chosen yet and as good as e:

        (z_e - z_f) / max(|z_f|, z_e) <= mixing_range

    With an own norm, z = (a * rms_norm(x) / sqrt(D)) W_router, where x is the residual stream of width D before the
    norm of the experts' input. A factor per expert multiplies its weight after normalization (Gemma 4).

    a, b, c and the factors are parameters of some families. Normalized softmax weights of the k largest logits equal
    the softmax of these logits alone.
    """

    # The function s of the logits, or "sparse_mixer".
    scores: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    is_normalized: bool = True  # Whether the weights of a token are divided by their sum.
    scale: float = 1.0  # Factor of the weights.
    num_groups: int = 1  # Number of groups.
    groups_per_token: int = 1  # Number of groups that keep their experts.
    # Score of a group: its largest choice, or the sum of the two largest.
    group_score: Literal["maximum", "top_two"] = "maximum"
    min_weight_sum: float = 0.0  # Lower bound of the sum that weights are divided by.
    weight_sum_offset: float = 0.0  # Added to the sum that weights are divided by.
    mixing_range: float = 0.0  # The range of SparseMixer.
    # Whether a weight multiplies the input of its expert instead of the output (Llama 4).
    scales_input: bool = False
    has_own_norm: bool = False  # Whether the router has a norm of its own input.

    def check_experts(self, num_experts: int, experts_per_token: int) -> None:
        """Check the groups against the number of experts.

        Raises:
            PrepError: The groups have different sizes, or the groups of a token have too few experts.
        """
        if num_experts % self.num_groups:
            why = f"{num_experts} experts cannot be cut into {self.num_groups} equal groups"
            raise invalid_config_error(why)
        group_size = num_experts // self.num_groups
        if self.groups_per_token > self.num_groups:
            why = f"a token has {self.groups_per_token} groups of {self.num_groups}"
            raise invalid_config_error(why)
        if self.group_score == "top_two" and group_size < 2:
            raise invalid_config_error("a group of experts needs 2 or more of them, not 1")
        if experts_per_token > self.groups_per_token * group_size:
            why = f"a token has {experts_per_token} experts, but its groups have {self.groups_per_token * group_size}"
            raise invalid_config_error(why)


# Mixtral (arXiv:2401.04088, section 2.1).
SOFTMAX_ROUTER = Router()


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The gating of GPT-OSS (`GptOssExperts` in transformers).

    hidden = (clip(up, -limit, limit) + 1) * g * sigmoid(alpha * g) with g = min(gate, limit)
    """

    alpha: float  # Slope of the sigmoid.
    limit: float  # Bound of the gate and up projections.


# Longer than any sequence. Bounds the memory that an invalid config can ask for.
MAX_RELATIVE_DISTANCE = 1 << 20


@dataclass(frozen=True, slots=True)
class RelativePositionBias:
    """T5's bias of attention scores by relative position (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, 2.1).

    Half of the buckets hold one distance each. The rest grow logarithmically up to `max_distance`.


    Raises:
        PrepError: A size is out of range.
    """

    num_buckets: int  # Number of biases per head.
    max_distance: int  # Distance from which on all keys share the last bucket.
    # Whether keys after the query have half of the buckets (encoder), or none (decoder).
    bidirectional: bool

    def __post_init__(self) -> None:
        exact = self.num_buckets // 2
        if self.num_buckets < 4 or not exact < self.max_distance <= MAX_RELATIVE_DISTANCE:
            why = f"it has {self.num_buckets} buckets of distances up to {self.max_distance}"
            allowed = (
                f"4 or more buckets, and a distance from {exact + 1} to {MAX_RELATIVE_DISTANCE:,}"
            )
            raise invalid_config_error(f"{why}; a relative position bias needs {allowed}")


@dataclass(frozen=True, slots=True)
class Alibi:
    """Attention with linear biases (Press et al. 2022, https://arxiv.org/abs/2108.12409, section 3).

    The scores of head h get the bias slope_h * (key position - query position).
    """

    slopes: tuple[float, ...]  # Slope of each head.


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return ALiBi's slopes: 2^(-8 i / n) for i = 1 to n, where n is the number of heads.

    If n is not a power of two, the slopes of the next lower power come first. The odd ones of the next
    higher power follow.
    """
    # E.g. 3 heads: 2^-4 and 2^-8 of n = 2, and 2^-2 of n = 4.
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)]
    between = [2.0 ** (-8 * i / (2 * lower)) for i in range(1, 2 * lower, 2)]
    return (*slopes, *between[: num_heads - lower])


# Rates of dropout and of forgetful causal masking, and the dropout rates in a Hugging Face config.

DROPOUT_KEY = "model.dropout"
FCM_KEY = "model.fcm_ratio"
# Name of a config field and its default. None: transformers does not drop there.
ConfigField = tuple[str, float] | None


@dataclass(frozen=True, slots=True)
class DropoutConfig:
    """Rates of the random masks of training."""

    attention: float = 0.0  # Rate of dropout of attention probabilities.
    # Rate of dropout of the outputs of attention and MLP, before they are added to the residual stream.
    residual: float = 0.0
    embedding: float = 0.0  # Rate of dropout of the input of the first layer.
    # Smallest and largest fraction of the keys that forgetful causal masking hides in a row.
    fcm_ratio: tuple[float, float] = (0.0, 0.0)
    adapters: float = 0.0  # Rate of dropout of the inputs of adapters.

    @property
    def is_active(self) -> bool:
        """Whether training needs random numbers."""
        rates = (self.attention, self.residual, self.embedding, self.adapters)
        return any((*rates, *self.fcm_ratio))


NO_DROPOUT = DropoutConfig()
# Sites of `model.dropout`. Adapters have a rate of their own, and `fcm_ratio` is a range.
DROPOUT_SITES = ("attention", "residual", "embedding")


@dataclass(frozen=True, slots=True)
class DropoutFields:
    """The fields of a family's config.json with the rate of each site of dropout."""

    attention: ConfigField = ("attention_dropout", 0.0)
    residual: ConfigField = None
    embedding: ConfigField = None


# Fields of families that drop attention probabilities only.
ATTENTION_DROPOUT = DropoutFields()


def read_dropout(config: HFConfig, dropout_fields: DropoutFields) -> dict[str, float]:
    """Return the dropout rate of each site in a config.json. A field that is absent or null has its default.

    Raises:
        PrepError: A rate is not a number from 0 to below 1.
    """
    return {site: _read_rate(config, getattr(dropout_fields, site)) for site in DROPOUT_SITES}


def _read_rate(config: HFConfig, config_field: ConfigField) -> float:
    """Return the rate in a field of config.json, 0 for a family without the field."""
    if config_field is None:
        return 0.0
    name, default = config_field
    value = config.get(name)
    if value is None:
        return default
    if not _is_rate(value):
        raise invalid_config_error(
            f"{name} is {value!r:.60}, it must be a number from 0 to below 1"
        )
    return float(value)


def _is_rate(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def resolve_dropout(
    value: float | str | Mapping[str, float],
    *,
    fcm_ratio: tuple[float, float],
    config: HFConfig,
    dropout_fields: DropoutFields,
) -> DropoutConfig:
    """Return the rates of a run.

    Args:
        value: `model.dropout`: one rate, the rates of some sites, or "config" for the rates in
            the config.
        fcm_ratio: `model.fcm_ratio`.
        config: Content of the checkpoint's config.json.
        dropout_fields: Its fields with dropout rates.

    Raises:
        PrepError: The rates of the config are needed, and one is invalid.
    """
    if isinstance(value, str):
        rates = read_dropout(config, dropout_fields)
    else:
        rates = dict(value) if isinstance(value, Mapping) else dict.fromkeys(DROPOUT_SITES, value)
    return DropoutConfig(**rates, fcm_ratio=fcm_ratio)


def check_dropout_table(table: Mapping[str, object]) -> None:
    """Check a table of dropout rates by site.

    Raises:
        UsageError: A site is unknown, or a rate is not a number from 0 to below 1.
    """
    for site, rate in table.items():
        if site not in DROPOUT_SITES:
            what = f"`{DROPOUT_KEY}` has the unknown key `{site:.60}`"
            raise usage_error(
                what, f"the keys are {', '.join(DROPOUT_SITES)}", did_you_mean(site, DROPOUT_SITES)
            )
        if not _is_rate(rate):
            what = f"`{site}` of `{DROPOUT_KEY}` is {rate!r:.60}"
            raise usage_error(
                what, "a rate is a number from 0 to below 1", f"`{DROPOUT_KEY} = {{{site} = 0.1}}`"
            )


def check_fcm_ratio(ratio: tuple[float, float]) -> None:
    """Raise a UsageError if the smallest fraction of hidden keys exceeds the largest."""
    low, high = ratio
    if low > high:
        why = f"the minimum {low} is above the maximum {high}"
        raise usage_error(f"`{FCM_KEY}` is [{low}, {high}]", why, f"`{FCM_KEY} = [{high}, {low}]`")
