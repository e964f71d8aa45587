"""Evaluate a checkpoint on data. The function imports jax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from prepcli.api.session import run_silently
from prepcli.commands.evaluate import evaluate as run_evaluate
from prepcli.commands.evaluate_run import EvaluateRequest
from prepcli.commands.evaluation_recipe import EvalData
from prepcli.console.progress import Progress
from prepcli.operations.conversion import common_options
from prepcli.operations.operation import public
from prepcli.operations.option_spec import NonNegativeInt, PathLike, PositiveInt, as_tuple
from prepcli.operations.options import SourceOptions
from prepcli.operations.results import Evaluation, EvaluationScores

METRIC_VALUES = ("rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "exact_match")


@public
def evaluate(
    checkpoint: PathLike,
    data: PathLike | Sequence[PathLike],
    *,
    type: str | None = None,
    fields: str | None = None,
    seq_length: PositiveInt | None = None,
    overrides: str | Sequence[str] = (),
    tokenizer: PathLike | None = None,
    cache: PathLike | None = None,
    limit: NonNegativeInt = 0,
    batch_size: PositiveInt = 8,
    mesh: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    reduction: Literal["fast", "exact"] = "fast",
    metrics: str | Sequence[str] = (),
    verify: bool = True,
    ema: bool = False,
    progress: Progress | None = None,
    **options: Unpack[SourceOptions],
) -> Evaluation:
    """Compute loss, perplexity and accuracy of a model on data files.

    Args:
        checkpoint: Folder, alias, hub id, URL, training run, or a step of one.
        data: One or more files, folders, globs or URLs; each is a source with its own result. "NAME=PATH" names it.
        type: Type of the files, as `data.type` of a recipe; default: by their suffix.
        fields: Columns of the text, as `data.fields` of a recipe.
        seq_length: Tokens per sequence; default: the positions of the model, at most 1024.
        overrides: Recipe keys, such as "data.source_length=512". [data]: add_bos, add_eos, always_start_with_bos,
            bad_lines, cache, config, fields, fields_from_example, format, ids_dtype, max_document_bytes,
            max_examples, mean_noise_span_length, noise_density, objective, packing, prepend_text, revision, seq_length,
            source_length, source_prefix, split, subfield_separator, tokenizer, type; [model]: attention_kernel, dtype,
            head_chunk_size, k_chunk_size, q_chunk_size.
        tokenizer: A tokenizer, as a file or folder; default: the checkpoint's.
        cache: Folder that keeps the tokens for later calls; default: none.
        limit: Sequences of each source; 0: all.
        batch_size: Sequences per batch, rounded up to a multiple of the mesh's dp x fsdp.
        mesh: `dp,fsdp,mp` sizes or named axes; None: the first device.
        dtype: Dtype of the computation; default: bfloat16 if all weights are bfloat16, otherwise float32.
        reduction: "exact" computes each sequence alone: results have the same bits on any mesh and batch size.
        metrics: Metrics of the targets that an encoder-decoder model generates from the sources: "rouge", "bleu",
            "exact_match".
        verify: Compare the weights with the checkpoint's checksums or digests.
        ema: Take the moving average of a run's parameters.
        progress: Receives the bytes downloaded, checked or tokenized; default: none. See `Progress`.
        **options: See `SourceOptions`.

    Returns:
        The scores over all data and of each source.

    Raises:
        UsageError: An argument is invalid.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: The checkpoint, the data or the devices cannot be used.
    """
    request = EvaluateRequest(
        common_options(checkpoint, None, {**options, "ema": ema}),
        EvalData(
            (str(data),) if isinstance(data, str | Path) else tuple(map(str, data)),
            type=type,
            fields=fields,
            seq_length=seq_length,
            overrides=as_tuple(overrides),
        ),
        tokenizer=Path(tokenizer) if tokenizer is not None else None,
        cache=Path(cache) if cache is not None else None,
        batch_size=batch_size,
        limit=limit,
        mesh=mesh,
        dtype=dtype,
        reduction=reduction,
        metrics=as_tuple(metrics),
        verify=verify,
    )
    outcome = run_silently("eval", lambda ui: run_evaluate(request, ui), progress)
    report_fields: Any = outcome.report.fields
    return Evaluation(
        **_scores(report_fields),
        sources={
            name: EvaluationScores(**_scores(source))
            for name, source in report_fields["sources"].items()
        },
        seconds=outcome.seconds,
    )


def _scores(fields: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name in EvaluationScores.__dataclass_fields__ if name != "metrics"]
    metrics = {name: value for name, value in fields.items() if name in METRIC_VALUES}
    return {**{name: fields[name] for name in names}, "metrics": metrics}
