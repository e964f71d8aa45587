"""`prep generate`: continue prompts with a model from any checkpoint."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from prepcli.commands.console.stdio import prepare_jax
from prepcli.commands.operations.checkpoint_options import CommonOptions, common_options
from prepcli.commands.operations.compute_options import GenerateOptions, format_token_ids
from prepcli.commands.operations.computing import compute_together, process_index
from prepcli.commands.operations.generation_model import (
    OUT_OF_MEMORY_HINT,
    PROMPT_IDS,
    EncodedPrompts,
    GenerationModel,
    open_generation_model,
    read_tools,
)
from prepcli.commands.operations.operation import public, reject_without
from prepcli.commands.operations.run_results import Generation, NewTokens
from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.core.formatting import count_text, format_duration
from prepcli.core.json_values import JsonValue, is_json_list, load_json
from prepcli.core.observer import Observer, Progress, StreamObserver
from prepcli.core.option_spec import PathLike, as_tuple
from prepcli.stores.files import io_error, read_file_or_pipe

if TYPE_CHECKING:
    from prepcli.core.process_group import ProcessGroup
    from trainer.data.chat import Prompt
    from trainer.data.incremental_decoder import IncrementalDecoder
    from trainer.data.tokenizer import TextTokenizer
    from trainer.generation.generator import Generator

STDIN = "-"
MAX_PROMPTS_NBYTES = 1_000_000_000
PROMPT_KEYS = ("prompt", "text")  # keys of a .jsonl line with a text, in order of precedence
# Keys of a .jsonl line with a conversation, in order of precedence.
CHAT_KEYS = ("messages", "prompt")


def read_prompts(file_name: str) -> Iterator[Prompt]:
    """Yield the prompts of a text or .jsonl file, one per line. A line of .jsonl may be a conversation.

    Raise PrepError for an invalid file or line.
    """
    try:
        text = _read_text(file_name)
    except OSError as error:
        raise io_error(Path(file_name), error) from error
    except UnicodeDecodeError as error:
        raise PrepError(
            f"{file_name} is not UTF-8 text", str(error), "convert it to UTF-8"
        ) from error
    is_json = file_name.endswith(".jsonl")
    # `splitlines` would also split at the other line separators, which JSON strings may contain.
    for line_number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        yield _prompt_from_json(file_name, line_number, line) if is_json else line


def _read_text(file_name: str) -> str:
    """Return the text of a file or of stdin."""
    if file_name == STDIN:
        # One character more than the limit, to notice that there are more.
        text = sys.stdin.read(MAX_PROMPTS_NBYTES + 1)
        if len(text) > MAX_PROMPTS_NBYTES:
            raise PrepError(
                "the prompts are too large",
                f"standard input has more than {MAX_PROMPTS_NBYTES:,} characters",
                "pass fewer prompts at a time",
            )
    else:
        text = read_file_or_pipe(Path(file_name), MAX_PROMPTS_NBYTES).decode()
    # Some editors write a byte order mark at the start of a file, and `\r\n` at the end of a line.
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _prompt_from_json(file_name: str, line_number: int, line: str) -> Prompt:
    try:
        value = load_json(line.encode())
    except ValueError as error:
        raise PrepError(
            f"line {line_number} of {file_name} is not valid JSON",
            str(error),
            "write one object per line, or rename a file of plain prompts to another suffix than .jsonl",
        ) from error
    if isinstance(value, dict):
        for key in PROMPT_KEYS:
            if isinstance(value.get(key), str):
                return value[key]
        for key in CHAT_KEYS:
            # Messages may be a JSON text, as in data.
            if isinstance(value.get(key), list) or is_json_list(value.get(key)):
                from trainer.data.chat import chat_prompt

                return chat_prompt(value[key], value.get("tools"), f"{file_name}:{line_number}")
    raise PrepError(
        f"line {line_number} of {file_name} has no prompt",
        f"it must be an object with a string `{PROMPT_KEYS[0]}` or `{PROMPT_KEYS[1]}`, or a list `{CHAT_KEYS[0]}`",
        """`{"prompt": "TEXT"}`""",
    )


# --- New tokens


class TokenStream:
    """Stream of the new tokens of prompts and their texts to a callback."""

    def __init__(
        self, decoders: Sequence[IncrementalDecoder], on_tokens: Callable[[NewTokens], None]
    ) -> None:
        """Start before the first token."""
        self._decoders = decoders
        self._on_tokens = on_tokens

    def push(self, first_prompt: int, new_tokens: Sequence[Sequence[int]]) -> None:
        """Pass on the next tokens of the prompts from number `first_prompt` on."""
        for prompt, tokens in enumerate(new_tokens, first_prompt):
            if tokens:
                self._pass_on_text(prompt, tokens, self._decoders[prompt].push(tokens))

    def finish(self, first_prompt: int, last_prompt: int) -> None:
        """Pass on the held-back text of prompts `first_prompt:last_prompt`."""
        for prompt in range(first_prompt, last_prompt):
            # A character may need several tokens, so the decoder holds incomplete ones back. No further token completes
            # them now.
            if text := self._decoders[prompt].finish():
                self._pass_on_text(prompt, (), text)

    def _pass_on_text(self, prompt: int, tokens: Sequence[int], text: str) -> None:
        self._on_tokens(NewTokens(prompt, tuple(tokens), text))


DEFAULT_NEW_TOKENS = 64
OnTokens = Callable[[NewTokens], None]


@public
def generate(
    checkpoint: PathLike | None = None,
    prompts: str | Sequence[str] = (),
    *,
    tokens: Sequence[Sequence[int]] = (),
    conversations: Sequence[Sequence[Mapping[str, JsonValue]]] = (),
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
        tokens: Prompts as token ids. They follow all other prompts in the result.
        conversations: Conversations that the assistant continues, each a list of messages with `role` and `content`.
            The model's chat template renders them. They follow the text prompts in the result.
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
        from trainer.data.chat import chat_prompt

        given = [*as_tuple(prompts), *_read_file_prompts(options["prompts_file"], group)]
        for number, messages in enumerate(conversations):
            place = f"conversation {number}"
            given.append(chat_prompt([dict(message) for message in messages], None, place))
        generation = _generate(
            common,
            _with_tools(given, options),
            ids,
            options=options,
            on_tokens=on_tokens,
            observer=observer,
        )
        return replace(generation, process=process_index(group))

    generation = compute_together(options["mesh"], progress, phase="generate", compute=compute)
    return replace(generation, seconds=time.monotonic() - started_s)


def _read_file_prompts(file: PathLike | None, group: ProcessGroup | None) -> list[Prompt]:
    """Return the prompts of a file. Process 0 alone reads stdin, as launchers pass it to one process."""
    if file is None:
        return []
    if str(file) != STDIN or group is None:
        return list(read_prompts(str(file)))
    # Lines of stdin are texts.
    texts = list(read_prompts(STDIN)) if group.index == 0 else []
    return json.loads(group.broadcast("prompts", json.dumps(texts)))


def _with_tools(prompts: Sequence[Prompt], options: GenerateOptions) -> list[Prompt]:
    """Return the prompts, with the tools of the option for conversations without tools of their own."""
    has_chats = any(not isinstance(prompt, str) for prompt in prompts)
    if not has_chats:
        why = "it is for conversations, which a chat template renders"
        for name in ("tools", "template_args"):
            reject_without(
                Option(name), options[name] is not None, Option("prompts_file", "chat.jsonl"), why
            )
        return list(prompts)
    tools = read_tools(options["tools"])
    completed: list[Prompt] = []
    for prompt in prompts:
        if not isinstance(prompt, str) and prompt.tools is None:
            prompt = replace(prompt, tools=tools)
        completed.append(prompt)
    return completed


def _generate(
    common: CommonOptions,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    *,
    options: GenerateOptions,
    on_tokens: OnTokens | None,
    observer: Observer,
) -> Generation:
    """Check the request, load the model and generate. See `generate`."""
    if not prompts and not ids:
        raise usage_error(
            "no prompt was given",
            "generation starts from a prompt",
            text("{}, or {}", Option("prompts", "TEXT"), PROMPT_IDS),
        )
    prepare_jax(observer)
    from trainer.distributed.sharding import catch_out_of_memory
    from trainer.generation.generator import check_prompts, max_fitting_new_tokens

    with catch_out_of_memory(OUT_OF_MEMORY_HINT):
        with open_generation_model(
            common, options, observer, needs_tokenizer=bool(prompts)
        ) as model:
            encoded = model.encode(prompts, ids)
            generator_inputs = encoded.batch(0, len(encoded.ids))
            default_new_tokens = min(
                DEFAULT_NEW_TOKENS,
                max_fitting_new_tokens(generator_inputs[0], model.model) or DEFAULT_NEW_TOKENS,
            )
            # A prompt that exceeds the positions leaves no room. `check_prompts` then reports its length.
            max_new_tokens = options["max_new_tokens"] or max(1, default_new_tokens)
            generation_config = model.generation_config(options, max_new_tokens)
            # Invalid prompts are reported before the weights are loaded.
            check_prompts(*generator_inputs, model=model.model, generation_config=generation_config)
            longest = max(map(len, generator_inputs[0])) + generation_config.max_new_tokens
            model.note_doubtful_inputs(longest, observer)
            generator = model.build_generator(options["dtype"], generation_config, observer)
        # The parameters are on their devices, so the files of the checkpoint are closed.
        return _generate_batches(
            generator,
            encoded,
            model,
            batch_size=options["batch_size"],
            on_tokens=on_tokens,
            observer=observer,
        )


def _generate_batches(
    generator: Generator,
    prompts: EncodedPrompts,
    model: GenerationModel,
    *,
    batch_size: int,
    on_tokens: OnTokens | None,
    observer: Observer,
) -> Generation:
    """Generate in batches of at most `batch_size` prompts, and measure the speed."""
    count = len(prompts.ids)
    start_s = time.monotonic()
    batch_size = min(batch_size, count)
    tokenizer = model.tokenizer
    stop_finders = model.stop_finders(prompts)
    output_ids: list[list[int]] = []
    observer.note("compiling for the first prompts")
    with _open_stream(prompts, tokenizer, on_tokens, observer) as stream:
        for start in range(0, count, batch_size):
            batch = prompts.batch(start, start + batch_size)
            push = partial(stream.push, start) if stream else None
            batch_stops = stop_finders and stop_finders[start : start + batch_size]
            # All batches have the same number of rows, so that one compiled step serves the last one too.
            output_ids += generator.generate(
                *batch,
                first_row=start,
                min_rows=batch_size,
                ends_with_stop=batch_stops,
                on_tokens=push,
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
    ended = [bool(ids) and ids[-1] in eos_token_ids for ids in output_ids]
    for number, finder in enumerate(stop_finders or ()):
        ended[number] |= finder.has_stopped
    texts: list[str | None] = []
    for ids, prefix in zip(output_ids, prompts.preceding_ids()):
        texts.append(None if tokenizer is None else tokenizer.decode(ids, prefix))
    return Generation(
        texts=tuple(texts),
        tokens=tuple(tuple(ids) for ids in output_ids),
        ended=tuple(ended),
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
    prompts: EncodedPrompts,
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
