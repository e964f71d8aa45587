"""Results of the public functions."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from prepcli.core.errors import PrepError
from prepcli.core.formatting import format_bytes, format_duration, shorten
from prepcli.planning.plan import Plan

if TYPE_CHECKING:
    from prepcli.commands.pages.plan_page import CompiledStep

    # Every operation imports this module, and only plans and reports need these.
    from prepcli.commands.pages.report_page import RunSummary
    from trainer.data.sample_text import SampleCounts, TokenSample
    from trainer.planning.training_plan import KindEstimate, TrainingPlan

# Characters of a value in a table
MAX_VALUE_WIDTH = 200


class _HtmlTable:
    """Base of the results: notebooks show their fields as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        """Return the fields as an HTML table, with the title of the class."""
        rows: list[str] = []
        for item in dataclasses.fields(cast(Any, self)):
            value = getattr(self, item.name)
            if not item.repr or value is None or value == ():
                continue
            cell = html.escape(_value_text(item.name, value))
            rows.append(f"<tr><th>{html.escape(item.name)}</th><td>{cell}</td></tr>")
        title = html.escape(type(self).__name__)
        return f"<table><caption>{title}</caption>{''.join(rows)}</table>"


def _value_text(name: str, value: object) -> str:
    """Return the value of a field as text for a table."""
    if isinstance(value, int) and "bytes" in name.split("_"):
        return format_bytes(value)
    if isinstance(value, int | float) and name.endswith("seconds"):
        return format_duration(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        values: Mapping[str, object] = value
        texts = [f"{key} {_value_text(name, each)}" for key, each in values.items()]
        return shorten(", ".join(texts), MAX_VALUE_WIDTH)
    if isinstance(value, PrepError | str | Path | bool | int):
        return str(value)
    return shorten(repr(value), MAX_VALUE_WIDTH)


@dataclass(frozen=True, slots=True)
class Conversion(_HtmlTable):
    """A finished output, or with `dry_run=True` the plan of one.

    Attributes:
        path: Folder of the output, or the local folder of an upload.
        bytes_read: Bytes of tensors read from the source by this call.
        bytes_written: Bytes of tensors written by this call. 0 if the output already existed.
        seconds: Duration of the call in seconds.
        peak_bytes: Highest anonymous memory in bytes above the level at the start of the call.
        already_done: Whether an equal output existed. Then no file was written.
        plan_digest: Digest of the plan. Equal plans write equal bytes.
        plan: The files, tensors and checks of the conversion. `print(plan)` lists them.
        stage_seconds: Busy time of each stage in seconds, over all workers: `read`, `move` (order, dtype and digests)
            and `write`. The stages run at once, so the largest one limits the speed.
        next_command: The command that usually follows.
        warnings: Messages about problems that did not stop the conversion, such as an unreachable hub.
        details: All fields of the command's `--json` output.
    """

    path: Path
    bytes_read: int
    bytes_written: int
    seconds: float
    peak_bytes: int
    already_done: bool
    plan_digest: str
    plan: Plan = field(repr=False)
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    next_command: str = field(default="", repr=False)
    warnings: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class LockedModel(_HtmlTable):
    """A written lock file.

    Attributes:
        path: The lock file.
        source: Hub id or URL of the checkpoint, or the name of its folder.
        revision: Commit on the hub. None for any other checkpoint.
        files: Number of files.
        tensors: Number of tensors.
        nbytes: Size of the files in bytes.
        seconds: Duration of the call in seconds.
        already_done: Whether an equal file existed. Then no file was written.
    """

    path: Path
    source: str
    revision: str | None
    files: int
    tensors: int
    nbytes: int
    seconds: float
    already_done: bool


LinkStatus = Literal["proven", "holds", "not proven", "failed"]


@dataclass(frozen=True, slots=True)
class ChainLink(_HtmlTable):
    """An output and one of its sources.

    Attributes:
        output: The output.
        source: Its source. Empty if the output itself is damaged, or if no source is recorded.
        command: The command that made the output, such as "export".
        status: "proven": all parts have equal digests. "holds": the source is the recorded one, and `not_shown` is not
            compared. "not proven": the source is missing, or no digest shows that it is the recorded one. "failed".
        proof: The parts with equal digests.
        reason: Why a link failed or is not proven. Otherwise empty.
        changed: Parts that the command changed on purpose, as its manifest records.
        not_shown: Changes with new content, which no digest of the source shows.
        check: Command line that compares this content. Empty for training, which is not repeated.
    """

    output: str
    source: str
    command: str
    status: LinkStatus
    proof: str = ""
    reason: str = ""
    changed: str = ""
    not_shown: str = ""
    check: str = ""


@dataclass(frozen=True, slots=True)
class Chain(_HtmlTable):
    """The way of a model from its first checkpoint to an output. True in a condition if every link holds.

    Attributes:
        links: The links, from the output back to the first checkpoints.
        origins: The first checkpoints, with the commit of a model of the hub.
        allows_unproven: Whether unproven links are accepted.
        seconds: Duration of the call in seconds.
    """

    links: tuple[ChainLink, ...]
    origins: tuple[str, ...]
    allows_unproven: bool
    seconds: float

    @property
    def broken_link(self) -> ChainLink | None:
        """Return the first failed link, else the first one that is not proven, unless such links are accepted."""
        for link in self.links:
            if link.status == "failed":
                return link
        for link in self.links:
            if link.status == "not proven" and not self.allows_unproven:
                return link
        return None

    def __bool__(self) -> bool:
        """Return whether no link is broken."""
        return self.broken_link is None


@dataclass(frozen=True, slots=True)
class MapSuggestion(_HtmlTable):
    """The rows of a suggested map. True in a condition if every tensor of both checkpoints has one.

    Attributes:
        path: The written map.
        rows: The rows.
        targets: Number of tensors of the rows.
        ambiguous: Target without a row whose values occur several times -> some tensors with these values.
        unmatched: Tensors of the target without a row.
        unused: Tensors of the mapped checkpoint without a row.
        cast_to: Dtype of a cast that makes the values equal. Empty if they are equal without one.
    """

    path: Path
    rows: tuple[str, ...]
    targets: int
    ambiguous: Mapping[str, tuple[str, ...]]
    unmatched: tuple[str, ...]
    unused: tuple[str, ...]
    cast_to: str = ""

    def __bool__(self) -> bool:
        """Return whether the map is complete."""
        return not (self.unmatched or self.unused)


@dataclass(frozen=True, slots=True)
class RoundtripWay(_HtmlTable):
    """A model after conversions and the way back.

    Attributes:
        name: Name of the way, such as "easylm".
        commands: The conversions, from the model to a Hugging Face folder.
        status: "equal", "different", or "not available" for this model.
        tensors: Number of tensors at the end of the way.
        nbytes: Bytes of the compared tensors.
        digest: XXH3-128 of the names, dtypes, shapes and digests of all tensors at the end of the way.
        reason: The differences, or why the way is not available.
    """

    name: str
    commands: tuple[str, ...]
    status: Literal["equal", "different", "not available"]
    tensors: int = 0
    nbytes: int = 0
    digest: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Roundtrip(_HtmlTable):
    """A certificate of conversions and their ways back. True in a condition if no way changed a bit.

    Attributes:
        path: The written certificate.
        source: The model, as errors name it.
        revision: Commit of the model on the hub.
        ways: The ways.
        versions: Versions of prep, Python and NumPy.
        seconds: Duration of the call in seconds. It is not part of the certificate.
    """

    path: Path
    source: str
    revision: str | None
    ways: tuple[RoundtripWay, ...]
    versions: Mapping[str, str]
    seconds: float

    def __bool__(self) -> bool:
        """Return whether all available ways end in an equal model."""
        return all(way.status != "different" for way in self.ways)


@dataclass(frozen=True, slots=True)
class TensorSummary(_HtmlTable):
    """A tensor or leaf as a checkpoint stores it.

    Attributes:
        name: Name in the checkpoint's files.
        shape: Shape, padding included.
        dtype: Dtype, such as "bfloat16".
        nbytes: Size in bytes, uncompressed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inspection(_HtmlTable):
    """The tensors of a checkpoint.

    Attributes:
        name: The checkpoint, as errors name it.
        format: Storage format, such as `safetensors` or `orbax`.
        tensors: One entry per tensor or leaf, in file order.
        parameters: Number of elements of the parameters, without buffers, copies of tied tensors and optimizer state.
            None for an unknown family.
    """

    name: str
    format: str
    tensors: tuple[TensorSummary, ...]
    parameters: int | None


@dataclass(frozen=True, slots=True)
class Generation(_HtmlTable):
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
class EvaluationScores(_HtmlTable):
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
class NewTokens(_HtmlTable):
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
class TokenizedData(_HtmlTable):
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
class Tokenization(_HtmlTable):
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
class TrainingRun(_HtmlTable):
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
class RunsReport(_HtmlTable):
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
class StepPlan(_HtmlTable):
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
