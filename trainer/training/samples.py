"""Texts that a model generates: samples of a run from its prompts, and the targets of a dataset of pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig, JsonObject
from prepcli.models.param_tree import Tree
from prepcli.sources.generation_config import NO_RULES, TokenRules, folder_generation_defaults
from trainer.data.chat import MESSAGES_KEY, TOOLS_KEY, Prompt, PromptEncoder, chat_prompt
from trainer.data.chat_template import ChatTemplate, recipe_template
from trainer.data.incremental_decoder import StopFinder
from trainer.data.order import eval_batches
from trainer.data.packing import Dataset
from trainer.data.seq2seq import Seq2SeqDataset
from trainer.data.tokenizer import TextTokenizer, load_tokenizer
from trainer.distributed.sharding import ShardingContext
from trainer.generation.decode import GenerationConfig
from trainer.generation.generator import Generator, check_prompts, max_fitting_new_tokens
from trainer.nn.model_spec import ForwardConfig, ModelSpec
from trainer.recipe import Recipe
from trainer.training.datasets import decoder_start_token_id
from trainer.training.metrics import Sample

SAMPLES_KEY = "log.samples"


class Sampler:
    """The prompts of a run, and the compiled functions that generate a text for each of them."""

    def __init__(
        self,
        prompts: Sequence[str | JsonObject],
        tokenizer: TextTokenizer,
        model: ModelSpec,
        *,
        sharding: ShardingContext,
        dtype: str,
        max_new_tokens: int,
        eos_token_ids: tuple[int, ...],
        decoder_start_id: int | None,
        rules: TokenRules = NO_RULES,
        stop_texts: tuple[str, ...] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Encode the prompts, and check that the model can generate from them.

        Args:
            prompts: The prompts, each a text, or a conversation with `messages` and optionally `tools`. An
                encoder-decoder model reads them with its encoder.
            tokenizer: Tokenizer of the model.
            model: The model.
            sharding: Mesh and rules of the run.
            dtype: Dtype of the computation.
            max_new_tokens: Maximum number of new tokens. Fewer if the longest prompt leaves fewer
                positions.
            eos_token_ids: Tokens that end a text.
            decoder_start_id: First token of the decoder. None if the model has no encoder.
            rules: Rules of the model that change which token is chosen.
            stop_texts: Texts that end a generated text.
            chat_template: Template of the conversations. None takes that of the tokenizer.

        Raises:
            UsageError: The mesh splits tokens, a prompt has no tokens or too many, or a token is
                unknown to the model.
            PrepError: The tokenizer fails.
        """
        if sharding.sequence_parallel_size > 1:
            why = "generation appends one token at a time, so that there are no tokens to split"
            raise usage_error(
                f"`{SAMPLES_KEY}` is not supported with sp in `mesh`",
                why,
                f"remove `{SAMPLES_KEY}`",
            )
        self._tokenizer = tokenizer
        self._stop_texts = stop_texts
        encoder = PromptEncoder(tokenizer, template=chat_template)
        with _recipe_keys_in_errors():
            encoded = [encoder.encode(_sample_prompt(prompt)) for prompt in prompts]
        self.prompts = tuple(prompt.text for prompt in encoded)
        ids = [prompt.ids for prompt in encoded]
        self._has_encoder = decoder_start_id is not None
        # With an encoder the prompts are sources, and each target begins with the start token.
        self._ids = ids
        self._sources: list[list[int]] | None = None
        if decoder_start_id is not None:
            self._ids = [[decoder_start_id] for _ in ids]
            self._sources = ids
        num_fitting = max_fitting_new_tokens(self._ids, model)
        if num_fitting is not None and num_fitting < 1:
            what = f"a prompt of `{SAMPLES_KEY}` has {max(map(len, ids)):,} tokens"
            raise usage_error(
                what,
                f"the model has {model.arch_config.max_positions:,} positions",
                "use a shorter prompt",
            )
        generation_config = GenerationConfig(
            min(max_new_tokens, num_fitting or max_new_tokens), eos_token_ids, rules=rules
        )
        with _recipe_keys_in_errors():
            check_prompts(
                self._ids, self._sources, model=model, generation_config=generation_config
            )
        forward_config = ForwardConfig(
            dtype, scan_layers=model.has_stacked_layers, sharding=sharding
        )
        self._generator = Generator(
            None, model, forward_config=forward_config, generation_config=generation_config
        )

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of new tokens of a text."""
        return self._generator.generation_config.max_new_tokens

    def compile(self, params: Tree) -> None:
        """Compile the functions of `generate` by generating the first tokens.

        All processes of a job call it together.
        """

        def stop_when_compiled(num_tokens: int) -> None:
            # The first token needs the prefill, and the next ones the decoding loop.
            if num_tokens > 1:
                raise _CompiledError

        with suppress(_CompiledError):
            self.generate(params, stop_when_compiled)

    def generate(
        self, params: Tree, on_progress: Callable[[int], None] = lambda tokens: None
    ) -> list[Sample]:
        """Generate a text for each prompt, with the most likely token at each position.

        In a job of several processes, all of them call it together.

        Args:
            params: Parameters of the model on the mesh of the run. They are copied if their dtype is not the dtype of
                the computation.
            on_progress: Called before each compiled call and after the last one, with the number of new tokens so far.
                Its exception ends the generation.
        """
        generator = self._generator.with_params(params)
        on_progress(0)
        # A target does not continue the text of its source.
        preceding: Sequence[list[int]] = self._ids
        if self._has_encoder:
            preceding = [[] for _ in self._ids]
        stop_finders = None
        if self._stop_texts:
            stop_finders = [
                StopFinder(self._stop_texts, self._tokenizer, prefix) for prefix in preceding
            ]
        outputs = generator.generate(
            self._ids, self._sources, ends_with_stop=stop_finders, on_progress=on_progress
        )
        samples: list[Sample] = []
        for prompt, preceding_ids, ids in zip(self.prompts, preceding, outputs, strict=True):
            samples.append(Sample(prompt, self._tokenizer.decode(ids, preceding_ids)))
        return samples


def build_sampler(
    recipe: Recipe,
    model: ModelSpec,
    config: HFConfig,
    *,
    files: Path,
    sharding: ShardingContext,
    note: Callable[[str], None] = lambda line: None,
) -> Sampler | None:
    """Build the sampler of a run.

    None without prompts.

    Args:
        recipe: The recipe.
        model: The model.
        config: Its config.json.
        files: Folder of its tokenizer and of generation_config.json.
        sharding: Mesh and rules of the run.
        note: Called with lines about the rules of generation.

    Raises:
        PrepError: There is no tokenizer, or the model cannot generate from the prompts.
    """
    if recipe.log.samples is None:
        return None
    try:
        tokenizer = load_tokenizer(Path(recipe.data.tokenizer) if recipe.data.tokenizer else files)
    except PrepError as error:
        what = text("{} needs a tokenizer", Key(SAMPLES_KEY))
        why = text("{}: {}", error.what, error.why)
        hint = text("set {}, or remove {}", Key("data.tokenizer"), Key(SAMPLES_KEY))
        raise PrepError(what, why, hint) from error
    chat_template = None
    data = recipe.data
    if any(not isinstance(prompt, str) for prompt in recipe.log.samples) and (
        data.chat_template or data.template_args or data.template_date
    ):
        # The conversations of the data have the same template.
        chat_template = recipe_template(data, tokenizer.path)
    vocab = model.true_vocab_size
    defaults = folder_generation_defaults(config, files, vocab)
    for line in defaults.notes:
        note(line)
    decoder_start_id = None
    if model.arch_config.encoder is not None:
        decoder_start_id = decoder_start_token_id(config, vocab)
    return Sampler(
        recipe.log.samples,
        tokenizer,
        model,
        sharding=sharding,
        dtype=recipe.model.dtype,
        max_new_tokens=recipe.log.sample_tokens,
        eos_token_ids=defaults.eos_token_ids,
        rules=defaults.rules,
        stop_texts=defaults.stop_texts,
        decoder_start_id=decoder_start_id,
        chat_template=chat_template,
    )


def _sample_prompt(prompt: str | JsonObject) -> Prompt:
    """Return a prompt of the recipe: its text, or its conversation. Raise PrepError for an invalid one."""
    if isinstance(prompt, str):
        return prompt
    unknown = sorted(prompt.keys() - {MESSAGES_KEY, TOOLS_KEY})
    if unknown or MESSAGES_KEY not in prompt:
        raise PrepError(
            "a conversation is invalid",
            f"its keys are {', '.join(sorted(prompt)) or 'missing'}",
            '`{messages = [{role = "user", content = "Hi"}]}`',
        )
    return chat_prompt(prompt[MESSAGES_KEY], prompt.get(TOOLS_KEY), SAMPLES_KEY)


class _CompiledError(Exception):
    """The end of a generation whose functions are all compiled."""


@contextmanager
def _recipe_keys_in_errors() -> Iterator[None]:
    """Rewrite errors of the block for training: name the recipe keys instead of options of `prep generate`."""
    try:
        yield
    except PrepError as error:
        what = text("{}: {}", Key(SAMPLES_KEY), error.what)
        hint = text("change {} or {}", Key(SAMPLES_KEY), Key("log.sample_tokens"))
        raise error.with_texts(what=what, hint=hint) from error.__cause__


@dataclass(frozen=True, slots=True)
class GeneratedTarget:
    """The text generated for a source, and the reference."""

    text: str  # The generated text, of at most as many tokens as a sequence has
    reference: str  # The whole target in the data
    is_longer: bool  # Whether the reference has more tokens than a sequence, end token excluded


def generate_targets(
    generator: Generator,
    dataset: Dataset,
    tokenizer: TextTokenizer,
    *,
    decoder_start_id: int,
    batch_size: int,
    limit: int = 0,
) -> Iterator[GeneratedTarget]:
    """Generate a target for each pair of a dataset, in order.

    Args:
        generator: The model, which has an encoder.
        dataset: The pairs.
        tokenizer: Decodes the generated and the reference tokens.
        decoder_start_id: First token of the decoder.
        batch_size: Pairs per batch.
        limit: Number of pairs, from the first. 0 means all.
    """
    end_id: int | None = None
    if isinstance(dataset, Seq2SeqDataset):
        end_id = dataset.eos_id
    for rows in eval_batches(dataset.n_rows, batch_size, limit=limit):
        present = rows[rows >= 0]
        batch = dataset.get_batch(present)
        sources = [ids[mask].tolist() for ids, mask in zip(batch["source"], batch["present"])]
        if isinstance(dataset, Seq2SeqDataset):
            references = [dataset.target_ids(int(row)).tolist() for row in present]
        else:
            references = [
                ids[mask > 0].tolist() for ids, mask in zip(batch["targets"], batch["weights"])
            ]
        outputs = generator.generate(
            [[decoder_start_id]] * len(present),
            sources,
            first_row=int(np.min(present)),
            min_rows=batch_size,
        )
        for output, reference in zip(outputs, references, strict=True):
            is_longer = len(reference) - (reference[-1:] == [end_id]) > dataset.seq_length
            yield GeneratedTarget(tokenizer.decode(output), tokenizer.decode(reference), is_longer)
