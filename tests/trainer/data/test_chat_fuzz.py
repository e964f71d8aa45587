"""Mutated templates and conversations: an example or one error, in bounded time."""

from __future__ import annotations

import copy
import datetime
import random
import time
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from tests.trainer.data import chat_templates
from trainer.data import chat_template
from trainer.data.chat import ChatBuilder
from trainer.data.chat_template import ChatTemplate
from trainer.data.conversations import ALL, LAST, LossRule
from trainer.data.examples import ExampleSettings
from trainer.data.readers.reader import Record

TEMPLATES = [text for name, text in vars(chat_templates).items() if name.isupper()]
PIECES = (
    *(
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if loop.last %}",
        "{% endif %}",
        "{{",
        "}}",
        "{%-",
    ),
    *(
        "messages",
        "m.content",
        "m.tool_calls",
        "| tojson",
        "| length",
        "* 99999",
        "range(10**9)",
        "~",
    ),
    *(
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% generation %}",
        "{% endgeneration %}",
    ),
    *(
        "\ufdd2\ufdd4\ufdd3",
        "\ufdd0",
        "content[::-1]",
        "content[1:]",
        "content.split('b')[0]",
        "| upper",
    ),
)
VALUES = (
    *(
        None,
        "",
        " ",
        "a",
        "b\n",
        "<think>x</think>y",
        "[THINK]z",
        "</think>",
        0,
        0.5,
        1,
        2,
        -1,
        True,
        False,
    ),
    *([], {}, "[]", "{}", [None], {"a": {"b": [1]}}, "\ufdd5", "\ud800", "😀" * 50, float("nan")),
    *([{"type": "text", "text": "c"}], [{"type": "image"}], ["d"], "x" * 10_000),
)
KEYS = (
    *(
        "role",
        "content",
        "tool_calls",
        "thinking",
        "reasoning",
        "reasoning_content",
        "weight",
        "train",
    ),
    *("loss", "function", "arguments", "name", "id", "type", "text"),
)
ROLES = ("user", "assistant", "system", "tool", "", "x")
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"city": "Ulm"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "r"},
    {"role": "tool", "content": "sun"},
    {"role": "assistant", "content": "<think>b</think>c", "weight": 0.5},
]
# A hang would take for ever. The bound leaves room for a busy machine.
MAX_SECONDS = 60


def mutate_template(text: str, rng: random.Random) -> str:
    """Return a template with parts removed, repeated or inserted."""
    for _ in range(rng.randrange(3)):
        start, length = rng.randrange(len(text) + 1), rng.randrange(12)
        part = rng.choice(["", text[start : start + length] * 2, rng.choice(PIECES)])
        text = text[:start] + part + text[start + length :]
    return text


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Return a value with one part changed."""
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        value[index] = mutate_value(value[index], rng)
        if rng.random() < 0.1:
            value.insert(index, copy.deepcopy(rng.choice(value)))
        return value
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice([*value, rng.choice(KEYS)])
        value[key] = mutate_value(value.get(key), rng)
        if rng.random() < 0.1:
            del value[key]
        return value
    return copy.deepcopy(rng.choice([*VALUES, *ROLES]))


def build_mutant(seed: int) -> bool:
    """Build the example of a mutated conversation. Return whether there is one."""
    rng = random.Random(seed)
    text = mutate_template(rng.choice(TEMPLATES), rng)
    messages: Any = copy.deepcopy(rng.sample(MESSAGES, rng.randrange(1, 6)))
    for _ in range(rng.randrange(3)):
        messages = mutate_value(messages, rng)
    tools = rng.choice([None, [CALL], "[]", mutate_value([copy.deepcopy(CALL)], rng)])
    template = ChatTemplate("t", text, (("bos_token", "<s>"),), date=datetime.date(2026, 1, 31))
    settings = ExampleSettings(
        fields="messages",
        chat_template=template,
        joins_last_turns=rng.random() < 0.3,
        loss=rng.choice([LossRule(), LossRule(LAST), LossRule(ALL), LossRule(("user",), False)]),
        stop_texts=("<|im_end|>", "</s>"),
    )
    try:
        builder = ChatBuilder(settings, template)
        example = builder.build(Record({"messages": messages, "tools": tools}, "a:1", 1))
    except PrepError:
        return False
    for segment in example.target:
        spans = segment.loss_spans or ()
        assert all(0 <= start <= end <= len(segment.content) for start, end, _ in spans)
        assert all(0 <= weight <= 1 for *_, weight in spans)
    return True


@pytest.mark.parametrize(
    "seeds",
    [range(500), pytest.param(range(500, 10_500), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_mutants_give_an_example_or_an_error(seeds: range, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "BASE_CPU_S", 2)
    n_built = 0
    for seed in seeds:
        start = time.monotonic()
        n_built += build_mutant(seed)
        assert time.monotonic() - start < MAX_SECONDS, seed
    assert n_built > len(seeds) // 10
