"""A checkpoint opened for generation: its model, tokenizer and defaults, and the generator of its tokens."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from prepcli.commands.operations.checkpoint_options import CommonOptions
from prepcli.commands.operations.compute_options import GenerateOptions
from prepcli.commands.operations.computing import (
    find_source_tokenizer,
    open_parameters,
    resolve_compute_dtype,
    source_generation_defaults,
    tokenizer_path,
)
from prepcli.commands.operations.operation import reject_without
from prepcli.core.errors import DamagedError, Option, PrepError, text, usage_error
from prepcli.core.json_values import JsonObject, JsonValue, is_utf8, load_json
from prepcli.core.observer import Observer
from prepcli.core.option_spec import PathLike, as_tuple
from prepcli.sources.generation_config import GenerationDefaults
from prepcli.sources.source import Source
from prepcli.stores.files import read_file_or_pipe
from trainer.run.params import OpenedModel

if TYPE_CHECKING:
    from trainer.data.chat import Prompt, PromptEncoder
    from trainer.data.incremental_decoder import StopFinder
    from trainer.data.tokenizer import TextTokenizer
    from trainer.generation.decode import GenerationConfig
    from trainer.generation.generator import Generator
    from trainer.nn.model_spec import ModelSpec

MAX_TOOLS_NBYTES = 64_000_000
OUT_OF_MEMORY_HINT = text(
    "use a smaller {}, fewer {}, {}, or more fsdp or mp in {}",
    Option("batch_size"),
    Option("max_new_tokens"),
    Option("dtype", "bfloat16"),
    Option("mesh"),
)
PROMPT_IDS = Option("tokens", [[1, 2, 3]])  # the example that hints show
TEMPLATE_ARGS_EXAMPLE = Option("template_args", '{"enable_thinking": false}')


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """Prompts as token ids. An encoder-decoder model reads them with its encoder.

    Attributes:
        ids: Token ids of each prompt.
        texts: Text of each prompt. None without a tokenizer.
        decoder_start_id: First token of the decoder. None for a model without an encoder.
    """

    ids: tuple[list[int], ...]
    texts: tuple[str | None, ...]
    decoder_start_id: int | None = None

    def batch(
        self, start: int, stop: int
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]] | None]:
        """Return the decoder prompts and the encoder inputs (None without an encoder) of prompts `start:stop`."""
        ids = self.ids[start:stop]
        if self.decoder_start_id is None:
            return ids, None
        # T5: the encoder reads the prompt, and the decoder starts from token 0.
        return [[self.decoder_start_id]] * len(ids), ids

    def preceding_ids(self) -> Sequence[Sequence[int]]:
        """Return the ids that precede the text of each prompt.

        The decoder's start token is not part of a text.
        """
        return self.ids if self.decoder_start_id is None else [()] * len(self.ids)


@dataclass(frozen=True, slots=True)
class GenerationModel:
    """A checkpoint opened for generation.

    Attributes:
        source: The checkpoint.
        opened: Its model and mesh.
        tokenizer: Its tokenizer. None if it is not needed and cannot be used.
        encoder: Encodes prompts with the tokenizer.
        defaults: How the model generates by default.
        stop_texts: Texts that end a generated text.
    """

    source: Source
    opened: OpenedModel
    tokenizer: TextTokenizer | None
    encoder: PromptEncoder | None
    defaults: GenerationDefaults
    stop_texts: tuple[str, ...]

    @property
    def model(self) -> ModelSpec:
        """The model."""
        return self.opened.model

    def encode(self, prompts: Sequence[Prompt], ids: Sequence[list[int]] = ()) -> EncodedPrompts:
        """Return prompts, as text or as token ids, as inputs of the generator."""
        from trainer.training.datasets import decoder_start_token_id

        encoded = [self.encoder.encode(prompt) for prompt in prompts] if self.encoder else []
        tokenizer = self.tokenizer
        decoded = [tokenizer.decode(prompt_ids) if tokenizer else None for prompt_ids in ids]
        decoder_start_id = (
            decoder_start_token_id(self.source.config, self.model.true_vocab_size)
            if self.model.arch_config.encoder is not None
            else None
        )
        return EncodedPrompts(
            (*(prompt.ids for prompt in encoded), *ids),
            (*(prompt.text for prompt in encoded), *decoded),
            decoder_start_id,
        )

    def generation_config(self, options: GenerateOptions, max_new_tokens: int) -> GenerationConfig:
        """Return the options of generation: those of the call, and the model's defaults."""
        from trainer.generation.decode import GenerationConfig
        from trainer.generation.sampling import Sampling

        sampling = Sampling(
            options["temperature"],
            options["top_k"],
            options["top_p"],
            options["seed"],
            min_p=options["min_p"],
        )
        rules = self.defaults.rules
        penalty = options["repetition_penalty"]
        if penalty is not None:
            rules = replace(rules, repetition_penalty=float(penalty))
        return GenerationConfig(max_new_tokens, self.defaults.eos_token_ids, sampling, rules)

    def stop_finders(self, prompts: EncodedPrompts) -> list[StopFinder] | None:
        """Return for each prompt a function that finds the end of a stop text. None without stop texts."""
        from trainer.data.incremental_decoder import StopFinder

        if not self.stop_texts or self.tokenizer is None:
            return None
        return [
            StopFinder(self.stop_texts, self.tokenizer, prefix)
            for prefix in prompts.preceding_ids()
        ]

    def build_generator(
        self, dtype: str | None, generation_config: GenerationConfig, observer: Observer
    ) -> Generator:
        """Load the parameters onto their devices, in the dtype of the computation."""
        from trainer.generation.decode import inference_dtype
        from trainer.generation.generator import Generator
        from trainer.nn.model_spec import ForwardConfig

        opened = self.opened
        if opened.sharding.sequence_parallel_size > 1:
            why = "generation appends one token at a time, so that there are no tokens to split"
            raise usage_error(
                text("{} splits tokens over sp", Option("mesh", opened.sharding.mesh)),
                why,
                text("use a {} with the axes fsdp and mp, without sp", Option("mesh")),
            )
        dtype = resolve_compute_dtype(dtype, opened)
        forward_config = ForwardConfig(
            dtype, scan_layers=opened.model.has_stacked_layers, sharding=opened.sharding
        )
        observer.note("loading the parameters")
        params = opened.load(lambda path: inference_dtype(path, dtype))
        return Generator(
            params, opened.model, forward_config=forward_config, generation_config=generation_config
        )

    def note_doubtful_inputs(self, longest: int, observer: Observer) -> None:
        """Note a text beyond the positions of the model, and a tokenizer of probably another model."""
        self.note_long_text("a prompt and its new tokens may have", longest, observer)
        if self.tokenizer and (
            remark := self.tokenizer.smaller_vocabulary_note(self.model.true_vocab_size)
        ):
            observer.note(remark)

    def note_long_text(self, subject: str, num_tokens: int, observer: Observer) -> None:
        """Note a text with more tokens than the model was made for."""
        from trainer.planning.step_inputs import rotary_context

        context = rotary_context(self.model.arch_config)
        if context is not None and num_tokens > context:
            made_for = f"the model was made for {context:,} positions"
            observer.note(f"{subject} {num_tokens:,} tokens, and {made_for}")


@contextmanager
def open_generation_model(
    common: CommonOptions,
    options: GenerateOptions,
    observer: Observer,
    *,
    needs_tokenizer: bool,
) -> Iterator[GenerationModel]:
    """Open a checkpoint for generation. Its files are open inside the context.

    Raises:
        UsageError: An option is invalid.
        PrepError: The checkpoint, its tokenizer or the devices cannot be used.
    """
    check_sampling(options)
    stop_option = check_stop_texts(options)
    template_args = parse_template_args(options)
    from trainer.data.chat import PromptEncoder
    from trainer.distributed.sharding import catch_out_of_memory

    with (
        catch_out_of_memory(OUT_OF_MEMORY_HINT),
        open_parameters(common, options["mesh"], verify=options["verify"], observer=observer) as (
            _,
            source,
            opened,
        ),
    ):
        tokenizer = _load_tokenizer(
            options["tokenizer"],
            source,
            observer,
            is_required=needs_tokenizer or bool(stop_option),
        )
        encoder = None
        if tokenizer is not None:
            encoder = PromptEncoder(tokenizer, template_args=template_args, now=datetime.now())
        defaults = source_generation_defaults(
            source, opened.model.true_vocab_size, note=observer.note
        )
        stop_texts = (*dict.fromkeys((*stop_option, *defaults.stop_texts)),)
        yield GenerationModel(source, opened, tokenizer, encoder, defaults, stop_texts)


def check_sampling(options: GenerateOptions) -> None:
    """Raise UsageError for options of random sampling at temperature 0."""
    if options["temperature"] == 0:
        temperature = Option("temperature")
        why = "temperature 0 always takes the most likely token"
        reject_without(Option("top_k"), options["top_k"] != 0, temperature, why)
        reject_without(Option("top_p"), options["top_p"] != 1, temperature, why)
        reject_without(Option("min_p"), options["min_p"] != 0, temperature, why)
        reject_without(Option("seed"), options["seed"] != 0, temperature, why)
    penalty = options["repetition_penalty"]
    if penalty is not None and not 0 < penalty < float("inf"):
        raise usage_error(
            text("{} is out of range", Option("repetition_penalty", penalty)),
            "it must be above 0, where 1 changes nothing",
            text("{}", Option("repetition_penalty", 1.1)),
        )


def check_stop_texts(options: GenerateOptions) -> tuple[str, ...]:
    """Return the stop texts of the option `stop`. Raise UsageError for an empty one, and for one that is no text."""
    from trainer.data.columns import SURROGATE_CAUSE

    stop_texts = as_tuple(options["stop"])
    if not all(map(is_utf8, stop_texts)):
        what = text("{} is not UTF-8 text", Option("stop"))
        raise usage_error(what, SURROGATE_CAUSE, "convert it to UTF-8")
    if "" in stop_texts:
        raise usage_error(
            text("{} is empty", Option("stop")),
            "every text has an empty text in it",
            text("{}", Option("stop", "User:")),
        )
    return stop_texts


def parse_template_args(options: GenerateOptions) -> Mapping[str, JsonValue] | None:
    """Return the variables of the chat template. Raise UsageError if they are not a JSON object."""
    value: Any = options["template_args"]
    if value is None:
        return None
    try:
        # A round trip through JSON gives Python values the types of JSON, for the template and its limits.
        parsed = load_json((value if isinstance(value, str) else json.dumps(value)).encode())
    except (TypeError, ValueError) as error:
        raise usage_error(
            text("{} is not JSON", Option("template_args")),
            str(error),
            text("{}", TEMPLATE_ARGS_EXAMPLE),
        ) from None
    if not isinstance(parsed, dict):
        raise usage_error(
            text("{} is not a JSON object", Option("template_args")),
            f"it is {value!r:.60}",
            text("{}", TEMPLATE_ARGS_EXAMPLE),
        )
    return cast(JsonObject, parsed)


def read_tools(file: PathLike | None) -> list[JsonObject] | None:
    """Return the schemas of tools in a JSON file. None without a file.

    Raises:
        PrepError: The file cannot be read, or is not a JSON list of objects.
    """
    if file is None:
        return None
    from prepcli.stores.files import io_error
    from trainer.data.conversations import tool_schemas

    try:
        content = read_file_or_pipe(Path(file), MAX_TOOLS_NBYTES).decode("utf-8-sig")
    except OSError as error:
        raise io_error(Path(file), error) from error
    except UnicodeDecodeError as error:
        raise PrepError(f"{file} is not UTF-8 text", str(error), "convert it to UTF-8") from error
    return tool_schemas(content, str(file)) or []


def _load_tokenizer(
    option: PathLike | None, source: Source, observer: Observer, *, is_required: bool
) -> TextTokenizer | None:
    """Load the tokenizer of the option or of the source.

    If no tokenizer is required, because all prompts are token ids, a missing or invalid one of the source is ignored.
    """
    from trainer.data.tokenizer import load_tokenizer

    hint = text("{}, or {}", Option("tokenizer", "PATH"), PROMPT_IDS)
    if not is_required and option is None and find_source_tokenizer(source) is None:
        return None
    path = tokenizer_path(source, option, purpose="encode the prompts", hint=hint)
    try:
        tokenizer = load_tokenizer(path)
    except PrepError as error:
        if not is_required and option is None:
            return None  # prompts as token ids need no tokenizer
        # E.g. a pointer of Git LFS, whose hint gets the file.
        if isinstance(error, DamagedError):
            raise
        raise PrepError(error.what, error.why, hint) from error
    for line in tokenizer.notes():
        observer.note(line)
    return tokenizer
