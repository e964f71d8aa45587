"""The factor of the loss that keeps gradients in the range of float16.

The gradients of a step are the gradients of factor * loss. They are divided by the factor in float32, before their
norm is taken. A step with an overflow is skipped like every step with a gradient that is not finite.

The loss is a sum over tokens, so the factor is the loss scale divided by the tokens of the batch, rounded to a power of
two. A loss scale has the usual meaning of a factor of the mean over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import jax.numpy as jnp
from jax import Array

# Positive float16 values reach from 2^-24 to 65504, just below 2^16. The gradients of a mean over
# tokens are often below 2^-24 and become 0. Scales are powers of two, which change no other bit.
# Halving after an overflow and doubling after 2,000 steps without one follow Micikevicius et al.,
# "Mixed Precision Training" (arXiv:1710.03740, section 3.2) and torch.amp.GradScaler, which begins
# at 2^16 and doubles as often.
INITIAL_SCALE = 2.0**15
# The limit of NVIDIA apex too. Without one, a model with tiny gradients would double the scale until
# it overflows float32.
MAX_SCALE = 2.0**24
GROWTH_STEPS = 2000


class ScaleState(TypedDict, total=False):
    """The entries of the training state for a dynamic loss scale. A static scale has none.

    Attributes:
        loss_scale: The scale, float32 [].
        loss_scale_steps: Steps since the last overflow or doubling, int32 [].
    """

    loss_scale: Array
    loss_scale_steps: Array


@dataclass(frozen=True, slots=True)
class LossScale:
    """A loss scale.

    Attributes:
        initial: The scale of the first step.
        is_dynamic: Whether an overflow halves it, and GROWTH_STEPS steps without one double it.
    """

    initial: float = INITIAL_SCALE
    is_dynamic: bool = True

    def init(self) -> ScaleState:
        """Return the entries before the first step."""
        if not self.is_dynamic:
            return {}
        return {"loss_scale": jnp.float32(self.initial), "loss_scale_steps": jnp.int32(0)}

    def factor(self, state: ScaleState, num_tokens: int) -> Array:
        """Return the factor of the summed loss, float32 [].

        Args:
            state: The training state.
            num_tokens: Tokens of the batch, including tokens without weight.
        """
        scale = state.get("loss_scale", jnp.float32(self.initial))
        # The largest power of two up to num_tokens: 1000 tokens have 10 bits, so the divisor is 2^9
        # = 512. Division by a power of two changes only the exponent, without rounding.
        return scale / (1 << (num_tokens.bit_length() - 1))

    def next_state(self, state: ScaleState, is_finite: Array) -> ScaleState:
        """Return the entries after a training step.

        Args:
            state: The training state before the step.
            is_finite: Whether all gradients were finite.
        """
        if not self.is_dynamic:
            return {}
        assert "loss_scale" in state
        assert "loss_scale_steps" in state
        scale = state["loss_scale"]
        steps = state["loss_scale_steps"] + 1
        grows = steps == GROWTH_STEPS
        grown = jnp.where(grows, jnp.minimum(2 * scale, MAX_SCALE), scale)
        return {
            # The floor of 1 keeps a series of overflows from scaling the loss to 0.
            "loss_scale": jnp.where(is_finite, grown, jnp.maximum(scale / 2, 1.0)),
            "loss_scale_steps": jnp.where(is_finite & ~grows, steps, 0),
        }
