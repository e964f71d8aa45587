"""`prep tokenize` of conversations in files that people have: what is read, skipped and refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK
from tests.helpers.tiny_checkpoints import LLAMA
from tests.helpers.training_folder import RECIPE, make_training_folder
from tests.trainer.data.chat_templates import CHATML
from tests.trainer.data.test_chat import write_tokenizer

USER = {"role": "user", "content": "Hello there"}
ANSWER = {"role": "assistant", "content": "it is the end"}
HUMAN = {"from": "human", "value": "Hello there"}
GPT = {"from": "gpt", "value": "it is the end"}
NAMES_FILE = "`--set data.chat_template=chat_template.jinja` names one"


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a model, a tokenizer with a chat template and a recipe in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder({**LLAMA, "vocab_size": 320})
    write_tokenizer(Path("tok"), CHATML)
    data = 'tokenizer = "tok"\npath = "rows.jsonl"'
    recipe = RECIPE.replace('type = "text"\npath = "text.txt"', data)
    Path("recipe.toml").write_text(recipe.replace("holdout = 0.1\n", ""))


def write_rows(*rows: Any) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenize(capsys: pytest.CaptureFixture[str], *words: str, code: int = OK) -> tuple[str, str]:
    """Run `prep tokenize`, and return its results and its messages."""
    capsys.readouterr()
    assert main(["tokenize", "recipe.toml", *words]) == code
    output = capsys.readouterr()
    return output.out, output.err


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"messages": [USER, ANSWER]}, NAMES_FILE),
        ({"conversations": [HUMAN, GPT]}, NAMES_FILE),
        (
            {"instruction": "Hello", "input": "there", "output": "it is the end of the time"},
            f"{NAMES_FILE}; `--set data.format=text` `--set data.fields='[instruction+input], output'`"
            " reads the columns as plain texts",
        ),
    ],
    ids=["messages", "sharegpt", "alpaca"],
)
def test_base_tokenizer_leads_to_both_ways_out(
    row: dict[str, Any], hint: str, capsys: pytest.CaptureFixture[str]
):
    write_rows(row, row)
    write_tokenizer(Path("tok"), "", chat_template=None)
    _, messages = tokenize(capsys, code=FAILED)
    assert "error: the tokenizer in tok has no chat template\n" in messages
    assert messages.endswith(f" hint: {hint}\n")
    # Both ways lead to tokens.
    Path("chat_template.jinja").write_text(CHATML)
    shown, _ = tokenize(capsys, "--set", "data.chat_template=chat_template.jinja", "--show", "1")
    assert "⟦it is the end" in shown
    if "instruction" in row:
        words = ("data.format=text", "data.fields=[instruction+input], output")
        shown, _ = tokenize(capsys, "--set", words[0], "--set", words[1], "--show", "1")
        assert "Hello there⟦it is the end of the time<s>⟧" in shown


def write_csv(path: str, *rows: dict[str, Any]) -> None:
    """Write rows with their lists as JSON texts."""
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        for row in rows:
            writer.writerow({name: cell_text(value) for name, value in row.items()})


def cell_text(value: object) -> object:
    return json.dumps(value) if isinstance(value, list) else value


TOOLS = [{"type": "function", "function": {"name": "the", "parameters": {}}}]
LISTS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, ANSWER], "tools": TOOLS},
    "conversations": {"conversations": [HUMAN, GPT], "system": "time"},
    "pair": {"prompt": [USER], "completion": [ANSWER]},
    "history": {"instruction": "Hello", "output": "the end", "history": [["there", "it is"]]},
}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("name", LISTS)
def test_lists_may_be_json_texts(name: str, suffix: str, capsys: pytest.CaptureFixture[str]):
    row = LISTS[name]
    write_rows(row, row)
    expected, _ = tokenize(capsys, "--show", "2")
    if suffix == "csv":
        write_csv("rows.csv", row, row)
    else:
        texts = {name: cell_text(value) for name, value in row.items()}
        pq.write_table(pa.Table.from_pylist([texts, texts]), "rows.parquet")
    shown, messages = tokenize(capsys, "--show", "2", "--set", f"data.path=rows.{suffix}")
    assert shown.splitlines()[:-1] == expected.splitlines()[:-1]
    if name != "history":
        (line,) = [line for line in messages.splitlines() if line.startswith("found by")]
        assert line.endswith(", with lists as JSON texts")


def test_other_texts_in_brackets_are_texts(capsys: pytest.CaptureFixture[str]):
    row = {"prompt": "[1, 2]", "completion": "[]"}
    write_rows(*[row] * 3)
    shown, messages = tokenize(capsys, "--show", "1")
    assert "[1, 2]⟦[]<s>⟧" in shown
    assert 'found by the columns: `data.format = "prompt_completion"`\n' in messages


@pytest.mark.parametrize("cell", ["[{", str([USER, ANSWER])], ids=["cut", "python"])
def test_broken_json_is_a_bad_line(cell: str, capsys: pytest.CaptureFixture[str]):
    row = {"messages": [USER, ANSWER]}
    write_csv("rows.csv", {"messages": cell}, row, row, {"messages": cell})
    words = ("--set", "data.path=rows.csv")
    _, messages = tokenize(capsys, *words, code=FAILED)
    assert "error: rows.csv:2: column `messages`: not JSON\n" in messages
    assert "json.dumps" in messages
    _, messages = tokenize(capsys, *words, "--set", "data.bad_lines=1", code=FAILED)
    assert "error: rows.csv:5: column `messages`: not JSON, after 1 invalid line\n" in messages
    _, messages = tokenize(capsys, *words, "--set", "data.bad_lines=2")
    assert "skipped rows.csv:2: column `messages`: not JSON" in messages
    assert "2 invalid lines skipped" in messages


STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'tool', 'system'] %}"
    "{{ raise_exception('Only known roles!') }}{% endif %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# It leaves out messages of other roles.
SILENT = (
    STRICT.replace("{% if m.role not", "{% if m.role in ['user', 'assistant'] %}")
    .replace(
        " in ['user', 'assistant', 'tool', 'system'] %}{{ raise_exception('Only known roles!') }}{% endif %}",
        "",
    )
    .replace("<|im_end|>{% endfor %}", "<|im_end|>{% endif %}{% endfor %}")
)
CALL = {"type": "function", "function": {"name": "the", "arguments": "city=Ulm"}}
INVALID: dict[str, tuple[str, list[Any], str, str]] = {
    "failing template": (
        STRICT,
        [USER, {"role": "narrator", "content": "time"}, ANSWER],
        "chat.jinja cannot render the messages",
        "Only known roles!",
    ),
    "hidden role": (
        SILENT,
        [USER, {"role": "narrator", "content": "time"}, ANSWER],
        "message 2: the role is `narrator`",
        "chat.jinja does not show messages of this role",
    ),
    "arguments": (
        STRICT,
        [USER, {"role": "assistant", "tool_calls": [CALL]}],
        "the arguments of a tool call: not JSON",
        "Expecting value: line 1 column 1 (char 0)",
    ),
    "image": (
        STRICT,
        [{"role": "user", "content": [{"type": "image"}]}, ANSWER],
        "message 1: a part of the content is not a text",
        "it has the type `image`, and the model reads texts only",
    ),
    "no role": (
        STRICT,
        [{"role": None, "content": "time"}, ANSWER],
        "column `messages` is not a list of messages",
        "message 1 is an object, or has no `role`",
    ),
    "huge text": (
        STRICT.replace("m.content or", "('x' * 9999999 if m.content == 'huge' else m.content) or"),
        [{"role": "user", "content": "huge"}, ANSWER],
        "chat.jinja cannot render the messages",
        "it makes a text of 1e+07 characters, the limit is",
    ),
    "recursion": (
        "{% macro f() %}{{ f() }}{% endmacro %}"
        + STRICT.replace("{{ m.content", "{% if m.content == 'deep' %}{{ f() }}{% endif %}{{ m.content"),
        [{"role": "user", "content": "deep"}, ANSWER],
        "chat.jinja cannot render the messages",
        "it is nested too deeply, or its macros call each other without end",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_invalid_row_is_one_error_or_a_bad_line(name: str, capsys: pytest.CaptureFixture[str]):
    template, messages, what, why = INVALID[name]
    good = {"messages": [USER, ANSWER]}
    write_rows(good, {"messages": messages}, good)
    Path("chat.jinja").write_text(template)
    words = ("--set", "data.chat_template=chat.jinja")
    _, output = tokenize(capsys, *words, code=FAILED)
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert line == f"error: rows.jsonl:2: {what}"
    assert f"  why: {why}" in output
    _, output = tokenize(capsys, *words, "--set", "data.bad_lines=1")
    assert f"skipped rows.jsonl:2: {what} ({why}" in output
    assert "1 invalid line skipped" in output
    assert "tokens in 2 documents" in output


def test_conversations_without_loss_are_counted(capsys: pytest.CaptureFixture[str]):
    empty = {"role": "assistant", "content": " "}
    rows = [[USER, ANSWER], [USER], [], [{"role": "user", "content": ""}, empty], [USER, ANSWER]]
    write_rows(*[{"messages": messages} for messages in rows])
    _, output = tokenize(capsys)
    assert "2 conversations have no token with loss\n" in output
    line = "1 turn of the assistant has no text, only the token that ends the turn has loss\n"
    assert line in output


def test_data_without_loss_names_the_keys(capsys: pytest.CaptureFixture[str]):
    write_rows({"messages": [USER]}, {"messages": [USER]})
    _, output = tokenize(capsys, code=FAILED)
    assert "error: the data has no token to train on\n" in output
    assert "or for conversations `data.loss`" in output


def test_many_turns_are_tokenized_or_refused_at_once(capsys: pytest.CaptureFixture[str]):
    write_rows({"messages": [USER, ANSWER] * 5_000})
    shown, _ = tokenize(capsys, "--show", "1")
    assert shown.startswith("--- train 1: 140,000 tokens, 35,000 with loss")
    # Each turn is rendered with all before it: the first rendering does not begin.
    words = ("--set", "data.chat_template=training")
    _, output = tokenize(capsys, *words, code=FAILED)
    assert "error: rows.jsonl:1: the conversation is too long\n" in output


def test_keys_of_chats_do_not_hide_the_missing_columns(capsys: pytest.CaptureFixture[str]):
    write_rows({"prompt": "Hello", "chosen": "the end", "rejected": "time"})
    _, messages = tokenize(capsys, "--set", "data.loss=last", code=FAILED)
    assert messages == (
        "error: rows.jsonl:1: no column `text`\n"
        "  why: its columns: `prompt`, `chosen`, `rejected`\n"
        " hint: `--set data.fields='[prompt], chosen'`\n"
    )
