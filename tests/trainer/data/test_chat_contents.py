"""Contents of messages: texts and lists of parts, for templates that take one of them, or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from tests.trainer.data.test_chat import encode_chat, make_messages, write_tokenizer
from tests.trainer.data.test_chat_turns import assistant, build, call, shown, user
from trainer.data.conversations import LossRule
from trainer.data.examples import EMPTY_TURN, HIDDEN_REASONING

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
