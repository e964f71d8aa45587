"""The choices of MoE layers: the router, the activation of the experts, and the layers without experts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prepcli.core.errors import invalid_config_error

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

    Attributes:
        scores: The function s of the logits, or "sparse_mixer".
        is_normalized: Whether the weights of a token are divided by their sum.
        scale: Factor of the weights.
        num_groups: Number of groups.
        groups_per_token: Number of groups that keep their experts.
        group_score: Score of a group: its largest choice, or the sum of the two largest.
        min_weight_sum: Lower bound of the sum that weights are divided by.
        weight_sum_offset: Added to the sum that weights are divided by.
        mixing_range: The range of SparseMixer.
        scales_input: Whether a weight multiplies the input of its expert instead of the output
            (Llama 4).
        has_own_norm: Whether the router has a norm of its own input.
    """

    scores: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    is_normalized: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["maximum", "top_two"] = "maximum"
    min_weight_sum: float = 0.0
    weight_sum_offset: float = 0.0
    mixing_range: float = 0.0
    scales_input: bool = False
    has_own_norm: bool = False

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

    Attributes:
        alpha: Slope of the sigmoid.
        limit: Bound of the gate and up projections.
    """

    alpha: float
    limit: float
