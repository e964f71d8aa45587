"""`prep generate`: continue prompts with a model from any checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.commands.compute_together import compute_together
from prepcli.commands.open_params import open_params
from prepcli.commands.prompts import STDIN, parse_token_ids, read_prompts
from prepcli.commands.token_stream import TokenCallback, TokenStream
from prepcli.console.formatting import format_duration
from prepcli.console.jax_logs import silence_jax
from prepcli.console.ui import Report, Ui
from prepcli.errors import Option, PrepError, usage_error
from prepcli.operations.conflicts import check_needs
from prepcli.operations.conversion import (
    CommonOptions,
    check_config_option,
    open_checkpoint,
    source_line,
)
from prepcli.operations.model_files import eos_token_ids, find_source_tokenizer
from prepcli.restore.params import OpenedModel
from prepcli.sources.source import Source

if TYPE_CHECKING:
    from trainer.data.tokenizer import TextTokenizer
    from trainer.distributed.process_group import ProcessGroup
    from trainer.generation.decode import GenerationConfig
    from trainer.generation.generator import Generator
    from trainer.nn.model_spec import ModelSpec

DEFAULT_NEW_TOKENS = 64
OUT_OF_MEMORY_HINT = (
    "a smaller `--batch-size`, fewer `--max-new-tokens`, `--dtype bfloat16`, "
    "or more fsdp or mp in `--mesh`"
)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request of `prep generate`."""

    common: CommonOptions
    prompt_texts: tuple[str, ...] = ()
    prompts_file: str | None = None  # one prompt per line; `-` is stdin
    prompt_ids: tuple[str, ...] = ()  # prompts as comma-separated token ids
    tokenizer: Path | None = None  # None: the checkpoint's tokenizer
    max_new_tokens: int | None = (
        None  # None: DEFAULT_NEW_TOKENS, or fewer if the model has fewer positions
    )
    sampling: tuple[float, int, float, int] = (0.0, 0, 1.0, 0)  # temperature, top-k, top-p, seed
    mesh: str | None = None  # None: one device
    dtype: str | None = None  # None: bfloat16 if all parameters have it, else float32
    batch_size: int = 16
    verify: bool = True  # check the bytes against their checksums
    on_tokens: TokenCallback | None = None  # receives tokens as they are decoded


@dataclass(frozen=True, slots=True)
class _EncodedPrompts:
    """Prompts as token ids. An encoder-decoder model reads them with its encoder."""

    ids: tuple[list[int], ...]
    texts: tuple[str | None, ...]  # None: there is no tokenizer
    decoder_start_id: int | None = (
        None  # first token of the decoder; None: the model has no encoder
    )

    def batch(
        self, start: int, stop: int
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]] | None]:
        """Return the decoder prompts and the encoder inputs (None without an encoder) of prompts `start:stop`."""
        ids = self.ids[start:stop]
        return (
            (ids, None)
            if self.decoder_start_id is None
            else ([[self.decoder_start_id]] * len(ids), ids)
        )

    def decoded_prefixes(self) -> Sequence[Sequence[int]]:
        """Return the ids that precede the text of each prompt.

        The decoder's start token is not part of a text.
        """
        return self.ids if self.decoder_start_id is None else [()] * len(self.ids)


def generate(request: GenerateRequest, ui: Ui) -> Report:
    """Generate a continuation of each prompt.

    In a job of several processes, all of them call it with a mesh of all their devices, and process 0 prints the
    result. Without a mesh each process generates alone.

    Args:
        request: Checkpoint, prompts, sampling and devices.
        ui: Receives notes, warnings and progress.

    Returns:
        Report with the generated texts (token ids without a tokenizer) in the order of the prompts.

    Raises:
        PrepError: A prompt or option is invalid, or the checkpoint, tokenizer or devices cannot be used.
    """

    def compute(group: ProcessGroup | None, process_ui: Ui) -> Report:
        return _generate(request, _read_file_prompts(request, group), process_ui)

    return compute_together(request.mesh, ui, phase="generate", compute=compute)


def _read_file_prompts(request: GenerateRequest, group: ProcessGroup | None) -> list[str]:
    """Return the prompts of the request's file.

    Process 0 alone reads stdin, as launchers pass it to one process.
    """
    if request.prompts_file is None:
        return []
    if request.prompts_file != STDIN or group is None:
        return list(read_prompts(request.prompts_file))
    texts = list(read_prompts(STDIN)) if group.index == 0 else []
    return json.loads(group.broadcast("prompts", json.dumps(texts)))


def _generate(request: GenerateRequest, file_prompts: Sequence[str], ui: Ui) -> Report:
    """Check the request, load the model and generate.

    Args:
        request: Checkpoint, prompts, sampling and devices.
        file_prompts: Prompts of the request's file.
        ui: Receives notes, warnings and progress.

    Raises:
        PrepError: A prompt or option is invalid, or the checkpoint, tokenizer or devices cannot be used.
    """
    texts = [*request.prompt_texts, *file_prompts]
    ids = [parse_token_ids(text) for text in request.prompt_ids]
    if not texts and not ids:
        raise usage_error(
            "no prompt was given",
            "generation starts from a prompt",
            "`--prompt TEXT`, or `--tokens 1,2,3`",
        )
    _check_sampling(*request.sampling)
    silence_jax(ui)
    from trainer.distributed.sharding import catch_out_of_memory
    from trainer.generation.decode import GenerationConfig
    from trainer.generation.generator import check_prompts, max_fitting_new_tokens
    from trainer.generation.sampling import Sampling

    sampling = Sampling(*request.sampling)
    located, source = open_checkpoint(request.common, ui)
    check_config_option(request.common, source)
    ui.note(source_line(source))
    with catch_out_of_memory(OUT_OF_MEMORY_HINT):
        with open_params(located, source, request.mesh, verify=request.verify, ui=ui) as opened:
            model = opened.model
            tokenizer = _load_tokenizer(request, source, is_required=bool(texts))
            prompts = _encode_prompts(
                texts, ids, tokenizer=tokenizer, model=model, config=source.config
            )
            generator_inputs = prompts.batch(0, len(prompts.ids))
            default_new_tokens = min(
                DEFAULT_NEW_TOKENS,
                max_fitting_new_tokens(generator_inputs[0], model) or DEFAULT_NEW_TOKENS,
            )
            generation_config = GenerationConfig(
                request.max_new_tokens or max(1, default_new_tokens),
                eos_token_ids(source, model.true_vocab_size),
                sampling,
            )
            check_prompts(*generator_inputs, model=model, generation_config=generation_config)
            generator = _build_generator(request, opened, generation_config, ui)
        return _generate_batches(request, generator, prompts, tokenizer, ui)


def _check_sampling(temperature: float, top_k: int, top_p: float, seed: int) -> None:
    """Raise UsageError for options of random sampling at temperature 0."""
    if temperature == 0:
        why = "temperature 0 always takes the most likely token"
        temperature_option = Option("temperature")
        check_needs(Option("top_k", top_k or None), temperature_option, why)
        check_needs(Option("top_p", top_p if top_p != 1 else None), temperature_option, why)
        check_needs(Option("seed", seed or None), temperature_option, why)


def _load_tokenizer(
    request: GenerateRequest, source: Source, is_required: bool
) -> TextTokenizer | None:
    """Load the tokenizer.

    Return None if there is none and all prompts are token ids, else raise PrepError.
    """
    from trainer.data.tokenizer import load_tokenizer

    path = request.tokenizer or find_source_tokenizer(source)
    hint = "`--tokenizer PATH`, or `--tokens 1,2,3`"
    if path is None:
        if not is_required:
            return None
        why = "there is no tokenizer.json or SentencePiece model to encode the prompts with"
        raise PrepError(f"{source.display_name} has no tokenizer", why, hint)
    try:
        return load_tokenizer(path)
    except PrepError as error:
        if not is_required and request.tokenizer is None:
            return None  # prompts as token ids need no tokenizer
        raise PrepError(error.what, error.why, hint) from error


def _encode_prompts(
    texts: Sequence[str],
    ids: Sequence[list[int]],
    *,
    tokenizer: TextTokenizer | None,
    model: ModelSpec,
    config: Mapping[str, Any],
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
    request: GenerateRequest, opened: OpenedModel, generation_config: GenerationConfig, ui: Ui
) -> Generator:
    """Load the parameters onto their devices, in the dtype of the computation."""
    from trainer.generation.decode import inference_dtype
    from trainer.generation.generator import Generator
    from trainer.nn.model_spec import ForwardConfig

    if opened.sharding.sequence_parallel_size > 1:
        why = "generation appends one token at a time, so that there are no tokens to split"
        raise usage_error(
            f"`--mesh {opened.sharding.mesh}` has sp", why, "`--mesh` with fsdp or mp"
        )
    dtype = request.dtype or ("bfloat16" if opened.stored_dtypes() == {"bfloat16"} else "float32")
    scan_layers = opened.model.has_stacked_layers
    forward_config = ForwardConfig(dtype, scan_layers=scan_layers, sharding=opened.sharding)
    ui.note("loading the parameters")
    params = opened.load(lambda path: inference_dtype(path, dtype))
    return Generator(
        params, opened.model, forward_config=forward_config, generation_config=generation_config
    )


def _generate_batches(
    request: GenerateRequest,
    generator: Generator,
    prompts: _EncodedPrompts,
    tokenizer: TextTokenizer | None,
    ui: Ui,
) -> Report:
    """Generate in batches of at most `request.batch_size` prompts, and report texts and speed."""
    count = len(prompts.ids)
    start_s = ui.clock()
    batch_size = min(request.batch_size, count)
    output_ids: list[list[int]] = []
    ui.note("compiling for the first prompts")
    with _open_stream(request, prompts, tokenizer, ui) as stream:
        for start in range(0, count, batch_size):
            batch = prompts.batch(start, start + batch_size)
            on_tokens = partial(stream.push, start) if stream else None
            output_ids += generator.generate(
                *batch, first_row=start, min_rows=batch_size, on_tokens=on_tokens
            )
            if stream:
                stream.finish(start, len(output_ids))
            if count > batch_size:
                ui.note(f"{len(output_ids):,} of {count:,} prompts done")
    seconds = ui.clock() - start_s - generator.compile_s
    num_tokens = sum(map(len, output_ids))
    tokens_per_s = num_tokens / max(seconds, 1e-9)
    summary = f"{num_tokens:,} tokens for {count:,} prompt{'s' if count > 1 else ''} in {format_duration(seconds)}"
    ui.note(
        f"{summary}, {tokens_per_s:,.1f} tokens/s; compiled in {format_duration(generator.compile_s)}"
    )
    texts = _decode_outputs(prompts, output_ids, tokenizer)
    sharding = generator.forward_config.sharding
    eos_token_ids = generator.generation_config.eos_token_ids
    fields = {
        "mesh": str(sharding.mesh) if sharding.mesh else None,
        "dtype": generator.forward_config.dtype,
        "prompts": prompts.texts,
        "prompt_tokens": prompts.ids,
        "texts": texts,
        "tokens": output_ids,
        "ended": [bool(ids) and ids[-1] in eos_token_ids for ids in output_ids],
        "tokens_per_s": round(tokens_per_s, 1),
        "compile_seconds": round(generator.compile_s, 3),
    }
    lines = texts or [_format_ids(ids) for ids in output_ids]
    return Report("\n".join(lines), fields, is_printed=stream is not None and stream.texts == lines)


@contextmanager
def _open_stream(
    request: GenerateRequest, prompts: _EncodedPrompts, tokenizer: TextTokenizer | None, ui: Ui
) -> Iterator[TokenStream | None]:
    """Yield a stream of new tokens for the request's callback or for one prompt on a terminal, else None."""
    from trainer.data.incremental_decoder import IncrementalDecoder

    if tokenizer is None:
        decoders = [IncrementalDecoder(_format_ids, lambda token_id: None) for _ in prompts.ids]
    else:
        codec = tokenizer.codec
        decoders = [
            IncrementalDecoder(codec.decode, codec.token, prefix)
            for prefix in prompts.decoded_prefixes()
        ]
    if request.on_tokens is not None:
        yield TokenStream(decoders, request.on_tokens)
    elif len(prompts.ids) == 1 and ui.can_stream:
        with ui.stream_line() as write:
            yield TokenStream(decoders, lambda prompt, ids, text: write(text))
    else:
        yield None


def _format_ids(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def _decode_outputs(
    prompts: _EncodedPrompts, output_ids: Sequence[Sequence[int]], tokenizer: TextTokenizer | None
) -> list[str] | None:
    """Decode the tokens generated for each prompt."""
    if tokenizer is None:
        return None
    return [
        tokenizer.decode(ids, prefix) for ids, prefix in zip(output_ids, prompts.decoded_prefixes())
    ]
