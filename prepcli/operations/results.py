"""Results of the public functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from prepcli.errors import PrepError
from prepcli.planning.plan import Plan

if TYPE_CHECKING:
    # Every operation imports this module, and only plans and reports need these.
    from prepcli.pages.plan_rows import CompiledStep
    from prepcli.pages.report_page import RunSummary
    from trainer.planning.memory_changes import MemoryChange
    from trainer.planning.training_plan import KindEstimate, TrainingPlan


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished output, or with `dry_run=True` the plan of one.

    Attributes:
        path: Folder of the output, or the local folder of an upload.
        bytes_read: Bytes of tensors read from the source by this call.
        bytes_written: Bytes of tensors written by this call. 0 if the output already existed.
        seconds: Duration of the call in seconds.
        peak_bytes: Highest anonymous memory in bytes above the level at the start of the call.
        already_done: Whether an equal output existed, so that nothing was written.
        plan_digest: Digest of the plan. Equal plans write equal bytes.
        plan: The files, tensors and checks of the conversion. `print(plan)` lists them.
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
    next_command: str = field(default="", repr=False)
    warnings: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict, repr=False)


class TensorDifference(TypedDict):
    """A difference of one tensor, or of one range of its rows.

    `leaf` is empty for a tensor without a path in the parameter tree. Different values have the `index` of the first
    one, its values `a` and `b`, and the `count`.
    """

    leaf: str
    tensor: str
    what: str
    index: NotRequired[Sequence[int]]
    a: NotRequired[object]
    b: NotRequired[object]
    count: NotRequired[int]


class SettingDifference(TypedDict):
    """A key of two configs, or a fact of two tokenizers, with other values a and b. None is an absent one."""

    kind: str
    key: str
    a: object
    b: object


class LeftOutTensor(TypedDict):
    """A tensor that only one of two checkpoints has, and the reason why it is not compared."""

    tensor: str
    checkpoint: str
    why: str


class OldAndNew(TypedDict):
    """A value before and after a change. `new` is None for a removed file."""

    old: int | str | None
    new: int | str | None


class AcceptedChange(TypedDict):
    """A file that was changed on purpose, with its size and digest, and the changed keys of a config.json."""

    file: str
    keys: NotRequired[Sequence[str]]
    bytes: NotRequired[OldAndNew]
    xxh3: OldAndNew


@dataclass(frozen=True, slots=True)
class TensorDistance:
    """The distance between the values a and b of one tensor in two checkpoints.

    Attributes:
        leaf: Path in the parameter tree. Empty for a tensor outside of it.
        tensor: Name in the checkpoint's files.
        max_abs: Largest |a - b|. Infinite if only one of two values is NaN.
        mean_abs: Mean of |a - b|.
        cosine: Cosine of the angle between the tensors as vectors. NaN if a value is not finite.
    """

    leaf: str
    tensor: str
    max_abs: float
    mean_abs: float
    cosine: float


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of a comparison with recorded digests or with another checkpoint.

    Attributes:
        is_equal: Whether no difference was found.
        tensors: Number of tensors compared. None if differences were found.
        values: Number of values compared. None if differences were found, or if no value was read (`quick`).
        differences: For each different tensor: `leaf` (path in the parameter tree, empty if it has none),
            `tensor` (name in the checkpoint's files), `what`, and for values `index`, `a`, `b`, `count`.
        seconds: Duration of the call in seconds.
        ignored_padding_rows: Number of rows, over all tensors of both checkpoints, that pad the vocabulary and were not
            compared. 0 for a comparison with digests, which covers padding.
        checked: Parts that a quick check compared, such as "names" and "shapes". Empty if values were compared.
        accepted: For each file of `accept` its name (`file`), and its old and new size and digest.
        checkpoint: The checkpoint, as errors name it.
        against: The second checkpoint, as errors name it. None for a comparison with digests.
        total_tensors: Number of tensors of the checkpoint, equal or not.
        distances: With a tolerance, the distance of each tensor that both checkpoints have in one shape.
        settings: Keys of the configs and facts of the tokenizers in which two checkpoints differ. They are differences
            only with `strict`.
        left_out: Tensors that one of two checkpoints leaves out on purpose. They are differences only with `strict`.
        remedy: How to replace a damaged checkpoint, e.g. by the command that made it. Empty for two checkpoints.
    """

    is_equal: bool
    tensors: int | None
    values: int | None
    differences: Sequence[TensorDifference]
    seconds: float
    ignored_padding_rows: int = 0
    checked: tuple[str, ...] = ()
    accepted: tuple[AcceptedChange, ...] = ()
    checkpoint: str = ""
    against: str | None = None
    total_tensors: int = 0
    distances: tuple[TensorDistance, ...] = ()
    remedy: str = ""
    settings: tuple[SettingDifference, ...] = ()
    left_out: tuple[LeftOutTensor, ...] = ()

    def __bool__(self) -> bool:
        return self.is_equal


@dataclass(frozen=True, slots=True)
class PromptComparison:
    """Distance between the outputs a and b of two models on one prompt.

    Attributes:
        name: Name of the prompt.
        tokens: Number of tokens.
        kl_mean: Mean over the tokens of the divergence KL(a || b), in nats.
        kl_max: Largest divergence of a token.
        top1_agreement: Fraction of the tokens with the same largest logit.
        top5_overlap: Mean fraction of the five largest logits in common.
        max_difference: Largest |a - b| of a logit. Infinite if a logit is not finite.
        layer_differences: max |a - b| / max |a| of the hidden states before the first layer, after each layer, and
            after the final norm in place of the last layer. The layers of an encoder come first. Empty if the models
            differ in depth or width.
        parts_at: First of these places with a difference above 0.001: "embedding", "layer N" or "final norm", with
            "encoder" before them in an encoder. None if there is none.
    """

    name: str
    tokens: int
    kl_mean: float
    kl_max: float
    top1_agreement: float
    top5_overlap: float
    max_difference: float
    layer_differences: tuple[float, ...]
    parts_at: str | None


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """Result of a comparison of the logits of two models.

    Attributes:
        checkpoint: The checkpoint, as errors name it.
        against: The second checkpoint.
        library: Library that computed the second one.
        tolerance: Largest accepted difference between two logits.
        prompts: Distances on each prompt.
        seconds: Duration of the call in seconds.
    """

    checkpoint: str
    against: str
    library: str
    tolerance: float
    prompts: tuple[PromptComparison, ...]
    seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether no logit differs by more than the tolerance, and all are finite."""
        differences = [prompt.max_difference for prompt in self.prompts]
        return all(math.isfinite(d) and d <= self.tolerance for d in differences)

    def __bool__(self) -> bool:
        return self.is_equal


@dataclass(frozen=True, slots=True)
class LockedModel:
    """A written lock file.

    Attributes:
        path: The lock file.
        source: Hub id or URL of the checkpoint, or the name of its folder.
        revision: Commit on the hub. None for any other checkpoint.
        files: Number of files.
        tensors: Number of tensors.
        nbytes: Size of the files in bytes.
        seconds: Duration of the call in seconds.
        already_done: Whether an equal file existed, so that nothing was written.
        signature: Path of the signature, if a key was given.
    """

    path: Path
    source: str
    revision: str | None
    files: int
    tensors: int
    nbytes: int
    seconds: float
    already_done: bool
    signature: Path | None = None


@dataclass(frozen=True, slots=True)
class ChainLink:
    """An output and one of its sources.

    Attributes:
        output: The output.
        source: Its source. Empty if the output itself is damaged, or if no source is recorded.
        command: The command that made the output, such as "export".
        status: "proven", "not proven" or "failed".
        proof: The compared and equal parts.
        reason: Why a link failed or is not proven. Empty for a proven one.
    """

    output: str
    source: str
    command: str
    status: Literal["proven", "not proven", "failed"]
    proof: str
    reason: str


@dataclass(frozen=True, slots=True)
class Chain:
    """The way of a model from its first checkpoint to an output. True in a condition if every link is proven.

    Attributes:
        links: The links, from the output back to the first checkpoints. The check ends at the first failed one.
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
        """Return the first failed link, else the first unproven one unless such links are accepted."""
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
class MapSuggestion:
    """The rows of a suggested map. True in a condition if every tensor of both checkpoints has one.

    Attributes:
        path: The written map.
        rows: The rows.
        targets: Number of tensors that the rows make.
        ambiguous: Target with several tensors of its values -> some of their names, the chosen one first.
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
class RoundtripWay:
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
class Roundtrip:
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
class TensorSummary:
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
class Inspection:
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
class Generation:
    """Generated continuations.

    Attributes:
        texts: Continuation of each prompt. None for a prompt given as ids without a tokenizer.
        tokens: Token ids of each continuation.
        ended: Whether each continuation ends with an end token.
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
class EvaluationScores:
    """Scores over the predicted tokens of data.

    Attributes:
        loss: Mean cross-entropy of a token, or None if it is not finite.
        perplexity: Exponential of the loss.
        accuracy: Fraction of the correctly predicted tokens.
        tokens: Number of predicted tokens.
        sequences: Number of sequences.
        metrics: Metrics of generated targets, of each source. None for a metric that is not finite.
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
class NewTokens:
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
class TokenizedData:
    """The tokens of the training data or of the evaluation data of a recipe, or of one of its sources.

    Attributes:
        name: "train" or "validation", after the name of the source in a mixture.
        path: The token store, or the file of another format. None if shards are missing.
        shards: Number of shards.
        missing_shards: Number of shards that other processes have not made yet.
        tokens: Number of tokens, or None if shards are missing.
        documents: Number of documents, or None if shards are missing.
    """

    name: str
    path: Path | None
    shards: int
    missing_shards: int
    tokens: int | None
    documents: int | None


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The tokens of a recipe after the work of a process.

    Attributes:
        is_complete: Whether all tokens exist. The last process to finish completes them.
        data: The training and evaluation data of each source.
        seconds: Duration of the call in seconds.
        process: Index of this process in a job of several processes, or None.
    """

    is_complete: bool
    data: tuple[TokenizedData, ...]
    seconds: float
    process: int | None = None


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A finished or stopped training run.

    Attributes:
        path: Folder of the run.
        step: Last saved step.
        is_finished: Whether the recipe's last step was reached.
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


@dataclass(frozen=True, slots=True)
class RunsReport:
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
class StepPlan:
    """The plan of a training step on one mesh.

    Attributes:
        training_plan: Mesh, tokens, memory, operations and communication of the step.
        kinds: Time and memory of the step on each kind of accelerator.
        change: Changes of the recipe with which the step fits into the memory of the kind of `devices`. None if it
            fits, if no change makes it fit, or without a kind.
        is_too_large: Whether the step does not fit into the memory of the kind of `devices`.
        compiled: The plan of the compiler. None if the step was not compiled.
    """

    training_plan: TrainingPlan
    kinds: tuple[KindEstimate, ...]
    change: MemoryChange | None
    is_too_large: bool
    compiled: CompiledStep | None

    @property
    def mesh(self) -> str:
        """The mesh, e.g. `1,64,4`."""
        return str(self.training_plan.mesh)

    @property
    def peak_bytes(self) -> int:
        """Estimated peak memory of one device in bytes."""
        return self.training_plan.memory.peak
