"""The training loop: take steps, and log, evaluate and save between them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from trainer.data.order import RowOrder
from trainer.data.packing import Dataset
from trainer.distributed.mesh_devices import peak_memory_nbytes
from trainer.models.checkpoint_store import CheckpointStore, PendingSave
from trainer.models.errors import Option, PrepError, text
from trainer.models.manifest_fields import StepFields
from trainer.recipe import Recipe
from trainer.training.checkpoint import host_leaves
from trainer.training.evaluation import (
    EvalStep,
    EvaluationResult,
    evaluate,
    jit_eval_step,
    jit_exact_eval_step,
)
from trainer.training.feed import batch_shapes, load_batch
from trainer.training.log_lines import (
    StepLine,
    evaluation_line,
    sample_line,
    speed_fields,
    step_line,
)
from trainer.training.metrics import NO_LOG, MetricsLog, StepTimer
from trainer.training.param_casts import count_changed_values
from trainer.training.profiling import StepProfiler
from trainer.training.samples import Sample, Sampler
from trainer.training.source_datasets import tokens_by_source
from trainer.training.step import StepSetup, TrainState, jit_train_step
from trainer.training.stop import StopSignals

# Steps that may be in flight before the metrics of the oldest are fetched, so that devices never wait for the host.
METRICS_LAG = 2
# CPUs block the dispatch of further steps, so a lag would only make the times of log lines wrong.
CPU_METRICS_LAG = 0
# Values of a log line and of an evaluation that are in the result of a run
RESULT_METRICS = ("loss", "tokens", "skipped", "tokens_per_s", "mfu", "memory_bytes")
RESULT_EVAL_METRICS = ("eval_loss", "eval_perplexity", "eval_tokens")
CompiledStep = Callable[..., tuple[TrainState, dict[str, Array]]]
# Steps. 0 means never.
Interval = int | Fraction


def is_due(step: int, every: Interval) -> bool:
    """Return whether an event happens after a step: the first step that completes a multiple of the interval."""
    # With every = 5/2, the quotients of steps 1 to 5 are 0 0 1 1 2: it happens after steps 3 and 5.
    return bool(every) and step // every > (step - 1) // every


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
    manifest_fields: StepFields
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
    def saves_best(self) -> bool:
        """Whether each step with the lowest evaluation loss so far is saved, with the loss in its manifest."""
        return self.recipe.checkpoint.best is not None

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


@dataclass(frozen=True, slots=True)
class LoopResult:
    """The last step of a run, and the reason of an early stop.

    Attributes:
        step: The last step taken.
        metrics: Last values of the logged metrics, the last samples, and the seconds of the compilation.
        stop_reason: Why the run stopped early. Empty if all steps were taken.
    """

    step: int
    metrics: Mapping[str, object]
    stop_reason: str = ""


class Callbacks(Protocol):
    """Receiver of the progress reports of the loop."""

    def on_compile(self, seconds: float) -> None:
        """Report the seconds of compiling the step."""
        ...

    def on_step(self, step: int) -> None:
        """Report a finished step."""
        ...

    def on_log(self, line: StepLine, remaining_s: float | None) -> None:
        """Report a log line, and an estimate of the remaining seconds."""
        ...

    def on_evaluate(self, step: int, result: EvaluationResult) -> None:
        """Report an evaluation after a step."""
        ...

    def on_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Report the texts generated after a step."""
        ...

    def on_save(self, step: int, seconds: float) -> None:
        """Report a durable checkpoint, its step, and the seconds of saving it."""
        ...


class Loop:
    """A run in progress.

    Apart from the training state, all its values can be rebuilt from the config and the step.
    """

    def __init__(
        self,
        config: LoopConfig,
        state: TrainState,
        *,
        store: CheckpointStore,
        metrics: MetricsLog,
        sample_log: MetricsLog = NO_LOG,
        callbacks: Callbacks,
        poll_stop_reason: Callable[[], str],
        enter_phase: Callable[[str], None] = lambda _: None,
        best_eval_loss: float = math.inf,
        profiler: StepProfiler | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create a loop that starts at the step of `state`.

        Args:
            config: The run.
            state: Training state to start from.
            store: Receives the checkpoints.
            metrics: Receives the log lines.
            sample_log: Receives the lines of samples.
            callbacks: Receives progress reports.
            poll_stop_reason: Called before every step. A non-empty reason stops the run, in all
                processes.
            enter_phase: Called with the name of each phase, such as `compile`,
                `step 12` or `save 12`.
            best_eval_loss: Lowest loss in the manifest of a saved step.
            profiler: Records some of the steps.
            warn: Called with a message if parameters cannot be cast for a checkpoint.
        """
        self.config = config
        self.state = state
        self.store = store
        self.callbacks = callbacks
        self.metrics = metrics
        self.sample_log = sample_log
        self.stop_signals = StopSignals(poll_stop_reason, config.setup.sharding)
        self.enter_phase = enter_phase
        self.profiler = profiler
        self.warn = warn
        self.best_eval_loss = best_eval_loss
        # Loss of the last evaluation by its step, so that no later step is saved with it.
        self.eval_losses: dict[int, float] = {}
        self.step = int(state["step"])
        self.start_step = self.last_saved_step = self.step
        self.pending_save: tuple[int, PendingSave] | None = None
        self.pending_metrics: deque[tuple[int, dict[str, Array]]] = deque()
        self.last_metrics: dict[str, object] = {}
        self.timer = StepTimer()
        (platform,) = {device.platform for device in state["step"].devices()}
        self.metrics_lag = CPU_METRICS_LAG if platform == "cpu" else METRICS_LAG
        self.eval_step = _jit_eval_step(config.setup)

    def run(self) -> LoopResult:
        """Take the remaining steps, or stop early for a stop reason.

        Save the last step in both cases.

        Raises:
            PrepError: Too many consecutive steps were skipped, because loss or gradients were not
                finite or no token had a weight, or a checkpoint cannot be saved.
        """
        compiled_step = self._compile_step()
        if self.step == 0 and self.config.evaluates_at_start:
            self._evaluate()
        if self.step == 0 and self.config.recipe.log.sample_every:
            self._log_samples()
        self.timer.resume()
        try:
            reason = self._take_steps(compiled_step)
        finally:
            if self.profiler is not None:
                self.profiler.stop()
        # A run that starts at its last step takes no step, and does not evaluate it again.
        if not reason and self.start_step < self.step == self.config.steps:
            self._evaluate()
            self._log_samples()
        self._save()
        self._wait_for_save()
        return LoopResult(self.step, self.last_metrics, reason)

    def _take_steps(self, compiled_step: CompiledStep) -> str:
        """Take the remaining steps, and return the reason of an early stop."""
        config = self.config
        reason = ""
        while self.step < config.steps and not (reason := self._stop_reason()):
            self.enter_phase(f"step {self.step + 1}")
            if self.profiler is not None:
                # The profiler waits for all steps in flight: a trace begins and ends between steps.
                self.profiler.before_step(self.step + 1, lambda: self._drain_metrics(0))
            batch = load_batch(
                config.train,
                config.order.rows(self.step),
                config.setup.sharding,
                epochs=config.order.epochs(self.step),
            )
            self.state, metrics = compiled_step(self.state, batch | self.stop_signals.batch_entry())
            self.step += 1
            # The dispatch is asynchronous: `metrics` are arrays that may not be computed yet. They
            # are read METRICS_LAG steps later.
            self.pending_metrics.append((self.step, metrics))
            self._drain_metrics(self.metrics_lag)
            # A save that has ended is reported, or its error is raised, at the next step.
            if self.pending_save and self.pending_save[1].is_done:
                self._wait_for_save()
            self._run_due_events()
        self._drain_metrics(0)
        return reason

    def _stop_reason(self) -> str:
        """Return why the run stops after this step, or an empty text."""
        if self.config.stop_after and self.step - self.start_step >= self.config.stop_after:
            return text("{}", Option("stop_after", self.config.stop_after))
        return self.stop_signals.reason()

    def _compile_step(self) -> CompiledStep:
        """Compile the training step for the state's shardings.

        The state is donated.
        """
        self.enter_phase("compile")
        setup = self.config.setup
        start_s = self.timer.clock()
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self.state,
        )
        batch = batch_shapes(self.config.train, self.config.order.batch_size, setup.sharding)
        batch |= self.stop_signals.batch_shapes()
        compiled = jit_train_step(setup).lower(shapes, batch).compile()
        compile_s = self.timer.clock() - start_s
        self.last_metrics["compile_seconds"] = round(compile_s, 3)
        self.callbacks.on_compile(compile_s)
        return compiled

    def _run_due_events(self) -> None:
        """Evaluate, sample and save, each if it is due after this step."""
        config = self.config
        # `run` does all three after the last step, whether they are due or not.
        if self.step == config.steps:
            return
        if is_due(self.step, config.eval_every):
            self._evaluate()
        if is_due(self.step, config.recipe.log.sample_every):
            self._log_samples()
        is_save_due = any(is_due(self.step, every) for every in config.save_intervals)
        if is_save_due or self._is_best():
            self._save()

    def _is_best(self) -> bool:
        """Return whether this step was evaluated and should be saved for its loss, the lowest so far."""
        eval_loss = self.eval_losses.get(self.step, math.inf)
        return self.config.saves_best and eval_loss < self.best_eval_loss

    def _drain_metrics(self, lag: int) -> None:
        """Fetch and log the metrics of all steps but the last `lag`.

        Raise PrepError if too many were skipped.
        """
        config = self.config
        while len(self.pending_metrics) > lag:
            step, metrics = self.pending_metrics.popleft()
            # The conversion waits until the step is done on the device.
            consecutive_skips = int(metrics["in_row"])
            self.stop_signals.update_from_metrics(metrics)
            self.timer.count_step()
            self.callbacks.on_step(step)
            if step % config.recipe.train.log_every == 0 or step in (1, config.steps):
                self._log_step(step, metrics)
            if consecutive_skips >= config.recipe.train.max_skipped:
                raise self._divergence_error(step, consecutive_skips)

    def _log_step(self, step: int, metrics: Mapping[str, Array]) -> None:
        """Write the metrics of a step to the log."""
        config = self.config
        values = {name: float(np.asarray(value)) for name, value in metrics.items()}
        line = step_line(step, values, tokens=step * config.tokens_per_step)
        tokens_per_row = config.tokens_per_step // config.order.batch_size
        source_tokens = tokens_by_source(
            config.order, config.train, step, tokens_per_row=tokens_per_row
        )
        step_s = self.timer.lap()
        speed = speed_fields(
            step_s, tokens_per_step=config.tokens_per_step, peak_step_s=config.peak_step_s
        )
        memory_nbytes = peak_memory_nbytes(config.setup.sharding)
        if memory_nbytes is not None:
            speed["memory_bytes"] = memory_nbytes
        logged: dict[str, object] = {**line, **source_tokens, **speed}
        self.metrics.write(logged)
        self.last_metrics |= {key: logged[key] for key in RESULT_METRICS if key in logged}
        self.callbacks.on_log({**line, **speed}, step_s * (config.steps - step) if step_s else None)

    def _evaluate(self) -> None:
        """Log the loss over the evaluation rows."""
        config = self.config
        dataset = config.evaluation
        if dataset is None:
            return
        self.enter_phase(f"evaluate {self.step}")
        self._drain_metrics(0)
        self.timer.pause()
        result = evaluate(
            self.state["params"],
            dataset,
            eval_step=self.eval_step,
            sharding=config.setup.sharding,
            batch_size=config.eval_batch_size,
            limit=config.recipe.eval.limit,
        )
        line = evaluation_line(self.step, result)
        self.eval_losses = {self.step: result.mean_loss}
        self.metrics.write(line)
        self.last_metrics |= {key: line[key] for key in RESULT_EVAL_METRICS}
        self.callbacks.on_evaluate(self.step, result)
        self.timer.resume()

    def _log_samples(self) -> None:
        """Generate a text for each prompt of the recipe, and log it."""
        if self.config.sampler is None:
            return
        self.enter_phase(f"sample {self.step}")
        self._drain_metrics(0)
        self.timer.pause()
        samples = self.config.sampler.generate(self.state["params"])
        lines: list[object] = []
        for sample in samples:
            line = sample_line(self.step, sample)
            self.sample_log.write(line)
            lines.append(line)
        self.last_metrics["samples"] = lines
        self.callbacks.on_samples(self.step, samples)
        self.timer.resume()

    def _save(self) -> None:
        """Begin to save this step unless it is saved already.

        Raise PrepError if the state is not finite.
        """
        if self.last_saved_step == self.step:
            return
        self.enter_phase(f"save {self.step}")
        self._drain_metrics(0)
        self.timer.pause()
        self._wait_for_save()
        # Checked before the first byte is written: a checkpoint that is not finite could replace a
        # good one under `checkpoint.keep`.
        if not bool(_all_finite(self.state)):
            what = f"the state after step {self.step} is not finite"
            raise PrepError(what, "nothing was saved", self._recovery_hint())
        config = self.config
        fields = self._manifest_fields()
        leaves = host_leaves(
            self.state,
            config.recipe.checkpoint.optimizer_state,
            frozen=config.setup.model.base_paths,
            saved_dtype=config.saved_dtype if "param_cast" in fields else None,
        )
        # The save may go on in the background. `_wait_for_save` above leaves at most one save in
        # flight, so steps become durable in their order.
        self.pending_save = self.step, self.store.start_save(self.step, leaves, fields)
        self.last_saved_step = self.step
        self.timer.resume()

    def _manifest_fields(self) -> StepFields:
        """Return the entries of the manifest.

        `param_cast` is absent if a value is too large for `saved_dtype`.
        """
        fields = self.config.manifest_fields.copy()
        eval_loss = self.eval_losses.get(self.step, math.nan)
        if self.config.saves_best and math.isfinite(eval_loss):
            fields["eval_loss"] = eval_loss
            self.best_eval_loss = min(self.best_eval_loss, eval_loss)
        if self.config.saved_dtype is not None:
            frozen = self.config.setup.model.base_paths
            try:
                fields["param_cast"] = count_changed_values(
                    self.state["params"], self.config.saved_dtype, frozen
                )
            except PrepError as error:
                self.warn(
                    f"step {self.step}: {error.what} - {error.why}; they are saved without a cast"
                )
        return fields

    def _wait_for_save(self) -> None:
        """Wait for the save in the background, and report it.

        Raise its PrepError if it failed.
        """
        if self.pending_save:
            step, save = self.pending_save
            # Cleared first: an error of the save is raised once, and not again when the run ends.
            self.pending_save = None
            self.callbacks.on_save(step, save.wait())

    def _divergence_error(self, step: int, consecutive_skips: int) -> PrepError:
        what = f"{consecutive_skips} steps in a row were skipped, up to step {step}"
        why = (
            "their loss or gradients were not finite, or no token had a weight:"
            " parameters and moments are unchanged since the step before them"
        )
        return PrepError(what, why, self._recovery_hint())

    def _recovery_hint(self) -> str:
        """Return how to go on after a run diverged."""
        steps = self.store.steps()
        start = ""
        if steps:
            start = f" from step {steps[-1]}"
        return f"a new run{start}, with a lower `optimizer.lr` or more warm-up"


def _jit_eval_step(setup: StepSetup) -> EvalStep:
    """Return the evaluation step of a run, with sums in the order of its training step."""
    if setup.reduction_shards:
        return jit_exact_eval_step(setup.model, setup.forward_config, setup.reduction_shards)
    return jit_eval_step(setup.model, setup.forward_config, setup.metric_fn)


@jax.jit
def _all_finite(state: TrainState) -> Array:
    """Return whether all numbers of the state are finite."""
    leaves = jax.tree.leaves(state)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in floats]).all()
