"""Transformations by the learning rate of a step, which the step passes to the chain."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax import Array


def scale_by_rate() -> optax.GradientTransformationExtraArgs:
    """Return the transformation that multiplies updates by the learning rate."""

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Array | float = 1.0,
        **_: Any,
    ) -> tuple[Any, Any]:
        return jax.tree.map(lambda leaf: learning_rate * leaf, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def add_scaled_decay(rate: float, mask: Any, power: int) -> optax.GradientTransformationExtraArgs:
    """Return the transformation that adds rate * learning_rate^power * parameter to updates.

    Args:
        rate: Weight decay.
        mask: For each leaf, whether it decays.
        power: Power of the learning rate.
    """

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        learning_rate: Array | float = 1.0,
        **_: Any,
    ) -> tuple[Any, Any]:
        factor = rate * learning_rate**power

        def add(update: Array, param: Array, decays: bool) -> Array:
            if decays:
                return update + factor * param
            return update

        return jax.tree.map(add, updates, params, mask), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
