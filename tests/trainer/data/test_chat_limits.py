"""Untrusted chat templates: bounded time and memory, deterministic results, and one error for each attempt."""

from __future__ import annotations

import copy
import datetime
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from tests.helpers.slow_cases import slow_except
from tests.trainer.data import chat_templates
from trainer.data import chat_template
from trainer.data.chat import ChatBuilder
from trainer.data.chat_template import ChatRenderer, ChatTemplate, Conversation, load_chat_template
from trainer.data.conversations import ALL, LAST, LossRule
from trainer.data.examples import ExampleSettings
from trainer.data.readers.reader import Record

# Untrusted chat templates: time and memory are bounded, results are deterministic, and each attempt is one error.

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes"},
]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a rendering to a second. The memory of Python and of some values is enough."""
    monkeypatch.setattr(chat_template, "BASE_CPU_S", 1)
    monkeypatch.setattr(chat_template, "BASE_MEMORY_NBYTES", 64 << 20)


def render(template: str, messages: list[dict[str, Any]] | None = None) -> str:
    """Render messages with a template."""
    renderer = ChatRenderer(ChatTemplate("chat_template.jinja", template, ()))
    conversation = Conversation(MESSAGES if messages is None else messages, "a.jsonl:3")
    return renderer.render(conversation)[0]


LOOP_10 = "{% for a in range(10) %}"

DOUBLED_LISTS = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)

DOUBLED_NAMESPACES = "{% set n0 = namespace(v=1) %}" + "".join(
    f"{{% set n{number} = namespace(v=[n{number - 1}, n{number - 1}]) %}}"
    for number in range(1, 60)
)


def repeat(first: str, expression: str, count: int = 90) -> str:
    """Return a template that computes `ns.x` again and again from its last value."""
    loop = f"{{% for i in range({count}) %}}{{% set ns.x = {expression} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(x={first}) %}}{loop}"


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops with text": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "indent": "{{ 'x'|indent(10**10) }}",
    "constant indent": "{{ 'x'|indent(9999999999) }}",
    "center": "{{ 'x'|center(9999999999) }}",
    "repeated text": "{{ 'x' * 10**10 }}",
    "repeated constant": "{{ 9999999999 * 'x' }}",
    "repeated list": "{{ ([1] * 9999999999)|length }}",
    "power": "{{ 10**5000 }}",
    "power of a power": "{{ 9**(9**9) }}",
    "long literal": "{{ 1" + "0" * 5000 + " }}",
    "squares": repeat("3", "ns.x * ns.x"),
    "doubled text": repeat("'ab'", "ns.x + ns.x"),
    "doubled text by tilde": repeat("'ab'", "ns.x ~ ns.x"),
    "wide tilde": "{% set x = 'a' * 900000 %}{{ " + " ~ ".join(["x"] * 3000) + " }}",
    "join": "{{ range(99999)|join('x' * 999999) }}",
    "join method": "{{ ('x' * 999999).join('y' * 9999) }}",
    "join of one value": "{{ range(99999)|map('default', 'x' * 999999, true)|map('replace', 'z', 'z')|join }}",
    "join of equal values": "{{ ''.join(messages|map(attribute='nothing')|map('default', 'x' * 999999)) }}",
    "replace": "{{ ('x' * 99999)|replace('', 'y' * 99999) }}",
    "replace method": "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "ljust": "{{ 'x'.ljust(9999999999) }}",
    "zfill": "{{ 'x'.zfill(9999999999) }}",
    "expandtabs": "{{ ('\\t' * 9999).expandtabs(9999999) }}",
    "format": "{{ '{:>9999999999}'.format(1) }}",
    "format by a field": "{{ '{:>{}}'.format(1, 9999999999) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent by a value": "{{ '%*d' % (9999999999, 1) }}",
    "format filter": "{{ '%9999999999d'|format(1) }}",
    "batch": "{{ [1]|batch(9999999999, 'x')|list }}",
    "slice": "{{ [1]|slice(9999999999)|list }}",
    "round": "{{ 2.5|round(9999999999, 'ceil') }}",
    "indent of JSON": "{{ [[1]]|tojson(indent=9999999999) }}",
    "separators of JSON": "{{ ([1] * 60000)|tojson(separators=('x' * 999999, ':')) }}",
    "integer as bytes": "{{ (1).to_bytes(9999999999, 'big') }}",
    "wide list as text": "{{ ['x' * 99999] * 99999 }}",
    "doubled lists as text": DOUBLED_LISTS + "{{ ns.a }}",
    "doubled lists compared": DOUBLED_LISTS + "{{ ns.a == ns.b }}",
    "doubled namespaces": DOUBLED_NAMESPACES + "{{ raise_exception(n59|string) }}",
    "doubled macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep conditions": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "21 loops": LOOP_10 * 21 + "{% endfor %}" * 21,
    "break outside a loop": "{% break %}",
    "long sum": "{{ " + " + ".join(["1"] * 50000) + " }}",
    "random": "{{ [1, 2]|random }}",
    "random text": "{{ lipsum() }}",
    "missing template": "{% include 'x' %}",
    "unknown filter": "{{ 1|nothing }}",
    "NUL": "\0{{ 1 \0 }}",
    "deep list of values": repeat("[]", "[ns.x]", 50_000) + "{{ ns.x }}",
    "deep JSON": repeat("[]", "[ns.x]", 50_000) + "{{ ns.x|tojson }}",
    "long error": "{{ raise_exception('x' * 999999) }}",
}  # fmt: skip

# One template for each limit: time, memory, depth, size of the text and of the error, and what templates may name.
FAST_HOSTILE = (
    *("nested loops", "repeated text", "macro that calls itself", "deep brackets", "deep JSON"),
    *("random", "missing template", "long error", "NUL", "format", "doubled text by tilde"),
)


@pytest.mark.parametrize("name", slow_except(HOSTILE, FAST_HOSTILE))
def test_hostile_template_is_one_short_error(name: str):
    with pytest.raises(PrepError) as caught:
        render(HOSTILE[name])
    assert "chat_template.jinja" in caught.value.what
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}", "1/2False 2/2True "),
        ("{% for m in messages if m.role == 'user' %}{{ m['content'][1:3] }}{% else %}none{% endfor %}", "el"),
        ("{% for key, value in messages[0].items() %}{{ key ~ '=' ~ value }};{% endfor %}", "role=user;content=hello;"),
        ("{% for m in messages[::-1] %}{{ m.role }}{% if loop.first %}{% continue %}{% endif %}.{% endfor %}",
         "assistantuser."),
        ("{{ messages|map(attribute='role')|join(', ') }}", "user, assistant"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro f(x, y='!') %}{{ x|upper }}{{ y }}{% endmacro %}{{ f('a') }}{{ f('b', y='?') }}", "A!B?"),
        ("{% for x in [[1, [2]], 3] recursive %}{{ '(' ~ loop(x) ~ ')' if x is iterable else x }}{% endfor %}",
         "(1(2))3"),
        ("{{ {'a': [1, 'é']}|tojson }}{{ {'b': 1}|tojson(indent=2) }}", '{"a": [1, "é"]}{\n  "b": 1\n}'),
        ("{{ '%s-%05.1f' % ('a', 2.25) }}{{ '{:>4}|{x}'.format(7, x='y') }}", "a-002.2   7|y"),
        ("{{ '**{}** 128000: {{{}}}'.format('a', 1) }}{{ '* 20000 %s 100%%' % 'b' }}",
         "**a** 128000: {1}* 20000 b 100%"),
        ("{{ ', '.join(messages|map(attribute='role')) }}{{ '%(a)s%(a)s' % {'a': 1} }}", "user, assistant11"),
        ("{{ 'a,b'.split(',')[-1] }}{{ 'x' * 3 }}{{ 2 ** 10 }}{{ (1, 2) + (3,) }}{{ 7 % 4 }}", "bxxx1024(1, 2, 3)3"),
        ("{{ 'a\nb'|indent(2) }}|{{ 'b'|center(3) }}|{{ [3, 1]|sort|first }}|{{ 1.55|round(1) }}", "a\n  b| b |1|1.6"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x|trim|replace('a', 'b')|default('c') }}{{ none or 'd' }}", "b1d"),
        ("{{ undefined_name }}{{ messages[0].missing|default('z') }}{% if tools %}t{% endif %}", "z"),
        ("{% set a, b = 1, 2 %}{{ a + b }}{{ [1, 2]|sum }}{{ [[1, 2], [3]]|sum(start=[]) }}", "33[1, 2, 3]"),
        ("{% for row in [1, 2, 3]|batch(2, 'x') %}{{ row }}{% endfor %}", "[1, 2][3, 'x']"),
        ("{% for g, items in messages|groupby('role') %}{{ g }}{{ items|length }}{% endfor %}", "assistant1user1"),
    ],
)  # fmt: skip
def test_ordinary_template_renders_as_jinja_does(template: str, text: str):
    jinja2 = pytest.importorskip("jinja2")
    assert render(template) == text
    plain = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    plain.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    assert plain.from_string(template).render(messages=MESSAGES) == text


def test_limits_grow_with_the_messages():
    content = "long text \n" * 400_000
    template = "{% for m in messages %}{{ m.content|trim|replace('long', 'short')|indent(2) ~ m.role }}{% endfor %}"
    text = render(template, [{"role": "user", "content": content}])
    assert len(text) > len(content)
    messages = [{"role": "user", "content": str(number)} for number in range(20_000)]
    tail = "{{ '<' + m['role'] + '>' + m['content']|trim }}{% if loop.index0 == messages|length - 1 %}!{% endif %}"
    assert render("{% for m in messages %}" + tail + "{% endfor %}", messages).endswith("19999!")


def test_equal_messages_have_equal_texts():
    assert len({render("{{ messages|tojson }}{{ namespace(a=1) }}") for _ in range(3)}) == 1


def test_each_rendering_has_its_own_limit():
    renderer = ChatRenderer(ChatTemplate("t", "{% for i in range(99999) %}{% endfor %}x", ()))
    assert [renderer.render(Conversation(MESSAGES, "p"))[0] for _ in range(30)] == ["x"] * 30


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_template_is_read_from_regular_files_only(tmp_path: Path, name: str):
    (tmp_path / "chat_template.jinja").write_text("x")
    path = tmp_path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(PrepError, match="is not a file"):
        load_chat_template(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(PrepError, match="is not a file"):
        load_chat_template(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(PrepError, match="is not a file"):
        load_chat_template(tmp_path)


def test_deep_or_large_settings_of_a_template_are_errors(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("x" * 5_000_000)
    with pytest.raises(PrepError, match="too large"):
        load_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(
        PrepError,
        match=r"tokenizer_config.json is not JSON - its JSON is nested more than 100 levels",
    ):
        load_chat_template(tmp_path)


# Mutated templates and conversations: an example or one error, in bounded time.

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

FUZZED_MESSAGES: list[dict[str, Any]] = [
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
    messages: Any = copy.deepcopy(rng.sample(FUZZED_MESSAGES, rng.randrange(1, 6)))
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
    [range(150), pytest.param(range(150, 10_500), marks=pytest.mark.slow)],
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
