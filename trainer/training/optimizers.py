"""AdamW and its learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import optax
from jax import Array

from trainer.models.param_tree import ParamLeaf, unflatten_tree


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """A learning rate schedule: linear warmup from 0 to `peak`, then decay to `end`.

    Attributes:
        peak: Learning rate after warmup.
        end: Learning rate from step `decay` on.
        kind: Shape of the decay; `constant` keeps `peak`.
        warmup: Steps of warmup.
        decay: Step at which the decay ends, counted from 0 with warmup included.
    """

    peak: float
    end: float
    kind: Literal["linear", "cosine", "constant"]
    warmup: int
    decay: int

    def learning_rate(self, step: Array) -> Array:
        """Compute the float32 learning rate of an update, counted from 0."""
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - self.warmup) / max(self.decay - self.warmup, 1), 0.0, 1.0)
        remaining = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + jnp.cos(math.pi * progress)),
            "constant": jnp.ones_like(progress),
        }
        decayed = self.end + (self.peak - self.end) * remaining[self.kind]
        return jnp.where(step < self.warmup, self.peak * step / max(self.warmup, 1), decayed)


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101).

    Matrices decay, embeddings if `decay_embeddings` is set, norms and biases never. The role of a leaf decides, not
    its shape: stacked norm scales have two axes.

    Attributes:
        lr_schedule: The learning rate.
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay, before it is scaled by the learning rate.
        decay_embeddings: Whether embeddings decay.
        clip_norm: Maximum norm of the gradients; 0 for no clipping.
    """

    lr_schedule: LRSchedule
    b1: float
    b2: float
    eps: float
    weight_decay: float
    decay_embeddings: bool
    clip_norm: float

    def transformation(self, leaves: Mapping[str, ParamLeaf]) -> optax.GradientTransformation:
        """Return the optax transformation from clipped gradients to updates, before the learning rate.

        Args:
            leaves: Parameters by path. Moments have their dtype, float32.
        """
        mask = unflatten_tree({path: self._is_decayed(leaf) for path, leaf in leaves.items()})
        return optax.named_chain(
            ("adam", optax.scale_by_adam(self.b1, self.b2, self.eps)),
            ("decay", optax.add_decayed_weights(self.weight_decay, mask)),
        )

    def _is_decayed(self, leaf: ParamLeaf) -> bool:
        """Return whether weight decay applies to a parameter."""
        return leaf.role == "matrix" or (leaf.role == "embedding" and self.decay_embeddings)
