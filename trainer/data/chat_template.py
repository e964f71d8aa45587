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
    """

    file: str
    text: str
    special_tokens: tuple[tuple[str, str], ...]

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
        return xxhash.xxh3_128_hexdigest(json.dumps([self.text, self.special_tokens]).encode())


def load_chat_template(tokenizer: Path) -> ChatTemplate:
    """Load the chat template of a tokenizer.

    Args:
        tokenizer: A tokenizer.json, or a folder that contains one.

    Returns:
        The template in `chat_template.jinja`, else the default one in `tokenizer_config.json`.

    Raises:
        PrepError: There is no template, or a file is invalid.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = read_settings(folder / CONFIG_FILE)
    file = folder / TEMPLATE_FILE
    text = read_text_file(file, MAX_TEMPLATE_NBYTES)
    if text is None:
        text = _default_template(config.get("chat_template"))
        file = folder / CONFIG_FILE
    if text is None:
        why = f"looked for {TEMPLATE_FILE}, and for `chat_template` in {CONFIG_FILE}"
        raise PrepError(
            f"the tokenizer in {folder} has no chat template",
            why,
            f"put a {TEMPLATE_FILE} into the folder",
        )
    return ChatTemplate(str(file), text, load_special_tokens(tokenizer))


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


def _default_template(value: Any) -> str | None:
    """Return the template in a tokenizer's config: a text, or the one named `default` in a list."""
    if isinstance(value, list):
        entries = [entry for entry in cast(list[Any], value) if isinstance(entry, dict)]
        value = next(
            (entry.get("template") for entry in entries if entry.get("name") == "default"), None
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
