"""`prep generate`: continue prompts with a model from any checkpoint."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from prepcli.console.formatting import count_text, format_duration
from prepcli.console.jax_logs import silence_jax
from prepcli.console.observer import Observer, StreamObserver
from prepcli.console.progress import Progress
from prepcli.errors import DamagedError, Option, PrepError, text, usage_error
from prepcli.operations.compute_options import GenerateOptions
from prepcli.operations.compute_together import compute_together, process_index
from prepcli.operations.conflicts import reject_without
from prepcli.operations.conversion import (
    CommonOptions,
    check_config_option,
    common_options,
    open_checkpoint,
)
from prepcli.operations.model_files import find_source_tokenizer, source_generation_defaults
from prepcli.operations.open_params import open_params, resolve_compute_dtype
from prepcli.operations.operation import public
from prepcli.operations.prompts import STDIN, read_prompts
from prepcli.operations.results import Generation, NewTokens
from prepcli.operations.source_line import source_line
from prepcli.operations.token_ids import format_token_ids
from prepcli.operations.token_stream import TokenStream
from prepcli.option_spec import PathLike, as_tuple
from prepcli.restore.params import OpenedModel
from prepcli.sources.source import Source
from trainer.models.json_types import HFConfig

if TYPE_CHECKING:
    from trainer.data.tokenizer import TextTokenizer
    from trainer.distributed.process_group import ProcessGroup
    from trainer.generation.decode import GenerationConfig
    from trainer.generation.generator import Generator
    from trainer.nn.model_spec import ModelSpec

DEFAULT_NEW_TOKENS = 64
OUT_OF_MEMORY_HINT = text(
    "use a smaller {}, fewer {}, {}, or more fsdp or mp in {}",
    Option("batch_size"),
    Option("max_new_tokens"),
    Option("dtype", "bfloat16"),
    Option("mesh"),
)
OnTokens = Callable[[NewTokens], None]
PROMPT_IDS = Option("tokens", [[1, 2, 3]])  # the example that hints show


@public
def generate(
    checkpoint: PathLike | None = None,
    prompts: str | Sequence[str] = (),
    *,
    tokens: Sequence[Sequence[int]] = (),
    on_tokens: Callable[[NewTokens], None] | None = None,
    progress: Progress | Observer | None = None,
    **options: Unpack[GenerateOptions],
) -> Generation:
    """Continue prompts with a model.

    In a job of several processes, all of them call it with a mesh of all their devices. Without a mesh each process
    generates alone.

    Args:
        checkpoint: Folder, alias, hub id, training run, or a step of one. Default: the only checkpoint of prep in the
            current folder.
        prompts: One prompt, or several, as text.
        tokens: Prompts as token ids. They follow the text prompts in the result.
        on_tokens: Called with the next tokens of a prompt and their text as they are decoded. See `NewTokens`.
        progress: Receives the bytes downloaded or checked. Default: none. See `Progress`.
        **options: See `GenerateOptions`.

    Returns:
        The continuations, without the prompts, in the order of the prompts.

    Raises:
        UsageError: An argument is invalid, a prompt is too long, or a token id is out of range.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: The checkpoint, its tokenizer or the devices cannot be used.
    """
    started_s = time.monotonic()
    common = common_options(checkpoint, None, options)
    ids = [list(prompt_ids) for prompt_ids in tokens]

    def compute(group: ProcessGroup | None, observer: Observer) -> Generation:
        texts = [*as_tuple(prompts), *_read_file_prompts(options["prompts_file"], group)]
        generation = _generate(
            common, texts, ids, options=options, on_tokens=on_tokens, observer=observer
        )
        return replace(generation, process=process_index(group))

    generation = compute_together(options["mesh"], progress, phase="generate", compute=compute)
    return replace(generation, seconds=time.monotonic() - started_s)


@dataclass(frozen=True, slots=True)
class _EncodedPrompts:
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


def _read_file_prompts(file: PathLike | None, group: ProcessGroup | None) -> list[str]:
    """Return the prompts of a file. Process 0 alone reads stdin, as launchers pass it to one process."""
    if file is None:
        return []
    if str(file) != STDIN or group is None:
        return list(read_prompts(str(file)))
    texts = list(read_prompts(STDIN)) if group.index == 0 else []
    return json.loads(group.broadcast("prompts", json.dumps(texts)))


def _generate(
    common: CommonOptions,
    texts: Sequence[str],
    ids: Sequence[list[int]],
    *,
    options: GenerateOptions,
    on_tokens: OnTokens | None,
    observer: Observer,
) -> Generation:
    """Check the request, load the model and generate. See `generate`."""
    if not texts and not ids:
        raise usage_error(
            "no prompt was given",
            "generation starts from a prompt",
            text("{}, or {}", Option("prompts", "TEXT"), PROMPT_IDS),
        )
    _check_sampling(options)
    silence_jax(observer)
    from trainer.distributed.sharding import catch_out_of_memory
    from trainer.generation.decode import GenerationConfig
    from trainer.generation.generator import check_prompts, max_fitting_new_tokens
    from trainer.generation.sampling import Sampling

    sampling = Sampling(options["temperature"], options["top_k"], options["top_p"], options["seed"])
    located, source = open_checkpoint(common, observer)
    check_config_option(common, source)
    observer.note(source_line(source))
    with catch_out_of_memory(OUT_OF_MEMORY_HINT):
        with open_params(
            located, source, options["mesh"], verify=options["verify"], observer=observer
        ) as opened:
            model = opened.model
            tokenizer = _load_tokenizer(
                options["tokenizer"], source, observer, is_required=bool(texts)
            )
            prompts = _encode_prompts(
                texts, ids, tokenizer=tokenizer, model=model, config=source.config
            )
            generator_inputs = prompts.batch(0, len(prompts.ids))
            default_new_tokens = min(
                DEFAULT_NEW_TOKENS,
                max_fitting_new_tokens(generator_inputs[0], model) or DEFAULT_NEW_TOKENS,
            )
            defaults = source_generation_defaults(source, model.true_vocab_size, note=observer.note)
            # A prompt that exceeds the positions leaves no room. `check_prompts` then reports its length.
            max_new_tokens = options["max_new_tokens"] or max(1, default_new_tokens)
            generation_config = GenerationConfig(
                max_new_tokens, defaults.eos_token_ids, sampling, defaults.rules
            )
            # Invalid prompts are reported before the weights are loaded.
            check_prompts(*generator_inputs, model=model, generation_config=generation_config)
            longest = max(map(len, generator_inputs[0])) + generation_config.max_new_tokens
            _note_doubtful_inputs(model, tokenizer, longest, observer)
            generator = _build_generator(options["dtype"], opened, generation_config, observer)
        # The parameters are on their devices, so the files of the checkpoint are closed.
        return _generate_batches(
            generator,
            prompts,
            tokenizer,
            batch_size=options["batch_size"],
            on_tokens=on_tokens,
            observer=observer,
        )


def _note_doubtful_inputs(
    model: ModelSpec, tokenizer: TextTokenizer | None, longest: int, observer: Observer
) -> None:
    """Note a text that exceeds the positions of the model, and a tokenizer that is probably another model's.

    Args:
        model: The model.
        tokenizer: Tokenizer of the prompts and of the new tokens.
        longest: Most tokens of a prompt and its new tokens.
        observer: Receives the notes.
    """
    from trainer.planning.step_inputs import rotary_context

    context = rotary_context(model.arch_config)
    if context is not None and longest > context:
        observer.note(
            f"a prompt and its new tokens may have {longest:,} tokens, "
            f"and the model was made for {context:,} positions"
        )
    if tokenizer and (remark := tokenizer.smaller_vocabulary_note(model.true_vocab_size)):
        observer.note(remark)


def _check_sampling(options: GenerateOptions) -> None:
    """Raise UsageError for options of random sampling at temperature 0."""
    if options["temperature"] == 0:
        temperature = Option("temperature")
        why = "temperature 0 always takes the most likely token"
        reject_without(Option("top_k"), options["top_k"] != 0, temperature, why)
        reject_without(Option("top_p"), options["top_p"] != 1, temperature, why)
        reject_without(Option("seed"), options["seed"] != 0, temperature, why)


def _load_tokenizer(
    option: PathLike | None, source: Source, observer: Observer, *, is_required: bool
) -> TextTokenizer | None:
    """Load the tokenizer of the option or of the source.

    If no tokenizer is required, because all prompts are token ids, a missing or invalid one of the source is ignored.

    Returns:
        The tokenizer, or None if it is ignored.

    Raises:
        PrepError: A required tokenizer is missing, or a tokenizer is invalid and not ignored.
    """
    from trainer.data.tokenizer import load_tokenizer

    path = Path(option) if option is not None else find_source_tokenizer(source)
    hint = text("{}, or {}", Option("tokenizer", "PATH"), PROMPT_IDS)
    if path is None:
        if not is_required:
            return None
        why = "there is no tokenizer.json or SentencePiece model to encode the prompts with"
        raise PrepError(f"{source.display_name} has no tokenizer", why, hint)
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


def _encode_prompts(
    texts: Sequence[str],
    ids: Sequence[list[int]],
    *,
    tokenizer: TextTokenizer | None,
    model: ModelSpec,
    config: HFConfig,
) -> _EncodedPrompts:
    from trainer.training.datasets import decoder_start_token_id

    encoded_texts = [tokenizer.encode_prompt(text) for text in texts] if tokenizer else []
    decoded = [tokenizer.decode(prompt_ids) if tokenizer else None for prompt_ids in ids]
    decoder_start_id = (
        decoder_start_token_id(config, model.true_vocab_size)
        if model.arch_config.encoder is not None
        else None
    )
    return _EncodedPrompts((*encoded_texts, *ids), (*texts, *decoded), decoder_start_id)


def _build_generator(
    dtype: str | None,
    opened: OpenedModel,
    generation_config: GenerationConfig,
    observer: Observer,
) -> Generator:
    """Load the parameters onto their devices, in the dtype of the computation."""
    from trainer.generation.decode import inference_dtype
    from trainer.generation.generator import Generator
    from trainer.nn.model_spec import ForwardConfig

    if opened.sharding.sequence_parallel_size > 1:
        why = "generation appends one token at a time, so that there are no tokens to split"
        raise usage_error(
            text("{} splits tokens over sp", Option("mesh", opened.sharding.mesh)),
            why,
            text("use a {} with the axes fsdp and mp, without sp", Option("mesh")),
        )
    dtype = resolve_compute_dtype(dtype, opened)
    scan_layers = opened.model.has_stacked_layers
    forward_config = ForwardConfig(dtype, scan_layers=scan_layers, sharding=opened.sharding)
    observer.note("loading the parameters")
    params = opened.load(lambda path: inference_dtype(path, dtype))
    return Generator(
        params, opened.model, forward_config=forward_config, generation_config=generation_config
    )


def _generate_batches(
    generator: Generator,
    prompts: _EncodedPrompts,
    tokenizer: TextTokenizer | None,
    *,
    batch_size: int,
    on_tokens: OnTokens | None,
    observer: Observer,
) -> Generation:
    """Generate in batches of at most `batch_size` prompts, and measure the speed."""
    count = len(prompts.ids)
    start_s = time.monotonic()
    batch_size = min(batch_size, count)
    output_ids: list[list[int]] = []
    observer.note("compiling for the first prompts")
    with _open_stream(prompts, tokenizer, on_tokens, observer) as stream:
        for start in range(0, count, batch_size):
            batch = prompts.batch(start, start + batch_size)
            push = partial(stream.push, start) if stream else None
            # All batches have the same number of rows, so that one compiled step serves the last one too.
            output_ids += generator.generate(
                *batch, first_row=start, min_rows=batch_size, on_tokens=push
            )
            if stream:
                stream.finish(start, len(output_ids))
            if count > batch_size:
                observer.note(f"{len(output_ids):,} of {count:,} prompts done")
    # Without the compilation: otherwise the speed would grow with the number of prompts.
    seconds = time.monotonic() - start_s - generator.compile_s
    num_tokens = sum(map(len, output_ids))
    tokens_per_s = num_tokens / max(seconds, 1e-9)
    observer.note(
        f"{count_text(num_tokens, 'token')} for {count_text(count, 'prompt')} in {format_duration(seconds)},"
        f" {tokens_per_s:,.1f} tokens/s; compiled in {format_duration(generator.compile_s)}"
    )
    sharding = generator.forward_config.sharding
    eos_token_ids = generator.generation_config.eos_token_ids
    return Generation(
        texts=_decode_outputs(prompts, output_ids, tokenizer),
        tokens=tuple(tuple(ids) for ids in output_ids),
        ended=tuple(bool(ids) and ids[-1] in eos_token_ids for ids in output_ids),
        tokens_per_s=round(tokens_per_s, 1),
        prompts=prompts.texts,
        prompt_tokens=tuple(tuple(ids) for ids in prompts.ids),
        mesh=str(sharding.mesh) if sharding.mesh else None,
        dtype=generator.forward_config.dtype,
        compile_seconds=generator.compile_s,
        seconds=0.0,
    )


@contextmanager
def _open_stream(
    prompts: _EncodedPrompts,
    tokenizer: TextTokenizer | None,
    on_tokens: OnTokens | None,
    observer: Observer,
) -> Iterator[TokenStream | None]:
    """Yield a stream that passes new tokens to `on_tokens`. Without it, a single prompt is streamed to the terminal.

    Yield None if there is neither a callback nor a terminal, or without a callback for several prompts.
    """
    from trainer.data.incremental_decoder import IncrementalDecoder

    if tokenizer is None:
        decoders = [
            IncrementalDecoder(format_token_ids, lambda token_id: None) for _ in prompts.ids
        ]
    else:
        codec = tokenizer.codec
        decoders = [
            IncrementalDecoder(codec.decode, codec.token, prefix)
            for prefix in prompts.preceding_ids()
        ]
    if on_tokens is not None:
        yield TokenStream(decoders, on_tokens)
    elif len(prompts.ids) == 1 and isinstance(observer, StreamObserver) and observer.can_stream:
        # Several prompts of a batch advance together: their texts would be mixed on one line.
        with observer.stream_line() as write:
            yield TokenStream(decoders, lambda new: write(new.text))
    else:
        yield None


def _decode_outputs(
    prompts: _EncodedPrompts, output_ids: Sequence[Sequence[int]], tokenizer: TextTokenizer | None
) -> tuple[str | None, ...]:
    """Decode the tokens generated for each prompt. Without a tokenizer there are no texts."""
    if tokenizer is None:
        return (None,) * len(output_ids)
    return tuple(
        tokenizer.decode(ids, prefix) for ids, prefix in zip(output_ids, prompts.preceding_ids())
    )
