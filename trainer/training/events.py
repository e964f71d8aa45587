"""The description of a run for its loop: the events between training steps, when they are due and how long they take.

With several processes each batch carries the stop signal of each process, in one int32 per device. The training step
returns the largest, so that all processes read the same signal at the same step, without an exchange of their own.
Between the batches of an evaluation and the tokens of a sample, `agree` exchanges the signals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from prepcli.core.intervals import EventSteps, Interval
from prepcli.planning.manifest_fields import Manifest
from trainer.data.order import RowOrder, num_eval_batches
from trainer.data.packing import Dataset
from trainer.distributed.sharding import ShardingContext
from trainer.recipe import Recipe
from trainer.training.eval_metrics import BestMetric, Patience, best_metric
from trainer.training.feed import STOP

if TYPE_CHECKING:
    from trainer.training.samples import Sampler
    from trainer.training.step import StepSetup

# The forward pass takes about a third of the operations of a training step: the backward pass takes twice as many.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Complete description of a run for the loop. Equal configs that start from equal states end in equal states."""

    setup: StepSetup  # Model, forward config, optimizer and accumulation of a step
    # Recipe of the run. The loop reads its tables `train`, `eval`, `checkpoint` and `log`.
    recipe: Recipe
    steps: int  # Number of the last step
    order: RowOrder  # Rows of each step
    train: Dataset  # Rows to train on
    evaluation: Dataset | None  # Rows to evaluate on. None without evaluation.
    eval_every: Interval  # Steps between two evaluations. 0 evaluates only after the last step.
    save_every: Interval  # Steps between two checkpoints. 0 saves only after the last step.
    manifest_fields: Manifest  # Extra entries for the manifest of every checkpoint
    stop_after: int = 0  # Steps that this process takes. 0 means no limit.
    # Seconds of the model operations of a step at the devices' peak. None if it is unknown.
    peak_step_s: float | None = None
    # Generates texts from the prompts of the recipe. None without prompts.
    sampler: Sampler | None = None

    @property
    def evaluates_at_start(self) -> bool:
        """Whether the start parameters are evaluated before the first step."""
        at_start = self.recipe.eval.at_start
        return self.eval_every > 0 if at_start is None else at_start

    @property
    def evaluation_steps(self) -> EventSteps:
        """Steps after which the parameters are evaluated, if there are rows for it."""
        return EventSteps((self.eval_every,), self.steps)

    @property
    def sample_steps(self) -> EventSteps:
        """Steps after which texts are generated, if there are prompts."""
        return EventSteps((self.recipe.log.sample_every,), self.steps)

    @property
    def save_steps(self) -> EventSteps:
        """Steps that are saved, whatever their loss is: at `save_every`, milestones and exports."""
        table = self.recipe.checkpoint
        return EventSteps((self.save_every, table.milestones, table.export_every), self.steps)

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
        return self.evaluation_steps.is_due(step)

    def num_samples_due(self, step: int, *, ends_early: bool = False) -> int:
        """Return the number of texts that are generated after a step, or before the first one.

        Args:
            step: The step.
            ends_early: Whether it is the last step of a run that ends early.
        """
        # Step 0 completes a multiple of every interval.
        is_sampled = ends_early or self.sample_steps.is_due(step)
        if self.sampler is None or not is_sampled:
            return 0
        return len(self.sampler.prompts)

    def steps_after(self, step: int) -> range:
        """Return the steps that a start takes after a step: to the last one, or `stop_after` of them."""
        last_step = self.steps
        if self.stop_after:
            last_step = min(last_step, step + self.stop_after)
        return range(step + 1, last_step + 1)

    def has_evaluation(self, steps: range) -> bool:
        """Return whether the parameters are evaluated after one of the steps."""
        # The last step of a run, which always has one, is found first.
        return self.evaluation is not None and any(map(self.is_evaluation_due, reversed(steps)))

    def has_samples(self, steps: range, *, may_end_early: bool) -> bool:
        """Return whether texts are generated after one of the steps."""
        if self.sampler is None:
            return False
        return any(self.num_samples_due(step, ends_early=may_end_early) for step in reversed(steps))

    def end_reason(self, step: int, patience: Patience) -> str:
        """Return why a run ends with a step before its last one, or an empty text. See `Patience`."""
        if step >= self.steps:
            return ""
        return patience.end_reason(self.recipe.eval.patience, self.best_metric)

    def has_ended(self, step: int, patience: Patience) -> bool:
        """Return whether a step is the last one of the run."""
        return step >= self.steps or bool(self.end_reason(step, patience))

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
        """Tokens of a training step: targets and sources, with padding."""
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
            total_s += evaluation_s * self.evaluation_steps.count_from(step)
        if self.sampler is not None:
            total_s += seconds.get("sample", 0.0) * self.sample_steps.count_from(step)
        total_s += seconds.get("save", 0.0) * self.save_steps.count_from(step)
        # The run waits for the last save, which is written in the background.
        return total_s + seconds.get("write", 0.0)


@dataclass(frozen=True, slots=True)
class MissingEvents:
    """Events of the start step that an earlier process of the run has not logged."""

    evaluation: bool = False  # Whether its evaluation is missing
    num_samples: int = 0  # Number of missing samples, the last ones of the step
    # Whether the evaluation counts for the best step: the saved step was to have it in its manifest.
    is_score: bool = False

    def __bool__(self) -> bool:
        """Return whether an event is missing."""
        return self.evaluation or self.num_samples > 0


NO_MISSING_EVENTS = MissingEvents()


@dataclass(slots=True)
class EventTimes:
    """The seconds that the last event of each kind took, such as `evaluate` or `save`."""

    clock: Callable[[], float] = time.monotonic  # Returns the time in seconds
    # Seconds by kind. An event that was interrupted is not among them.
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Measure the event of the `with` block."""
        started_s = self.clock()
        yield
        self.seconds[kind] = self.clock() - started_s


# The index of a reason is its value in a batch. Among several, the largest one wins.
STOP_REASONS = ("", "SIGUSR1", "SIGTERM", "SIGINT")


class EventStoppedError(Exception):
    """A stop signal ended an event between two steps, such as an evaluation, before it was complete."""


class StopSignals:
    """Stop signals of all processes of a run."""

    def __init__(self, sharding: ShardingContext) -> None:
        """Create the signals of a run on these devices. No process receives one before `poll` is set."""
        # Returns the name of the signal that this process received. Empty if there is none.
        self.poll: Callable[[], str] = str
        self._agreed = ""
        # Signals of steps, by step, that do not count yet. A process may read the metrics of a step before others do.
        self._carried: dict[int, str] = {}
        self._sharding: NamedSharding | None = None
        self._largest: Callable[[Array], Array] | None = None
        self._shape = (sharding.num_devices,)
        if sharding.device_mesh is not None and sharding.has_other_processes:
            self._sharding = NamedSharding(
                sharding.device_mesh, PartitionSpec(sharding.device_mesh.axis_names)
            )
            self._largest = jax.jit(jnp.max, out_shardings=sharding.replicated_sharding())

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shape of each array of `batch_entry`, by name. Empty in a run of one process."""
        if self._sharding is None:
            return {}
        return {STOP: jax.ShapeDtypeStruct(self._shape, np.int32, sharding=self._sharding)}

    def batch_entry(self) -> dict[str, Array]:
        """Return the entry of the next batch: the signal of this process on each of its devices."""
        if self._sharding is None:
            return {}
        # One int32 per device: shape [1] on each of n devices, [n] in total.
        value = np.full(1, STOP_REASONS.index(self.poll()), np.int32)
        return {STOP: jax.make_array_from_callback(self._shape, self._sharding, lambda _: value)}

    def store(self, step: int, metrics: Mapping[str, Array]) -> None:
        """Store the strongest signal of all processes in a step, from its metrics."""
        if STOP in metrics:
            self._carried[step] = STOP_REASONS[int(metrics[STOP])]

    def agree_up_to(self, step: int) -> None:
        """Let the stored signals of the steps up to this one count. All processes call it after the same steps."""
        for carried_step in sorted(self._carried):
            if carried_step <= step:
                self._update(self._carried.pop(carried_step))

    def agree(self) -> str:
        """Exchange the signals of all processes, and return the strongest one. All processes call it together."""
        if self._largest is not None:
            self._update(STOP_REASONS[int(self._largest(self.batch_entry()[STOP]))])
        return self.reason()

    def _update(self, largest: str) -> None:
        # The maximum over all devices is equal in all processes, so they stop at the same point. A
        # process that stopped alone would leave the next collectives waiting.
        self._agreed = max(self._agreed, largest, key=STOP_REASONS.index)

    def reason(self) -> str:
        """Return the name of the signal. Empty if there is none."""
        # With several processes, a local signal counts only after a step has carried it to all of
        # them.
        if self._sharding is None:
            return self.poll()
        return self._agreed


@dataclass(slots=True)
class StepTimer:
    """Timer of training steps alone: paused while the loop compiles, evaluates, samples or saves."""

    clock: Callable[[], float] = time.monotonic  # Returns the time in seconds
    started_at: float | None = None  # Time of the last `resume`. None while paused.
    seconds: float = 0.0  # Seconds of the current lap, up to the last `pause`
    steps: int = 0  # Steps of the current lap

    def resume(self) -> None:
        """Start or restart the clock, before training steps."""
        self.started_at = self.clock()

    def pause(self) -> None:
        """Stop the clock, before work that is not a training step."""
        if self.started_at is not None:
            self.seconds += self.clock() - self.started_at
        self.started_at = None

    def count_step(self) -> None:
        """Count a finished step."""
        self.steps += 1

    def lap(self) -> float | None:
        """Start a new lap, and return the seconds per step of the last one.

        The result is None if the lap had no steps.
        """
        self.pause()
        self.resume()
        step_s = self.seconds / self.steps if self.steps else None
        self.seconds = 0.0
        self.steps = 0
        return step_s


# Name of the folder in the folder of a run.
PROFILE_FOLDER = "profile"


@dataclass(slots=True)
class StepProfiler:
    """Records a trace of consecutive steps with JAX's profiler.

    An error of the profiler gives a warning and does not end the run.
    """

    first_step: int  # The first recorded step, counted from 1
    num_steps: int  # Number of recorded steps
    folder: Path  # Receives the trace
    warn: Callable[[str], None]  # Called with a message if the profiler fails
    is_recording: bool = False  # Whether a trace has begun

    def before_step(self, step: int, wait_for_steps: Callable[[], None]) -> None:
        """Begin or end the trace before a step.

        Args:
            step: The step to be taken.
            wait_for_steps: Waits until all earlier steps are done.
        """
        if self.is_recording and step == self.first_step + self.num_steps:
            wait_for_steps()
            self.stop()
        elif step == self.first_step:
            wait_for_steps()
            self.is_recording = self._try_profiler(self._start)

    def stop(self) -> None:
        """Write the trace if one has begun."""
        if self.is_recording:
            self.is_recording = False
            self._try_profiler(jax.profiler.stop_trace)

    def _start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(self.folder)

    def _try_profiler(self, function: Callable[[], None]) -> bool:
        """Return whether a function of the profiler succeeded."""
        try:
            function()
        except (OSError, RuntimeError) as error:
            self.warn(f"no profile was recorded: {error}")
            return False
        return True
