"""The terms of the training loss, and the sums of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jax import Array

# (logits [B, C, V], targets [B, C]) -> values [B, C]
TokenFunction = Callable[[Array, Array], Array]
TokenMetrics = Callable[[Array, Array], Mapping[str, Array]]


class LossSums(NamedTuple):
    """Sums over tokens, float32 [] each.

    Attributes:
        loss: Weighted loss of tokens.
        weight: Token weights.
        correct: Token weights where the most likely token is the target.
    """

    loss: Array
    weight: Array
    correct: Array


class TrainingSums(NamedTuple):
    """Sums over tokens, float32 [] each. The loss excludes the z-loss, as in evaluations.

    Attributes:
        loss: Weighted loss of tokens without the z-loss.
        weight: Token weights.
        correct: Token weights where the most likely token is the target.
        z_loss: Weighted z-loss of tokens. None if there is no such term.
    """

    loss: Array
    weight: Array
    correct: Array
    z_loss: Array | None

    @property
    def total(self) -> Array:
        """The loss to differentiate."""
        if self.z_loss is None:
            return self.loss
        return self.loss + self.z_loss

    def by_name(self) -> dict[str, Array]:
        """Return the sums that exist, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class LossTerms(NamedTuple):
    """Terms of a token's loss in addition to the cross entropy.

    Attributes:
        z_loss: Coefficient of log(Z)^2, where Z is the sum of the exponentials of a token's logits (PaLM,
            arXiv:2204.02311, section 5).
        label_smoothing: Share of the target distribution that is uniform over the true vocabulary, in [0, 1)
            (arXiv:1512.00567, section 7).
        token_loss: Computes the loss of each token in place of the cross entropy, from logits without padding.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    token_loss: TokenFunction | None = None

    @property
    def has_z_loss(self) -> bool:
        """Whether the loss has the z-loss. A user-defined `token_loss` replaces it."""
        return self.z_loss > 0 and self.token_loss is None

    @property
    def sum_names(self) -> tuple[str, ...]:
        """Names of the sums of a batch."""
        names = ("loss", "weight", "correct")
        if self.has_z_loss:
            return (*names, "z_loss")
        return names


NO_LOSS_TERMS = LossTerms()
