"""xIELU, an activation with learned factors (arXiv:2411.13010).

Axes: B rows of the batch, T tokens, F hidden units.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax, nn

from trainer.nn.layer_weights import Projections

# Key of a factor among the weights of an MLP. An MLP with it has all parameters of xIELU.
ALPHA_P = "xielu_alpha_p"


def xielu(x: Array, weights: Projections) -> Array:
    """Compute xIELU of [B, T, F].

    a_p x^2 + beta x                            if x > 0
    a_n (exp(min(x, eps)) - 1 - x) + beta x     otherwise

    Args:
        x: Input [B, T, F].
        weights: Weights of an MLP. `xielu_alpha_p` and `xielu_alpha_n` are learned: a_p = softplus(alpha_p) and
            a_n = beta + softplus(alpha_n). `xielu_beta` and `xielu_eps` are constants.

    Returns:
        [B, T, F].
    """
    beta = lax.stop_gradient(weights["xielu_beta"]["scale"])
    eps = lax.stop_gradient(weights["xielu_eps"]["scale"])
    positive_factor = nn.softplus(weights[ALPHA_P]["weight"])
    negative_factor = beta + nn.softplus(weights["xielu_alpha_n"]["weight"])
    # The exponential of a large x would be infinite, and its gradient in the unused branch NaN.
    exponential = jnp.expm1(jnp.minimum(x, eps))
    branch = jnp.where(x > 0, positive_factor * x * x, negative_factor * (exponential - x))
    return branch + beta * x
