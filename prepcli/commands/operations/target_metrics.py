"""Metrics of the targets that an encoder-decoder model generates from the sources of a dataset."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prepcli.commands.operations.compute_options import EvaluateOptions
from prepcli.commands.operations.evaluation_model import LoadedModel
from prepcli.commands.operations.model_files import source_generation_defaults, tokenizer_path
from prepcli.core.errors import Option, text, usage_error
from prepcli.core.formatting import count_text
from prepcli.core.observer import Observer
from prepcli.core.option_spec import as_tuple
from prepcli.sources.source import Source
from trainer.run.params import OpenedModel

if TYPE_CHECKING:
    from trainer.data.packing import Dataset


def check_target_metrics(options: EvaluateOptions, opened: OpenedModel) -> None:
    """Check that the metrics of the options can be computed.

    Raises:
        UsageError: A name is unknown, or the model has no encoder or its mesh splits tokens.
        PrepError: A package is not installed.
    """
    names = as_tuple(options["metrics"])
    if not names:
        return
    from trainer.generation.text_metrics import check_metrics

    option = Option("metrics", names[0])
    if opened.model.arch_config.encoder is None:
        why = f"targets are generated from sources, and {opened.model.family.name} has no encoder"
        raise usage_error(
            text("{} is not supported for this model", option),
            why,
            text("remove {}", Option("metrics")),
        )
    if opened.sharding.sequence_parallel_size > 1:
        why = "generation appends one token at a time, so that there are no tokens to split"
        raise usage_error(
            text("{} is not supported with {}", option, Option("mesh", opened.sharding.mesh)),
            why,
            "use a mesh without sp",
        )
    check_metrics(names)


def target_metrics(
    options: EvaluateOptions,
    dataset: Dataset,
    source: Source,
    opened: OpenedModel,
    *,
    loaded: LoadedModel,
    observer: Observer,
) -> dict[str, float | None]:
    """Generate the targets of a dataset, and return their metrics.

    Infinite and NaN values are None.
    """
    metrics = as_tuple(options["metrics"])
    if not metrics:
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
    defaults = source_generation_defaults(source, model.true_vocab_size, note=observer.note)
    generation_config = GenerationConfig(
        dataset.seq_length, defaults.eos_token_ids, rules=defaults.rules
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
            load_tokenizer(tokenizer_path(source, options["tokenizer"], purpose="decode targets")),
            decoder_start_id=decoder_start_token_id(config, model.true_vocab_size),
            batch_size=min(loaded.batch_size, dataset.n_rows),
            limit=options["limit"],
        )
    )
    observer.note(f"generated {count_text(len(targets), 'target')}")
    if num_longer := sum(target.is_longer for target in targets):
        observer.warn(
            text(
                "{:,} of {:,} references are longer than {} tokens, where generated texts end ({})",
                num_longer,
                len(targets),
                dataset.seq_length,
                Option("seq_length"),
            )
        )
    texts = [target.text for target in targets]
    references = [target.reference for target in targets]
    scores = score_texts(metrics, texts, references)
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}
