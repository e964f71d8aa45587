"""Adafactor, and Adafactor as PaLM used it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import optax

from prepcli.models.param_tree import ParamLeaf
from trainer.recipe.optimizer_tables import AdafactorTable, PalmTable
from trainer.training.optimizers.factored_moments import by_matrix, scale_by_factored_moments
from trainer.training.optimizers.scaling import add_scaled_decay, scale_by_rate
from trainer.training.optimizers.weight_decay import WeightDecay

# PaLM decays a parameter x by lr^2 x (arXiv:2204.02311, section 5). Here it is
# rate / PALM_REFERENCE_DECAY * lr^2 x, so a rate of 1e-4 gives the decay of the paper.
PALM_REFERENCE_DECAY = 1e-4


@dataclass(frozen=True, slots=True)
class Adafactor:
    """Adafactor (arXiv:1804.04235), with means over the matrices of each layer.

    Root mean squares are of these matrices too. With `scales_stacked` they are of whole leaves, as
    in optax: a leaf of stacked layers then has one scale for all layers.

    Attributes:
        decay_rate: Power r of the decay rate 1 - step^-r of the second moment.
        min_factored_size: Smallest dim of a matrix whose second moment is factored. 0 means no
            factors.
        clip_threshold: Maximum root mean square of updates. 0 means no limit.
        scale_by_parameter: Whether to multiply updates by the root mean square of the parameter.
        momentum: Decay rate of the average of updates. 0 keeps no average.
        decay_power: Power of the learning rate by which weight decay is multiplied.
        reference_decay: Divisor of the rate of weight decay.
        scales_stacked: Whether root mean squares are of whole leaves.
    """

    decay_rate: float = 0.8
    min_factored_size: int = 128
    clip_threshold: float = 1.0
    scale_by_parameter: bool = True
    momentum: float = 0.0
    decay_power: int = 1
    reference_decay: float = 1.0
    scales_stacked: bool = False

    def transformation(
        self, leaves: Mapping[str, ParamLeaf], decay: WeightDecay
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain in the order of `optax.adafactor`.

        See `UpdateRule`. The momentum averages updates that are scaled by the learning rates of
        their steps.
        """
        # Gradient g, parameter x [R, C], step t from 1, decay d = 1 - t^-r (section 7.2):
        #     v <- d v + (1 - d) (g^2 + 1e-30)      factored, see `scale_by_factored_moments`
        #     u = g / sqrt(v)
        #     u <- u / max(1, rms(u) / clip_threshold)
        #     x <- x - lr max(1e-3, rms(x)) u       without `scale_by_parameter`: x - lr u
        # The first step has d = 0, so the moments need no correction of their start at 0.
        clip = optax.identity()
        if self.clip_threshold:
            # u / max(1, rms(u) / d), arXiv:1804.04235, section 6
            clip = optax.clip_by_block_rms(self.clip_threshold)
        scale = optax.identity()
        if self.scale_by_parameter:
            # u * max(1e-3, rms(x)), arXiv:1804.04235, section 8
            scale = optax.scale_by_param_block_rms()
        momentum = optax.identity()
        if self.momentum:
            momentum = optax.ema(self.momentum, debias=False)
        if not self.scales_stacked:
            clip = by_matrix(clip, leaves)
            scale = by_matrix(scale, leaves)
        decay_rate = decay.rate / self.reference_decay
        return optax.named_chain(
            ("rms", scale_by_factored_moments(leaves, self.decay_rate, self.min_factored_size)),
            ("clip", clip),
            ("rate", scale_by_rate()),
            ("scale", scale),
            ("momentum", momentum),
            ("decay", add_scaled_decay(decay_rate, decay.mask(leaves), self.decay_power)),
        )


def build_adafactor(table: AdafactorTable) -> Adafactor:
    """Build Adafactor from its recipe table."""
    min_factored_size = 0
    if table.factored:
        min_factored_size = table.min_factored_size
    return Adafactor(
        decay_rate=table.decay_rate,
        min_factored_size=min_factored_size,
        clip_threshold=table.clip_threshold,
        scale_by_parameter=table.scale_by_parameter,
        momentum=table.momentum,
        scales_stacked=table.scale_by == "stacked",
    )


def build_palm(table: PalmTable) -> Adafactor:
    """Build the optimizer of PaLM (arXiv:2204.02311, section 5) from its recipe table."""
    # "Adafactor without factorization": whole second moments, updates scaled by rms(x) and not
    # clipped by their own size.
    return Adafactor(
        decay_rate=table.decay_rate,
        min_factored_size=0,
        clip_threshold=0.0,
        momentum=table.momentum,
        decay_power=2,
        reference_decay=PALM_REFERENCE_DECAY,
        scales_stacked=table.scale_by == "stacked",
    )
