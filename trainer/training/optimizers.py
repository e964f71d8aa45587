"""AdamW and its learning rate.

What decays is said by the roles of the table's leaves, not by shapes: a stacked norm is a matrix by shape.
"""

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
    """The learning rate by step: from 0 up to `peak` within `warmup` steps, then down to `end` at step `decay`."""

    peak: float
    end: float
    kind: Literal["linear", "cosine", "constant"]
    warmup: int
    decay: int  # counted from 0, warm-up included

    def learning_rate(self, step: Array) -> Array:
        """The rate of the update number `step`, from 0 on; float32."""
        now = jnp.asarray(step, jnp.float32)
        past = jnp.clip((now - self.warmup) / max(self.decay - self.warmup, 1), 0.0, 1.0)
        left = {"linear": 1.0 - past, "cosine": 0.5 * (1.0 + jnp.cos(math.pi * past)), "constant": jnp.ones_like(past)}
        after = self.end + (self.peak - self.end) * left[self.kind]
        return jnp.where(now < self.warmup, self.peak * now / max(self.warmup, 1), after)


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay of matrices and, if asked, embeddings; never of norms and biases."""

    lr_schedule: LRSchedule
    b1: float
    b2: float
    eps: float
    weight_decay: float
    decay_embeddings: bool
    clip_norm: float  # 0: none

    def transformation(self, leaves: Mapping[str, ParamLeaf]) -> optax.GradientTransformation:
        """From clipped gradients to the update before it is scaled by the rate. Moments are float32 as the leaves."""
        mask = unflatten_tree({path: self._is_decayed(leaf) for path, leaf in leaves.items()})
        return optax.named_chain(
            ("adam", optax.scale_by_adam(self.b1, self.b2, self.eps)),
            ("decay", optax.add_decayed_weights(self.weight_decay, mask)),
        )

    def _is_decayed(self, leaf: ParamLeaf) -> bool:
        return leaf.role == "matrix" or (leaf.role == "embedding" and self.decay_embeddings)
