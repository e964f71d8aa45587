"""Load parameters, train and generate. These functions import jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from prepcli.api.parameters import open_parameters
from prepcli.api.session import run_silently
from prepcli.commands import generate as generate_command
from prepcli.commands import train as train_command
from prepcli.console.progress import Progress
from prepcli.operations.conversion import common_options
from prepcli.operations.operation import public
from prepcli.operations.option_spec import NonNegativeInt, PathLike, PositiveInt, as_tuple
from prepcli.operations.options import SourceOptions
from prepcli.operations.results import Generation, NewTokens, TrainingRun
from prepcli.training_runs.run import TrainRequest
from trainer.models.param_tree import Tree
from trainer.training.token_functions import TokenFunctions, TokenLoss, TokenMetrics

ComputeDtype = Literal["float32", "bfloat16"]
LoadDtype = Literal["float32", "bfloat16", "keep"]


@public
def load_params(
    checkpoint: PathLike,
    mesh: str | None = None,
    *,
    dtype: LoadDtype = "float32",
    verify: bool = True,
    ema: bool = False,
    progress: Progress | None = None,
    **options: Unpack[SourceOptions],
) -> Tree:
    """Read the parameters of a checkpoint onto a device mesh.

    Each device gets only the byte ranges of its own shards. The source may have any format that prep reads.
    Sources that are not in prep's default layout are converted while they are read: layers stacked on the first axis,
    the vocabulary padded to the size that the mesh divides. No file is written.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        mesh: `dp,fsdp,mp` sizes, or named axes such as `fsdp:64,mp:4`. None: the first device.
        dtype: Dtype of the arrays, "float32" or "bfloat16"; "keep": the stored dtype of each parameter.
        verify: Compare every byte with the checkpoint's checksums or digests.
        ema: Take the moving average of a run's parameters.
        progress: Receives the bytes downloaded or checked; default: none. See `Progress`.
        **options: See `SourceOptions`.

    Returns:
        Nested dict of arrays, sharded by the family's partition rules. Weights are `[out, in]`; the query weight of the
        stacked layers is `[layers, heads, head_dim, embed]`.

    Raises:
        UsageError: An argument is invalid, or the mesh does not fit the devices or does not divide a parameter.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: The checkpoint cannot be read, or lacks a parameter.
    """
    with open_parameters(
        checkpoint, mesh, {**options, "ema": ema}, verify=verify, progress=progress
    ) as opened:
        if dtype == "keep":
            return opened.load(opened.stored_dtype)
        return opened.load(lambda path: dtype)


@public
def generate(
    checkpoint: PathLike,
    prompts: str | Sequence[str] = (),
    *,
    tokens: Sequence[Sequence[int]] = (),
    tokenizer: PathLike | None = None,
    max_new_tokens: PositiveInt | None = None,
    temperature: float = 0.0,
    top_k: NonNegativeInt = 0,
    top_p: float = 1.0,
    seed: NonNegativeInt = 0,
    mesh: str | None = None,
    dtype: ComputeDtype | None = None,
    batch_size: PositiveInt = 16,
    verify: bool = True,
    ema: bool = False,
    on_tokens: Callable[[NewTokens], None] | None = None,
    progress: Progress | None = None,
    **options: Unpack[SourceOptions],
) -> Generation:
    """Continue prompts with a model.

    Args:
        checkpoint: Folder, alias, hub id, training run, or a step of one.
        prompts: One prompt, or several, as text.
        tokens: Prompts as token ids. They follow the text prompts in the result.
        tokenizer: A tokenizer.json, a SentencePiece model, or a folder with a tokenizer; default: the checkpoint's.
        max_new_tokens: Limit per prompt; default: 64, or fewer if the positions end.
        temperature: 0 selects the most likely token.
        top_k: Sample from this many of the most likely tokens; 0: all.
        top_p: Sample from the smallest set of tokens with this probability.
        seed: Seed of the random draws.
        mesh: `dp,fsdp,mp` sizes or named axes; None: the first device.
        dtype: Dtype of the computation; default: bfloat16 if all weights are bfloat16, otherwise float32.
        batch_size: Prompts per batch.
        verify: Compare the weights with the checkpoint's checksums or digests.
        ema: Take the moving average of a run's parameters.
        on_tokens: Called with the next tokens of a prompt and their text as they are decoded. See `NewTokens`.
        progress: Receives the bytes downloaded or checked; default: none. See `Progress`.
        **options: See `SourceOptions`.

    Returns:
        The continuations, without the prompts, in the order of the prompts.

    Raises:
        UsageError: An argument is invalid, a prompt is too long, or a token id is out of range.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: The checkpoint, its tokenizer or the devices cannot be used.
    """
    request = generate_command.GenerateRequest(
        common_options(checkpoint, None, {**options, "ema": ema}),
        prompt_texts=as_tuple(prompts),
        prompt_ids=tuple(",".join(map(str, ids)) for ids in tokens),
        tokenizer=Path(tokenizer) if tokenizer is not None else None,
        max_new_tokens=max_new_tokens,
        sampling=(temperature, top_k, top_p, seed),
        mesh=mesh,
        dtype=dtype,
        batch_size=batch_size,
        verify=verify,
        on_tokens=on_tokens
        and (lambda prompt, ids, text: on_tokens(NewTokens(prompt, tuple(ids), text))),
    )
    outcome = run_silently("generate", lambda ui: generate_command.generate(request, ui), progress)
    fields: Any = outcome.report.fields
    return Generation(
        texts=tuple(fields["texts"] or [None] * len(fields["tokens"])),
        tokens=tuple(map(tuple, fields["tokens"])),
        ended=tuple(fields["ended"]),
        tokens_per_s=fields["tokens_per_s"],
        seconds=outcome.seconds,
    )


@public
def train(
    recipe: PathLike,
    out: PathLike | None = None,
    *,
    overrides: str | Sequence[str] = (),
    restart: bool = False,
    stop_after: NonNegativeInt = 0,
    offline: bool = False,
    stream: bool = False,
    verify: bool = True,
    force: bool = False,
    loss_fn: TokenLoss | None = None,
    metric_fn: TokenMetrics | None = None,
    progress: Progress | None = None,
) -> TrainingRun:
    """Train from a recipe, or resume a run that was stopped.

    `loss_fn(logits, targets)` replaces the cross entropy in training. It is called for chunks of tokens with float32
    logits `[rows, tokens, vocabulary]` without padding and int32 targets `[rows, tokens]`, and returns a loss for each
    token, `[rows, tokens]`. It is traced by `jax.jit`. prep multiplies the losses by the weights of the tokens, and
    divides the sum of the batch by the sum of the weights. The function must compute each token by itself: the result
    then depends neither on the mesh nor on micro-batches nor on chunks, beyond rounding, and the logits of all tokens
    never exist. `metric_fn(logits, targets)` is called in the same way in evaluation, and returns a dict of values
    `[rows, tokens]`; the weighted mean of `NAME` is logged as `eval_NAME`. Evaluation always reports the
    cross entropy.

    Args:
        recipe: A TOML file, or the name of one of `prep recipes`; `prep docs recipes` lists its keys.
        out: Folder of the run; default: `runs/NAME`.
        overrides: One or more changes of recipe keys, such as "train.steps=10".
        restart: Delete the steps of an earlier run.
        stop_after: Stop after this many steps; 0: at the end of the recipe.
        offline: Use only the hub's cache.
        stream: Read a hub model without a local copy.
        verify: Compare the checkpoint with its checksums while it is read.
        force: Start even if a step is estimated not to fit into memory.
        loss_fn: Loss of each token; default: the cross entropy. A run resumes with a function of the same name. Not
            supported with `train.reduction = "exact"` and the keys of `[loss]`.
        metric_fn: Values of each token to evaluate. Not supported with `train.reduction = "exact"`.
        progress: Receives the bytes downloaded, checked or tokenized; default: none. See `Progress`.

    Returns:
        The run. A run stopped by `stop_after` or a signal is not an exception: its `is_finished` is False.

    Raises:
        UsageError: An argument or a key of the recipe is invalid.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: Training failed.
    """
    request = TrainRequest(
        Path(recipe),
        as_tuple(overrides),
        Path(out) if out is not None else None,
        restart=restart,
        stop_after=stop_after,
        offline=offline,
        stream=stream,
        verify=verify,
        force=force,
        token_functions=TokenFunctions(loss_fn, metric_fn),
    )
    outcome = run_silently("train", lambda ui: train_command.train(request, ui), progress)
    fields: Any = outcome.report.fields
    return TrainingRun(
        path=Path(fields["run"]),
        step=fields["step"],
        is_finished=outcome.report.error is None,
        seconds=outcome.seconds,
        details=fields,
    )
