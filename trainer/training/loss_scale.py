"""The factor of the loss that keeps gradients in the range of float16.

The gradients of a step are the gradients of factor * loss. They are divided by the factor in float32, before their
norm is taken. A step with an overflow is skipped like every step with a gradient that is not finite.

The loss is a sum over tokens, so the factor is the loss scale divided by the tokens of the batch, rounded to a power of
two. A loss scale has the usual meaning of a factor of the mean over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

# Entries of the training state: float32 [] and int32 [].
SCALE = "loss_scale"
FINITE_STEPS = "loss_scale_steps"
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


@dataclass(frozen=True, slots=True)
class LossScale:
    """A loss scale.

    Attributes:
        initial: The scale of the first step.
        is_dynamic: Whether an overflow halves it, and GROWTH_STEPS steps without one double it.
    """

    initial: float = INITIAL_SCALE
    is_dynamic: bool = True

    def init(self) -> dict[str, Array]:
        """Return the entries of the training state before the first step.

        A static scale has none.
        """
        if not self.is_dynamic:
            return {}
        return {SCALE: jnp.float32(self.initial), FINITE_STEPS: jnp.int32(0)}

    def factor(self, state: Mapping[str, Array], num_tokens: int) -> Array:
        """Return the factor of the summed loss, float32 [].

        Args:
            state: The training state.
            num_tokens: Tokens of the batch, including tokens without weight.
        """
        scale = jnp.float32(self.initial)
        if self.is_dynamic:
            scale = state[SCALE]
        # The largest power of two up to num_tokens: 1000 tokens have 10 bits, so the divisor is 2^9
        # = 512. Division by a power of two changes only the exponent, without rounding.
        return scale / (1 << (num_tokens.bit_length() - 1))

    def next_state(self, state: Mapping[str, Array], is_finite: Array) -> dict[str, Array]:
        """Return the values of SCALE and FINITE_STEPS after a training step.

        The result is empty for a static scale.

        Args:
            state: The training state before the step.
            is_finite: Whether all gradients were finite.
        """
        if not self.is_dynamic:
            return {}
        steps = state[FINITE_STEPS] + 1
        grows = steps == GROWTH_STEPS
        grown = jnp.where(grows, jnp.minimum(2 * state[SCALE], MAX_SCALE), state[SCALE])
        return {
            # The floor of 1 keeps a series of overflows from scaling the loss to 0.
            SCALE: jnp.where(is_finite, grown, jnp.maximum(state[SCALE] / 2, 1.0)),
            FINITE_STEPS: jnp.where(is_finite & ~grows, steps, 0),
        }
