"""`prep tokenize --show`, and conversations in files that people have."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, USAGE
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing
from tests.helpers.slow_cases import slow_except
from tests.helpers.terminals import run_on_terminal
from tests.helpers.tiny_checkpoints import LLAMA
from tests.helpers.training_folder import RECIPE, make_training_folder, write_tokenizer
from tests.trainer.data.test_chat import CHATML
from tests.trainer.data.test_chat import write_tokenizer as write_chat_tokenizer
from trainer.data.sample_text import SamplePart, TokenSample, sample_line, sample_lines

FIELDS = 'type = "json"\npath = "data/*.jsonl"\nfields = "[ask], answer"\nholdout = 0'
ASKED = ["w5 w6", "w7", "\x1b[31m ⟦w8⟧"]
ANSWERED = ["w9 w1", "w3 " * 20, "w4"]
WORDS = ["w0", *(f"w{number}" for number in range(1, 120)), "\x1b[31m", "⟦w8⟧"]


@pytest.fixture
def fields_folder(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    Path("words").mkdir()
    write_tokenizer(Path("words"), WORDS)
    Path("data").mkdir()
    for index, (ask, answer) in enumerate(zip(ASKED, ANSWERED)):
        row = json.dumps({"ask": ask, "answer": answer})
        Path(f"data/{index}.jsonl").write_text(f"{row}\n")
    recipe = RECIPE.replace('type = "text"\npath = "text.txt"', f'tokenizer = "words"\n{FIELDS}')
    Path("recipe.toml").write_text(recipe.replace("holdout = 0.1\n", ""))


def read_json(capsys: Capture, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["tokenize", "recipe.toml", "--json", *words]) == OK
    return json.loads(capsys.readouterr().out)["data"]["train"]


@pytest.mark.usefixtures("fields_folder")
def test_pipe_gets_brackets_around_loss(capsys: Capture):
    assert main(["tokenize", "recipe.toml", "--show", "3", "-v"]) == OK
    lines = capsys.readouterr().out.splitlines()
    # The end token of the model is w0.
    assert lines[:3] == [
        "--- train 1: 5 tokens, 3 with loss",
        "w5 w6⟦ w9 w1 w0⟧",
        "ids: 5 6 ⟦9 1 0⟧",
    ]
    assert lines[4] == "--- train 2: 22 tokens, 21 with loss, longer than a sequence"
    # Neither a control character nor a bracket of the data looks like one of prep.
    assert lines[9] == "\\x1b[31m \\u27e6w8\\u27e7⟦ w4 w0⟧"
    assert lines[12].startswith("data   samples  tokens  with loss  cut  dropped  longest")
    assert lines[13].split() == ["train", "3", "31", "26", "1", "15", "22", "0"]


@pytest.mark.usefixtures("fields_folder")
def test_marks_end_at_the_end_of_a_line():
    parts = (
        SamplePart("a\n", (1,), 0.0),
        SamplePart("b\nc\n", (2,), 1.0),
        SamplePart("\nd", (3,), 0.0),
        SamplePart("e", (4,), 1.0),
        SamplePart("\n", (5,), 0.0),
    )
    sample = TokenSample(parts=parts, source=(), tokens=5, loss_tokens=2, is_cut=False)
    assert list(sample_lines(sample, shows_ids=False, width=None)) == ["a↵\n⟦b↵\nc↵⟧\n↵\nd⟦e⟧↵"]
    assert sample_line(sample) == "a\\n⟦b\\nc\\n⟧\\nd⟦e⟧\\n"


@pytest.mark.usefixtures("fields_folder")
def test_terminal_of_80_columns_gets_color():
    words = ("tokenize", "recipe.toml", "--show", "1")
    code, output = run_on_terminal(*words, columns=80, shows_stderr=False)
    assert code == OK
    output = output.replace("\r\n", "\n")
    lines = output.splitlines()
    assert lines[1] == "w5 w6\x1b[1;32m w9 w1 w0\x1b[0m"
    table = lines[3:5]
    assert [line.split()[0] for line in table] == ["data", "train"]
    assert max(map(len, table)) <= 80


@pytest.mark.usefixtures("fields_folder")
def test_json_has_the_parts_of_samples(capsys: Capture):
    train = read_json(capsys, "--show", "2")
    assert train["counts"]["samples"] == 3
    parts = train["samples"][0]["parts"]
    assert [(part["text"], part["ids"], part["weight"]) for part in parts] == [
        ("w5 w6", [5, 6], 0.0),
        (" w9 w1 w0", [9, 1, 0], 1.0),
    ]
    assert len(train["samples"]) == 2
    assert "samples" not in read_json(capsys)


@pytest.mark.usefixtures("fields_folder")
def test_python_has_samples_as_data():
    (train,) = prep.tokenize_shard("recipe.toml", show=0).data
    assert train.counts == prep.SampleCounts(3, 31, 26, cut=1, dropped=15, longest=22)
    assert train.samples == ()
    (train,) = prep.tokenize_shard("recipe.toml", show=9).data
    assert [sample.tokens for sample in train.samples] == [5, 22, 4]


@pytest.mark.usefixtures("fields_folder")
def test_page_has_marks_and_escapes(capsys: Capture):
    Path("data/3.jsonl").write_text(json.dumps({"ask": "<b>", "answer": "w1"}) + "\n")
    assert main(["tokenize", "recipe.toml", "--show", "3", "--html", "page.html"]) == OK
    assert "wrote page.html" in capsys.readouterr().err
    page = Path("page.html").read_text()
    assert "<pre>\nw5 w6<mark> w9 w1 w0</mark></pre>" in page
    assert "<summary>token ids</summary><p>5 6 <mark>9 1 0</mark></p>" in page
    assert "\x1b" not in page
    assert '<td>without loss</td><td class="n">0</td>' in page
    # The page of another program is not replaced, and the tokens are not made first.
    Path("other.html").write_text("mine")
    words = ("tokenize", "recipe.toml", "--show", "1", "--html", "other.html")
    assert "other.html is not overwritten" in run_failing(capsys, FAILED, *words)


@pytest.mark.usefixtures("fields_folder")
def test_page_needs_samples(capsys: Capture):
    error = run_failing(capsys, USAGE, "tokenize", "recipe.toml", "--html", "page.html")
    assert "`--html` needs `--show`" in error
    assert "hint: `--show 3`" in error


def all_files() -> set[Path]:
    return set(Path(".").rglob("*"))


@pytest.mark.usefixtures("fields_folder")
def test_dry_run_shows_samples_and_keeps_nothing(capsys: Capture, monkeypatch: MonkeyPatch):
    words = ("tokenize", "recipe.toml", "--show", "1")
    temporary = Path("temporary").absolute()
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    before = all_files()
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == OK
    shown = capsys.readouterr().out
    assert all_files() == before
    assert shown.splitlines()[-1] == "train: no tokens are kept"
    # The samples and the table are those of a run.
    assert main([*words]) == OK
    output = capsys.readouterr().out
    assert output.splitlines()[:-1] == shown.splitlines()[:-1]
    # Tokens that exist are read.
    before = all_files()
    assert main([*words, "--dry-run"]) == OK
    assert capsys.readouterr().out == output
    assert all_files() == before


@pytest.mark.usefixtures("fields_folder")
@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "`--dry-run` needs `--show`"),
        (["--show", "1", "--processes", "2/0"], "`--dry-run` is for one process"),
        (["--show", "1", "--format", "parquet", "--out", "a"], "exclude each other"),
    ],
)
def test_dry_run_without_samples_is_refused(words: list[str], why: str, capsys: Capture):
    assert why in run_failing(capsys, USAGE, "tokenize", "recipe.toml", "--dry-run", *words)


@pytest.mark.usefixtures("fields_folder")
def test_dry_run_in_python_has_samples():
    (train,) = prep.tokenize_shard("recipe.toml", show=2, dry_run=True).data
    assert train.path is None
    assert len(train.samples) == 2
    assert not Path("runs").exists()


@pytest.mark.usefixtures("fields_folder")
def test_mixture_shows_samples_of_each_source(capsys: Capture):
    sources = "".join(
        f'[[data.sources]]\nname = "{name}"\npath = "data/{index}.jsonl"\n'
        for index, name in enumerate(("near", "far"))
    )
    recipe = Path("recipe.toml").read_text().replace('path = "data/*.jsonl"\n', "")
    recipe = recipe.replace("seq_length = 16", "seq_length = 4").replace(
        "[batch]", f"{sources}[batch]"
    )
    Path("recipe.toml").write_text(recipe)
    assert main(["tokenize", "recipe.toml", "--show", "1"]) == OK
    output = capsys.readouterr().out
    assert "--- near-train 1: 5 tokens" in output
    assert "--- far-train 1: 22 tokens" in output


@pytest.mark.usefixtures("fields_folder")
def test_train_logs_counts_and_one_sample(capsys: Capture):
    assert main(["train", "recipe.toml", "--set", "data.seq_length=4", "--dry-run"]) == OK
    lines = capsys.readouterr().err.splitlines()
    (row,) = (line.split() for line in lines if line.startswith("train "))
    assert row == ["train", "3", "31", "26", "2", "3", "22", "0"]
    assert "first sample: w5 w6⟦ w9 w1 w0⟧" in lines


@pytest.mark.usefixtures("fields_folder")
def test_train_logs_a_long_sample_in_a_few_lines(capsys: Capture):
    row = json.dumps({"ask": "w5", "answer": "w100 " * 3000})
    Path("data/0.jsonl").write_text(f"{row}\n")
    assert main(["train", "recipe.toml", "--dry-run"]) == OK
    (line,) = (
        line for line in capsys.readouterr().err.splitlines() if line.startswith("first sample")
    )
    assert " [… 2,938 tokens …] " in line
    assert 300 < len(line) < 7 * 80


# `prep tokenize` of conversations in files that people have: what is read, skipped and refused


USER = {"role": "user", "content": "Hello there"}
ANSWER = {"role": "assistant", "content": "it is the end"}
HUMAN = {"from": "human", "value": "Hello there"}
GPT = {"from": "gpt", "value": "it is the end"}
NAMES_FILE = "`--set data.chat_template=chat_template.jinja` names one"


@pytest.fixture
def chat_folder(monkeypatch: MonkeyPatch) -> None:
    """Make a model, a tokenizer with a chat template and a recipe in the current folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder({**LLAMA, "vocab_size": 320})
    write_chat_tokenizer(Path("tok"), CHATML)
    data = 'tokenizer = "tok"\npath = "rows.jsonl"'
    recipe = RECIPE.replace('type = "text"\npath = "text.txt"', data)
    Path("recipe.toml").write_text(recipe.replace("holdout = 0.1\n", ""))


def write_rows(*rows: Any) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tokenize(capsys: Capture, *words: str, code: int = OK) -> tuple[str, str]:
    """Run `prep tokenize`, and return its results and its messages."""
    capsys.readouterr()
    assert main(["tokenize", "recipe.toml", *words]) == code
    output = capsys.readouterr()
    return output.out, output.err


@pytest.mark.usefixtures("chat_folder")
@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"conversations": [HUMAN, GPT]}, NAMES_FILE),
        (
            {"instruction": "Hello", "input": "there", "output": "it is the end of the time"},
            f"{NAMES_FILE}; `--set data.format=text` `--set data.fields='[instruction+input], output'`"
            " reads the columns as plain texts",
        ),
    ],
    ids=["sharegpt", "alpaca"],
)
def test_base_tokenizer_leads_to_both_ways_out(row: dict[str, Any], hint: str, capsys: Capture):
    write_rows(row, row)
    write_chat_tokenizer(Path("tok"), "", chat_template=None)
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


@pytest.mark.usefixtures("chat_folder")
@pytest.mark.parametrize("name", slow_except(LISTS, ["messages"]))
def test_lists_may_be_json_texts(name: str, capsys: Capture):
    row = LISTS[name]
    write_rows(row, row)
    expected, _ = tokenize(capsys, "--show", "2")
    write_csv("rows.csv", row, row)
    shown, messages = tokenize(capsys, "--show", "2", "--set", "data.path=rows.csv")
    assert shown.splitlines()[:-1] == expected.splitlines()[:-1]
    if name != "history":
        (line,) = [line for line in messages.splitlines() if line.startswith("the columns of")]
        assert line.endswith(", with lists as JSON texts")


@pytest.mark.usefixtures("chat_folder")
def test_other_texts_in_brackets_are_texts(capsys: Capture):
    row = {"prompt": "[1, 2]", "completion": "[]"}
    write_rows(*[row] * 3)
    shown, messages = tokenize(capsys, "--show", "1")
    assert "[1, 2]⟦[]<s>⟧" in shown
    assert 'the columns of the data mean `data.format = "prompt_completion"`\n' in messages


@pytest.mark.usefixtures("chat_folder")
def test_broken_json_is_a_bad_line(capsys: Capture):
    row = {"messages": [USER, ANSWER]}
    write_csv("rows.csv", {"messages": "[{"}, row, row, {"messages": "[{"})
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


@pytest.mark.usefixtures("chat_folder")
@pytest.mark.parametrize("name", slow_except(INVALID, ["failing template", "image", "recursion"]))
def test_invalid_row_is_one_error_or_a_bad_line(name: str, capsys: Capture):
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


@pytest.mark.usefixtures("chat_folder")
def test_conversations_without_loss_are_counted(capsys: Capture):
    empty = {"role": "assistant", "content": " "}
    rows = [[USER, ANSWER], [USER], [], [{"role": "user", "content": ""}, empty], [USER, ANSWER]]
    write_rows(*[{"messages": messages} for messages in rows])
    _, output = tokenize(capsys)
    assert "2 conversations have no token with loss\n" in output
    line = "1 turn of the assistant has no text, only the token that ends the turn has loss\n"
    assert line in output


@pytest.mark.usefixtures("chat_folder")
def test_data_without_loss_names_the_keys(capsys: Capture):
    write_rows({"messages": [USER]}, {"messages": [USER]})
    _, output = tokenize(capsys, code=FAILED)
    assert "error: the data has no token to train on\n" in output
    assert "or for conversations `data.loss`" in output


@pytest.mark.usefixtures("chat_folder")
def test_keys_of_chats_do_not_hide_the_missing_columns(capsys: Capture):
    write_rows({"prompt": "Hello", "chosen": "the end", "rejected": "time"})
    _, messages = tokenize(capsys, "--set", "data.loss=last", code=FAILED)
    assert messages == (
        "error: rows.jsonl:1: no column `text`\n"
        "  why: its columns: `prompt`, `chosen`, `rejected`\n"
        " hint: `--set data.fields='[prompt], chosen'`\n"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("chat_folder")
def test_many_turns_are_tokenized_or_refused_at_once(capsys: Capture):
    write_rows({"messages": [USER, ANSWER] * 5_000})
    shown, _ = tokenize(capsys, "--show", "1")
    assert shown.startswith("--- train 1: 140,000 tokens, 35,000 with loss")
    # Each turn is rendered with all before it: the first rendering does not begin.
    words = ("--set", "data.chat_template=training")
    _, output = tokenize(capsys, *words, code=FAILED)
    assert "error: rows.jsonl:1: the conversation is too long\n" in output


@pytest.mark.slow
@pytest.mark.usefixtures("fields_folder")
def test_train_logs_a_sample_of_each_source(capsys: Capture):
    names = ("near", "far", "third", "fourth", "fifth")
    for name, index in zip(names, (0, 1, 0, 0, 0)):
        row = json.loads(Path(f"data/{index}.jsonl").read_text().splitlines()[0])
        lines = [json.dumps(row | {"answer": f"{row['answer']} w{index}"})] * 9
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    sources = "".join(
        f'[[data.sources]]\nname = "{name}"\npath = "{name}.jsonl"\n' for name in names
    )
    recipe = Path("recipe.toml").read_text().replace('path = "data/*.jsonl"\n', "")
    Path("recipe.toml").write_text(recipe.replace("[batch]", f"{sources}[batch]"))
    assert main(["train", "recipe.toml", "--dry-run"]) == OK
    lines = capsys.readouterr().err.splitlines()
    samples = [line for line in lines if line.startswith("first sample")]
    assert [line.partition(":")[0] for line in samples] == [
        f"first sample of {name}" for name in names[:4]
    ]
    assert samples[0] == "first sample of near: w5 w6⟦ w9 w1 w0 w0⟧"
    assert all("⟦" in line for line in samples)
    assert sum(map(len, samples)) < 7 * 80
    assert "`prep tokenize RECIPE --show 1` shows the first samples of 1 other source" in lines
