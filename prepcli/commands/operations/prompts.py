"""Prompts from a file or stdin."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.core.errors import PrepError
from prepcli.core.json_values import is_json_list, load_json
from prepcli.stores.files import io_error, read_file_or_pipe

if TYPE_CHECKING:
    from trainer.data.chat_prompts import Prompt

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
    if file_name != STDIN:
        # utf-8-sig drops the byte order mark that some editors write at the start of a file.
        return read_file_or_pipe(Path(file_name), MAX_PROMPTS_NBYTES).decode("utf-8-sig")
    # One character more than the limit, to notice that there are more.
    text = sys.stdin.read(MAX_PROMPTS_NBYTES + 1)
    if len(text) > MAX_PROMPTS_NBYTES:
        raise PrepError(
            "the prompts are too large",
            f"standard input has more than {MAX_PROMPTS_NBYTES:,} characters",
            "pass fewer prompts at a time",
        )
    return text


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
                from trainer.data.chat_prompts import chat_prompt

                return chat_prompt(value[key], value.get("tools"), f"{file_name}:{line_number}")
    raise PrepError(
        f"line {line_number} of {file_name} has no prompt",
        f"it must be an object with a string `{PROMPT_KEYS[0]}` or `{PROMPT_KEYS[1]}`, or a list `{CHAT_KEYS[0]}`",
        """`{"prompt": "TEXT"}`""",
    )
