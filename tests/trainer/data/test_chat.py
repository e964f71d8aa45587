"""Conversations: the ids and masks of transformers, prompts of generation, and errors that name the line."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from prepcli.core.errors import PrepError
from tests.helpers.chat_masks import without_markers
from tests.trainer.data.chat_templates import CHATML, GEMMA, LLAMA3
from trainer.data.chat import ChatPrompt, PromptEncoder, chat_prompt
from trainer.data.chat_forms import load_forms
from trainer.data.chat_template import load_chat_template
from trainer.data.conversations import tool_schemas
from trainer.data.encode import EncodedBatch, encode_batch, span_weights
from trainer.data.examples import ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.readers.reader import Record
from trainer.data.tokenizer import load_tokenizer

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA}

SPECIAL = (
    *(
        "<s>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    *("<start_of_turn>", "<end_of_turn>"),
)

CONVERSATIONS = [
    [("user", "Hello there"), ("assistant", "  Hi! It is 日本 time.\n")],
    [("user", "a\n"), ("assistant", "\n\nb"), ("user", "😀"), ("assistant", ""), ("user", "last")],
    [("user", "only a question")],
    [
        ("user", "x <s> y"),
        ("assistant", "the é"),
        ("user", ""),
        ("assistant", "the end <|im_end|>"),
    ],
]


def write_tokenizer(folder: Path, template: str, **config: Any) -> Path:
    """Write a tokenizer with special tokens and a chat template; return the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Hello there, it is the end of the time.\n\n" * 20], trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {
        "bos_token": "<s>",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": template,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def make_messages(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return turns as messages."""
    return [{"role": role, "content": content} for role, content in turns]


def encode_chat(folder: Path, messages: object, **settings: Any) -> EncodedBatch:
    """Return the tokens of a conversation."""
    all_settings = ExampleSettings(
        fields="messages", chat_template=load_chat_template(folder), add_eos=False, **settings
    )
    example = compile_fields(all_settings, vocab=300).build(
        Record({"messages": messages}, "a.jsonl:3", 1)
    )
    return encode_batch([example], load_tokenizer(folder))


@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_chat_has_the_ids_and_masks_of_transformers(
    tmp_path: Path, template: str, has_markers: bool
):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(write_tokenizer(tmp_path, template) / "tokenizer.json"), bos_token="<s>"
    )
    write_tokenizer(tmp_path, template if has_markers else without_markers(template))
    for turns in CONVERSATIONS:
        messages = make_messages(turns)
        expected = reference.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        document = encode_chat(tmp_path, messages)
        assert document.weights is not None
        assert document.ids[:].tolist() == expected["input_ids"]
        assert document.weights.tolist() == expected["assistant_masks"]


# As in Qwen2.5: a system prompt before the first message, which must exist.
QWEN = CHATML.replace(
    "{% for message in messages %}",
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}",
)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN], ids=["chatml", "llama3", "qwen"])
def test_conversation_may_begin_with_the_assistant(tmp_path: Path, template: str):
    transformers = pytest.importorskip("transformers")
    file = write_tokenizer(tmp_path, without_markers(template)) / "tokenizer.json"
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>")
    messages = make_messages([("assistant", "Hi!"), ("user", "a"), ("assistant", "bye")])
    expected = reference.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    document = encode_chat(tmp_path, messages)
    assert document.weights is not None
    assert document.ids[:].tolist() == expected["input_ids"]
    assert document.weights.tolist() == expected["assistant_masks"]


def test_first_turn_of_a_template_without_starts_has_loss(tmp_path: Path):
    template = "{% for message in messages %}{{ message['content'] + '<|im_end|>' }}{% endfor %}"
    folder = write_tokenizer(tmp_path, template)
    weights = encode_chat(folder, make_messages([("assistant", "Hi!")])).weights
    assert weights is not None
    assert weights.all()


def test_bos_and_eos_are_put_around_a_conversation(tmp_path: Path):
    folder, messages = write_tokenizer(tmp_path, CHATML), make_messages(CONVERSATIONS[0])
    plain = encode_chat(folder, messages)
    settings = ExampleSettings(
        fields="messages",
        chat_template=load_chat_template(folder),
        add_bos=True,
        bos_id=0,
        eos_id=2,
    )
    builder = compile_fields(settings, vocab=300)
    document = encode_batch(
        [builder.build(Record({"messages": messages}, "x", 1))], load_tokenizer(folder)
    )
    assert plain.weights is not None
    assert document.weights is not None
    assert document.ids[:].tolist() == [0, *plain.ids, 2]
    assert document.weights.tolist() == [0, *plain.weights, 1]
    assert (builder.has_weights, builder.max_extra_token_id) == (True, 2)


def test_conversation_has_one_begin_token(tmp_path: Path):
    messages = make_messages(CONVERSATIONS[0])
    folder = write_tokenizer(tmp_path, LLAMA3)
    assert encode_chat(folder, messages).ids[0] == 0
    begun = encode_chat(folder, messages, add_bos=True, bos_id=0)
    assert begun.ids[:].tolist() == encode_chat(folder, messages).ids[:].tolist()


def test_tokens_that_overlap_a_span_have_loss():
    offsets = np.array([(0, 2), (2, 3), (3, 3), (3, 4), (3, 4), (4, 9)])
    assert span_weights(offsets, [(2, 4, 1.0)]).tolist() == [0, 1, 1, 1, 1, 0]
    assert span_weights(offsets, [(1, 2, 1.0), (8, 9, 0.5)]).tolist() == [1, 0, 0, 0, 0, 0.5]
    assert span_weights(offsets, [(4, 4, 1.0)]).tolist() == [0] * 6
    assert span_weights(np.zeros((0, 2), np.int64), [(0, 4, 1.0)]).tolist() == []


def test_template_that_leaves_out_a_message_is_an_error(tmp_path: Path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content if m.role == 'user' else '...' }}\n{% endfor %}"
    folder = write_tokenizer(tmp_path, template)
    turns = make_messages([("user", "a"), ("assistant", "b"), ("user", "c")])
    with pytest.raises(
        PrepError, match=r"a.jsonl:3: the turns with loss cannot be found"
    ) as caught:
        encode_chat(folder, turns)
    assert (
        caught.value.why
        == f"the text that {folder}/tokenizer_config.json renders does not show the content of message 2"
    )
    assert "chat_template.jinja" in caught.value.hint


@pytest.mark.parametrize(
    ("messages", "what", "why"),
    [
        ("hi", "column `messages` is not a list of messages", "it is a string"),
        (
            ["hi"],
            "column `messages` is not a list of messages",
            "message 1 is a string, or has no `role`",
        ),
        (
            [{"from": "human"}],
            "column `messages` is not a list of messages",
            "message 1 is an object, or has no `role`",
        ),
        (
            [{"role": "system", "content": "x"}],
            "tokenizer_config.json cannot render",
            "System role not supported",
        ),
        ([{"role": "user", "content": "\ufdd0"}], "a message is not text", "U+FDD0"),
    ],
)
def test_error_names_the_line_of_invalid_messages(
    tmp_path: Path, messages: object, what: str, why: str
):
    folder = write_tokenizer(tmp_path, GEMMA)
    with pytest.raises(PrepError) as caught:
        encode_chat(folder, messages)
    assert caught.value.what.startswith("a.jsonl:3: ")
    assert what in caught.value.what
    assert why in caught.value.why


def test_missing_messages_column_is_an_error(tmp_path: Path):
    settings = ExampleSettings(
        fields="messages", chat_template=load_chat_template(write_tokenizer(tmp_path, CHATML))
    )
    with pytest.raises(PrepError, match=r"a.jsonl:3: no column `messages`"):
        compile_fields(settings, vocab=300).build(Record({"text": "x"}, "a.jsonl:3", 1))


def test_template_file_comes_before_the_tokenizer_config(tmp_path: Path):
    folder = write_tokenizer(tmp_path, "config")
    assert load_chat_template(folder).text == "config"
    (folder / "chat_template.jinja").write_text("file")
    template = load_chat_template(folder / "tokenizer.json")
    assert (template.text, template.file) == ("file", f"{folder}/chat_template.jinja")
    assert dict(template.special_tokens) == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def test_default_of_several_templates_is_used(tmp_path: Path):
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    assert (
        load_chat_template(write_tokenizer(tmp_path, "", chat_template=templates)).text == "plain"
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "tokenizer_config.json",
            "{}",
            "has no chat template - looked for chat_template.jinja, and for",
        ),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        ("chat_template.jinja", "{% if %}", "chat_template.jinja is not a valid chat template"),
    ],
)
def test_missing_or_invalid_template_is_reported(
    tmp_path: Path, name: str, text: str, message: str
):
    folder = write_tokenizer(tmp_path, CHATML)
    (folder / name).write_text(text)
    with pytest.raises(PrepError, match=message):
        encode_chat(folder, [])


@pytest.mark.parametrize(
    "text", ["{{ strftime_now('%d') }}", "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"]
)
def test_template_has_no_clock_and_no_access_to_python(tmp_path: Path, text: str):
    with pytest.raises(PrepError, match=r"a.jsonl:3: .* cannot render the messages"):
        encode_chat(write_tokenizer(tmp_path, text), [])


TOOL_TEMPLATE = (
    "{% if tools %}{{ '<tools>' + tools | tojson + '</tools>' }}{% endif %}"
    "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}"
    "<no_think>{% endif %}{% endif %}{{ bos_token }}"
)

TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": {"é": ["<", None, 1.5]}}}
]


def render(
    folder: Path,
    messages: Any,
    tools: Any = None,
    template_args: dict[str, Any] | None = None,
    *,
    date: datetime | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """Return the text of a conversation."""
    arguments = json.dumps(template_args or {})
    template = replace(load_chat_template(folder), arguments=arguments, date=date)
    forms = load_forms(template)
    conversation = forms.conversation(messages, tools, "chat")
    return forms.renderer.render(conversation, add_generation_prompt=add_generation_prompt)[0]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no_tools", "tools"])
@pytest.mark.parametrize(
    "template_args", [{}, {"enable_thinking": False}, {"bos_token": "<bos>"}], ids=str
)
def test_rendering_passes_tools_and_variables(
    tmp_path: Path, tools: Any, template_args: dict[str, Any]
):
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path, TOOL_TEMPLATE)
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>"
    )
    messages = make_messages([("user", "Hello there")])
    expected = reference.apply_chat_template(
        messages,
        tools=tools,
        chat_template=TOOL_TEMPLATE,
        tokenize=False,
        add_generation_prompt=True,
        **template_args,
    )
    text = render(folder, messages, tools, template_args, add_generation_prompt=True)
    assert text == expected


def test_rendering_refuses_variables_of_a_conversation(tmp_path: Path):
    folder = write_tokenizer(tmp_path, TOOL_TEMPLATE)
    with pytest.raises(PrepError, match="`tools` is not a variable"):
        render(folder, [], template_args={"tools": []})


def test_rendering_prints_the_given_time_only(tmp_path: Path):
    template = (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}no date{% endif %}"
    )
    folder = write_tokenizer(tmp_path, template)
    assert render(folder, [], date=datetime(2026, 7, 4)) == "04 Jul 2026"
    assert render(folder, []) == "no date"


def test_rendering_limits_the_size_of_a_time(tmp_path: Path):
    template = "{{ strftime_now('%c' * 500000) }}"
    folder = write_tokenizer(tmp_path, template)
    with pytest.raises(PrepError, match="cannot render"):
        render(folder, [], date=datetime(2026, 7, 4))


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_rendering_names_the_reasoning_as_transformers(tmp_path: Path, key: str):
    transformers = pytest.importorskip("transformers")
    template = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{% endfor %}"
    folder = write_tokenizer(tmp_path, template)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    messages: Any = [{"role": "assistant", "content": "a", key: "think"}]
    expected = reference.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert render(folder, messages) == expected


@pytest.mark.parametrize("is_file", [False, True])
def test_conversations_with_tools_use_their_template(tmp_path: Path, is_file: bool):
    default = "default {{ messages | length }}"
    tool_use = "tools {{ tools | length }}"
    templates = [
        {"name": "default", "template": default},
        {"name": "tool_use", "template": tool_use},
    ]
    folder = write_tokenizer(tmp_path, default)
    if is_file:
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(default)
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    else:
        write_tokenizer(tmp_path, cast(Any, templates))
    assert render(folder, []) == "default 0"
    assert render(folder, [], TOOLS) == "tools 1"


# Prompts of generation have the ids of transformers.

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
