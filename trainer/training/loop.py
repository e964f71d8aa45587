"""The training loop: take steps, and log, evaluate and save between them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from prepcli.core.errors import Option, PrepError, text
from prepcli.core.worker_thread import run_abandonable
from prepcli.planning.manifest_fields import CastCounts, Manifest
from trainer.data.order import eval_batches
from trainer.distributed.sharding import peak_memory_nbytes
from trainer.training.checkpoint import (
    Checkpoints,
    PendingSave,
    count_changed_values,
    host_leaves,
)
from trainer.training.datasets import tokens_by_source
from trainer.training.eval_metrics import NO_EVALUATIONS, Patience, check_metric_name
from trainer.training.evaluation import EvalStep, evaluate, jit_eval_step, jit_exact_eval_step
from trainer.training.events import (
    NO_MISSING_EVENTS,
    EventStoppedError,
    EventTimes,
    LoopConfig,
    MissingEvents,
    StepProfiler,
    StepTimer,
    StopSignals,
)
from trainer.training.feed import batch_shapes, load_batch
from trainer.training.metrics import (
    RunLog,
    StepLine,
    evaluation_line,
    sample_line,
    speed_fields,
    step_line,
)
from trainer.training.step import StepSetup, TrainState, jit_train_step

# Steps that may be in flight before the metrics of the oldest are fetched, so that devices never wait for the host.
METRICS_LAG = 2
# CPUs block the dispatch of further steps, so a lag would only make the times of log lines wrong.
CPU_METRICS_LAG = 0
# Values of a log line and of an evaluation that are in the result of a run
RESULT_METRICS = ("loss", "tokens", "skipped", "tokens_per_s", "mfu", "memory_bytes")
RESULT_EVAL_METRICS = ("eval_loss", "eval_perplexity", "eval_tokens")
CompiledStep = Callable[..., tuple[TrainState, dict[str, Array]]]


class Loop:
    """A run in progress.

    A resumed run takes the training state, `lowest_cost`, `patience` and `missing_events` from its files. All other
    values follow from the config and the step.

    Attributes:
        step: The last step taken.
        metrics: Values of the last step and of the last evaluation, the last samples, and the seconds of the
            compilation.
        stop_reason: Why the run was stopped before its end. Empty if it is finished.
        end_reason: Why the run ended before its last step, by `eval.patience`. Empty if it did not.
    """

    def __init__(
        self,
        config: LoopConfig,
        state: TrainState,
        *,
        checkpoints: Checkpoints,
        logs: Sequence[RunLog] = (),
        lowest_cost: float = math.inf,
        patience: Patience = NO_EVALUATIONS,
        missing_events: MissingEvents = NO_MISSING_EVENTS,
        profiler: StepProfiler | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Create a loop that starts at the step of `state`.

        Args:
            config: The run.
            state: Training state to start from.
            checkpoints: Receives the checkpoints.
            logs: Receive the events of the run, in this order.
            lowest_cost: Lowest cost of the evaluations of saved steps. See `BestMetric`.
            patience: The evaluations up to the start step.
            missing_events: Events of a start step that was saved, and stopped or killed before its events had ended,
                or of the training state of a new run. The loop knows the events of step 0.
            profiler: Records some of the steps.
            warn: Called with a message if parameters cannot be cast for a checkpoint.
        """
        self.config = config
        self.state = state
        self.checkpoints = checkpoints
        self.logs = logs
        self.stop_signals = StopSignals(config.setup.sharding)
        self.profiler = profiler
        self.warn = warn
        self.lowest_cost = lowest_cost
        self.patience = patience
        # Cost of the last evaluation by its step, so that no later step is saved with it.
        self.eval_costs: dict[int, float] = {}
        self.step = int(state["step"])
        self.missing_events = missing_events
        if not self.step:
            self.missing_events = MissingEvents(
                config.is_evaluation_due(0), config.num_samples_due(0)
            )
        self.start_step = self.last_saved_step = self.step
        self.pending_save: tuple[int, PendingSave] | None = None
        self.pending_metrics: deque[tuple[int, dict[str, Array]]] = deque()
        # The last finished step and its metrics, if it has no log line.
        self.unlogged_step: tuple[int, dict[str, Array]] | None = None
        self.metrics: dict[str, object] = {}
        self.stop_reason = ""
        self.end_reason = ""
        self.timer = StepTimer()
        self.event_times = EventTimes()
        self.step_s: float | None = None
        self.compiled_step: CompiledStep | None = None
        self.is_compiled = False
        (platform,) = {device.platform for device in state["step"].devices()}
        self.metrics_lag = CPU_METRICS_LAG if platform == "cpu" else METRICS_LAG
        self.eval_step = _jit_eval_step(config.setup)

    def compile(self) -> None:
        """Compile the programs of this start. An exception of a signal ends the wait for them.

        Nothing can be lost here, because the state is as it was loaded. Later compilations could outlast the time
        between a stop signal and a kill.
        """
        self._enter_phase("compile")
        # XLA compiles for minutes in one call, during which this thread could handle no signal.
        run_abandonable(self._compile)
        self.is_compiled = True

    def _compile(self) -> None:
        config = self.config
        steps = config.steps_after(self.step)
        if steps:
            self.compiled_step = self._compile_step()
            self._compile_save()
        missing = self.missing_events
        evaluates = missing.evaluation or config.has_evaluation(steps)
        may_end_early = evaluates and config.recipe.eval.patience > 0
        samples = missing.num_samples > 0 or config.has_samples(steps, may_end_early=may_end_early)
        # Compiled by their first batch or first tokens, which are computed again when they are due.
        if evaluates:
            assert config.evaluation is not None
            batches = eval_batches(
                config.evaluation.n_rows, config.eval_batch_size, limit=config.recipe.eval.limit
            )
            batch = load_batch(config.evaluation, next(batches), config.setup.sharding)
            sums = jax.block_until_ready(self.eval_step(self.state["params"], batch))
            check_metric_name(config.best_metric, sums)
        if samples:
            assert config.sampler is not None
            config.sampler.compile(self.state["params"])
        if evaluates or samples:
            self.stop_signals.agree()

    def _compile_save(self) -> None:
        """Compile the functions of a save by a call with the start state."""
        jax.block_until_ready(_all_finite(self.state))
        if self.config.saved_dtype is not None:
            # A value that is too large for the dtype is reported by the save.
            with suppress(PrepError):
                self._count_cast_values()

    def run(self, poll_stop_reason: Callable[[], str] = str) -> None:
        """Take the remaining steps, or stop early for a stop reason.

        Save the last step in both cases.

        Args:
            poll_stop_reason: Called before every step. A non-empty reason stops the run, in all processes.

        Raises:
            PrepError: Too many consecutive steps were skipped, because loss or gradients were not
                finite or no token had a weight, or a checkpoint cannot be saved.
        """
        if not self.is_compiled:
            self.compile()
        self.stop_signals.poll = poll_stop_reason
        try:
            reason = ""
            has_all_events = self._run_start_events()
            self.timer.resume()
            while not self._has_ended() and not (reason := self._find_stop_reason()):
                self._take_step()
                has_all_events = self._run_due_events()
            self._drain_metrics(0)
            if self.unlogged_step is not None:
                # For the result alone: the log of a stopped run is then that of a run without a stop.
                self._measure_step(*self.unlogged_step)
            if not has_all_events:
                # A signal has stopped the events of this step, which may be the last one.
                reason = self.stop_signals.reason()
            self.stop_reason = reason
        finally:
            if self.profiler is not None:
                self.profiler.stop()
        self._save()
        self._wait_for_save()
        if not self.stop_reason:
            self.end_reason = self.config.end_reason(self.step, self.patience)
        for log in self.logs:
            log.on_end(self.stop_reason)

    def _take_step(self) -> None:
        """Start the next step on the devices, and log the steps that have ended."""
        config = self.config
        assert self.compiled_step is not None
        self._enter_phase(f"step {self.step + 1}")
        if self.profiler is not None:
            # The profiler waits for all steps in flight: a trace begins and ends between steps. Only process 0 has
            # one, so the signals of these steps must not count here yet: the other processes have not read them.
            self.profiler.before_step(self.step + 1, lambda: self._drain_metrics(0))
        batch = load_batch(
            config.train,
            config.order.rows(self.step),
            config.setup.sharding,
            epochs=config.order.epochs(self.step),
        )
        self.state, metrics = self.compiled_step(
            self.state, batch | self.stop_signals.batch_entry()
        )
        self.step += 1
        # The dispatch is asynchronous: `metrics` are arrays that may not be computed yet. They
        # are read METRICS_LAG steps later.
        self.pending_metrics.append((self.step, metrics))
        self._drain_metrics(self.metrics_lag)
        self.stop_signals.agree_up_to(self.step - self.metrics_lag)
        self._report_finished_save()

    def _has_ended(self) -> bool:
        """Return whether this is the last step of the run."""
        return self.config.has_ended(self.step, self.patience)

    def _find_stop_reason(self) -> str:
        """Return why the run stops after this step, or an empty text."""
        if self.config.stop_after and self.step - self.start_step >= self.config.stop_after:
            return text("{}", Option("stop_after", self.config.stop_after))
        return self.stop_signals.reason()

    def _compile_step(self) -> CompiledStep:
        """Compile the training step for the state's shardings. The state is donated."""
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
        self.metrics["compile_seconds"] = round(compile_s, 3)
        for log in self.logs:
            log.on_compile(compile_s)
        return compiled

    def _run_start_events(self) -> bool:
        """Run the events before the first step, or the missing ones of a resumed step. Return whether all were run."""
        num_samples = self.missing_events.num_samples
        # A signal may stop them.
        try:
            if self.missing_events.evaluation:
                self._evaluate()
                if self.missing_events.is_score:
                    self._count_late_evaluation()
                if self.config.end_reason(self.step, self.patience):
                    # Only this evaluation has shown that the run ends here.
                    num_samples = self.config.num_samples_due(self.step, ends_early=True)
            self._log_samples(num_samples)
        except EventStoppedError:
            return False
        return True

    def _count_late_evaluation(self) -> None:
        """Count the evaluation of the saved start step as if its manifest had it."""
        cost = self.eval_costs[self.step]
        self.lowest_cost = min(self.lowest_cost, cost)
        self.checkpoints.note_evaluations(self.config.best_metric.name, {self.step: cost})

    def _run_due_events(self) -> bool:
        """Save, evaluate and sample, each if it is due after this step. Return whether all due events were run."""
        # A signal may stop them.
        config = self.config
        is_evaluation_due = config.is_evaluation_due(self.step)
        is_save_due = config.save_steps.is_due(self.step)
        try:
            # Saved first: a process may be killed during the evaluation. Only a manifest that records the evaluation
            # needs it. A signal during this evaluation saves the step without it.
            if is_save_due and not (is_evaluation_due and config.records_evaluations):
                self._save()
            if is_evaluation_due:
                self._evaluate()
            ends_early = bool(self.config.end_reason(self.step, self.patience))
            if ends_early and self.unlogged_step is not None:
                # Only its evaluation has shown that it is the last step.
                self._log_step(*self.unlogged_step)
            cost = self.eval_costs.get(self.step, math.inf)
            is_best = self.config.saves_best and cost < self.lowest_cost
            if is_save_due or ends_early or is_best:
                self._save()
            self._log_samples(config.num_samples_due(self.step, ends_early=ends_early))
        except EventStoppedError:
            return False
        return True

    def _report_finished_save(self) -> None:
        """Report the save in the background, or raise its error, if it has ended."""
        if self.pending_save and self.pending_save[1].is_done:
            self._wait_for_save()

    def _drain_metrics(self, lag: int) -> None:
        """Fetch and log the metrics of all steps but the last `lag`. Raise PrepError if too many were skipped."""
        config = self.config
        while len(self.pending_metrics) > lag:
            step, metrics = self.pending_metrics.popleft()
            # The conversion waits until the step is done on the device.
            consecutive_skips = int(metrics["in_row"])
            self.stop_signals.store(step, metrics)
            self.timer.count_step()
            remaining_s = self._remaining_s(step)
            for log in self.logs:
                log.on_step(step, remaining_s)
            self.unlogged_step = step, metrics
            if step % config.recipe.train.log_every == 0 or step in (1, config.steps):
                self._log_step(step, metrics)
            if consecutive_skips >= config.recipe.train.max_skipped:
                what = f"{consecutive_skips} steps in a row were skipped, up to step {step}"
                why = (
                    "their loss or gradients were not finite, or no token had a weight:"
                    " parameters and moments are unchanged since the step before them"
                )
                raise PrepError(what, why, self._recovery_hint())

    def _log_step(self, step: int, metrics: dict[str, Array]) -> None:
        """Write the metrics of a step to the log."""
        self.unlogged_step = None
        line = self._measure_step(step, metrics)
        remaining_s = self._remaining_s(step)
        for log in self.logs:
            log.on_log(line, remaining_s)

    def _measure_step(self, step: int, metrics: dict[str, Array]) -> StepLine:
        """Return the line of a step, with the speed since the last one, and keep its values for the result."""
        config = self.config
        numbers = {name: float(np.asarray(value)) for name, value in metrics.items()}
        line = step_line(step, numbers, tokens=step * config.tokens_per_step)
        tokens_per_row = config.tokens_per_step // config.order.batch_size
        source_tokens = tokens_by_source(
            config.order, config.train, step, tokens_per_row=tokens_per_row
        )
        step_s = self.timer.lap()
        self.step_s = step_s or self.step_s
        speed = speed_fields(
            step_s, tokens_per_step=config.tokens_per_step, peak_step_s=config.peak_step_s
        )
        memory_nbytes = peak_memory_nbytes(config.setup.sharding)
        if memory_nbytes is not None:
            speed["memory_bytes"] = memory_nbytes
        values = {**line, **source_tokens, **speed}
        self.metrics |= {key: values[key] for key in RESULT_METRICS if key in values}
        # The type of a line does not name the sources of a mixture.
        return cast(StepLine, values)

    def _remaining_s(self, step: int) -> float | None:
        """Estimate the seconds from a step to the end of the run. None before a step was timed."""
        if self.step_s is None:
            return None
        return self.config.remaining_s(step, step_s=self.step_s, seconds=self.event_times.seconds)

    def _evaluate(self) -> None:
        """Log the loss over the evaluation rows."""
        config = self.config
        assert config.evaluation is not None
        with self._event("evaluate"):
            result = evaluate(
                self.state["params"],
                config.evaluation,
                eval_step=self.eval_step,
                sharding=config.setup.sharding,
                batch_size=config.eval_batch_size,
                limit=config.recipe.eval.limit,
                on_progress=self._report_progress,
            )
            line = evaluation_line(self.step, result)
            cost = config.best_metric.cost(line)
            self.eval_costs = {self.step: cost}
            self.patience = self.patience.after(self.step, cost)
            self.metrics |= {key: line[key] for key in RESULT_EVAL_METRICS}
            for log in self.logs:
                log.on_evaluate(self.step, result)

    def _report_progress(self, done: int, total: int) -> None:
        """Report the progress of an event, and end it after a stop signal unless it is complete."""
        for log in self.logs:
            log.on_progress(done, total)
        if done < total:
            self._report_finished_save()
            if self.stop_signals.agree():
                raise EventStoppedError

    def _log_samples(self, num_samples: int) -> None:
        """Generate a text for each prompt of the recipe, and log the last `num_samples` texts."""
        sampler = self.config.sampler
        if sampler is None or not num_samples:
            return
        with self._event("sample"):
            samples = sampler.generate(
                self.state["params"],
                lambda done: self._report_progress(done, sampler.max_new_tokens),
            )
            self.metrics["samples"] = [sample_line(self.step, sample) for sample in samples]
            for log in self.logs:
                log.on_samples(self.step, samples, num_samples)

    def _enter_phase(self, phase: str) -> None:
        """Report the begin of a phase."""
        for log in self.logs:
            log.on_phase(phase)

    @contextmanager
    def _event(self, kind: str) -> Iterator[None]:
        """Enter the phase of an event, and measure its time apart from the steps."""
        self._enter_phase(f"{kind} {self.step}")
        self._drain_metrics(0)
        self.stop_signals.agree_up_to(self.step)
        self.timer.pause()
        try:
            with self.event_times.measure(kind):
                yield
        finally:
            self.timer.resume()

    def _save(self) -> None:
        """Begin to save this step unless it is saved already. Raise PrepError if the state is not finite."""
        if self.last_saved_step == self.step:
            return
        with self._event("save"):
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
            self.pending_save = self.step, self.checkpoints.start_save(self.step, leaves, fields)
            self.last_saved_step = self.step

    def _manifest_fields(self) -> Manifest:
        """Return the entries of the manifest. `param_cast` is absent if a value is too large for `saved_dtype`."""
        fields = self.config.manifest_fields
        metric = self.config.best_metric
        cost = self.eval_costs.get(self.step, math.inf)
        if self.config.saves_best and math.isfinite(cost):
            fields |= metric.manifest_fields(cost)
            self.lowest_cost = min(self.lowest_cost, cost)
        if self.config.recipe.eval.patience:
            fields |= Manifest(patience={"metric": metric.name, **self.patience.to_json()})
        if self.config.saved_dtype is not None:
            try:
                counts = self._count_cast_values()
            except PrepError as error:
                self.warn(
                    f"step {self.step}: {error.what} - {error.why}; they are saved without a cast"
                )
            else:
                fields |= Manifest(param_cast=counts)
        return fields

    def _count_cast_values(self) -> CastCounts:
        """Count the values that the dtype of checkpoints changes. Raise PrepError if one is too large for it."""
        config = self.config
        assert config.saved_dtype is not None
        return count_changed_values(
            self.state["params"], config.saved_dtype, config.setup.model.base_paths
        )

    def _wait_for_save(self) -> None:
        """Wait for the save in the background, and report it. Raise its PrepError if it failed."""
        if self.pending_save:
            step, save = self.pending_save
            # Cleared first: an error of the save is raised once, and not again when the run ends.
            self.pending_save = None
            write_s = save.wait()
            self.event_times.seconds["write"] = write_s
            for log in self.logs:
                log.on_save(step, write_s)

    def _recovery_hint(self) -> str:
        """Return how to continue after a run diverged."""
        steps = self.checkpoints.steps()
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
