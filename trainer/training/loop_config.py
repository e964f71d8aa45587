"""The description of a run for the training loop: its steps, and the events between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prepcli.planning.manifest_fields import Manifest
from trainer.data.order import RowOrder, num_eval_batches
from trainer.data.packing import Dataset
from trainer.recipe import Recipe
from trainer.training.eval_metrics import BestMetric, Patience, best_metric
from trainer.training.events import Interval, is_due, num_due
from trainer.training.samples import Sampler
from trainer.training.step import StepSetup

# The forward pass takes about a third of the operations of a training step: the backward pass takes twice as many.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Complete description of a run for the loop. Equal configs that start from equal states end in equal states.

    Attributes:
        setup: Model, forward config, optimizer and accumulation of a step.
        recipe: Recipe of the run. The loop reads its tables `train`, `eval`, `checkpoint` and
            `log`.
        steps: Number of the last step.
        order: Rows of each step.
        train: Rows to train on.
        evaluation: Rows to evaluate on. None without evaluation.
        eval_every: Steps between two evaluations. 0 evaluates only after the last step.
        save_every: Steps between two checkpoints. 0 saves only after the last step.
        manifest_fields: Extra entries for the manifest of every checkpoint.
        stop_after: Steps that this process takes. 0 means no limit.
        peak_step_s: Seconds of the model operations of a step at the devices' peak. None if it is
            unknown.
        sampler: Generates texts from the prompts of the recipe. None without prompts.
    """

    setup: StepSetup
    recipe: Recipe
    steps: int
    order: RowOrder
    train: Dataset
    evaluation: Dataset | None
    eval_every: Interval
    save_every: Interval
    manifest_fields: Manifest
    stop_after: int = 0
    peak_step_s: float | None = None
    sampler: Sampler | None = None

    @property
    def evaluates_at_start(self) -> bool:
        """Whether the start parameters are evaluated before the first step."""
        at_start = self.recipe.eval.at_start
        return self.eval_every > 0 if at_start is None else at_start

    @property
    def save_intervals(self) -> tuple[Interval, ...]:
        """Intervals at which checkpoints are saved: `save_every`, milestones and exports."""
        table = self.recipe.checkpoint
        return (self.save_every, table.milestones, table.export_every)

    @property
    def best_metric(self) -> BestMetric:
        """The value of evaluations that selects the best step."""
        return best_metric(self.recipe)

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether the parameters are evaluated after a step, or before the first one."""
        if self.evaluation is None:
            return False
        if step == 0:
            return self.evaluates_at_start
        return step == self.steps or is_due(step, self.eval_every)

    def num_samples_due(self, step: int, *, ends_early: bool = False) -> int:
        """Return the number of texts that are generated after a step, or before the first one.

        Args:
            step: The step.
            ends_early: Whether it is the last step of a run that ends early.
        """
        every = self.recipe.log.sample_every
        is_last = ends_early or step == self.steps
        is_sampled = is_last or is_due(step, every) or (step == 0 and bool(every))
        if self.sampler is None or not is_sampled:
            return 0
        return len(self.sampler.prompts)

    def is_save_due(self, step: int) -> bool:
        """Return whether a step is saved, whatever its loss is."""
        return step == self.steps or any(is_due(step, every) for every in self.save_intervals)

    def end_reason(self, step: int, patience: Patience) -> str:
        """Return why a run ends with a step before its last one, or an empty text. See `Patience`."""
        if step >= self.steps:
            return ""
        return patience.end_reason(self.recipe.eval.patience, self.best_metric)

    @property
    def saves_best(self) -> bool:
        """Whether each step with the best evaluation so far is saved, with its value in the manifest."""
        return self.recipe.checkpoint.best is not None

    @property
    def records_evaluations(self) -> bool:
        """Whether the manifest of a step has its evaluation, so that a step is saved after it."""
        return self.saves_best or self.recipe.eval.patience > 0

    @property
    def saved_dtype(self) -> str | None:
        """Dtype of the saved parameters, or None without a cast. Resuming needs them without a cast."""
        dtype = self.recipe.checkpoint.dtype
        return None if dtype == self.setup.param_dtype else dtype

    @property
    def eval_batch_size(self) -> int:
        """Sequences of an evaluation batch.

        As many as in a training micro-batch, which is known to fit into memory. With an exact reduction, a batch of
        logical shards.
        """
        if self.setup.reduction_shards:
            return self.order.batch_size
        return self.order.batch_size // self.setup.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a training step, source tokens included."""
        columns = self.train.columns
        tokens_per_row = 0
        for name in ("tokens", "source"):
            if name in columns:
                tokens_per_row += columns[name][0]
        return self.order.batch_size * tokens_per_row

    def remaining_s(self, step: int, *, step_s: float, seconds: Mapping[str, float]) -> float:
        """Estimate the seconds from a step to the end of the run, with its evaluations, samples and saves.

        Args:
            step: The last finished step.
            step_s: Seconds of a step.
            seconds: Seconds of the last event of each kind. See `EventTimes`.
        """
        total_s = step_s * (self.steps - step)
        if self.evaluation is not None:
            num_batches = num_eval_batches(
                self.evaluation.n_rows, self.eval_batch_size, limit=self.recipe.eval.limit
            )
            num_steps = num_batches * self.eval_batch_size / self.order.batch_size
            evaluation_s = seconds.get("evaluate", FORWARD_SHARE * step_s * num_steps)
            total_s += evaluation_s * num_due(step, self.steps, self.eval_every)
        if self.sampler is not None:
            sample_every = self.recipe.log.sample_every
            total_s += seconds.get("sample", 0.0) * num_due(step, self.steps, sample_every)
        num_saves = max(num_due(step, self.steps, every) for every in self.save_intervals)
        total_s += seconds.get("save", 0.0) * num_saves
        # The run waits for the last save, which is written in the background.
        return total_s + seconds.get("write", 0.0)
