"""The loop: steps, with what is logged, evaluated and saved between them, until the last or until told to stop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from trainer.data.order import SampleOrder
from trainer.data.packing import Dataset
from trainer.models.checkpoint_store import CheckpointStore
from trainer.models.errors import PrepError
from trainer.training import feed
from trainer.training.checkpoint import host_leaves
from trainer.training.metrics import MetricsWriter, StepTimer
from trainer.training.step import StepSetup, TrainState, eval_step, state_shapes, train_step

METRICS_LAG = 2  # steps that are under way before what one measured is looked at: devices never wait for the host


@dataclass(frozen=True, slots=True)
class Job:
    """What a run does, whole: two equal jobs that start from equal states end in equal ones.

    `save_every`, `eval_every`: 0 for only after the last step. `stop_after`: steps of this process, 0 for all.
    """

    setup: StepSetup
    steps: int
    order: SampleOrder
    train: Dataset
    evaluation: Dataset | None
    eval_limit: int
    log_every: int
    eval_every: int
    save_every: int
    optimizer_state: bool
    max_skipped: int
    manifest_fields: Mapping[str, Any]
    stop_after: int = 0

    @property
    def eval_batch_size(self) -> int:
        """Sequences of an evaluation's batch: as many as go through the model at a time in training."""
        return self.order.batch_size // self.setup.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Those of sources among them."""
        columns = self.train.columns
        return self.order.batch_size * sum(columns[name][0] for name in ("tokens", "source") if name in columns)


class Callbacks(Protocol):
    """Who is told how a run goes."""

    def on_compile(self, seconds: float) -> None:
        """The step is compiled."""
        ...

    def on_log(self, line: Mapping[str, Any], remaining_s: float | None) -> None:
        """A line of the log, and about how many seconds of steps are left."""
        ...

    def on_evaluate(self, line: Mapping[str, Any]) -> None:
        """The line of an evaluation."""
        ...

    def on_save(self, step: int, seconds: float) -> None:
        """A checkpoint is durable."""
        ...


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run stopped: after `step` steps, all of them done or not; `stopped` says why not."""

    step: int
    stop_reason: str = ""


class Loop:
    """A run on its way. Everything that it holds is either the state or can be made from the job and the step."""

    def __init__(
        self,
        job: Job,
        state: TrainState,
        store: CheckpointStore,
        metrics: MetricsWriter,
        callbacks: Callbacks,
        poll_stop_reason: Callable[[], str],
    ) -> None:
        self.job, self.state, self.store, self.metrics, self.callbacks, self.poll_stop_reason = (
            job,
            state,
            store,
            metrics,
            callbacks,
            poll_stop_reason,
        )
        self.step = int(state["step"])
        self.start_step = self.last_saved_step = self.step
        self.pending_metrics: deque[tuple[int, dict[str, Array]]] = deque()
        self.timer = StepTimer()
        self.evaluate_batch = jax.jit(partial(eval_step, setup=job.setup))

    def run(self) -> RunResult:
        """Take all steps that are left, or stop early with all that is done saved. PrepError where loss or gradients
        are not finite too often, or a checkpoint cannot be stored."""
        advance = self._compile_step()
        if self.step == 0 and self.job.eval_every:
            self._evaluate()
        self.timer.resume()
        reason = ""
        while self.step < self.job.steps and not (reason := self._stop_reason()):
            batch = feed.load_batch(self.job.setup, self.job.train, self.job.order, self.step)
            self.state, measured = advance(self.state, batch)
            self.step += 1
            self.pending_metrics.append((self.step, measured))
            self._drain_metrics(METRICS_LAG)
            self._evaluate_and_save_if_due()
        self._drain_metrics(0)
        if not reason and self._should_evaluate_at_end():
            self._evaluate()
        self._save()
        return RunResult(self.step, reason)

    def _stop_reason(self) -> str:
        if self.job.stop_after and self.step - self.start_step >= self.job.stop_after:
            return f"--stop-after {self.job.stop_after}"
        return self.poll_stop_reason()

    def _compile_step(self) -> Callable[..., tuple[TrainState, dict[str, Array]]]:
        setup = self.job.setup
        began = self.timer.clock()
        shapes = state_shapes(setup)
        where = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        step = jax.jit(partial(train_step, setup=setup), donate_argnums=0, out_shardings=(where, None))
        placed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self.state
        )
        found = step.lower(placed, feed.batch_shapes(setup, self.job.train, self.job.order.batch_size)).compile()
        self.callbacks.on_compile(self.timer.clock() - began)
        return found

    def _evaluate_and_save_if_due(self) -> None:
        job, last = self.job, self.step == self.job.steps
        if job.eval_every and self.step % job.eval_every == 0 and not last:
            self._evaluate()
        if job.save_every and self.step % job.save_every == 0 and not last:
            self._save()

    def _should_evaluate_at_end(self) -> bool:
        return self.step == self.job.steps and self.step > self.start_step

    def _drain_metrics(self, lag: int) -> None:
        """Take in what steps measured, but for the last `lag` of them."""
        while len(self.pending_metrics) > lag:
            step, measured = self.pending_metrics.popleft()
            job = self.job
            in_row = int(measured["in_row"])  # waits for the step
            self.timer.count_step()
            if step % job.log_every == 0 or step in (1, job.steps):
                self._log_step(step, measured)
            if in_row >= job.max_skipped:
                raise self._divergence_error(step, in_row)

    def _log_step(self, step: int, metrics: Mapping[str, Array]) -> None:
        found = {name: float(np.asarray(value)) for name, value in metrics.items()}
        weight = max(found["weight"], 1e-9)
        line = {
            "step": step,
            "loss": finite_or_none(found["loss"] / weight),
            "accuracy": finite_or_none(found["correct"] / weight),
            "grad_norm": finite_or_none(found["grad_norm"]),
            "lr": found["lr"],
            "tokens": step * self.job.tokens_per_step,
            "skipped": int(found["skipped"]),
        }
        took = self.timer.lap()
        if took:
            line |= {"seconds": round(took, 4), "tokens_per_s": round(self.job.tokens_per_step / took, 1)}
        self.metrics.write(line)
        self.callbacks.on_log(line, took * (self.job.steps - step) if took else None)

    def _evaluate(self) -> None:
        """Loss over the evaluation split; sums add up in float64, so batches do not matter."""
        job, data = self.job, self.job.evaluation
        if data is None:
            return
        self._drain_metrics(0)
        self.timer.pause()
        batches = feed.load_eval_batches(job.setup, data, job.eval_batch_size, job.eval_limit)
        sums = np.zeros(3)
        for batch in batches:
            found = self.evaluate_batch(self.state["params"], batch)
            sums += [float(found[name]) for name in ("loss", "weight", "correct")]
        loss = sums[0] / sums[1]
        line = {
            "step": self.step,
            "eval_loss": finite_or_none(loss),
            "eval_perplexity": finite_or_none(math.exp(min(loss, 700.0))),
            "eval_accuracy": finite_or_none(sums[2] / sums[1]),
            "eval_tokens": int(sums[1]),
        }
        self.metrics.write(line)
        self.callbacks.on_evaluate(line)
        self.timer.resume()

    def _save(self) -> None:
        """A checkpoint of this step, if there is none. PrepError, and nothing saved, if the state is not finite."""
        if self.last_saved_step == self.step:
            return
        self._drain_metrics(0)
        self.timer.pause()
        began = self.timer.clock()
        if not bool(_all_finite(self.state)):
            raise PrepError(
                f"the state after step {self.step} is not finite", "nothing was saved", self._recovery_hint()
            )
        leaves = host_leaves(self.state, self.job.optimizer_state)
        self.store.save(self.step, leaves, self.job.manifest_fields)
        self.last_saved_step = self.step
        self.callbacks.on_save(self.step, self.timer.clock() - began)
        self.timer.resume()

    def _divergence_error(self, step: int, consecutive_skips: int) -> PrepError:
        what = f"no finite loss in {consecutive_skips} steps, up to step {step}"
        return PrepError(
            what, "each was skipped: parameters and moments are those from before them", self._recovery_hint()
        )

    def _recovery_hint(self) -> str:
        steps = self.store.steps()
        start = f" from step {steps[-1]}" if steps else ""
        return f"another run{start}, with a lower `optimizer.lr` or more warm-up"


def finite_or_none(value: float) -> float | None:
    """The number, None where JSON has none for it."""
    return value if math.isfinite(value) else None


@jax.jit
def _all_finite(state: TrainState) -> Array:
    floats = [leaf for leaf in jax.tree.leaves(state) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)]
    return jax.numpy.stack([jax.numpy.isfinite(leaf).all() for leaf in floats]).all()
