"""Hints with the recipe keys for the columns of a data file, from the names that public datasets give them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trainer.models.errors import Key, Text, text

# Columns of conversations, of prompts, of answers and of plain text, each in the order in which they are preferred.
CONVERSATIONS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question", "query", "input", "article", "document", "source")
ANSWERS = (
    *("completion", "response", "output", "answer", "chosen", "target", "summary", "highlights"),
    "label",
)
TEXTS = ("text", "content", "body", "code", "document", "article", "markdown")
# Keys of a turn as ShareGPT names them.
SHAREGPT_KEYS = ("from", "value")
# Column with a context that follows the prompt, as Alpaca's `input` follows its `instruction`.
CONTEXTS = {"instruction": "input", "question": "context"}


def columns_hint(values: Mapping[str, object], default: Text) -> Text:
    """Return the recipe keys that read the columns of a record, or a default for columns of unknown names.

    >>> columns_hint({"prompt": "a", "response": "b"}, Text("?")) == "`--set data.fields='[prompt], response'`"
    True

    Args:
        values: Columns of the record.
        default: Hint for other columns.
    """
    columns = values.keys()
    if name := _first(CONVERSATIONS, columns):
        keys = text("{}", Key("data.format", "chat", is_override=True))
        if name != CONVERSATIONS[0]:
            keys = text("{} {}", keys, _fields_key(name))
        if needed := turns_hint(values[name]):
            return text("{}, then {}", needed, keys)
        return keys
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


def turns_hint(turns: object) -> str:
    """Return how to change turns with the keys of ShareGPT. Empty for other turns.

    Args:
        turns: Value of a column of conversations.
    """
    turn = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(turn, dict) or not {*SHAREGPT_KEYS} <= {*turn}:
        return ""
    return (
        "rename `from` to `role` and `value` to `content` in the data, with `human` as `user` "
        "and `gpt` as `assistant`"
    )


def _fields_key(value: str) -> Key:
    return Key("data.fields", value, is_override=True)


def _first(names: Collection[str], columns: Collection[str]) -> str:
    """Return the first name that is a column. Empty if none is."""
    return next((name for name in names if name in columns), "")
