"""The chat template of a tokenizer and its special tokens."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import xxhash

from prepcli.core.errors import Key, PrepError, Text, text, usage_error
from prepcli.core.json_values import JsonValue
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
    """A Jinja template that renders the messages of a conversation as a text.

    Attributes:
        file: File of the template, for error messages.
        text: The template.
        special_tokens: Names and texts of special tokens, variables of the template such as
            `bos_token`.
        tool_text: Template of conversations with tools. None if `text` is for all.
        arguments: Other variables of the template, a JSON object.
        date: Date that `strftime_now` writes. None makes that an error.
    """

    file: str
    text: str
    special_tokens: tuple[tuple[str, str], ...]
    tool_text: str | None = None
    arguments: str = "{}"
    date: datetime.date | None = None

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
    """Load the chat template of a tokenizer.

    Args:
        tokenizer: A tokenizer.json, or a folder that contains one.
        hint: What to do without a template.

    Returns:
        The template in `chat_template.jinja`, else the default one in `tokenizer_config.json`. With it the
        template of conversations with tools, if the tokenizer has one.

    Raises:
        PrepError: There is no template, or a file is invalid.
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

    Args:
        data: The table `[data]`.
        tokenizer: A tokenizer.json, or a folder that contains one.

    Raises:
        PrepError: There is no template, or a file is invalid.
        UsageError: The date of the recipe does not exist.
    """
    if data.chat_template in (None, TRAINING):
        template = load_chat_template(tokenizer, hint=_missing_template_hint(data))
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


def _missing_template_hint(data: Data) -> Text:
    """Return the keys that read data with a tokenizer without a chat template, e.g. of a base model."""
    file = text("{} names one", Key("data.chat_template", TEMPLATE_FILE, is_override=True))
    if data.format != "alpaca":
        # Messages are no texts, so only a template can render them.
        return file
    fields = Key("data.fields", data.fields, is_override=True)
    plain = text("{} {}", Key("data.format", PLAIN, is_override=True), fields)
    return text("{}; {} reads the columns as plain texts", file, plain)


def load_special_tokens(tokenizer: Path) -> tuple[tuple[str, str], ...]:
    """Load the names and texts of a tokenizer's special tokens, such as `("bos_token", "<s>")`.

    Args:
        tokenizer: A tokenizer file, or a folder that contains one.

    Raises:
        PrepError: A file is invalid.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = read_settings(folder / CONFIG_FILE)
    return _special_tokens(read_settings(folder / SPECIAL_TOKENS_FILE) | config)


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


def _special_tokens(config: Mapping[str, JsonValue]) -> tuple[tuple[str, str], ...]:
    """Return the special tokens of a config by name.

    A token is a text or an object, e.g. `"</s>"` or `{"content": "</s>", "lstrip": false}`.
    """
    tokens = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in sorted(config.items())
        if key.endswith("_token")
    }
    return tuple((key, text) for key, text in tokens.items() if isinstance(text, str))
