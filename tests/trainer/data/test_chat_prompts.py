"""Prompts of generation have the ids of transformers."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from prepcli.core.errors import PrepError
from tests.trainer.data.test_chat import (
    CONVERSATIONS,
    GEMMA,
    LLAMA3,
    make_messages,
    write_tokenizer,
)
from trainer.data.chat import ChatPrompt, PromptEncoder, chat_prompt
from trainer.data.conversations import tool_schemas
from trainer.data.tokenizer import load_tokenizer

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_TOOLS = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ strftime_now('%Y') }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% if enable_thinking is false %}"
    "<think></think>{% endif %}{% endif %}"
)


def add_bos_to_prompts(folder: Path) -> None:
    """Let the tokenizer put `<s>` before a prompt, as those of Llama and Gemma do."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("template", [LLAMA3, GEMMA, WITH_TOOLS], ids=["llama3", "gemma", "tools"])
def test_conversation_has_the_ids_of_transformers(tmp_path: Path, template: str):
    transformers = pytest.importorskip("transformers")
    add_bos_to_prompts(write_tokenizer(tmp_path, template))
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>"
    )
    args: Any = {"enable_thinking": False}
    encoder = PromptEncoder(load_tokenizer(tmp_path), template_args=args, now=datetime.now())
    for turns in CONVERSATIONS:
        for tools in (None, [TOOL]):
            messages: Any = make_messages(turns)
            if template is WITH_TOOLS:
                call = {"function": {"name": "add", "arguments": {"a": 1}}}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "content": "3", "name": None})
            expected = reference.apply_chat_template(
                messages,
                tools=tools,
                chat_template=template,
                add_generation_prompt=True,
                return_dict=False,
                **args,
            )
            encoded = encoder.encode(chat_prompt(messages, tools, "a.jsonl:1"))
            assert encoded.ids == expected


def test_begin_token_is_not_doubled(tmp_path: Path):
    add_bos_to_prompts(write_tokenizer(tmp_path, LLAMA3))
    encoder = PromptEncoder(load_tokenizer(tmp_path))
    chat = encoder.encode(ChatPrompt([{"role": "user", "content": "Hello"}]))
    bos = encoder.tokenizer.codec.token_id("<s>")
    assert [token for token in chat.ids if token == bos] == [bos]
    # The same text as a plain prompt: the tokenizer adds the token unless the text spells it out.
    assert encoder.encode(chat.text).ids == chat.ids
    assert encoder.encode("Hello").ids[0] == bos
    assert encoder.encode("Hello").ids[1] != bos


@pytest.mark.parametrize("tools", ["[{]", "3", {"a": 1}, [1]], ids=str)
def test_invalid_tools_are_an_error(tools: Any):
    with pytest.raises(PrepError, match=r"a\.jsonl:1"):
        tool_schemas(tools, "a.jsonl:1")


@pytest.mark.parametrize("messages", [[], [{"content": "a"}], "hi"], ids=str)
def test_invalid_messages_are_an_error(messages: Any):
    with pytest.raises(PrepError, match=r"a\.jsonl:1"):
        chat_prompt(messages, None, "a.jsonl:1")
