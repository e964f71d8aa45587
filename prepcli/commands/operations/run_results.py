"""Results of the public functions that train, plan and use a model, or prepare its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.operations.html_table import HtmlTable
from prepcli.core.errors import PrepError

if TYPE_CHECKING:
    from prepcli.commands.pages.plan_page import CompiledStep

    # Every operation of training imports this module, and only plans and reports need these.
    from prepcli.commands.pages.report_page import RunSummary
    from trainer.data.sample_text import SampleCounts, TokenSample
    from trainer.planning.training_plan import KindEstimate, TrainingPlan


@dataclass(frozen=True, slots=True)
class Generation(HtmlTable):
    """Generated continuations.

    Attributes:
        texts: Continuation of each prompt. None for a prompt given as ids without a tokenizer.
        tokens: Token ids of each continuation.
        ended: Whether each continuation ends with an end token or a stop text.
        tokens_per_s: Tokens per second over all prompts, without compilation.
        prompts: Text of each prompt. None without a tokenizer.
        prompt_tokens: Token ids of each prompt.
        mesh: Mesh of the devices. None means one device.
        dtype: Dtype of the computation.
        compile_seconds: Duration of the compilation in seconds.
        seconds: Duration of the call in seconds.
        process: Index of this process in a job of several processes, or None.
    """

    texts: tuple[str | None, ...]
    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]
    tokens_per_s: float
    prompts: tuple[str | None, ...]
    prompt_tokens: tuple[tuple[int, ...], ...]
    mesh: str | None
    dtype: str
    compile_seconds: float
    seconds: float
    process: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationScores(HtmlTable):
    """Scores over the predicted tokens of data.

    Attributes:
        loss: Mean cross-entropy of a token, or None if it is not finite.
        perplexity: Exponential of the loss.
        accuracy: Fraction of the correctly predicted tokens.
        tokens: Number of predicted tokens.
        sequences: Number of sequences.
        metrics: Metrics of generated targets, of each source. None for a metric without a finite value.
    """

    loss: float | None
    perplexity: float | None
    accuracy: float | None
    tokens: int
    sequences: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluation(EvaluationScores):
    """Scores over all data, and of each source.

    Attributes:
        sources: Scores of each source, by name.
        checkpoint: The checkpoint, as errors name it.
        step: Step of a training run, or None.
        mesh: Mesh of the devices. None means one device.
        dtype: Dtype of the computation.
        reduction: "fast" or "exact".
        seq_length: Tokens per sequence.
        compute_seconds: Duration of the computation in seconds, compilation included.
        seconds: Duration of the call in seconds.
        process: Index of this process in a job of several processes, or None.
    """

    sources: Mapping[str, EvaluationScores]
    checkpoint: str
    step: int | None
    mesh: str | None
    dtype: str
    reduction: str
    seq_length: int
    compute_seconds: float
    seconds: float
    process: int | None = None


@dataclass(frozen=True, slots=True)
class NewTokens(HtmlTable):
    """The next tokens of a prompt.

    Attributes:
        prompt: Number of the prompt, from 0.
        tokens: The token ids. Empty for text that had to wait for the last token.
        text: The next piece of the text. The pieces of a prompt add up to its text: a character without all of its
            bytes waits for them. Without a tokenizer, token ids with commas.
    """

    prompt: int
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class TokenizedData(HtmlTable):
    """The tokens of the training data or of the evaluation data of a recipe, or of one of its sources.

    Attributes:
        name: "train" or "validation", after the name of the source in a mixture.
        path: The token store, or the file of another format. None if shards are missing, or if a dry run made them.
        shards: Number of shards.
        missing_shards: Number of shards that other processes have not made yet.
        tokens: Number of tokens, or None if shards are missing.
        documents: Number of documents, or None if shards are missing.
        counts: Counts of its samples, if `show` is given. In a job, one process has them: the one that completed the
            tokens, or process 0 if they were complete before.
        samples: The first samples, where `counts` are. Evaluation data has none.
    """

    name: str
    path: Path | None
    shards: int
    missing_shards: int
    tokens: int | None
    documents: int | None
    counts: SampleCounts | None = None
    samples: tuple[TokenSample, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Tokenization(HtmlTable):
    """The tokens of a recipe after the work of a process.

    Attributes:
        is_complete: Whether all tokens exist, and are kept. The last process to finish completes them.
        data: The training and evaluation data of each source.
        seconds: Duration of the call in seconds.
        process: Index of this process in a job of several processes, or None.
    """

    is_complete: bool
    data: tuple[TokenizedData, ...]
    seconds: float
    process: int | None = None


@dataclass(frozen=True, slots=True)
class TrainingRun(HtmlTable):
    """A finished or stopped training run.

    Attributes:
        path: Folder of the run.
        step: Last saved step.
        is_finished: Whether the run has ended, with the recipe's last step or by `eval.patience`. The details have the
            `end_reason` of an early end.
        seconds: Duration of the call in seconds.
        details: All fields of `prep train --json`.
        error: Why the run stopped before its last step. None for a finished run.
        process: Index of this process in a job of several processes, or None.
    """

    path: Path
    step: int
    is_finished: bool
    seconds: float
    details: Mapping[str, Any] = field(default_factory=dict, repr=False)
    error: PrepError | None = None
    process: int | None = None

    @property
    def metrics(self) -> dict[str, list[Any]]:
        """The log of the run as columns of equal length, e.g. for `pandas.DataFrame(run.metrics)`.

        A row is a step, with the values of its evaluation. Missing values are None. Empty without a local log.
        """
        from trainer.training.metrics import METRICS_FILE, MetricsFile

        rows: dict[object, dict[str, Any]] = {}
        for line in MetricsFile(self.path / METRICS_FILE):
            rows.setdefault(line["step"], {}).update(line)
        names = dict.fromkeys(name for row in rows.values() for name in row)
        return {name: [row.get(name) for row in rows.values()] for name in names}


@dataclass(frozen=True, slots=True)
class RunsReport(HtmlTable):
    """The page of training runs.

    Attributes:
        path: The HTML file.
        runs: For each run `run` (its folder or URL), `step`, `steps`, `tokens`, `loss`, `eval_loss`, `best_eval_loss`,
            `tokens_per_s`, `mfu` and `skipped`. None for missing numbers.
        changed_keys: Recipe keys whose values differ between the runs.
        names: Name of each run in the page: its folder's name, or its path or URL if two names are equal.
    """

    path: Path
    runs: tuple[RunSummary, ...]
    changed_keys: tuple[str, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan(HtmlTable):
    """The plan of a training step on one mesh.

    Attributes:
        training_plan: Mesh, tokens, memory, operations and communication of the step.
        kinds: Time and memory of the step on each kind of accelerator.
        is_too_large: Whether the step does not fit into the memory of the kind of `devices`.
        compiled: The plan of the compiler. None if the step was not compiled.
        settings: Sentences about schedule, tokens with loss, long records and evaluations of the recipe. Empty for a
            checkpoint.
    """

    training_plan: TrainingPlan
    kinds: tuple[KindEstimate, ...]
    is_too_large: bool
    compiled: CompiledStep | None
    settings: tuple[str, ...] = ()

    @property
    def mesh(self) -> str:
        """The mesh, e.g. `1,64,4`."""
        return str(self.training_plan.mesh)

    @property
    def peak_bytes(self) -> int:
        """Estimated peak memory of one device in bytes."""
        return self.training_plan.memory.peak
