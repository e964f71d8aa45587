"""The texts that a run generates from the prompts of its recipe: their sampler and their file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.model_files import GENERATION_CONFIG_FILE, model_eos_token_ids
from prepcli.commands.train_files import store_at_end
from prepcli.commands.train_run import Run
from prepcli.errors import PrepError
from prepcli.inspection.run_record import SAMPLES_FILE

if TYPE_CHECKING:
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ModelSpec
    from trainer.recipe import Recipe
    from trainer.training.metrics import MetricsLog
    from trainer.training.samples import Sampler


def build_sampler(
    recipe: Recipe, model: ModelSpec, config: Mapping[str, Any], *, files: Path, sharding: ShardingContext
) -> Sampler | None:
    """Build the sampler of a run; None without prompts.

    Args:
        recipe: The recipe.
        model: The model.
        config: Its config.json.
        files: Folder of its tokenizer and of generation_config.json.
        sharding: Mesh and rules of the run.

    Raises:
        PrepError: There is no tokenizer, or the model cannot generate from the prompts.
    """
    from trainer.data.tokenizer import load_tokenizer
    from trainer.training.datasets import decoder_start_token_id
    from trainer.training.samples import SAMPLES_KEY, Sampler

    if recipe.log.samples is None:
        return None
    try:
        tokenizer = load_tokenizer(Path(recipe.data.tokenizer) if recipe.data.tokenizer else files)
    except PrepError as error:
        hint = f"`data.tokenizer`, or no `{SAMPLES_KEY}`"
        raise PrepError(f"`{SAMPLES_KEY}` needs a tokenizer", f"{error.what}: {error.why}", hint) from error
    generation_config = files / GENERATION_CONFIG_FILE
    vocab = model.true_vocab_size
    return Sampler(
        recipe.log.samples,
        tokenizer,
        model,
        sharding=sharding,
        dtype=recipe.model.dtype,
        max_new_tokens=recipe.log.sample_tokens,
        eos_token_ids=model_eos_token_ids(config, generation_config if generation_config.is_file() else None, vocab),
        decoder_start_id=None if model.arch_config.encoder is None else decoder_start_token_id(config, vocab),
    )


@contextmanager
def open_sample_log(run: Run) -> Iterator[MetricsLog]:
    """Open the file of the samples in process 0, to continue after the step of the run; other processes have none.

    The folder of the run exists.

    Raises:
        PrepError: The file cannot be written.
    """
    from trainer.training.metrics import NO_LOG, MetricsWriter

    if run.group.index:
        yield NO_LOG
        return
    path = run.folder / SAMPLES_FILE
    run.place.restore_file(SAMPLES_FILE)
    if run.job.sampler is None and not path.exists():
        yield NO_LOG
        return
    log = MetricsWriter(path, run.step)  # without a sampler too: later samples of an earlier start are removed
    run.place.store_file(SAMPLES_FILE)
    with store_at_end(run.place, SAMPLES_FILE):
        yield log
