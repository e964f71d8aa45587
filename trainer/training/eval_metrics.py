"""The metrics of evaluations: a user's functions of tokens, the metric of the best step, and when a run ends early."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from prepcli.core.errors import Key, text, usage_error
from prepcli.core.json_values import JsonObject
from prepcli.planning.manifest_fields import Manifest
from trainer.recipe import Recipe
from trainer.recipe.tables import EVAL_LOSS, EVAL_METRICS, Direction

# Prefix of the names of the sums of `metric_fn` in an evaluation
METRIC_PREFIX = "metric."


@dataclass(frozen=True, slots=True)
class BestMetric:
    """A value of evaluations, and whether its lowest or its highest value is the best one."""

    name: str = EVAL_LOSS  # Its name in the log, e.g. `eval_accuracy`.
    best_is: Direction = "lowest"  # The best value

    def cost(self, line: Mapping[str, object]) -> float:
        """Return the value of an evaluation's line as a number whose lowest value is the best one.

        Infinite if the line has no finite value.
        """
        value = line.get(self.name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return math.inf
        return self.value(value)

    def value(self, cost: float) -> float:
        """Return the value of a cost, or the cost of a value."""
        if self.best_is == "highest":
            return -cost
        return cost

    def manifest_fields(self, cost: float) -> Manifest:
        """Return the manifest entry of a finite cost."""
        if self.name == EVAL_LOSS:
            return Manifest(eval_loss=cost)
        value = self.value(cost)
        return Manifest(eval_metric={"name": self.name, "value": value, "best_is": self.best_is})


def best_metric(recipe: Recipe) -> BestMetric:
    """Return the metric of a recipe: `checkpoint.best`, or the loss."""
    table = recipe.checkpoint
    if table.best is None:
        return BestMetric()
    return BestMetric(table.best, table.best_is or EVAL_METRICS.get(table.best, "lowest"))


@dataclass(frozen=True, slots=True)
class Patience:
    """The evaluations of a run so far, as far as they decide whether it ends early."""

    cost: float = math.inf  # Lowest cost so far. Infinite before the first finite one.
    best_step: int = 0  # Step of the lowest cost
    last_step: int = -1  # Step of the last evaluation. -1 before the first one.
    evaluations: int = 0  # Number of evaluations since the one with the lowest cost

    def after(self, step: int, cost: float) -> Patience:
        """Return the state after one more evaluation."""
        if cost < self.cost:
            return Patience(cost, step, step)
        return Patience(self.cost, self.best_step, step, self.evaluations + 1)

    def end_reason(self, limit: int, metric: BestMetric) -> str:
        """Return why the run ends early, or an empty text.

        Args:
            limit: `eval.patience`. 0 means no limit.
            metric: The metric of the run.
        """
        if not limit or self.evaluations < limit:
            return ""
        best = "it was never finite"
        if math.isfinite(self.cost):
            best = f"its {metric.best_is} is {metric.value(self.cost):.4f} at step {self.best_step}"
        return f"{metric.name} has not improved in {self.evaluations} evaluations: {best}"

    def to_json(self) -> JsonObject:
        """Return the state as a JSON object, for a manifest and for other processes."""
        fields: JsonObject = dataclasses.asdict(self)
        # JSON has no infinity.
        if math.isinf(self.cost):
            del fields["cost"]
        return fields

    @staticmethod
    def of_manifest(manifest: Manifest, config_fields: Manifest, name: str) -> Patience | None:
        """Return the state in the manifest of a step.

        None without evaluations of the same metric and sequences.

        Args:
            manifest: The manifest.
            config_fields: Manifest fields of the resuming run.
            name: The metric of the resuming run.
        """
        is_comparable = (
            manifest.patience.get("metric") == name
            and manifest.eval_sequences == config_fields.eval_sequences
            and manifest.eval_stride == config_fields.eval_stride
        )
        return Patience.from_json(manifest.patience) if is_comparable else None

    @staticmethod
    def from_json(fields: Mapping[str, object]) -> Patience:
        """Return the state of a JSON object, or the state before the first evaluation if it is malformed."""
        cost = fields.get("cost", math.inf)
        steps = [fields.get(name) for name in ("best_step", "last_step", "evaluations")]
        if not isinstance(cost, int | float) or not all(type(step) is int for step in steps):
            return NO_EVALUATIONS
        best_step, last_step, evaluations = (int(str(step)) for step in steps)
        return Patience(float(cost), best_step, last_step, evaluations)


NO_EVALUATIONS = Patience()


def check_metric_name(metric: BestMetric, names: Collection[str]) -> None:
    """Check that the evaluations of a run have its metric.

    Args:
        metric: The metric.
        names: Names of the sums of an evaluation.

    Raises:
        UsageError: They do not have it.
    """
    known = [*EVAL_METRICS]
    for name in names:
        if name.startswith(METRIC_PREFIX):
            known.append(f"eval_{name.removeprefix(METRIC_PREFIX)}")
    if metric.name in known:
        return
    what = f'`checkpoint.best` is "{metric.name}"'
    why = f"an evaluation has {', '.join(known)}"
    raise usage_error(what, why, text("{}", Key("checkpoint.best", EVAL_LOSS, is_override=True)))


TokenLoss = Callable[[Any, Any], Any]  # (logits [B, C, V], targets [B, C]) -> losses [B, C]
TokenMetrics = Callable[
    [Any, Any], Mapping[str, Any]
]  # (logits [B, C, V], targets [B, C]) -> name -> values [B, C]


@dataclass(frozen=True, slots=True)
class TokenFunctions:
    """Functions of float32 logits [B, C, V] of a chunk of tokens and their targets, int32 [B, C].

    They compute each token by itself, so that the sums over tokens depend neither on the mesh nor
    on micro-batches nor on chunks, beyond rounding. The logits have no padding of the vocabulary.
    """

    # Computes the loss of each token in training, [B, C]. None means the cross entropy.
    loss_fn: TokenLoss | None = None
    # Computes values [B, C] of each token in evaluation, by name. None means none.
    metric_fn: TokenMetrics | None = None

    @property
    def names(self) -> dict[str, str]:
        """Names of the functions, by argument of `prep.train`."""
        functions = {"loss_fn": self.loss_fn, "metric_fn": self.metric_fn}
        return {
            argument: function_name(function)
            for argument, function in functions.items()
            if function is not None
        }

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
        names = self.names
        if names and recipe.train.reduction == "exact":
            why = f"the order of sums in `{next(iter(names))}` is not fixed"
            raise usage_error(
                "`train.reduction` is exact",
                why,
                text("{}", Key("train.reduction", "fast", is_override=True)),
            )
        terms = [key for key, value in recipe.loss if value]
        if self.loss_fn is not None and terms:
            why = "it is a term of the cross entropy, which `loss_fn` replaces"
            raise usage_error(
                f"`loss.{terms[0]}` is set",
                why,
                text("{}", Key(f"loss.{terms[0]}", 0, is_override=True)),
            )


NO_TOKEN_FUNCTIONS = TokenFunctions()


def function_name(function: Callable[..., Any]) -> str:
    """Return module and name of a function. For another callable, use its class."""
    named: Any = function
    # An object with `__call__` has no name, its class has.
    if not hasattr(function, "__qualname__"):
        named = type(function)
    return f"{named.__module__}.{named.__qualname__}"
