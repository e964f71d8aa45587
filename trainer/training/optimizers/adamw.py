"""AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import optax

from trainer.models.param_tree import ParamLeaf, unflatten_tree
from trainer.recipe.optimizer_tables import AdamWTable
from trainer.training.optimizers.lr_schedule import LRSchedule


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
        """Return the optax transformation of clipped gradients; the step computes params - learning rate * update.

        Args:
            leaves: Parameters by path; the moments are float32 like them.
        """
        mask = unflatten_tree({path: self._is_decayed(leaf) for path, leaf in leaves.items()})
        return optax.named_chain(
            ("adam", optax.scale_by_adam(self.b1, self.b2, self.eps)),
            ("decay", optax.add_decayed_weights(self.weight_decay, mask)),
        )

    def _is_decayed(self, leaf: ParamLeaf) -> bool:
        """Return whether weight decay applies to a parameter."""
        return leaf.role == "matrix" or (leaf.role == "embedding" and self.decay_embeddings)


def build_adamw(table: AdamWTable, lr_schedule: LRSchedule) -> AdamW:
    """Build AdamW from its recipe table."""
    return AdamW(
        lr_schedule=lr_schedule,
        b1=table.b1,
        b2=table.b2,
        eps=table.eps,
        weight_decay=table.weight_decay,
        decay_embeddings=table.decay_embeddings,
        clip_norm=table.clip_norm,
    )
