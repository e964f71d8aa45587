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

from trainer.data.order import Order
from trainer.data.packing import Dataset
from trainer.models.checkpoint_store import Store
from trainer.models.errors import PrepError
from trainer.training import feed
from trainer.training.checkpoint import host_leaves
from trainer.training.metrics import Log, Speed
from trainer.training.step import Setup, State, eval_step, state_shapes, train_step

LAG = 2  # steps that are under way before what one measured is looked at: devices never wait for the host


@dataclass(frozen=True, slots=True)
class Job:
    """What a run does, whole: two equal jobs that start from equal states end in equal ones.

    `save_every`, `eval_every`: 0 for only after the last step. `stop_after`: steps of this process, 0 for all.
    """

    setup: Setup
    steps: int
    order: Order
    train: Dataset
    evaluation: Dataset | None
    eval_limit: int
    log_every: int
    eval_every: int
    save_every: int
    optimizer_state: bool
    max_skipped: int
    facts: Mapping[str, Any]
    stop_after: int = 0

    @property
    def eval_size(self) -> int:
        """Sequences of an evaluation's batch: as many as go through the model at a time in training."""
        return self.order.size // self.setup.accumulate

    @property
    def tokens_a_step(self) -> int:
        """Those of sources among them."""
        columns = self.train.columns
        return self.order.size * sum(columns[name][0] for name in ("tokens", "source") if name in columns)


class Watcher(Protocol):
    """Who is told how a run goes."""

    def compiled(self, seconds: float) -> None:
        """The step is compiled."""
        ...

    def logged(self, line: Mapping[str, Any], left_s: float | None) -> None:
        """A line of the log, and about how many seconds of steps are left."""
        ...

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """The line of an evaluation."""
        ...

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint is durable."""
        ...


@dataclass(frozen=True, slots=True)
class Ended:
    """Where a run stopped: after `step` steps, all of them done or not; `stopped` says why not."""

    step: int
    stopped: str = ""


class Loop:
    """A run on its way. Everything that it holds is either the state or can be made from the job and the step."""

    def __init__(
        self, job: Job, state: State, store: Store, log: Log, watcher: Watcher, stop: Callable[[], str]
    ) -> None:
        self.job, self.state, self.store, self.log, self.watcher, self.stop = job, state, store, log, watcher, stop
        self.step = int(state["step"])
        self.began_at = self.saved_at = self.step
        self.pending: deque[tuple[int, dict[str, Array]]] = deque()
        self.speed = Speed()
        self.evaluate_batch = jax.jit(partial(eval_step, setup=job.setup))

    def run(self) -> Ended:
        """Take all steps that are left, or stop early with all that is done saved. PrepError where loss or gradients
        are not finite too often, or a checkpoint cannot be stored."""
        advance = self._compiled()
        if self.step == 0 and self.job.eval_every:
            self._evaluate()
        self.speed.resume()
        reason = ""
        while self.step < self.job.steps and not (reason := self._told_to_stop()):
            batch = feed.batch(self.job.setup, self.job.train, self.job.order, self.step)
            self.state, measured = advance(self.state, batch)
            self.step += 1
            self.pending.append((self.step, measured))
            self._look(LAG)
            self._between_steps()
        self._look(0)
        if not reason and self._evaluates_at_the_end():
            self._evaluate()
        self._save()
        return Ended(self.step, reason)

    def _told_to_stop(self) -> str:
        if self.job.stop_after and self.step - self.began_at >= self.job.stop_after:
            return f"--stop-after {self.job.stop_after}"
        return self.stop()

    def _compiled(self) -> Callable[..., tuple[State, dict[str, Array]]]:
        setup = self.job.setup
        began = self.speed.clock()
        shapes = state_shapes(setup)
        where = jax.tree.map(lambda leaf: leaf.sharding, shapes)
        step = jax.jit(partial(train_step, setup=setup), donate_argnums=0, out_shardings=(where, None))
        placed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self.state
        )
        found = step.lower(placed, feed.shapes(setup, self.job.train, self.job.order.size)).compile()
        self.watcher.compiled(self.speed.clock() - began)
        return found

    def _between_steps(self) -> None:
        job, last = self.job, self.step == self.job.steps
        if job.eval_every and self.step % job.eval_every == 0 and not last:
            self._evaluate()
        if job.save_every and self.step % job.save_every == 0 and not last:
            self._save()

    def _evaluates_at_the_end(self) -> bool:
        return self.step == self.job.steps and self.step > self.began_at

    def _look(self, lag: int) -> None:
        """Take in what steps measured, but for the last `lag` of them."""
        while len(self.pending) > lag:
            step, measured = self.pending.popleft()
            job = self.job
            in_row = int(measured["in_row"])  # waits for the step
            self.speed.stepped()
            if step % job.log_every == 0 or step in (1, job.steps):
                self._log(step, measured)
            if in_row >= job.max_skipped:
                raise self._diverged(step, in_row)

    def _log(self, step: int, measured: Mapping[str, Array]) -> None:
        found = {name: float(np.asarray(value)) for name, value in measured.items()}
        weight = max(found["weight"], 1e-9)
        line = {
            "step": step,
            "loss": finite(found["loss"] / weight),
            "accuracy": finite(found["correct"] / weight),
            "grad_norm": finite(found["grad_norm"]),
            "lr": found["lr"],
            "tokens": step * self.job.tokens_a_step,
            "skipped": int(found["skipped"]),
        }
        took = self.speed.lap()
        if took:
            line |= {"seconds": round(took, 4), "tokens_per_s": round(self.job.tokens_a_step / took, 1)}
        self.log.add(line)
        self.watcher.logged(line, took * (self.job.steps - step) if took else None)

    def _evaluate(self) -> None:
        """Loss over the evaluation split; sums add up in float64, so batches do not matter."""
        job, data = self.job, self.job.evaluation
        if data is None:
            return
        self._look(0)
        self.speed.pause()
        batches = feed.evaluation(job.setup, data, job.eval_size, job.eval_limit)
        sums = np.zeros(3)
        for batch in batches:
            found = self.evaluate_batch(self.state["params"], batch)
            sums += [float(found[name]) for name in ("loss", "weight", "correct")]
        loss = sums[0] / sums[1]
        line = {
            "step": self.step,
            "eval_loss": finite(loss),
            "eval_perplexity": finite(math.exp(min(loss, 700.0))),
            "eval_accuracy": finite(sums[2] / sums[1]),
            "eval_tokens": int(sums[1]),
        }
        self.log.add(line)
        self.watcher.evaluated(line)
        self.speed.resume()

    def _save(self) -> None:
        """A checkpoint of this step, if there is none. PrepError, and nothing saved, if the state is not finite."""
        if self.saved_at == self.step:
            return
        self._look(0)
        self.speed.pause()
        began = self.speed.clock()
        if not bool(_all_finite(self.state)):
            raise PrepError(f"the state after step {self.step} is not finite", "nothing was saved", self._way_back())
        leaves = host_leaves(self.state, self.job.optimizer_state)
        self.store.save(self.step, leaves, self.job.facts)
        self.saved_at = self.step
        self.watcher.saved(self.step, self.speed.clock() - began)
        self.speed.resume()

    def _diverged(self, step: int, in_row: int) -> PrepError:
        what = f"no finite loss in {in_row} steps, up to step {step}"
        return PrepError(what, "each was skipped: parameters and moments are those from before them", self._way_back())

    def _way_back(self) -> str:
        steps = self.store.steps()
        start = f" from step {steps[-1]}" if steps else ""
        return f"another run{start}, with a lower `optimizer.lr` or more warm-up"


def finite(value: float) -> float | None:
    """The number, None where JSON has none for it."""
    return value if math.isfinite(value) else None


@jax.jit
def _all_finite(state: State) -> Array:
    floats = [leaf for leaf in jax.tree.leaves(state) if jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)]
    return jax.numpy.stack([jax.numpy.isfinite(leaf).all() for leaf in floats]).all()
