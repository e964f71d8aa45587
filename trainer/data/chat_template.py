"""The chat template of a tokenizer and its special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash

from trainer.data.tokenizer import read_settings, read_text_file
from trainer.models.errors import PrepError
from trainer.models.json_types import JsonValue

TEMPLATE_FILE = "chat_template.jinja"
# Template of conversations with tools, beside the one of all others. Else an entry `tool_use` of the config.
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
MAX_TEMPLATE_NBYTES = 4_000_000


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template that renders the messages of a conversation as a text.

    Attributes:
        file: File of the template, for error messages.
        text: The template.
        special_tokens: Names and texts of special tokens, variables of the template such as
            `bos_token`.
        tool_text: The template of conversations with tools. None if `text` renders these too.
    """

    file: str
    text: str
    special_tokens: tuple[tuple[str, str], ...]
    tool_text: str | None = None

    @property
    def identity(self) -> str:
        """Digest of the templates and their variables."""
        parts: list[object] = [self.text, self.special_tokens]
        # Stores of tokens record the digest. Without the second template it stays as it was.
        if self.tool_text is not None:
            parts.append(self.tool_text)
        return xxhash.xxh3_128_hexdigest(json.dumps(parts).encode())


def load_chat_template(tokenizer: Path) -> ChatTemplate:
    """Load the chat template of a tokenizer.

    Args:
        tokenizer: A tokenizer.json, or a folder that contains one.

    Returns:
        The template in `chat_template.jinja`, else the default one in `tokenizer_config.json`, and the
        template `tool_use` if there is one.

    Raises:
        PrepError: There is no template, or a file is invalid.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = read_settings(folder / CONFIG_FILE)
    file = folder / TEMPLATE_FILE
    text = read_text_file(file, MAX_TEMPLATE_NBYTES)
    tool_text = read_text_file(folder / TOOL_TEMPLATE_FILE, MAX_TEMPLATE_NBYTES)
    if text is None:
        text = _named_template(config.get("chat_template"), "default")
        tool_text = tool_text or _named_template(config.get("chat_template"), "tool_use")
        file = folder / CONFIG_FILE
    if text is None:
        why = f"looked for {TEMPLATE_FILE}, and for `chat_template` in {CONFIG_FILE}"
        raise PrepError(
            f"the tokenizer in {folder} has no chat template",
            why,
            f"put a {TEMPLATE_FILE} into the folder",
        )
    if tool_text == text:
        tool_text = None
    return ChatTemplate(str(file), text, load_special_tokens(tokenizer), tool_text)


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
    """Return the template in a tokenizer's config: a text for any name, or the one of this name in a list."""
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
