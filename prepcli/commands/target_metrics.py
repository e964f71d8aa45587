"""Metrics of the targets that an encoder-decoder model generates from the sources of a dataset."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prepcli.commands.evaluate_run import EvaluateRequest, LoadedModel
from prepcli.console.ui import Ui
from prepcli.errors import usage_error
from prepcli.operations.model_files import eos_token_ids, tokenizer_path
from prepcli.restore.params import OpenedModel
from prepcli.sources.source import Source

if TYPE_CHECKING:
    from trainer.data.packing import Dataset


def check_target_metrics(names: Sequence[str], opened: OpenedModel) -> None:
    """Check that metrics can be computed.

    Raises:
        UsageError: A name is unknown, or the model has no encoder or its mesh splits tokens.
        PrepError: A package is not installed.
    """
    if not names:
        return
    from trainer.generation.text_metrics import check_metrics

    option = f"`--metric {names[0]}`"
    if opened.model.arch_config.encoder is None:
        why = f"targets are generated from sources, and {opened.model.family.name} has no encoder"
        raise usage_error(f"{option} is not supported for this model", why)
    if opened.sharding.sequence_parallel_size > 1:
        why = "generation appends one token at a time, so that there are no tokens to split"
        raise usage_error(
            f"{option} is not supported with `--mesh {opened.sharding.mesh}`",
            why,
            "a mesh without sp",
        )
    check_metrics(names)


def target_metrics(
    request: EvaluateRequest,
    dataset: Dataset,
    source: Source,
    opened: OpenedModel,
    *,
    loaded: LoadedModel,
    ui: Ui,
) -> dict[str, Any]:
    """Generate the targets of a dataset, and return their metrics.

    Infinite and NaN values are None.
    """
    if not request.metrics:
        return {}
    from trainer.data.tokenizer import load_tokenizer
    from trainer.generation.decode import GenerationConfig
    from trainer.generation.generator import Generator
    from trainer.generation.text_metrics import score_texts
    from trainer.nn.model_spec import ForwardConfig
    from trainer.training.datasets import decoder_start_token_id
    from trainer.training.target_generation import generate_targets

    model = opened.model
    config = source.config
    forward_config = ForwardConfig(
        loaded.forward_config.dtype, scan_layers=model.has_stacked_layers, sharding=opened.sharding
    )
    generation_config = GenerationConfig(
        dataset.seq_length, eos_token_ids(source, model.true_vocab_size)
    )
    targets = list(
        generate_targets(
            Generator(
                loaded.params,
                model,
                forward_config=forward_config,
                generation_config=generation_config,
            ),
            dataset,
            load_tokenizer(tokenizer_path(source, request.tokenizer, purpose="decode targets")),
            decoder_start_id=decoder_start_token_id(config, model.true_vocab_size),
            batch_size=min(loaded.batch_size, dataset.n_rows),
            limit=request.limit,
        )
    )
    ui.note(f"generated {len(targets):,} targets")
    if num_longer := sum(target.is_longer for target in targets):
        limit = f"{dataset.seq_length} tokens, where generated texts end (`--seq-length`)"
        ui.warn(f"{num_longer:,} of {len(targets):,} references are longer than {limit}")
    texts = [target.text for target in targets]
    references = [target.reference for target in targets]
    scores = score_texts(request.metrics, texts, references)
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}
