"""Turns that a template renders in another way when more messages follow, and contents that are lists of parts."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.core.errors import PrepError
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
from tests.trainer.data.test_chat import QWEN, encode_chat, make_messages, write_tokenizer
from trainer.data.chat_template import ChatTemplate
from trainer.data.conversations import LossRule
from trainer.data.encode import span_weights
from trainer.data.examples import EMPTY_TURN, HIDDEN_REASONING, Example, ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.readers.reader import Record

# Conversations of templates that render a turn in another way when more messages follow: text and loss.

STOPS = ("<|im_end|>", "</s>", "<|user|>", "<|return|>", "<eos>")

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def user(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


def assistant(content: Any = None, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "a", "function": {"name": "weather", "arguments": arguments}}


def build(
    template: str, messages: list[dict[str, Any]], tools: Any = None, **settings: Any
) -> Example:
    """Return the example of a conversation."""
    chat = ChatTemplate(
        "chat.jinja", template, (("bos_token", "<s>"),), date=datetime.date(2026, 1, 31)
    )
    all_settings = ExampleSettings(
        fields="messages", chat_template=chat, add_eos=False, stop_texts=STOPS, **settings
    )
    record = Record({"messages": messages, "tools": tools}, "a.jsonl:3", 1)
    return compile_fields(all_settings, vocab=9).build(record)


def shown(*arguments: Any, **settings: Any) -> str:
    """Return the text of a conversation with brackets around its parts with loss."""
    (segment,) = build(*arguments, **settings).target
    assert isinstance(segment.content, str)
    assert segment.loss_spans is not None
    text = segment.content
    for start, end, weight in reversed(segment.loss_spans):
        mark = "" if weight == 1 else f"{weight:g}:"
        text = f"{text[:start]}⟦{mark}{text[start:end]}⟧{text[end:]}"
    return text


@pytest.mark.parametrize("arguments", [{"city": "Ulm"}, '{"city": "Ulm"}'], ids=["object", "text"])
@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["absent", "null"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            LAST_REASONS,
            '<|im_start|>assistant\n⟦\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
            "<|im_end|>\n⟧<|im_start|>user\n<tool_response>sun</tool_response><|im_end|>\n",
        ),
        (
            TEXT_ARGUMENTS,
            '<Assistant>⟦<call>weather {"city": "Ulm"}</call><eos>⟧<output>sun</output>',
        ),
    ],
    ids=["objects", "texts"],
)
def test_tool_calls_are_in_the_form_of_the_template(
    template: str, expected: str, content: dict[str, None], arguments: object
):
    calls = {"role": "assistant", **content, "tool_calls": [call(arguments)]}
    messages = [user("a"), calls, {"role": "tool", "content": "sun"}, assistant("b")]
    assert expected in shown(template, messages)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
def test_template_gets_the_tools_of_a_record(tools: object):
    text = shown(LAST_REASONS, [user("a"), assistant("b")], tools)
    assert text.startswith(f"<|im_start|>system\n{json.dumps(TOOLS[0])}\n<|im_end|>\n")
    assert build(NEXT_ROLE_ENDS, [user("a"), assistant("b")], tools).ignored == ("tools",)


def test_training_rendering_shows_each_turn_as_the_last_one():
    messages = [user("1+1?"), assistant("2", reasoning_content="one"), user("So?"), assistant("3")]
    assert shown(LAST_REASONS, messages, joins_last_turns=True) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n⟦<think>\none\n</think>\n\n2<|im_end|>\n⟧"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\n3<|im_end|>\n⟧"
    )
    # The last turn equals that of the template.
    assert shown(LAST_REASONS, messages[:2], joins_last_turns=True) == shown(
        LAST_REASONS, messages[:2]
    )


@pytest.mark.parametrize(
    "answer",
    [assistant("<think>\none\n</think>\n\n2"), assistant("2", reasoning_content="one")],
    ids=["inline", "key"],
)
def test_training_rendering_keeps_reasoning_that_templates_cut(answer: dict[str, Any]):
    messages = [user("a"), answer, user("b")]
    assert shown(TEXT_ARGUMENTS, messages, joins_last_turns=True) == (
        "<User>a<Assistant>⟦<think>\none\n</think>\n\n2<eos>⟧<User>b"
    )


def test_reasoning_may_have_no_loss():
    rule = LossRule(has_reasoning=False)
    inline = [user("a"), assistant("<think>\none\n</think>\n\n2")]
    assert shown(LAST_REASONS, inline, loss=rule).endswith(
        "<think>\none\n</think>\n\n⟦2<|im_end|>\n⟧"
    )
    thinking = [user("a"), assistant("2", thinking="one")]
    assert shown(LAST_RETURNS, thinking, loss=rule).endswith(
        "one<|end|><|start|>assistant<|message|>⟦2<|return|>⟧"
    )


CHAT = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("last", "<|user|>\na<|assistant|>\nb<|user|>\nc<|assistant|>\n⟦d<|user|>⟧\ne"),
        ("user", "<|user|>\n⟦a⟧<|assistant|>\nb<|user|>\n⟦c⟧<|assistant|>\nd<|user|>\n⟦e⟧"),
        ("all", "⟦<|user|>\na<|assistant|>\nb<|user|>\nc<|assistant|>\nd<|user|>\ne⟧"),
    ],
)
def test_loss_is_on_the_chosen_turns(turns: str, expected: str):
    assert shown(NEXT_ROLE_ENDS, CHAT, loss=LossRule((turns,))) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"weight": 0}, "⟦0:b<|user|>⟧"),
        ({"train": False}, "⟦0:b<|user|>⟧"),
        ({"loss": False}, "⟦0:b<|user|>⟧"),
        ({"training": False}, "⟦0:b<|user|>⟧"),
        ({"loss_weight": 0.25}, "⟦0.25:b<|user|>⟧"),
        ({"weight": 0.5, "loss": True}, "⟦0.5:b<|user|>⟧"),
    ],
)
def test_messages_have_their_loss_weight(keys: dict[str, Any], expected: str):
    messages = [user("a", weight=1), assistant("b", **keys), user("c"), assistant("d")]
    text = shown(NEXT_ROLE_ENDS, messages).replace("\nb<|user|>", f"\n{expected}")
    assert text == f"<|user|>\na<|assistant|>\n{expected}\nc<|assistant|>\n⟦d⟧"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([assistant("a", weight=2)], "`weight` of a message is 2 - a number from 0 to 1"),
        ([assistant("a", train="no")], "`train` of a message is a string"),
        ([assistant(tool_calls=[call("{")])], "the arguments of a tool call: not JSON"),
        ([assistant(tool_calls=[call([1])])], "the arguments of a tool call are not an object"),
        ([assistant(tool_calls=["x"])], "a tool call is not an object"),
        ([user("a"), assistant("b\ufdd5")], "a message is not text"),
    ],
)
def test_error_names_the_line_of_invalid_parts(messages: list[dict[str, Any]], message: str):
    with pytest.raises(PrepError, match=f"a.jsonl:3: .*{message}|a.jsonl:3: {message}"):
        build(LAST_REASONS, messages)


def test_tools_must_be_a_list():
    with pytest.raises(
        PrepError, match=r"a.jsonl:3: column `tools` is not a list - it is an object"
    ):
        build(LAST_REASONS, CHAT, {"name": "weather"})


def test_hidden_tool_calls_are_an_error():
    messages = [user("a"), assistant("b", tool_calls=[call({})])]
    with pytest.raises(PrepError, match="does not show the tool calls of message 2"):
        build(NEXT_ROLE_ENDS, messages)


def test_template_without_tools_names_the_hidden_call():
    # As Phi-3 and Command R, whose templates need a content and know no calls.
    template = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
    with pytest.raises(PrepError, match="does not show the tool calls of message 2"):
        build(template, [user("a"), {"role": "assistant", "tool_calls": [call({})]}])


def test_each_tool_call_is_shown_or_an_error():
    # As gpt-oss, which renders the first call only.
    template = TEXT_ARGUMENTS.replace("in m.tool_calls", "in m.tool_calls[:1]")
    messages = [user("a"), assistant(tool_calls=[call({"x": "1"}), call({"x": "2"})])]
    with pytest.raises(PrepError, match="does not show all tool calls of message 2"):
        build(template, messages)
    assert shown(template, [user("a"), assistant(tool_calls=[call({"x": "1"})])])


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% generation %}"
    "{% if loop.last and m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% endfor %}"
)


def test_hidden_reasoning_is_counted_for_any_loss():
    messages = [user("a"), assistant("b", thinking="c"), user("d"), assistant("e", thinking="f")]
    assert build(MARKED, messages).ignored == ("hidden_reasoning",)
    everything = build(LAST_REASONS, messages, loss=LossRule(("all",)))
    assert everything.ignored == ("hidden_reasoning",)


def test_hidden_tool_calls_are_an_error_with_markers():
    messages = [user("a"), assistant("b", tool_calls=[call({})])]
    with pytest.raises(PrepError, match="does not show the tool calls of message 2"):
        build(MARKED, messages)


@pytest.mark.parametrize(
    "content",
    ["Sure. <think>one</think>2", "<think>one</think>2<think>two</think>3"],
    ids=["before", "between"],
)
def test_text_that_a_template_cuts_off_is_an_error(content: str):
    # As Qwen3: the reasoning is in front of the first end tag, and the answer after the last one.
    with pytest.raises(PrepError, match=r"does not show the content of message 2"):
        build(LAST_REASONS, [user("1+1?"), assistant(content)])


# Roles are read once the content has no blanks around it, so a list is an error in it.
TWO_ROLES = (
    "{% for m in messages %}{% set text = (m.content or '').strip() %}"
    "{% if m.role == 'user' %}<user>{{ text }}{% elif m.role == 'assistant' %}<assistant>{{ text }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

# It shows a message of the system at the start only (gpt-oss).
FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "role", "why"),
    [
        (TWO_ROLES, "system", "does not show messages of this role"),
        (TWO_ROLES, "tool", "does not show messages of this role"),
        (FIRST_SYSTEM, "system", "does not show it, or not all of it"),
    ],
    ids=["system", "tool", "later system"],
)
@pytest.mark.parametrize("joins", [False, True])
def test_message_is_shown_or_an_error(template: str, role: str, why: str, joins: bool):
    messages = [user("a"), assistant("b"), {"role": role, "content": "c"}, assistant("d")]
    with pytest.raises(PrepError, match=rf"message 3.* `{role}` - chat\.jinja {why}"):
        build(template, messages, joins_last_turns=joins)


def test_unknown_role_leads_to_the_known_ones():
    with pytest.raises(PrepError) as caught:
        build(TWO_ROLES, [user("a"), {"role": "model", "content": "b"}])
    assert "the role is `model`" in caught.value.what
    assert caught.value.hint == "the roles are system, developer, user, assistant, tool"


def test_all_text_may_have_loss_but_reasoning():
    rule = LossRule(("all",), has_reasoning=False)
    messages = [user("a"), assistant("b", thinking="one"), user("c", weight=0), assistant("d")]
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.thinking %}[{{ m.thinking }}]{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (segment,) = build(template, messages, loss=rule).target
    assert segment.content == (
        "<user>a<|im_end|><assistant>[one]b<|im_end|><user>c<|im_end|><assistant>d<|im_end|>"
    )
    offsets = np.array([(i, i + 1) for i in range(len(segment.content))])
    weights = span_weights(offsets, segment.loss_spans or ())
    without_loss = "".join(
        char for char, weight in zip(segment.content, weights, strict=True) if not weight
    )
    assert without_loss == "[one]c<|im_end|>"


def test_many_turns_take_linear_time():
    messages = [message for _ in range(20_000) for message in (user("a"), assistant("b"))]
    (segment,) = build(NEXT_ROLE_ENDS, messages).target
    assert segment.loss_spans is not None
    assert len(segment.loss_spans) == 20_000


# Contents of messages: texts and lists of parts, for templates that take one of them, or both.

TURN = "{% for m in messages %}<{{ m.role }}>CONTENT<|im_end|>{% endfor %}"

PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"

PARTS = "{% for c in m.content %}{% if c.type == 'text' %}{{ c['text'] }}{% else %}<image>{% endif %}{% endfor %}"

EITHER = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{PARTS}{{% endif %}}"

CONTENTS = {
    "adds": "{{ '' + m.content }}",
    # It writes a list as a Python value.
    "trims": "{{ m.content | trim }}",
    # LFM2
    "json": "{{ m.content if m.content is string else m.content | tojson }}",
    # LLaVA-NeXT, and Gemma 3 for the system
    "first part": "{{ m.content[0]['text'] }}",
    "parts": PARTS,
    "either": EITHER,
    # Pixtral
    "parts of users": f"{{% if m.role == 'user' %}}{PARTS}{{% else %}}{{{{ '' + m.content }}}}{{% endif %}}",
}

TEMPLATES = {name: TURN.replace("CONTENT", text) + PROMPT for name, text in CONTENTS.items()}

EXPECTED = "<user>Hello there<|im_end|><assistant>⟦the end<|im_end|>⟧"


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Hello there", "the end"),
        (parts("Hello ", "there"), parts("the end")),
        (parts("Hello there"), "the end"),
        (["Hello ", "there"], [{"text": "the end"}]),
        ("Hello there", [{"type": "output_text", "text": "the end"}]),
    ],
    ids=["texts", "parts", "mixed", "bare", "other type"],
)
def test_contents_are_in_the_form_of_the_template(template: str, question: Any, answer: Any):
    assert shown(template, [user(question), assistant(answer)]) == EXPECTED


@pytest.mark.parametrize("name", ["parts", "either"])
def test_parts_have_the_ids_of_transformers(name: str, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    template = TEMPLATES[name]
    file = write_tokenizer(tmp_path, template) / "tokenizer.json"
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    messages: list[dict[str, Any]] = [user(parts("Hello ", "there")), assistant(parts("the"))]
    expected = reference.apply_chat_template(messages, chat_template=template, tokenize=True)
    assert encode_chat(tmp_path, messages).ids[:].tolist() == expected["input_ids"]


def test_parts_of_the_system_are_joined():
    # Mistral adds the text of the system to that of a user.
    template = "{% set s = messages[0].content + ': ' %}" + TEMPLATES["either"].replace(
        "in messages %}", "in messages[1:] %}{{ s }}"
    )
    messages = [{"role": "system", "content": parts("Be ", "kind")}, user("a"), assistant("b")]
    assert shown(template, messages) == (
        "Be kind: <user>a<|im_end|>Be kind: <assistant>⟦b<|im_end|>⟧"
    )


def test_result_of_a_tool_may_be_any_value():
    template = TURN.replace(
        "CONTENT",
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.content | tojson if m.role == 'tool' else m.content }}",
    )
    for result, text in [
        ({"sun": 5}, '{"sun": 5}'),
        ([1, 2], "[1, 2]"),
        ("sun", '"sun"'),
        (parts("sun"), '[{"type": "text", "text": "sun"}]'),
    ]:
        messages = [user("a"), assistant("", tool_calls=[call({})])]
        messages += [{"role": "tool", "content": result}, assistant("b")]
        assert f"<tool>{text}<|im_end|>" in shown(template + PROMPT, messages)


IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([IMAGE, *parts("a")], "a part of the content is not a text - it has the type `image_url`"),
        ([{"type": "text", "text": None}], "a part of the content is not a text - it has the type"),
        ([5], "a part of the content is not a text - it is a number"),
        (5, "the content is not a text - it is a number"),
        ({"text": "a"}, "the content is not a text - it is an object"),
    ],
)
@pytest.mark.parametrize("template", ["trims", "either"])
def test_other_contents_are_refused_by_name(template: str, content: Any, message: str):
    with pytest.raises(PrepError, match=rf"^a\.jsonl:3: message 1: {message}"):
        build(TEMPLATES[template], [user(content), assistant("b")])


def test_empty_lists_are_empty_texts():
    messages = make_messages([("user", ""), ("assistant", "b")])
    # A template that asks for the first part rejects both.
    for template in (TEMPLATES[name] for name in TEMPLATES if name != "first part"):
        text = shown(template, [user([]), assistant("b")])
        assert text == shown(template, messages)


THOUGHT = [{"type": "thinking", "thinking": "hmm"}, *parts("the end")]

# Magistral
SHOWS_THINKING = TEMPLATES["parts"].replace("<image>", "[THINK]{{ c.thinking }}[/THINK]")

SHOWS_KEY = TEMPLATES["adds"].replace(
    "{{ '' +", "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ '' +"
)


@pytest.mark.parametrize("thinking", ["hmm", parts("h", "mm")], ids=["text", "parts"])
@pytest.mark.parametrize("has_loss", [True, False])
@pytest.mark.parametrize(
    ("template", "reasoning"),
    [(SHOWS_THINKING, "[THINK]hmm[/THINK]"), (SHOWS_KEY, "<think>hmm</think>")],
    ids=["part", "key"],
)
def test_reasoning_may_be_a_part(template: str, reasoning: str, has_loss: bool, thinking: Any):
    answer = [{"type": "thinking", "thinking": thinking}, *parts("the end")]
    text = shown(
        template, [user("a"), assistant(answer)], loss=LossRule(has_reasoning=has_loss)
    ).removeprefix("<user>a<|im_end|><assistant>")
    assert text == (
        f"⟦{reasoning}the end<|im_end|>⟧" if has_loss else f"{reasoning}⟦the end<|im_end|>⟧"
    )


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_hidden_part_with_reasoning_is_counted(template: str):
    messages = [user("Hello there"), assistant(THOUGHT)]
    if template == TEMPLATES["parts"]:
        template = template.replace("<image>", "")
    assert shown(template, messages) == EXPECTED
    assert build(template, messages).ignored == (HIDDEN_REASONING,)


def test_second_reasoning_is_an_error():
    with pytest.raises(PrepError, match=r"message 2: it has two kinds of reasoning"):
        build(TEMPLATES["adds"], [user("a"), assistant(THOUGHT, reasoning="other")])
    with pytest.raises(PrepError, match=r"message 2: .* not a text - its `thinking` is a number"):
        build(TEMPLATES["adds"], [user("a"), assistant([{"type": "thinking", "thinking": 5}])])


@pytest.mark.parametrize("content", [" ", parts(" "), []], ids=["text", "part", "list"])
def test_blank_answer_is_an_empty_turn(content: Any):
    messages = [user("a"), assistant(content)]
    assert build(TEMPLATES["either"], messages).ignored == (EMPTY_TURN,)


# Conversations of twelve families of templates: the ids of transformers, and the masks of texts marked by hand.

MARKED_TEMPLATES = {
    "chatml": CHATML,
    "default_system": QWEN,
    "gemma": GEMMA,
    "llama3": LLAMA3,
    "python_calls": PYTHON_CALLS,
}
MASK_TEMPLATES = {
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


@pytest.mark.parametrize("name", MASK_TEMPLATES)
def test_masks_are_those_of_texts_marked_by_hand(name: str, tokenizer: TokenizerOfBytes):
    texts = read_marked_texts(MARKED_TEXTS / "own" / f"{name}.txt")
    for case, conversation in CONVERSATIONS.items():
        result = compare(tokenizer, MASK_TEMPLATES[name], conversation, expected=texts.get(case))
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
