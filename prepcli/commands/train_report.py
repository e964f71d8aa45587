"""The description of a run that `prep train` prints, and the values of its events for the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prepcli.commands.train_display import RunDisplay
from prepcli.console.formatting import count_text, format_bytes
from prepcli.console.ui import Ui
from trainer.models.architecture import ArchConfig
from trainer.models.attention_kernels import KernelChoice
from trainer.models.chunk_sizes import WHOLE
from trainer.models.dropout_config import DROPOUT_SITES, DropoutConfig
from trainer.models.rope_config import Rope
from trainer.models.rule_text import rule_texts

if TYPE_CHECKING:
    from trainer.nn.kernels.options import AttentionOptions
    from trainer.nn.model_spec import ModelSpec
    from trainer.recipe import Recipe
    from trainer.training.loop import Job
    from trainer.training.samples import Sample


def run_summary_lines(job: Job, recipe: Recipe, step: int, *, kernel: KernelChoice) -> Iterator[str]:
    """Yield lines that describe the run: mesh, rules, model, attention kernel, batch, evaluation and first step.

    Args:
        job: The run.
        recipe: Its recipe.
        step: First step of the run.
        kernel: Its attention kernel.
    """
    from trainer.training.step import state_nbytes_per_device

    setup, size, length = job.setup, job.order.batch_size, job.tokens_per_step // job.order.batch_size
    mesh, leaves = setup.forward_config.sharding.mesh, setup.model.leaves
    if mesh is not None:
        axes = " x ".join(f"{name} {extent}" for name, extent in zip(mesh.names, mesh.sizes))
        state_size = format_bytes(state_nbytes_per_device(setup))
        yield f"mesh {axes} = {count_text(mesh.n_devices, 'device')}; {state_size} of parameters and moments per device"
        dims = {dim[0] for leaf in leaves.values() for dim in leaf.dims if dim}
        yield f"rules {', '.join(rule_texts(setup.forward_config.sharding.rules, dims))}"
    yield from filter(
        None, [adapters_text(setup.model), rope_text(setup.model.arch_config), dropout_text(setup.dropout)]
    )
    yield attention_text(kernel, setup.forward_config.attention_options)
    parts = f" in {setup.accumulate} parts" if setup.accumulate > 1 else ""
    epochs = job.steps / job.order.steps_per_epoch
    yield (
        f"batch {size} x {length} = {job.tokens_per_step:,} tokens per step{parts};"
        f" {job.steps:,} steps = {epochs:.2f} epochs of {job.train.n_rows:,} sequences"
    )
    if job.evaluation is not None:
        yield f"evaluation on {min(job.evaluation.n_rows, job.eval_limit or job.evaluation.n_rows):,} sequences"
    if step:
        yield f"resuming at step {step}"


def adapters_text(model: ModelSpec) -> str:
    """Return the adapters of a model and their size as text; empty without adapters."""
    if model.adapters is None:
        return ""
    lora = model.adapters.config
    trained, total = (sum(math.prod(leaf.shape) for leaf in x.values()) for x in (model.trained_leaves, model.leaves))
    share = f"{trained:,} of {total:,} parameters are trained"
    return f"adapters of rank {lora.rank} for {', '.join(lora.targets)}, scaled by {lora.scaling:g}; {share}"


def rounding_text(counts: Mapping[str, Any]) -> str:
    """Return the numbers of rounded and of changed parameters as text."""
    return (
        f"parameters {counts['from']} -> {counts['to']}: {counts['changed']:,} of {counts['values']:,} values changed"
    )


def attention_text(kernel: KernelChoice, options: AttentionOptions) -> str:
    """Return an attention kernel, the reason for it, and the sizes of its tiles as text."""
    sizes = {"queries": options.q_chunk_size, "keys": options.k_chunk_size}
    tile = " x ".join(f"{'all' if size == WHOLE else size} {name}" for name, size in sizes.items())
    return f"{kernel}, tiles of {tile}" if options.spec.has_tiles else str(kernel)


def rope_text(arch_config: ArchConfig) -> str:
    """Return the rotary embeddings of a model and its positions as text; empty without rotary embeddings."""
    ropes = " and ".join(map(_describe_rope, arch_config.ropes))
    return f"rotary embedding {ropes}; {arch_config.max_positions:,} positions" if ropes else ""


def dropout_text(dropout: DropoutConfig) -> str:
    """Return the rates of dropout and forgetful causal masking as text; empty without both."""
    rates = {site: getattr(dropout, site) for site in DROPOUT_SITES}
    texts = [f"{site} {rate:g}" for site, rate in rates.items() if rate]
    parts = [f"dropout {', '.join(texts)}"] if texts else []
    low, high = dropout.fcm_ratio
    return "; ".join([*parts, *([f"forgetful causal masking of {low:g} to {high:g} of the keys"] if high else [])])


def _describe_rope(rope: Rope) -> str:
    details = [f"theta {rope.theta:,.10g}"]
    if rope.rope_type not in ("default", "longrope"):
        details.append(f"factor {rope.factor:g}")
    if rope.rope_type not in ("default", "linear"):
        details.append(f"original positions {rope.original_max_positions:,}")
    return f"{rope.rope_type} ({', '.join(details)})"


class TrainReporter:
    """Callbacks of a run that show its events and keep the last values for the result."""

    def __init__(self, display: RunDisplay) -> None:
        self.display = display
        self.fields: dict[str, Any] = {}

    def on_compile(self, seconds: float) -> None:
        """Show and keep the compile time."""
        self.display.on_compile(seconds)
        self.fields["compile_seconds"] = round(seconds, 3)

    def on_step(self, step: int) -> None:
        """Show a finished step."""
        self.display.on_step(step)

    def on_log(self, line: Mapping[str, Any], remaining_s: float | None) -> None:
        """Show a log line, and keep its values."""
        kept = ("loss", "tokens", "skipped", "tokens_per_s", "mfu", "memory_bytes")
        self.fields |= {key: line[key] for key in kept if key in line}
        self.display.on_log(line, remaining_s)

    def on_evaluate(self, line: Mapping[str, Any]) -> None:
        """Show an evaluation, and keep its values."""
        self.fields |= {key: line[key] for key in ("eval_loss", "eval_perplexity", "eval_tokens")}
        self.display.on_evaluate(line)

    def on_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show the texts generated after a step, and keep them."""
        from trainer.training.log_lines import sample_lines

        self.fields["samples"] = list(sample_lines(step, samples))
        self.display.on_samples(step, samples)

    def on_save(self, step: int, seconds: float) -> None:
        """Show a saved step."""
        self.display.on_save(step, seconds)


def _format_tokens(count: int) -> str:
    """Format as `3.1 M tokens` or `310 M tokens`."""
    return f"{count / 1e6:,.{0 if count >= 10_000_000 else 1}f} M tokens"


def tokenize_progress(ui: Ui) -> Callable[[int, int, int], None]:
    """Return a callback that shows the progress of tokenizing, one bar per dataset.

    It takes the bytes done, the total bytes, and the tokens made. The first call for a dataset has the bytes and tokens
    of an interrupted run.
    """
    progress = ui.progress()
    done_nbytes, shown_tokens = -1, ""

    def report_progress(nbytes: int, total: int, n_tokens: int) -> None:
        nonlocal done_nbytes, shown_tokens
        if done_nbytes < 0:
            progress.begin("tokenize", total, nbytes)
            done_nbytes = nbytes
        tokens = _format_tokens(n_tokens)
        if n_tokens and tokens != shown_tokens:
            progress.note(tokens)
            shown_tokens = tokens
        progress.advance(nbytes - done_nbytes)
        done_nbytes = nbytes
        if nbytes >= total:
            progress.end()
            done_nbytes = -1

    return report_progress
