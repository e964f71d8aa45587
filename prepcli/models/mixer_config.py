"""The recurrent mixers of layers: sublayers with a state of fixed size in place of keys and values. Pure.

A mixer reads the earlier tokens of a row through its state. `trainer.nn.mixer` computes them. Each conv(x) is causal
and has one filter of L taps per channel: conv(x)_t = sum_d w_d x_(t-d) + b, with d from 0 to L - 1. `act` is
`ArchConfig.activation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple


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

    Jamba has RMS norms of q, k and v W_dt_down (arXiv:2403.19887, section 6.4).

    Attributes:
        kind: The equations.
        activation: Activation of the convolutions in place of `act`.
        dt_limits: Smallest and largest step of Mamba-2.
        norm_place: Place of the norm of Mamba-2.
        input_scale: Factor of the normed input.
        projection_scales: Name of a projection -> factor of its output. Other outputs have the factor 1.
        output_scale: Factor of the output.
        initial_steps: Initial softplus(b_dt) of Mamba and Mamba-2. If it is None, b_dt starts at 0 and 1.
    """

    kind: Literal["short_conv", "gated_delta", "mamba2", "mamba"]
    activation: str | None = None
    dt_limits: tuple[float, float] = (0.0, math.inf)
    norm_place: Literal["after_gate", "before_gate", "none"] = "after_gate"
    input_scale: float = 1.0
    projection_scales: tuple[tuple[str, float], ...] = ()
    output_scale: float = 1.0
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
