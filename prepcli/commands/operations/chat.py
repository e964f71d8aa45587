"""`prep generate --chat`: a conversation with a model in the terminal, or with turns from a pipe."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from prepcli.commands.console.stdio import prepare_jax
from prepcli.commands.operations.checkpoint_options import common_options
from prepcli.commands.operations.compute_options import GenerateOptions
from prepcli.commands.operations.generate import MAX_PROMPTS_NBYTES
from prepcli.commands.operations.generation_model import (
    OUT_OF_MEMORY_HINT,
    GenerationModel,
    open_generation_model,
    read_tools,
)
from prepcli.commands.operations.operation import reject_without
from prepcli.core.errors import (
    TERMINAL,
    Option,
    PrepError,
    render_text,
    text,
    usage_error,
)
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonObject
from prepcli.core.observer import RunObserver
from prepcli.core.option_spec import PathLike, with_defaults
from prepcli.core.process_address import ProcessSettings, process_address
from prepcli.core.signals import handle_interrupts

if TYPE_CHECKING:
    from trainer.data.chat import ChatPrompt
    from trainer.generation.generator import Generator
DEFAULT_ANSWER_TOKENS = 1024
# Slots of prompts are powers of two from here on, so that few lengths of a conversation are compiled.
LEAST_SLOTS = 256
EXIT = "/exit"
RESET = "/reset"
INTRODUCTION = f"Ctrl-D or {EXIT} ends, {RESET} starts again, Ctrl-C stops an answer"
PROMPT = "> "


@dataclass(frozen=True)
class ChatResult:
    """A conversation with a model.

    Attributes:
        messages: Its messages, with the answers of the model.
        num_tokens: Tokens of all answers, also of stopped ones and of those before a reset.
        mesh: Mesh of the devices. None means one device.
        dtype: Dtype of the computation.
        seconds: Duration of the conversation in seconds.
    """

    messages: tuple[JsonObject, ...]
    num_tokens: int
    mesh: str | None
    dtype: str
    seconds: float


class ChatObserver(RunObserver, Protocol):
    """Observer that shows the answers of a conversation."""

    def stream_line(self) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context with a function that shows the next piece of an answer."""
        ...


class _AnswerStoppedError(Exception):
    """A signal stopped an answer."""


@dataclass(slots=True)
class _Chat:
    """A conversation with a model.

    Attributes:
        model: The model and its tokenizer.
        generator: Generates the answers.
        observer: Shows answers and notes.
        tools: Schemas of the tools that the assistant may call.
        first_messages: Messages before the first turn, e.g. of the system.
        shows_answers: Whether answers are printed while they are generated.
        messages: The conversation so far.
        turn: Number of the next answer. Random draws depend on it.
        num_tokens: Tokens of all answers.
    """

    model: GenerationModel
    generator: Generator
    observer: ChatObserver
    tools: list[JsonObject] | None
    first_messages: list[JsonObject]
    shows_answers: bool
    messages: list[JsonObject] = field(default_factory=list)
    turn: int = 0
    num_tokens: int = 0

    def reset(self) -> None:
        """Forget all turns."""
        self.messages = [*self.first_messages]

    def answer(self, line: str) -> None:
        """Generate the answer to a turn of the user, and append both to the conversation.

        An answer that Ctrl-C stops keeps the text so far. Without text, the turn is dropped.

        Raises:
            PrepError: The chat template rejects the messages, or they exceed the positions of the model.
            KeyboardInterrupt: Ctrl-C arrived twice.
        """
        messages: list[JsonObject] = [*self.messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        is_interrupted = False

        def interrupt() -> None:
            nonlocal is_interrupted
            if is_interrupted:
                raise KeyboardInterrupt
            is_interrupted = True

        with handle_interrupts(interrupt), self._open_answer() as write:

            def show(piece: str) -> None:
                pieces.append(piece)
                write(piece)
                if is_interrupted:
                    raise _AnswerStoppedError

            try:
                self._generate(messages, show)
            except _AnswerStoppedError:
                self.observer.note("stopped")
        if pieces:
            self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    @contextmanager
    def _open_answer(self) -> Iterator[Callable[[str], None]]:
        if not self.shows_answers:
            yield lambda piece: None
            return
        with self.observer.stream_line() as write:
            yield write

    def _generate(self, messages: Sequence[JsonObject], show: Callable[[str], None]) -> None:
        """Generate an answer, and show each piece of its text."""
        from trainer.data.chat import ChatPrompt
        from trainer.data.incremental_decoder import IncrementalDecoder
        from trainer.generation.generator import max_fitting_new_tokens

        assert self.model.tokenizer is not None
        prompts = self.model.encode([ChatPrompt(messages, self.tools)])
        inputs = prompts.batch(0, 1)
        num_fitting = max_fitting_new_tokens(inputs[0], self.model.model)
        if num_fitting is not None and num_fitting < 1:
            positions = self.model.model.arch_config.max_positions
            raise usage_error(
                f"the conversation has {len(inputs[0][0]):,} tokens",
                f"the model has {positions:,} positions",
                f"`{RESET}` starts a new one",
            )
        self.model.note_long_text("the conversation has", len(inputs[0][0]), self.observer)
        codec = self.model.tokenizer.codec
        decoder = IncrementalDecoder(codec.decode, codec.token, prompts.preceding_ids()[0])

        def push(new: list[list[int]]) -> None:
            self.num_tokens += len(new[0])
            show(decoder.push(new[0]))

        self.turn += 1
        self.generator.generate(
            *inputs,
            first_row=self.turn - 1,
            min_slots=max(LEAST_SLOTS, 1 << (len(inputs[0][0]) - 1).bit_length()),
            max_new_tokens=num_fitting,
            ends_with_stop=self.model.stop_finders(prompts),
            on_tokens=push,
        )
        show(decoder.finish())


def chat(
    checkpoint: PathLike | None,
    *,
    system: str | None,
    observer: ChatObserver,
    shows_answers: bool,
    options: GenerateOptions,
) -> ChatResult:
    """Read turns from stdin, and answer each of them with a model.

    Raises:
        UsageError: An option is invalid or has no effect.
        PrepError: The checkpoint, its tokenizer or the devices cannot be used. Without a terminal also an answer
            that cannot be generated.
    """
    started_s = time.monotonic()
    options = cast(GenerateOptions, with_defaults(GenerateOptions, options))
    if options["prompts_file"] is not None:
        raise _prompt_error()
    if options["mesh"] is not None:
        address = process_address(ProcessSettings(), os.environ)
        if address is not None and address.count > 1:
            raise usage_error(
                "a chat has one process", f"this job has {address.count}", "start one process"
            )
    common = common_options(checkpoint, None, options)
    prepare_jax(observer)
    from trainer.distributed.sharding import catch_out_of_memory

    tools = read_tools(options["tools"])
    first_messages: list[JsonObject] = []
    if system is not None:
        first_messages.append({"role": "system", "content": system})
    with catch_out_of_memory(OUT_OF_MEMORY_HINT):
        with open_generation_model(common, options, observer, needs_tokenizer=True) as model:
            max_new_tokens = options["max_new_tokens"] or DEFAULT_ANSWER_TOKENS
            if model.model.arch_config.has_limited_positions:
                max_new_tokens = min(max_new_tokens, model.model.arch_config.max_positions)
            config = model.generation_config(options, max_new_tokens)
            model.note_doubtful_inputs(0, observer)
            # A missing or invalid template is reported before the weights are loaded.
            model.encode([_first_prompt(first_messages, tools)])
            generator = model.build_generator(options["dtype"], config, observer)
        state = _Chat(model, generator, observer, tools, first_messages, shows_answers)
        state.reset()
        _answer_turns(state)
    sharding = generator.forward_config.sharding
    return ChatResult(
        messages=tuple(state.messages),
        num_tokens=state.num_tokens,
        mesh=str(sharding.mesh) if sharding.mesh else None,
        dtype=generator.forward_config.dtype,
        seconds=time.monotonic() - started_s,
    )


def _first_prompt(
    first_messages: Sequence[JsonObject], tools: list[JsonObject] | None
) -> ChatPrompt:
    """Return the prompt of a conversation with one short turn."""
    from trainer.data.chat import ChatPrompt

    return ChatPrompt([*first_messages, {"role": "user", "content": "Hi"}], tools)


def check_chat_options(*, chat: bool, system: str | None, has_prompts: bool) -> None:
    """Raise UsageError for a chat with prompts, and for a message of the system without a chat."""
    if not chat:
        why = "it begins a conversation in the terminal"
        reject_without(Option("system"), system, Option("chat"), why)
    elif has_prompts:
        raise _prompt_error()


def _prompt_error() -> PrepError:
    return usage_error(
        text("{} takes no prompts", Option("chat")),
        "it reads the turns of the user from the terminal or a pipe",
        text("remove {}, or the prompts", Option("chat")),
    )


def _answer_turns(chat_state: _Chat) -> None:
    """Answer turns until their end."""
    observer = chat_state.observer
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        observer.note(INTRODUCTION)
    while (line := _read_turn(observer, is_terminal=is_terminal)) is not None:
        if line == EXIT:
            return
        if line == RESET:
            chat_state.reset()
            observer.note("the conversation starts again")
        elif line:
            try:
                chat_state.answer(line)
            except PrepError as error:
                if not is_terminal:
                    raise
                # A person may go on, e.g. with another turn or from the start.
                parts = (
                    render_text(part, TERMINAL) for part in (error.what, error.why, error.hint)
                )
                observer.warn(" - ".join(part for part in parts if part))
    observer.note(
        f"{count_text(chat_state.num_tokens, 'token')} in {count_text(chat_state.turn, 'answer')}"
    )


def _read_turn(observer: ChatObserver, *, is_terminal: bool) -> str | None:
    """Return the next line without spaces around it. None at the end of the input.

    On a terminal, Ctrl-C drops the line, and the second one in sequence ends the command.
    """
    if not is_terminal:
        return _read_line()
    with handle_interrupts(_interrupt):
        try:
            return _read_line_from_terminal()
        except KeyboardInterrupt:
            observer.note(f"\n{INTRODUCTION}")
        return _read_line_from_terminal()


def _read_line_from_terminal() -> str | None:
    """Read a line with the editing of readline, if stdout is the terminal too."""
    if not sys.stdout.isatty():
        return _read_line()
    with suppress(ImportError):
        # Its import gives `input` an editable line, and lines longer than the 4,095 bytes of the kernel's.
        import readline  # noqa: F401
    try:
        return input(PROMPT).strip()
    except EOFError:
        sys.stdout.write("\n")
        return None
    except UnicodeDecodeError as error:
        raise _encoding_error(error) from error


def _read_line() -> str | None:
    """Read a line of stdin."""
    try:
        line = sys.stdin.readline(MAX_PROMPTS_NBYTES)
    except UnicodeDecodeError as error:
        raise _encoding_error(error) from error
    if not line:
        return None
    return line.strip()


def _encoding_error(error: UnicodeDecodeError) -> PrepError:
    return PrepError("standard input is not UTF-8 text", str(error), "convert it to UTF-8")


def _interrupt() -> None:
    raise KeyboardInterrupt
