"""A user's loss and metrics in place of the cross entropy, as functions of the logits of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prepcli.core.errors import Key, text, usage_error
from prepcli.planning.manifest_fields import Manifest
from trainer.recipe import Recipe
from trainer.training.best_metric import best_metric, check_metric_name

TokenLoss = Callable[[Any, Any], Any]  # (logits [B, C, V], targets [B, C]) -> losses [B, C]
TokenMetrics = Callable[
    [Any, Any], Mapping[str, Any]
]  # (logits [B, C, V], targets [B, C]) -> name -> values [B, C]


@dataclass(frozen=True, slots=True)
class TokenFunctions:
    """Functions of float32 logits [B, C, V] of a chunk of tokens and their targets, int32 [B, C].

    They compute each token by itself, so that the sums over tokens depend neither on the mesh nor
    on micro-batches nor on chunks, beyond rounding. The logits have no padding of the vocabulary.

    Attributes:
        loss_fn: Computes the loss of each token in training, [B, C]. None means the cross entropy.
        metric_fn: Computes values [B, C] of each token in evaluation, by name. None means none.
    """

    loss_fn: TokenLoss | None = None
    metric_fn: TokenMetrics | None = None

    @property
    def manifest_fields(self) -> Manifest:
        """Entry of a checkpoint's manifest: the name of the loss."""
        if self.loss_fn is None:
            return Manifest()
        return Manifest(loss_fn=function_name(self.loss_fn))

    def check(self, recipe: Recipe) -> None:
        """Check that a recipe can be computed with these functions.

        Raises:
            UsageError: The recipe has terms of the cross entropy, sums in a fixed order, or a metric without
                `metric_fn`.
        """
        if self.metric_fn is None:
            check_metric_name(best_metric(recipe), ())
        names = [name for name in ("loss_fn", "metric_fn") if getattr(self, name) is not None]
        if names and recipe.train.reduction == "exact":
            why = f"the order of sums in `{names[0]}` is not fixed"
            raise usage_error(
                "`train.reduction` is exact",
                why,
                text("{}", Key("train.reduction", "fast", is_override=True)),
            )
        terms = [key for key in ("z_loss", "label_smoothing") if getattr(recipe.loss, key)]
        if self.loss_fn is not None and terms:
            why = "it is a term of the cross entropy, which `loss_fn` replaces"
            raise usage_error(
                f"`loss.{terms[0]}` is set",
                why,
                text("{}", Key(f"loss.{terms[0]}", 0, is_override=True)),
            )


NO_TOKEN_FUNCTIONS = TokenFunctions()


def function_name(function: Callable[..., Any]) -> str:
    """Return module and name of a function. For another callable, return those of its class."""
    named: Any = function
    # An object with `__call__` has no name, its class has.
    if not hasattr(function, "__qualname__"):
        named = type(function)
    return f"{named.__module__}.{named.__qualname__}"
