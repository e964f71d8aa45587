"""Conversations of twelve families of templates: the ids of transformers, and the masks of texts marked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.chat_masks import (
    CONVERSATIONS,
    MARKED_TEXTS,
    TokenizerOfBytes,
    compare,
    read_marked_texts,
    without_markers,
)
from tests.trainer.data.chat_templates import (
    CHATML,
    END_OF_TEXT,
    GEMMA,
    LAST_REASONS,
    LAST_RETURNS,
    LLAMA3,
    NEXT_ROLE_ENDS,
    OPEN_THINKING,
    PYTHON_CALLS,
    SYSTEM_IN_LAST,
    TEXT_ARGUMENTS,
)
from tests.trainer.data.test_chat import QWEN

MARKED_TEMPLATES = {
    "chatml": CHATML,
    "default_system": QWEN,
    "gemma": GEMMA,
    "llama3": LLAMA3,
    "python_calls": PYTHON_CALLS,
}
TEMPLATES = {
    "end_of_text": END_OF_TEXT,
    "last_reasons": LAST_REASONS,
    "last_returns": LAST_RETURNS,
    "next_role_ends": NEXT_ROLE_ENDS,
    "open_thinking": OPEN_THINKING,
    "system_in_last": SYSTEM_IN_LAST,
    "text_arguments": TEXT_ARGUMENTS,
    **{name: without_markers(text) for name, text in MARKED_TEMPLATES.items()},
}
HIDDEN = "the text that chat.jinja renders does not show the tool calls of message 2"
ALTERNATE = "refused: Conversation roles must alternate user/assistant/user/assistant/..."
# Conversations without a marked text, and why.
REFUSED = {
    ("chatml", "two calls"): f"refused: {HIDDEN}",
    ("default_system", "two calls"): f"refused: {HIDDEN}",
    ("end_of_text", "two calls"): f"refused: {HIDDEN}",
    ("gemma", "system"): "refused: System role not supported",
    ("gemma", "two calls"): ALTERNATE,
    ("last_returns", "two calls"): f"refused: {HIDDEN}",
    # transformers renders no call.
    ("llama3", "two calls"): f"error: {HIDDEN}",
    ("next_role_ends", "two calls"): f"error: {HIDDEN}",
    ("system_in_last", "two calls"): "refused: chat.jinja does not show messages of this role",
    # It needs a null content, which transformers leaves out. test_chat_turns has the text.
    (
        "text_arguments",
        "two calls",
    ): "only transformers refuses it: 'dict object' has no attribute 'content'",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerOfBytes:
    pytest.importorskip("transformers")
    return TokenizerOfBytes(tmp_path_factory.mktemp("bytes"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_masks_are_those_of_texts_marked_by_hand(name: str, tokenizer: TokenizerOfBytes):
    texts = read_marked_texts(MARKED_TEXTS / "own" / f"{name}.txt")
    for case, conversation in CONVERSATIONS.items():
        result = compare(tokenizer, TEMPLATES[name], conversation, expected=texts.get(case))
        assert (case, result) == (case, REFUSED.get((name, case), "equal"))
        assert (case in texts) == (result == "equal")


@pytest.mark.parametrize("name", MARKED_TEMPLATES)
def test_masks_are_those_of_the_markers(name: str, tokenizer: TokenizerOfBytes):
    for case, conversation in CONVERSATIONS.items():
        result = compare(tokenizer, MARKED_TEMPLATES[name], conversation)
        assert (case, result) == (case, REFUSED.get((name, case), "equal"))


def test_another_mask_or_text_is_noticed(tokenizer: TokenizerOfBytes):
    expected = "<|user|>\nHi<|assistant|>⟦\nHello!⟧"
    result = compare(tokenizer, NEXT_ROLE_ENDS, CONVERSATIONS["single turn"], expected=expected)
    assert result == r"other mask: '<|user|>\nHi<|assistant|>\n⟦Hello!⟧'"
    result = compare(tokenizer, CHATML, CONVERSATIONS["single turn"], expected=expected)
    assert result.startswith("other text: ")


def test_published_templates_have_marked_texts():
    files = list(Path(MARKED_TEXTS / "published").glob("*.txt"))
    assert len(files) == 12
    for file in files:
        assert read_marked_texts(file).keys() <= CONVERSATIONS.keys()
