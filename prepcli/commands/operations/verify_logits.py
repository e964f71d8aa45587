"""Compare what two models compute: logits and hidden states on prompts of token ids."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from prepcli.commands.console.stdio import prepare_jax
from prepcli.commands.operations.checkpoint_options import CommonOptions, common_options
from prepcli.commands.operations.compute_options import MAX_ID_DIGITS, split_token_ids
from prepcli.commands.operations.computing import open_parameters
from prepcli.commands.operations.generate import read_prompts
from prepcli.commands.operations.inspection_options import LogitsOptions
from prepcli.commands.operations.model_outputs import (
    PromptOutput,
    prep_outputs,
    temporary_folder,
    transformers_folder,
    transformers_outputs,
)
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.verification_results import LogitComparison, PromptComparison
from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.formatting import format_bytes
from prepcli.core.observer import Observer, Progress, observer_of
from prepcli.core.option_spec import PathLike
from prepcli.stores.paths import AnyPath
from trainer.run.params import OpenedModel

# Rows of logits in float64 at the same time: with 256,000 tokens 64 rows take 131 MB.
BLOCK_ROWS = 64
NUM_TOP = 5
# Divisor of hidden states that are all zero.
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)

Float64Array = npt.NDArray[np.float64]
DEFAULT_TOLERANCE = 1e-3
# Rounding in float32 differs by less, and rounding to bfloat16 by more: 2^-9 is 0.002.
LAYER_TOLERANCE = 1e-3
OUT_OF_MEMORY_HINT = text(
    "the devices need 4 bytes of memory per parameter: {} takes more of them", Option("mesh")
)
RANDOM_LENGTHS = (16, 512)
RANDOM_SEED = 0
EMBEDDING = "embedding"
FINAL_NORM = "final norm"
# Prompts by their name in messages.
Prompts = Mapping[str, Sequence[int]]


class LogitDistance(TypedDict):
    """Distance between the logits a and b of two models. See `PromptComparison`."""

    kl_mean: float
    kl_max: float
    top1_agreement: float
    top5_overlap: float
    max_difference: float


def logit_distance(a: np.ndarray, b: np.ndarray) -> LogitDistance:
    """Return the distance between two arrays of logits [T, V]."""
    num_tokens = len(a)
    divergences = np.zeros(num_tokens)
    num_same = 0
    overlap = 0.0
    max_abs = 0.0
    for start in range(0, num_tokens, BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        a_rows = a[rows].astype(np.float64)
        b_rows = b[rows].astype(np.float64)
        if not (np.isfinite(a_rows).all() and np.isfinite(b_rows).all()):
            return {
                "kl_mean": np.inf,
                "kl_max": np.inf,
                "top1_agreement": 0.0,
                "top5_overlap": 0.0,
                "max_difference": np.inf,
            }
        divergences[rows] = _kl_divergence(a_rows, b_rows)
        num_same += int((a_rows.argmax(1) == b_rows.argmax(1)).sum())
        overlap += float(_top_overlap(a_rows, b_rows).sum())
        max_abs = max(max_abs, float(np.abs(a_rows - b_rows).max()))
    return {
        "kl_mean": float(divergences.mean()),
        "kl_max": float(divergences.max()),
        "top1_agreement": num_same / num_tokens,
        "top5_overlap": overlap / num_tokens,
        "max_difference": max_abs,
    }


def _kl_divergence(a: Float64Array, b: Float64Array) -> Float64Array:
    """Return KL(a || b) = sum p_a (log p_a - log p_b) of each row of logits, in nats."""
    log_a = _log_softmax(a)
    log_b = _log_softmax(b)
    divergence: Float64Array = (np.exp(log_a) * (log_a - log_b)).sum(1)
    # Rounding may make it slightly negative.
    return np.maximum(divergence, 0.0)


def _log_softmax(logits: Float64Array) -> Float64Array:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _top_overlap(a: Float64Array, b: Float64Array) -> Float64Array:
    """Return the fraction of the largest logits that two models have in common, for each row."""
    count = min(NUM_TOP, a.shape[1])
    top_a = np.argpartition(-a, count - 1, axis=1)[:, :count]
    top_b = np.argpartition(-b, count - 1, axis=1)[:, :count]
    is_common = (top_a[:, :, None] == top_b[:, None, :]).any(2)
    return is_common.mean(1)


def relative_differences(a: Sequence[np.ndarray], b: Iterable[np.ndarray]) -> tuple[float, ...]:
    """Return max |a - b| / max |a| for each pair of hidden states [T, D]. Infinite if a value is not finite."""
    differences: list[float] = []
    for a_states, b_states in zip(a, b, strict=True):
        differences.append(_relative_difference(a_states, b_states))
    return tuple(differences)


def _relative_difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return max |a - b| / max |a|, or infinity if a value is not finite."""
    difference = 0.0
    largest = 0.0
    for start in range(0, len(a), BLOCK_ROWS):
        a_rows = a[start : start + BLOCK_ROWS].astype(np.float64)
        distance = float(np.abs(a_rows - b[start : start + BLOCK_ROWS]).max())
        if not np.isfinite(distance):
            return np.inf
        difference = max(difference, distance)
        largest = max(largest, float(np.abs(a_rows).max()))
    if difference == 0:
        return 0.0
    return difference / max(largest, SMALLEST_NORMAL)


@public
def verify_logits(
    checkpoint: PathLike | None = None,
    against: PathLike | None = None,
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[LogitsOptions],
) -> LogitComparison:
    """Run two models on the same prompts, and compare their logits and the hidden states after each layer.

    Both compute in float32, one after the other on the first device or on the mesh. The models have the same
    vocabulary. Their formats, layouts and dtypes may differ. A model with an encoder reads a prompt, and its decoder
    predicts the prompt.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        against: A second checkpoint. Default with `library="transformers"`: `checkpoint` itself.
        progress: Receives the bytes read. Default: none. See `Progress`.
        **options: See `LogitsOptions`.

    Returns:
        The distances. A difference is not an exception: the result is False in a condition.

    Raises:
        UsageError: An argument is invalid, or a prompt does not fit a model.
        DamagedError: Files of a checkpoint are damaged.
        PrepError: A checkpoint cannot be read or computed, or the models have different vocabularies.
    """
    from trainer.distributed.sharding import catch_out_of_memory

    started_s = time.monotonic()
    observer = observer_of(progress)
    prepare_jax(observer)
    if against is None and options["library"] == "prep":
        raise usage_error(
            text("{} requires a second checkpoint", Option("logits", True)),
            "a model alone has no logits to compare with",
            text("name one, or use {}", Option("library", "transformers")),
        )
    tolerance = options["tolerance"]
    if tolerance is None:
        tolerance = DEFAULT_TOLERANCE
    library = options["library"]
    common = common_options(checkpoint, None, options)
    other = common
    if against is not None:
        # The revision, the step and the lock belong to the first checkpoint.
        other = replace(common, checkpoint=str(against), revision=None, step=None, lock=None)
    comparisons: list[PromptComparison] = []
    with (
        catch_out_of_memory(OUT_OF_MEMORY_HINT),
        _open_model(common, options["mesh"], observer) as first,
        _open_model(other, options["mesh"], observer) as second,
    ):
        _check_pair(first, second)
        reference = None
        if library != "prep":
            reference = transformers_folder(second.folder, second.name)
        prompts = _make_prompts(options["prompt_ids"], (first, second), library)
        ids = list(prompts.values())
        _check_disk(ids, first)
        # The parameters of the first model are deleted before the second ones are loaded.
        observer.note(f"computing {first.name}")
        first_outputs = list(prep_outputs(first.opened, ids, first.decoder_start_id))
        observer.note(f"computing {second.name} with {library}")
        start_id = second.decoder_start_id
        if reference is None:
            second_outputs = prep_outputs(second.opened, ids, start_id)
        else:
            vocab_size = second.opened.model.true_vocab_size
            second_outputs = transformers_outputs(reference, ids, vocab_size, start_id)
        for name, a, b in zip(prompts, first_outputs, second_outputs, strict=True):
            comparisons.append(_compare(name, a, b))
    return LogitComparison(
        checkpoint=first.name,
        against=second.name,
        library=library,
        tolerance=tolerance,
        prompts=tuple(comparisons),
        seconds=time.monotonic() - started_s,
    )


class _Model(NamedTuple):
    """An opened model, with its name and its folder.

    `decoder_start_id` is the first token of the decoder
    of a model with an encoder, else None.
    """

    name: str
    folder: AnyPath
    opened: OpenedModel
    decoder_start_id: int | None


@contextmanager
def _open_model(common: CommonOptions, mesh: str | None, observer: Observer) -> Iterator[_Model]:
    """Open a checkpoint for reading onto a mesh. Raise UsageError for a mesh with sp."""
    from trainer.training.datasets import decoder_start_token_id

    with open_parameters(common, mesh, verify=True, observer=observer) as (
        located,
        source,
        opened,
    ):
        if opened.sharding.sequence_parallel_size > 1:
            raise usage_error(
                text("{} splits tokens over sp", Option("mesh", mesh)),
                "logits are compared for prompts of any length",
                text("use a {} with the axes fsdp and mp, without sp", Option("mesh")),
            )
        decoder_start_id: int | None = None
        if opened.model.arch_config.encoder is not None:
            decoder_start_id = decoder_start_token_id(source.config, opened.model.true_vocab_size)
        yield _Model(source.display_name, located.files.path, opened, decoder_start_id)


def _check_pair(first: _Model, second: _Model) -> None:
    """Raise PrepError if two models have different numbers of tokens, or only one of them has an encoder."""
    if (first.decoder_start_id is None) != (second.decoder_start_id is None):
        models = [first, second] if second.decoder_start_id is None else [second, first]
        what = f"{models[0].name} has an encoder, and {models[1].name} has none"
        raise usage_error(what, "they have no layers in common", "compare models of one kind")
    sizes = [model.opened.model.true_vocab_size for model in (first, second)]
    if sizes[0] != sizes[1]:
        raise PrepError(
            "the models have different vocabularies",
            f"{first.name} has {sizes[0]:,} tokens, {second.name} {sizes[1]:,}",
            "compare models with one tokenizer",
        )


def _make_prompts(file: PathLike | None, models: Sequence[_Model], library: str) -> Prompts:
    """Return the prompts of a file, or random ones: a short and a long one, within the positions of the models."""
    if file is not None:
        prompts = _read_prompts(str(file))
        for model in models:
            _check_prompts(prompts, model)
        return prompts
    generator = np.random.default_rng(RANDOM_SEED)
    random_prompts: dict[str, Sequence[int]] = {}
    for length in RANDOM_LENGTHS:
        for model in models:
            limit = _max_length(model.opened)
            if library != "prep":
                # Some models of transformers have a table of rotations with one row per position.
                limit = model.opened.model.arch_config.max_positions
            length = min(length, limit or length)
        ids = generator.integers(0, models[0].opened.model.true_vocab_size, length)
        random_prompts[f"{length} random tokens"] = ids.tolist()
    return random_prompts


def _max_length(opened: OpenedModel) -> int | None:
    """Return the largest length of a prompt. None for a model without a limit."""
    arch_config = opened.model.arch_config
    if arch_config.has_limited_positions:
        return arch_config.max_positions
    return None


def _read_prompts(file: str) -> Prompts:
    """Return the prompts of a file of comma-separated token ids, one prompt per line."""
    prompts: dict[str, Sequence[int]] = {}
    for number, line in enumerate(read_prompts(file), start=1):
        ids = split_token_ids(line) if isinstance(line, str) else None
        if ids is None:
            why = f"prompt {number} is {line!r:.60}"
            hint = f"write comma-separated token ids of at most {MAX_ID_DIGITS} digits, one prompt per line"
            raise PrepError(f"{file} has an invalid prompt", why, hint)
        prompts[f"prompt {number}"] = ids
    if not prompts:
        hint = "write comma-separated token ids, one prompt per line"
        raise PrepError(f"{file} has no prompts", "all lines are empty", hint)
    return prompts


def _check_prompts(prompts: Prompts, model: _Model) -> None:
    """Raise UsageError for a token outside of the vocabulary, and for a prompt longer than the model's positions."""
    vocab_size = model.opened.model.true_vocab_size
    max_length = _max_length(model.opened)
    for prompt_name, ids in prompts.items():
        if max(ids) >= vocab_size:
            raise usage_error(
                f"token id {max(ids)} of {prompt_name} is out of range",
                f"the vocabulary of {model.name} has {vocab_size:,} tokens",
                "use the ids of its tokenizer",
            )
        if max_length is not None and len(ids) > max_length:
            raise usage_error(
                f"{prompt_name} has {len(ids):,} tokens",
                f"{model.name} has {max_length:,} positions",
                "use a shorter prompt",
            )


def _check_disk(prompts: Sequence[Sequence[int]], model: _Model) -> None:
    """Raise UsageError if the temporary files of the logits and hidden states would not fit.

    The outputs of the first model stay in files until the second one has computed the same prompts.
    """
    spec = model.opened.model
    arch_config = spec.arch_config
    width = spec.leaves["embed.tokens"].shape[-1]
    num_states = 1 + len(arch_config.sliding_windows)
    if arch_config.encoder is not None:
        num_states += 1 + len(arch_config.encoder.sliding_windows)
    num_values = spec.true_vocab_size + width * num_states
    num_tokens = sum(map(len, prompts)) + max(map(len, prompts))
    nbytes = 4 * num_tokens * num_values
    folder = temporary_folder()
    free_nbytes = shutil.disk_usage(folder).free
    if nbytes > free_nbytes:
        raise usage_error(
            f"the prompts have {sum(map(len, prompts)):,} tokens",
            f"their logits and hidden states take {format_bytes(nbytes)} of temporary files, "
            f"{folder} has {format_bytes(free_nbytes)}",
            "set the variable TMPDIR to a larger disk, or use fewer or shorter prompts",
        )


def _compare(prompt_name: str, first: PromptOutput, second: PromptOutput) -> PromptComparison:
    """Return the distances between two outputs on one prompt."""
    states = (*first.encoder_states, *first.states)
    other_states = (*second.encoder_states, *second.states)
    layers: tuple[float, ...] = ()
    # Models of other depth or width have no corresponding layers.
    if [state.shape for state in states] == [state.shape for state in other_states]:
        layers = relative_differences(states, other_states)
    return PromptComparison(
        name=prompt_name,
        tokens=len(first.logits),
        **logit_distance(first.logits, second.logits),
        layer_differences=layers,
        parts_at=_parting_place(layers, len(first.encoder_states)),
    )


def _parting_place(layers: Sequence[float], num_encoder_states: int) -> str | None:
    """Return the first place with a relative difference above `LAYER_TOLERANCE`. None if there is none."""
    encoder = _parting_layer(layers[:num_encoder_states])
    if encoder is not None:
        return f"encoder {encoder}"
    return _parting_layer(layers[num_encoder_states:])


def _parting_layer(layers: Sequence[float]) -> str | None:
    """Return the first place of a stack of layers with a larger difference. See `_parting_place`."""
    for number, difference in enumerate(layers):
        if not difference <= LAYER_TOLERANCE:
            if number == 0:
                return EMBEDDING
            if number == len(layers) - 1:
                return FINAL_NORM
            return f"layer {number - 1}"
    return None
