"""The training loop: take steps, and log, evaluate and save between them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array

from trainer.data.order import RowOrder
from trainer.data.packing import Dataset
from trainer.distributed.device_memory import peak_memory_nbytes
from trainer.models.checkpoint_store import CheckpointStore, PendingSave
from trainer.models.errors import PrepError
from trainer.training.callbacks import Callbacks
from trainer.training.checkpoint import host_leaves
from trainer.training.evaluation import EvalStep, evaluate, jit_eval_step, jit_exact_eval_step
from trainer.training.feed import batch_shapes, load_batch
from trainer.training.intervals import Interval, is_due
from trainer.training.log_lines import evaluation_line, sample_lines, speed_fields, step_line
from trainer.training.metrics import NO_LOG, MetricsLog, StepTimer
from trainer.training.param_casts import count_changed_values
from trainer.training.profiling import StepProfiler
from trainer.training.samples import Sampler
from trainer.training.source_datasets import tokens_by_source
from trainer.training.step import StepSetup, TrainState
from trainer.training.step_compilation import jit_train_step
from trainer.training.stop import StopSignals

# Steps that may be in flight before the metrics of the oldest are fetched, so that devices never wait for the host.
# CPUs block the dispatch of further steps, so a lag would only make the times of log lines wrong.
METRICS_LAG, CPU_METRICS_LAG = 2, 0
CompiledStep = Callable[..., tuple[TrainState, dict[str, Array]]]


@dataclass(frozen=True, slots=True)
class Job:
    """Complete description of a run. Equal jobs that start from equal states end in equal states.

    Attributes:
        setup: Model, forward config, optimizer and accumulation of a step.
        steps: Number of the last step.
        order: Rows of each step.
        train: Rows to train on.
        evaluation: Rows to evaluate on; None without evaluation.
        eval_limit: Number of rows of an evaluation; 0 for all.
        log_every: Steps between two log lines.
        eval_every: Steps between two evaluations; 0 to evaluate only after the last step.
        save_every: Steps between two checkpoints; 0 to save only after the last step.
        also_save_every: Further intervals of checkpoints, such as that of milestones.
        saves_best: Save each step whose evaluation has the lowest loss so far, with the loss in its manifest.
        sampler: Generates texts from the prompts of the recipe; None without prompts.
        sample_every: Steps between two samples, from step 0 on; 0 to sample only after the last step.
        saved_dtype: Dtype of the saved parameters; None: that of the state, which resuming needs.
        optimizer_state: Save the optimizer's moments.
        max_skipped: Consecutive skipped steps that end the run.
        manifest_fields: Extra entries for the manifest of every checkpoint.
        stop_after: Steps that this process takes; 0 for no limit.
        eval_at_start: Evaluate before the first step; None to do so if `eval_every` is set.
        peak_step_s: Seconds of the model operations of a step at the devices' peak; None if it is unknown.
    """

    setup: StepSetup
    steps: int
    order: RowOrder
    train: Dataset
    evaluation: Dataset | None
    eval_limit: int
    log_every: int
    eval_every: Interval
    save_every: Interval
    optimizer_state: bool
    max_skipped: int
    manifest_fields: Mapping[str, Any]
    stop_after: int = 0
    peak_step_s: float | None = None
    eval_at_start: bool | None = None
    also_save_every: tuple[Interval, ...] = ()
    saves_best: bool = False
    saved_dtype: str | None = None
    sampler: Sampler | None = None
    sample_every: Interval = 0

    @property
    def evaluates_at_start(self) -> bool:
        """Whether the start parameters are evaluated before the first step."""
        return self.eval_every > 0 if self.eval_at_start is None else self.eval_at_start

    @property
    def eval_batch_size(self) -> int:
        """Sequences of an evaluation batch: as many as in a training micro-batch, or a batch of logical shards."""
        if self.setup.reduction_shards:
            return self.order.batch_size
        return self.order.batch_size // self.setup.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a training step, source tokens included."""
        columns = self.train.columns
        return self.order.batch_size * sum(columns[name][0] for name in ("tokens", "source") if name in columns)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The last step of a run, and the reason of an early stop.

    Attributes:
        step: The last step taken.
        stop_reason: Why the run stopped early; empty if all steps were taken.
    """

    step: int
    stop_reason: str = ""


class Loop:
    """A run in progress.

    Apart from the training state, everything it holds can be rebuilt from the job and the step.
    """

    def __init__(
        self,
        job: Job,
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
            job: The job to run.
            state: Training state to start from.
            store: Receives the checkpoints.
            metrics: Receives the log lines.
            sample_log: Receives the lines of samples.
            callbacks: Receives progress reports.
            poll_stop_reason: Called before every step; a non-empty reason stops the run, in all processes.
            enter_phase: Called with the name of each phase, such as `compile`, `step 12` or `save 12`.
            best_eval_loss: Lowest loss in the manifest of a saved step.
            profiler: Records some of the steps.
            warn: Called with a message if parameters cannot be cast for a checkpoint.
        """
        self.job, self.state = job, state
        self.store, self.callbacks = store, callbacks
        self.metrics, self.sample_log = metrics, sample_log
        self.stop_signals = StopSignals(poll_stop_reason, job.setup.sharding)
        self.enter_phase, self.profiler, self.warn = enter_phase, profiler, warn
        self.best_eval_loss, self.eval_losses = best_eval_loss, dict[int, float]()
        self.step = int(state["step"])
        self.start_step = self.last_saved_step = self.step
        self.pending_save: tuple[int, PendingSave] | None = None
        self.pending_metrics: deque[tuple[int, dict[str, Array]]] = deque()
        self.timer = StepTimer()
        (platform,) = {device.platform for device in state["step"].devices()}
        self.metrics_lag = CPU_METRICS_LAG if platform == "cpu" else METRICS_LAG
        self.eval_step = _jit_eval_step(job.setup)

    def run(self) -> RunResult:
        """Take the remaining steps, or stop early for a stop reason; save the last step in both cases.

        Raises:
            PrepError: Too many consecutive steps were skipped because loss or gradients were not finite, or a
                checkpoint cannot be saved.
        """
        compiled_step = self._compile_step()
        if self.step == 0 and self.job.evaluates_at_start:
            self._evaluate()
        if self.step == 0 and self.job.sample_every:
            self._sample()
        self.timer.resume()
        try:
            reason = self._take_steps(compiled_step)
        finally:
            if self.profiler is not None:
                self.profiler.stop()
        if not reason and self.start_step < self.step == self.job.steps:
            self._evaluate()
            self._sample()
        self._save()
        self._wait_for_save()
        return RunResult(self.step, reason)

    def _take_steps(self, compiled_step: CompiledStep) -> str:
        """Take the remaining steps; return the reason of an early stop."""
        reason = ""
        while self.step < self.job.steps and not (reason := self._stop_reason()):
            self.enter_phase(f"step {self.step + 1}")
            if self.profiler is not None:
                self.profiler.before_step(self.step + 1, lambda: self._drain_metrics(0))
            batch = self._load_batch()
            self.state, metrics = compiled_step(self.state, batch | self.stop_signals.batch_entry())
            self.step += 1
            self.pending_metrics.append((self.step, metrics))
            self._drain_metrics(self.metrics_lag)
            self._report_save()
            self._run_due_events()
        self._drain_metrics(0)
        return reason

    def _stop_reason(self) -> str:
        if self.job.stop_after and self.step - self.start_step >= self.job.stop_after:
            return f"--stop-after {self.job.stop_after}"
        return self.stop_signals.reason()

    def _load_batch(self) -> dict[str, Array]:
        """Load the batch of the next step."""
        order, sharding = self.job.order, self.job.setup.sharding
        return load_batch(self.job.train, order.rows(self.step), sharding, epochs=order.epochs(self.step))

    def _compile_step(self) -> CompiledStep:
        """Compile the training step for the state's shardings; the state is donated."""
        self.enter_phase("compile")
        setup = self.job.setup
        start_s = self.timer.clock()
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self.state
        )
        batch = batch_shapes(self.job.train, self.job.order.batch_size, setup.sharding)
        batch |= self.stop_signals.batch_shapes()
        compiled = jit_train_step(setup).lower(shapes, batch).compile()
        self.callbacks.on_compile(self.timer.clock() - start_s)
        return compiled

    def _run_due_events(self) -> None:
        """Evaluate, sample and save, each if it is due after this step."""
        job = self.job
        if self.step == job.steps:
            return  # `run` does this after the last step
        if is_due(self.step, job.eval_every):
            self._evaluate()
        if is_due(self.step, job.sample_every):
            self._sample()
        if any(is_due(self.step, every) for every in (job.save_every, *job.also_save_every)) or self._is_best():
            self._save()

    def _is_best(self) -> bool:
        """Return whether this step was evaluated and should be saved for its loss, the lowest so far."""
        eval_loss = self.eval_losses.get(self.step, math.inf)
        return self.job.saves_best and eval_loss < self.best_eval_loss

    def _drain_metrics(self, lag: int) -> None:
        """Fetch and log the metrics of all steps but the last `lag`; raise PrepError if too many were skipped."""
        job = self.job
        while len(self.pending_metrics) > lag:
            step, metrics = self.pending_metrics.popleft()
            consecutive_skips = int(metrics["in_row"])  # blocks until the step is done
            self.stop_signals.read(metrics)
            self.timer.count_step()
            self.callbacks.on_step(step)
            if step % job.log_every == 0 or step in (1, job.steps):
                self._log_step(step, metrics)
            if consecutive_skips >= job.max_skipped:
                raise self._divergence_error(step, consecutive_skips)

    def _log_step(self, step: int, metrics: Mapping[str, Array]) -> None:
        job = self.job
        values = {name: float(np.asarray(value)) for name, value in metrics.items()}
        line = step_line(step, values, tokens=step * job.tokens_per_step)
        tokens_per_row = job.tokens_per_step // job.order.batch_size
        line |= tokens_by_source(job.order, job.train, step, tokens_per_row=tokens_per_row)
        step_s = self.timer.lap()
        line |= speed_fields(step_s, tokens_per_step=job.tokens_per_step, peak_step_s=job.peak_step_s)
        memory_nbytes = peak_memory_nbytes(job.setup.sharding)
        line |= {} if memory_nbytes is None else {"memory_bytes": memory_nbytes}
        self.metrics.write(line)
        self.callbacks.on_log(line, step_s * (job.steps - step) if step_s else None)

    def _evaluate(self) -> None:
        """Log the loss over the evaluation rows."""
        job, dataset = self.job, self.job.evaluation
        if dataset is None:
            return
        self.enter_phase(f"evaluate {self.step}")
        self._drain_metrics(0)
        self.timer.pause()
        result = evaluate(
            self.state["params"],
            dataset,
            eval_step=self.eval_step,
            sharding=job.setup.sharding,
            batch_size=job.eval_batch_size,
            limit=job.eval_limit,
        )
        line = evaluation_line(self.step, result)
        self.eval_losses = {self.step: result.mean_loss}
        self.metrics.write(line)
        self.callbacks.on_evaluate(line)
        self.timer.resume()

    def _sample(self) -> None:
        """Generate a text for each prompt of the job, and log it."""
        if self.job.sampler is None:
            return
        self.enter_phase(f"sample {self.step}")
        self._drain_metrics(0)
        self.timer.pause()
        samples = self.job.sampler.generate(self.state["params"])
        for line in sample_lines(self.step, samples):
            self.sample_log.write(line)
        self.callbacks.on_samples(self.step, samples)
        self.timer.resume()

    def _save(self) -> None:
        """Begin to save this step unless it is saved already; raise PrepError if the state is not finite."""
        if self.last_saved_step == self.step:
            return
        self.enter_phase(f"save {self.step}")
        self._drain_metrics(0)
        self.timer.pause()
        self._wait_for_save()
        if not bool(_all_finite(self.state)):
            what = f"the state after step {self.step} is not finite"
            raise PrepError(what, "nothing was saved", self._recovery_hint())
        fields, frozen = self._manifest_fields(), self.job.setup.model.frozen_paths
        dtype = self.job.saved_dtype if "param_cast" in fields else None
        leaves = host_leaves(self.state, self.job.optimizer_state, frozen=frozen, saved_dtype=dtype)
        self.pending_save = self.step, self.store.start_save(self.step, leaves, fields)
        self.last_saved_step = self.step
        self.timer.resume()

    def _manifest_fields(self) -> Mapping[str, Any]:
        """Return the entries of the manifest; `param_cast` is absent if a value is too large for `saved_dtype`."""
        fields = dict(self.job.manifest_fields)
        eval_loss = self.eval_losses.get(self.step, math.nan)
        if self.job.saves_best and math.isfinite(eval_loss):
            fields["eval_loss"] = eval_loss
            self.best_eval_loss = min(self.best_eval_loss, eval_loss)
        if self.job.saved_dtype is not None:
            frozen = self.job.setup.model.frozen_paths
            try:
                fields["param_cast"] = count_changed_values(self.state["params"], self.job.saved_dtype, frozen)
            except PrepError as error:
                self.warn(f"step {self.step}: {error.what} - {error.why}; they are saved without a cast")
        return fields

    def _report_save(self) -> None:
        """Report a save that has ended since the last call; raise its PrepError if it failed."""
        if self.pending_save and self.pending_save[1].is_done:
            self._wait_for_save()

    def _wait_for_save(self) -> None:
        """Wait for the save in the background, and report it; raise its PrepError if it failed."""
        if self.pending_save:
            (step, save), self.pending_save = self.pending_save, None
            self.callbacks.on_save(step, save.wait())

    def _divergence_error(self, step: int, consecutive_skips: int) -> PrepError:
        what = f"no finite loss in {consecutive_skips} steps, up to step {step}"
        why = "each was skipped: parameters and moments are unchanged since the step before them"
        return PrepError(what, why, self._recovery_hint())

    def _recovery_hint(self) -> str:
        steps = self.store.steps()
        start = f" from step {steps[-1]}" if steps else ""
        return f"a new run{start}, with a lower `optimizer.lr` or more warm-up"


def _jit_eval_step(setup: StepSetup) -> EvalStep:
    """Return the evaluation step of a run, with sums in the order of its training step."""
    if setup.reduction_shards:
        return jit_exact_eval_step(setup.model, setup.forward_config, setup.reduction_shards)
    return jit_eval_step(setup.model, setup.forward_config, setup.metric_fn)


@jax.jit
def _all_finite(state: TrainState) -> Array:
    floats = [leaf for leaf in jax.tree.leaves(state) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)]
    return jax.numpy.stack([jax.numpy.isfinite(leaf).all() for leaf in floats]).all()
