"""The chat template of a tokenizer, and the texts of conversations that it renders in a child process."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import xxhash

from prepcli.core.errors import Key, PrepError, Text, text, usage_error
from prepcli.core.json_values import JsonObject, JsonValue
from prepcli.core.sandbox import MIB, Limits, Sandbox, SandboxError, SandboxLimitError
from trainer.data.conversations import ASSISTANT
from trainer.data.readers.reader import RecordLimitError
from trainer.data.tokenizer import read_settings, read_text_file
from trainer.recipe.data_table import Data
from trainer.recipe.text_fields import PLAIN, TRAINING

TEMPLATE_FILE = "chat_template.jinja"
# Names of the template without and with tools, in a tokenizer with several.
DEFAULT_NAME = "default"
TOOL_NAME = "tool_use"
TOOL_TEMPLATE_FILE = f"additional_chat_templates/{TOOL_NAME}.jinja"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
MAX_TEMPLATE_NBYTES = 4_000_000
FOLDER_HINT = Text(f"put a {TEMPLATE_FILE} into the folder")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template that renders the messages of a conversation as a text."""

    file: str  # File of the template, for error messages
    text: str  # The template
    # Names and texts of special tokens, variables of the template such as `bos_token`
    special_tokens: tuple[tuple[str, str], ...]
    tool_text: str | None = None  # Template of conversations with tools. None if `text` is for all.
    arguments: str = "{}"  # Other variables of the template, a JSON object
    date: datetime.date | None = None  # Date that `strftime_now` writes. None makes that an error.

    @property
    def bos_text(self) -> str:
        """Text of the begin token that the template may write. Empty if it never writes one."""
        text = dict(self.special_tokens).get("bos_token", "")
        if "bos_token" in self.text or text in self.text:
            return text
        return ""

    @property
    def identity(self) -> str:
        """Digest of the template and its variables."""
        inputs: list[Any] = [self.text, self.special_tokens]
        others = [self.tool_text, json.loads(self.arguments), self.date and self.date.isoformat()]
        # Templates without these values keep the digest of earlier versions.
        if any(others):
            inputs += others
        return xxhash.xxh3_128_hexdigest(json.dumps(inputs).encode())


def load_chat_template(tokenizer: Path, *, hint: Text = FOLDER_HINT) -> ChatTemplate:
    """Load the chat template of a tokenizer, with the one of conversations with tools if it has one.

    It is in `chat_template.jinja`, else the default one in `tokenizer_config.json`.

    Raises:
        PrepError: There is no template, which `hint` is for, or a file is invalid.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = read_settings(folder / CONFIG_FILE)
    file = folder / TEMPLATE_FILE
    text = read_text_file(file, MAX_TEMPLATE_NBYTES)
    tool_text = read_text_file(folder / TOOL_TEMPLATE_FILE, MAX_TEMPLATE_NBYTES)
    if text is None:
        text = _named_template(config.get("chat_template"), DEFAULT_NAME)
        tool_text = tool_text or _named_template(config.get("chat_template"), TOOL_NAME)
        if tool_text == text:
            tool_text = None
        file = folder / CONFIG_FILE
    if text is None:
        why = f"looked for {TEMPLATE_FILE}, and for `chat_template` in {CONFIG_FILE}"
        raise PrepError(
            f"the tokenizer in {folder} has no chat template",
            why,
            hint,
        )
    return ChatTemplate(str(file), text, load_special_tokens(tokenizer), tool_text)


def recipe_template(data: Data, tokenizer: Path) -> ChatTemplate:
    """Load the chat template of a recipe's data.

    Raises:
        PrepError: There is no template, or a file is invalid.
        UsageError: The date of the recipe does not exist.
    """
    if data.chat_template in (None, TRAINING):
        # A tokenizer may have no template, e.g. of a base model.
        hint = text("{} names one", Key("data.chat_template", TEMPLATE_FILE, is_override=True))
        # Messages are no texts, so only a template can render them.
        if data.format == "alpaca":
            fields = Key("data.fields", data.fields, is_override=True)
            plain = text("{} {}", Key("data.format", PLAIN, is_override=True), fields)
            hint = text("{}; {} reads the columns as plain texts", hint, plain)
        template = load_chat_template(tokenizer, hint=hint)
    else:
        template_text = read_text_file(Path(data.chat_template), MAX_TEMPLATE_NBYTES)
        if template_text is None:
            key = Key("data.chat_template", data.chat_template)
            raise usage_error(
                text("{}: there is no such file", key), "", f'a Jinja file, or "{TRAINING}"'
            )
        special_tokens = load_special_tokens(tokenizer)
        template = ChatTemplate(data.chat_template, template_text, special_tokens)
    date: datetime.date | None = None
    if data.template_date is not None:
        try:
            date = datetime.date.fromisoformat(data.template_date)
        except ValueError as error:
            what = text("{}", Key("data.template_date", data.template_date))
            raise usage_error(what, str(error), "year-month-day") from None
    return replace(template, arguments=json.dumps(data.template_args or {}), date=date)


def load_special_tokens(tokenizer: Path) -> tuple[tuple[str, str], ...]:
    """Load the names and texts of a tokenizer's special tokens, e.g. `("bos_token", "<s>")`."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = read_settings(folder / CONFIG_FILE)
    settings = read_settings(folder / SPECIAL_TOKENS_FILE) | config
    tokens: list[tuple[str, str]] = []
    for key, value in sorted(settings.items()):
        # A token is a text or an object, e.g. `"</s>"` or `{"content": "</s>", "lstrip": false}`.
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens.append((key, content))
    return tuple(tokens)


def _named_template(value: Any, name: str) -> str | None:
    """Return the template in a tokenizer's config: a text, or the one of a name in a list."""
    if isinstance(value, list):
        entries = [entry for entry in cast(list[Any], value) if isinstance(entry, dict)]
        value = next(
            (entry.get("template") for entry in entries if entry.get("name") == name), None
        )
    if isinstance(value, str):
        return value
    return None


START_MARK = "\ufdd0"
END_MARK = "\ufdd1"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Limits of a rendering: a constant part, and a part that grows with the characters of the messages. A template may
# repeat a long conversation, and a short one gives no template a reason to make megabytes.
BASE_CHARS = MIB
CHARS_PER_CHAR = 16
BASE_MEMORY_NBYTES = 512 * MIB
MEMORY_PER_CHAR = 64
BASE_CPU_S = 20
CHARS_PER_CPU_S = 50_000
# Variables that each rendering sets.
CONVERSATION_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
# The variable with the tools in a template.
TOOLS_VARIABLE = re.compile(r"\btools\b")
# For a part of a conversation that a template leaves out.
HIDDEN_HINT = "put a chat_template.jinja that shows it next to the tokenizer, or remove the message"
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The inputs of a rendering."""

    messages: Sequence[JsonObject]  # The messages, in order
    place: str  # File and line, for error messages. Empty for a conversation that prep makes.
    # Schemas of the tools that the model may call. None without any.
    tools: Sequence[JsonValue] | None = None

    @property
    def num_chars(self) -> int:
        """Characters of the messages and tools as JSON."""
        return len(json.dumps([self.messages, self.tools], ensure_ascii=False))

    @property
    def assistant_indices(self) -> list[int]:
        """Indices of the messages of the assistant."""
        return [i for i, message in enumerate(self.messages) if message["role"] == ASSISTANT]

    def until(self, index: int) -> Conversation:
        """Return the conversation up to a message, with this message."""
        return replace(self, messages=self.messages[: index + 1])


class ChatRenderer:
    """A compiled chat template.

    The time of day is not available to it: the ids of a conversation do not depend on the day. The recipe may
    give it a fixed date.

    Attributes:
        file: File of the template.
        takes_tools: Whether the template uses the tools of a conversation.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Compile a template.

        Raises:
            PrepError: The template is not valid Jinja.
        """
        self.file = template.file
        variables: Mapping[str, JsonValue] = {
            **dict(template.special_tokens),
            **json.loads(template.arguments),
        }
        for name in CONVERSATION_VARIABLES:
            if name in variables:
                what = f"`{name}` is not a variable that can be passed to a chat template"
                hint = "remove it from the template variables"
                raise PrepError(what, "each conversation sets it", hint)
        texts = [template.text]
        if template.tool_text is not None:
            texts.append(template.tool_text)
        self.takes_tools = any(TOOLS_VARIABLE.search(text) for text in texts)
        self._have_markers = [GENERATION.search(text) is not None for text in texts]
        time = template.date and template.date.isoformat()
        name = "trainer.data.chat_environment:TemplateRenderer"
        self._templates = Sandbox(
            name, (texts, variables, (START_MARK, END_MARK), time), limits=_limits(0)
        )
        try:
            self._templates.start()
        except SandboxError as error:
            what = f"{self.file} is not a valid chat template"
            raise PrepError(what, _error_text(error), "correct the template") from None

    def render(
        self, conversation: Conversation, *, add_generation_prompt: bool = False
    ) -> tuple[str, Spans | None]:
        """Render a conversation.

        Args:
            conversation: The conversation. Its texts are without U+FDD0 and U+FDD1.
            add_generation_prompt: End with the text that starts a turn of the assistant.

        Returns:
            The text, and the start and end of each part marked as generated by the template. The
            second value is None for a template without markers.

        Raises:
            PrepError: The template fails or rejects the messages.
        """
        index = 0 if conversation.tools is None else -1
        rendered = self._render(conversation, index, add_generation_prompt=add_generation_prompt)
        if self._have_markers[index]:
            return _split_marks(rendered)
        return rendered, None

    def probe(self, messages: Sequence[JsonObject]) -> str | None:
        """Return the text of a few short messages, or None if the template fails.

        Raises:
            RecordLimitError: The template takes too much memory or time.
        """
        try:
            rendered, _ = self.render(Conversation(messages, ""))
        except RecordLimitError:
            raise
        except PrepError:
            return None
        return rendered

    def _render(
        self, conversation: Conversation, index: int, *, add_generation_prompt: bool
    ) -> str:
        content = json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)
        max_chars = BASE_CHARS + CHARS_PER_CHAR * len(content)
        # A role that is no UTF-8 text is probed before the conversation is refused.
        data = content.encode("utf-8", "surrogatepass")
        arguments = (index, data, add_generation_prompt, max_chars)
        try:
            (rendered,) = self._templates.call("render", *arguments, limits=_limits(len(content)))
        except SandboxError as error:
            what = f"{self.file} cannot render the messages"
            if conversation.place:
                what = f"{conversation.place}: {what}"
            error_type = PrepError
            if isinstance(error, SandboxLimitError):
                error_type = RecordLimitError
            hint = "correct the messages or the template"
            if "strftime_now" in str(error):
                key = Key("data.template_date", "2026-01-31", is_override=True)
                hint = text("{} is the date that it writes", key)
            raise error_type(what, _error_text(error), hint) from None
        return rendered


def _limits(num_chars: int) -> Limits:
    """Return the limits of a rendering of messages with `num_chars` characters."""
    return Limits(
        BASE_MEMORY_NBYTES + MEMORY_PER_CHAR * num_chars, BASE_CPU_S + num_chars // CHARS_PER_CPU_S
    )


def _error_text(error: SandboxError) -> str:
    """Return the cause of a Jinja or Python error, for readers who know neither."""
    if error.type_name == "builtins.RecursionError":
        return "it is nested too deeply, or its macros call each other without end"
    return f"{str(error) or error.type_name.rpartition('.')[2]:.300}"


def _split_marks(text: str) -> tuple[str, Spans]:
    """Return a text without its marks, and the parts between them."""
    # E.g. with < and > as the marks: "a<bc>d" -> "abcd" and the span (1, 3). Parts at odd positions
    # of the split are between a start and an end mark.
    parts = []
    spans = []
    length = 0
    for index, part in enumerate(re.split(f"[{START_MARK}{END_MARK}]", text)):
        if index % 2:
            spans.append((length, length + len(part)))
        parts.append(part)
        length += len(part)
    return "".join(parts), tuple(spans)
