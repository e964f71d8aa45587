"""Shapes of data sets found by their columns: the keys, the text and the parts with loss of public layouts."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from tests.trainer.data.test_chat_turns import STOPS
from trainer.data.chat_template import ChatTemplate
from trainer.data.columns import find_data_shape
from trainer.data.examples import ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.readers.reader import Record
from trainer.recipe.data_table import Data
from trainer.recipe.text_fields import CHAT_FORMATS

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}
HUMAN = {"from": "human", "value": "1+1?"}
GPT = {"from": "gpt", "value": "2"}
CALL = {"from": "function_call", "value": '{"name": "sum", "arguments": {"a": "1"}}'}
CHAT_TEXT = "<user>1+1?<|im_end|><assistant>⟦2<|im_end|>⟧"
# Twelve public layouts: columns of a record, the keys of its shape, its text with brackets around the parts with loss.
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, str], str]] = {
    "ultrachat": (
        {"prompt": "1+1?", "prompt_id": "a", "messages": [USER, ANSWER]},
        ("chat", "messages"),
        CHAT_TEXT,
    ),
    "tulu-3": ({"id": "a", "messages": [USER, ANSWER], "source": "b"}, ("chat", "messages"), CHAT_TEXT),
    "conversation": ({"conversation": [USER, ANSWER]}, ("chat", "conversation"), CHAT_TEXT),
    "openhermes": (
        {"conversations": [HUMAN, GPT], "system_prompt": None, "source": "b"},
        ("sharegpt", "conversations"),
        CHAT_TEXT,
    ),
    "slim-orca": (
        {"conversations": [
            {"from": "system", "value": "Be kind", "weight": None},
            {"from": "human", "value": "1+1?", "weight": 0},
            {"from": "gpt", "value": "2", "weight": 1},
        ]},
        ("sharegpt", "conversations"),
        f"<system>Be kind<|im_end|>{CHAT_TEXT}",
    ),
    "glaive-toolcall": (
        {"conversations": [HUMAN, CALL, {"from": "observation", "value": "2"}, GPT], "system": "Be kind",
         "tools": '[{"name": "sum", "description": "", "parameters": {}}]'},
        ("sharegpt", "conversations"),
        "<system>Be kind<|im_end|><user>1+1?<|im_end|>"
        '<assistant>⟦sum({"a": "1"})<|im_end|>⟧<tool>2<|im_end|><assistant>⟦2<|im_end|>⟧',
    ),
    "trl-tldr": (
        {"prompt": "1+1?", "completion": " 2"},
        ("prompt_completion", "[prompt], completion"),
        "1+1?⟦ 2⟧",
    ),
    "trl-conversational": (
        {"prompt": [ANSWER, USER], "completion": [ANSWER]},
        ("chat", "[prompt], completion"),
        f"<assistant>2<|im_end|>{CHAT_TEXT}",
    ),
    "prompt-response": (
        {"prompt": "1+1?", "response": " 2"},
        ("prompt_response", "[prompt], response"),
        "1+1?⟦ 2⟧",
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1+1", "output": "2", "system": "Be kind", "history": [["a", "b"]]},
        ("alpaca", "[instruction+input], output"),
        "<system>Be kind<|im_end|><user>a<|im_end|><assistant>⟦b<|im_end|>⟧"
        "<user>Add.\n1+1<|im_end|><assistant>⟦2<|im_end|>⟧",
    ),
    "alpaca-no-input": (
        {"instruction": "1+1?", "input": "", "output": "2"},
        ("alpaca", "[instruction+input], output"),
        CHAT_TEXT,
    ),
    "dolly": (
        {"instruction": "Add.", "context": "1+1", "response": "2", "category": "c"},
        ("alpaca", "[instruction+context], response"),
        "<user>Add.\n1+1<|im_end|><assistant>⟦2<|im_end|>⟧",
    ),
    "gsm8k": ({"question": "1+1?", "answer": "2"}, ("question_answer", "[question], answer"), "1+1?⟦2⟧"),
    "wikitext": ({"text": "One."}, ("text", "text"), "⟦One.⟧"),
}  # fmt: skip


def make_data(path: Path | str, **keys: Any) -> Data:
    return Data(path=(str(path),), seq_length=8, **keys)


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def find(path: Path, **keys: Any) -> tuple[Data, list[str]]:
    notes: list[str] = []
    return find_data_shape(make_data(path, **keys), note=notes.append), notes


def settings_of(data: Data) -> ExampleSettings:
    template = None
    if data.format in CHAT_FORMATS:
        template = ChatTemplate("chat.jinja", TEMPLATE, ())
    return ExampleSettings(
        fields=data.fields or "",
        chat_template=template,
        chat_format=data.format if template else "chat",
        add_eos=False,
        stop_texts=STOPS,
    )


def shown(data: Data, record: dict[str, Any]) -> str:
    """Return the text of a record with brackets around its parts with loss."""
    text = ""
    for segment in (
        compile_fields(settings_of(data), vocab=9).build(Record(record, "a:1", 1)).target
    ):
        assert isinstance(segment.content, str)
        spans = segment.loss_spans
        if spans is None:
            spans = ((0, len(segment.content), 1.0),) if segment.weight else ()
        part = segment.content
        for start, end, _ in reversed(spans):
            part = f"{part[:start]}⟦{part[start:end]}⟧{part[end:]}"
        text += part
    return text


@pytest.mark.parametrize("name", LAYOUTS)
def test_public_layouts_are_found_by_their_columns(name: str, tmp_path: Path):
    record, shape, expected = LAYOUTS[name]
    data, notes = find(write_rows(tmp_path, record))
    assert (data.format, data.fields) == shape
    assert shown(data, record) == expected
    assert len(notes) == 1
    assert notes[0].startswith("the columns of the data mean `data.f")


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        ({"text": "a", "messages": [USER]}, ["data.format=chat", "data.format=text"]),
        ({"prompt": "a", "instruction": "b", "output": "c"}, ["data.format=alpaca", "[prompt], output"]),
        ({"prompt": "a", "completion": "b", "response": "c"}, ["prompt_completion", "prompt_response"]),
        ({"conversations": [HUMAN], "messages": [USER]}, ["data.format=chat", "data.format=sharegpt"]),
    ],
)  # fmt: skip
def test_ambiguous_columns_print_the_keys(record: dict[str, Any], keys: list[str], tmp_path: Path):
    with pytest.raises(
        PrepError, match=r"rows\.jsonl:1: the shape of the data is not clear"
    ) as caught:
        find(write_rows(tmp_path, record))
    assert all(key in caught.value.hint for key in keys)


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        ({"instruction": None, "input": "1+1", "output": "2"}, ("alpaca", "[instruction+input], output")),
        ({"prompt": "1+1?", "completion": None}, ("prompt_completion", "[prompt], completion")),
        ({"messages": None, "id": 1}, ("chat", "messages")),
        ({"text": "One.", "messages": None}, ("text", "text")),
    ],
)  # fmt: skip
def test_null_of_the_first_record_is_an_invalid_line(
    record: dict[str, Any], shape: tuple[str, str], tmp_path: Path
):
    data, _ = find(write_rows(tmp_path, record))
    assert (data.format, data.fields) == shape


@pytest.mark.parametrize(
    ("records", "shape"),
    [
        ([{"conversations": None}, {"conversations": [HUMAN]}], ("sharegpt", "conversations")),
        ([{"text": None, "messages": None}, {"messages": [USER]}], ("chat", "messages")),
    ],
)
def test_record_with_values_tells_the_shape_after_one_of_nulls(
    records: list[dict[str, Any]], shape: tuple[str, str], tmp_path: Path
):
    path = write_rows(tmp_path, *records)
    data, _ = find(path, bad_lines=1)
    assert (data.format, data.fields) == shape


@pytest.mark.parametrize("file_type", ["csv", "gzip", "list", "parquet"])
def test_shape_is_found_in_other_files(file_type: str, tmp_path: Path):
    row = {"question": "1+1?", "answer": "2"}
    names = {"csv": "a.csv", "gzip": "a.jsonl.gz", "list": "a.json", "parquet": "a.parquet"}
    path = tmp_path / names[file_type]
    if file_type == "csv":
        with path.open("w") as file:
            csv.writer(file).writerows([row.keys(), row.values()])
    elif file_type == "gzip":
        path.write_bytes(gzip.compress(json.dumps(row).encode()))
    elif file_type == "list":
        path.write_text(json.dumps([row, {"text": "other"}], indent=2))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    data, _ = find(path)
    assert (data.format, data.fields) == ("question_answer", "[question], answer")


def test_named_columns_are_not_looked_for(tmp_path: Path):
    path = write_rows(tmp_path, {"text": "a", "messages": [USER]})
    for keys in ({"fields": "text"}, {"format": "chat", "fields": "messages"}):
        data, notes = find(path, **keys)
        assert data.fields == keys["fields"]
        assert not notes


def test_text_files_have_no_shape(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("One.")
    data, notes = find(path)
    assert (data.format, data.fields, notes) == ("text", None, [])


def test_later_record_without_the_columns_is_an_error(tmp_path: Path):
    data, _ = find(write_rows(tmp_path, {"messages": [USER, ANSWER]}, {"text": "a"}))
    builder = compile_fields(settings_of(data), vocab=9)
    with pytest.raises(PrepError, match=r"rows\.jsonl:2: no column `messages`"):
        builder.build(Record({"text": "a"}, "rows.jsonl:2", 1))


@pytest.mark.parametrize(
    ("turn", "what"),
    [
        ({"from": "narrator", "value": "a"}, "turn 2 is from `narrator`"),
        ({"from": "gpt", "value": 3}, "turn 2 is no turn"),
        ({"from": "function_call", "value": "sum()"}, "turn 2: not JSON"),
        ({"from": "function_call", "value": "[1]"}, "turn 2 is no call"),
        ("a", "turn 2 is no object"),
    ],
)
def test_invalid_turns_name_their_place(turn: object, what: str, tmp_path: Path):
    record = {"conversations": [HUMAN, turn]}
    data, _ = find(write_rows(tmp_path, record))
    with pytest.raises(PrepError, match=f"a:1: column `conversations`: {what}"):
        shown(data, record)


def test_history_of_other_values_is_an_error(tmp_path: Path):
    record = {"instruction": "a", "output": "b", "history": [["c"]]}
    data, _ = find(write_rows(tmp_path, record))
    with pytest.raises(PrepError, match="`history` is not a list of pairs"):
        shown(data, record)


def test_columns_of_other_names_are_not_read(tmp_path: Path):
    """E.g. a time that Python does not have, next to the text."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    far = pa.array([10**17], pa.timestamp("ms"))
    parquet.write_table(pa.table({"text": ["One."], "time": far}), tmp_path / "rows.parquet")
    data, _ = find(tmp_path / "rows.parquet")
    assert (data.format, data.fields) == ("text", "text")
