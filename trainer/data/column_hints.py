"""Hints with the recipe keys for the columns of a data file, from the names that public datasets give them."""

from __future__ import annotations

from collections.abc import Collection

from trainer.models.errors import Key, Text, text

# Columns of conversations, of prompts, of answers and of plain text, each in the order in which they are preferred.
CONVERSATIONS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question", "query", "input", "article", "document", "source")
ANSWERS = (
    *("completion", "response", "output", "answer", "chosen", "target", "summary", "highlights"),
    "label",
)
TEXTS = ("text", "content", "body", "code", "document", "article", "markdown")
# Column with a context that follows the prompt, as Alpaca's `input` follows its `instruction`.
CONTEXTS = {"instruction": "input", "question": "context"}


def columns_hint(columns: Collection[str], default: Text) -> Text:
    """Return the recipe keys that read the columns of a record, or a default for columns of unknown names.

    >>> columns_hint(["prompt", "response"], Text("?")) == "`--set data.fields='[prompt], response'`"
    True

    Args:
        columns: Columns of the record.
        default: Hint for other columns.
    """
    for name in CONVERSATIONS:
        if name in columns:
            chat = Key("data.format", "chat", is_override=True)
            if name == CONVERSATIONS[0]:
                return text("{}", chat)
            return text("{} {}, for turns with `role` and `content`", chat, _fields_key(name))
    prompt = _first(PROMPTS, columns)
    answer = _first(ANSWERS, columns)
    if prompt and answer:
        context = CONTEXTS.get(prompt)
        if context in columns:
            prompt = f"{prompt}+{context}"
        return text("{}", _fields_key(f"[{prompt}], {answer}"))
    if name := _first(TEXTS, columns):
        return text("{}", _fields_key(name))
    return default


def _fields_key(value: str) -> Key:
    return Key("data.fields", value, is_override=True)


def _first(names: Collection[str], columns: Collection[str]) -> str:
    """Return the first name that is a column. Empty if none is."""
    return next((name for name in names if name in columns), "")
