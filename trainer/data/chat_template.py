"""The chat template of a tokenizer: which file has it, and the special tokens that it may use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash

from trainer.data.files import io_error
from trainer.files.reading import read_regular_file
from trainer.models.errors import PrepError

TEMPLATE_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE = (
    "chat_template.jinja",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
MAX_TEMPLATE_NBYTES = 4_000_000
MAX_SETTINGS_NBYTES = 64_000_000  # the added tokens of some tokenizers take megabytes


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template that renders the messages of a conversation as a text.

    Attributes:
        file: The file that has it, for error messages.
        text: The template.
        special_tokens: Names and texts of special tokens, such as `bos_token`, which are variables of the template.
    """

    file: str
    text: str
    special_tokens: tuple[tuple[str, str], ...]

    @property
    def identity(self) -> str:
        """Digest of the template and its variables."""
        return xxhash.xxh3_128_hexdigest(json.dumps([self.text, self.special_tokens]).encode())


def load_chat_template(tokenizer: Path) -> ChatTemplate:
    """Load the chat template beside a tokenizer.

    Args:
        tokenizer: A tokenizer.json, or a folder that contains one.

    Returns:
        The template in `chat_template.jinja`, else the default one in `tokenizer_config.json`.

    Raises:
        PrepError: There is no template, or a file is invalid.
    """
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    config = read_settings(folder / CONFIG_FILE)
    special_tokens = _special_tokens(read_settings(folder / SPECIAL_TOKENS_FILE) | config)
    file = folder / TEMPLATE_FILE
    text = _read_text(file, MAX_TEMPLATE_NBYTES)
    if text is None:
        text, file = _default_template(config.get("chat_template")), folder / CONFIG_FILE
    if text is None:
        why = f"looked for {TEMPLATE_FILE}, and for `chat_template` in {CONFIG_FILE}"
        raise PrepError(
            f"the tokenizer in {folder} has no chat template", why, f"put a {TEMPLATE_FILE} into the folder"
        )
    return ChatTemplate(str(file), text, special_tokens)


def _read_text(path: Path, max_nbytes: int) -> str | None:
    """Return the text of a file; None if there is none."""
    try:
        return read_regular_file(path, max_nbytes).decode()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise io_error(path, error) from error
    except UnicodeDecodeError as error:
        raise PrepError(f"{path} is not UTF-8", str(error)) from None


def read_settings(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file beside a tokenizer; empty if there is none.

    Raises:
        PrepError: The file is not a regular file, is too large, or is not a JSON object.
    """
    text = _read_text(path, MAX_SETTINGS_NBYTES)
    try:
        value = {} if text is None else json.loads(text)
    except ValueError as error:
        raise PrepError(f"{path} is not JSON", str(error)) from None
    except RecursionError:
        raise PrepError(f"{path} is not JSON", "it is nested too deeply") from None
    if not isinstance(value, dict):
        raise PrepError(f"{path} is not a JSON object", f"it is {value!r:.60}")
    return cast(dict[str, Any], value)


def _default_template(value: Any) -> str | None:
    """Return the template in a tokenizer's config: a text, or the one named `default` in a list."""
    if isinstance(value, list):
        entries = [entry for entry in cast(list[Any], value) if isinstance(entry, dict)]
        value = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the special tokens of a config; each is a text, or an object with its text as `content`."""
    tokens = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in sorted(config.items())
        if key.endswith("_token")
    }
    return tuple((key, text) for key, text in tokens.items() if isinstance(text, str))
