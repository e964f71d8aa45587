"""What `prep train` tells while it works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prepcli.console.formatting import bytes_text, left_text, seconds_text
from prepcli.console.ui import Ui

if TYPE_CHECKING:
    from trainer.recipe import Recipe
    from trainer.training.loop import Job


def plan_lines(job: Job, recipe: Recipe, step: int) -> Iterator[str]:
    """What the run is about to do."""
    from trainer.distributed.sharding import device_nbytes

    setup, size, length = job.setup, job.order.size, job.tokens_a_step // job.order.size
    mesh, leaves = setup.how.shards.mesh, setup.model.leaves
    if mesh is not None:
        axes = " x ".join(f"{name} {extent}" for name, extent in zip(mesh.names, mesh.sizes))
        held = bytes_text(3 * device_nbytes(leaves, setup.how.shards))
        yield f"mesh {axes} = {mesh.n_devices} devices; {held} of parameters and moments a device"
    parts = f" in {setup.accumulate} parts" if setup.accumulate > 1 else ""
    epochs = job.steps / job.order.steps_per_epoch
    yield (
        f"batch {size} x {length} = {job.tokens_a_step:,} tokens a step{parts};"
        f" {job.steps:,} steps = {epochs:.2f} epochs of {job.train.n:,} sequences"
    )
    if job.evaluation is not None:
        yield f"evaluation on {min(job.evaluation.n, job.eval_limit or job.evaluation.n):,} sequences"
    if step:
        yield f"resuming at step {step}"


class Watch:
    """Tells a run's lines to a Ui, and keeps the last values for the result."""

    def __init__(self, ui: Ui, steps: int, tokens_a_step: int) -> None:
        self.ui, self.steps, self.tokens_a_step = ui, steps, tokens_a_step
        self.fields: dict[str, Any] = {}

    def compiled(self, seconds: float) -> None:
        """How long it took."""
        self.ui.note(f"compiled in {seconds_text(seconds)}")
        self.fields["compile_seconds"] = round(seconds, 3)

    def logged(self, line: Mapping[str, Any], left_s: float | None) -> None:
        """`step   288/480  loss 2.6914  lr 1.60e-06  41.2k tok/s  0.58 s/step  2 min left`."""
        self.fields |= {key: line[key] for key in ("loss", "tokens", "skipped")}
        place = f"{line['step']:>{len(str(self.steps))}}/{self.steps}"
        text = f"step {place}  loss {_number(line['loss'])}  lr {line['lr']:.2e}"
        if left_s is not None:
            self.fields["tokens_per_s"] = line["tokens_per_s"]
            text += f"  {_rate(line['tokens_per_s'])}  {line['seconds']:.2f} s/step  {left_text(left_s)}"
        if line["skipped"]:
            text += f"  {line['skipped']} skipped"
        self.ui.note(text)

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """`evaluated at step 288: loss 2.6914  perplexity 14.75  tokens 245,760`."""
        self.fields |= {key: line[key] for key in ("eval_loss", "eval_perplexity", "eval_tokens")}
        loss, perplexity = _number(line["eval_loss"]), _number(line["eval_perplexity"], 2)
        self.ui.note(
            f"evaluated at step {line['step']}: loss {loss}  perplexity {perplexity}  tokens {line['eval_tokens']:,}"
        )

    def saved(self, step: int, seconds: float) -> None:
        """Which step, and how long it took."""
        self.ui.note(f"saved step {step} in {seconds_text(seconds)}")


def _number(value: float | None, digits: int = 4) -> str:
    return "not finite" if value is None else f"{value:.{digits}f}"


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s / 1000:.1f}k tok/s" if tokens_per_s >= 1000 else f"{tokens_per_s:.0f} tok/s"
