"""Rows of Parquet and Arrow files have the values of the same rows in JSON Lines."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import xxhash

from prepcli.core.errors import PrepError
from tests.helpers.corpus import make_config, tokenize_quietly
from tests.trainer.data.chat_templates import LAST_REASONS
from tests.trainer.data.readers.test_arrow_file import read_records
from tests.trainer.data.test_chat import write_tokenizer
from trainer.data.chat_template import load_chat_template
from trainer.data.store import DOCUMENTS_FILE, TOKENS_FILE, WEIGHTS_FILE, read_meta
from trainer.recipe.text_fields import FileType

pa = pytest.importorskip("pyarrow")

# It shows all keys and values of a row. Arrow has one order of keys for all objects of a column.
ALL_VALUES = (
    "{{ tools | tojson }}{% for message in messages %}{{ message | dictsort | tojson }}{% endfor %}"
)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a turn that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"name": name, "arguments": arguments}]}


ROWS = [
    {"messages": [{"role": "user", "content": "a"}, call("weather", city="Ulm")]},
    {"messages": [call("sum", a=1, b={"c": [1, 2], "d": "x"})]},
    {"messages": [{"role": "user", "content": ""}, call("now")]},
    {"messages": [call("sum", b={"c": []})]},
]


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str, schema: Any = None) -> Path:
    """Write rows as a Parquet file, an Arrow stream or JSON Lines."""
    from pyarrow import ipc, parquet

    path = folder / name
    table = pa.Table.from_pylist(rows, schema=schema)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        make_writer = ipc.new_file if name == "file.arrow" else ipc.new_stream
        with make_writer(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize(("name", "file_type"), [("a.parquet", "parquet"), ("a.arrow", "arrow")])
def test_structs_have_no_keys_of_other_rows(tmp_path: Path, name: str, file_type: FileType):
    records = read_records(write_rows(tmp_path, ROWS, name), file_type)
    assert [dict(record.values) for record in records] == ROWS


def schema_of(name: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of a tool."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def function_call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# Each tool has its own parameters and each call its own arguments, so that Arrow fills all of them with nulls.
WEATHER = schema_of("weather", city={"type": "string"})
SUM = schema_of("sum", a={"type": "integer"}, b={"type": "array", "items": {"type": "integer"}})
CHATS = [
    {
        "messages": [
            user("Weather?"),
            {"role": "assistant", "tool_calls": [function_call("weather", city="Ulm")]},
            {"role": "tool", "name": "weather", "content": "sun"},
            {"role": "assistant", "content": "Sun.", "reasoning_content": "The tool says so."},
        ],
        "tools": [WEATHER],
    },
    {
        "messages": [
            user("1+2+3?"),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [function_call("sum", a=1, b=[2, 3]), function_call("weather")],
            },
            {"role": "tool", "content": "6"},
            {"role": "assistant", "content": "6", "weight": 0.5},
        ],
        "tools": [SUM, WEATHER],
    },
    {"messages": [user("Hi"), {"role": "assistant", "content": "Hello!"}], "tools": None},
]
TABLES: Mapping[str, FileType] = {
    "a.parquet": "parquet",
    "stream.arrow": "arrow",
    "file.arrow": "arrow",
    "json-columns.parquet": "parquet",
    "datasets.parquet": "parquet",
}


def write_chats(folder: Path, name: str) -> Path:
    """Write `CHATS` as a table, in one of them with tools and calls in columns of the type `Json` of `datasets`."""
    if name == "json-columns.parquet":
        rows = [{**chat, "tools": chat["tools"] and json.dumps(chat["tools"])} for chat in CHATS]
        table = pa.Table.from_pylist(rows)
        place = table.schema.get_field_index("tools")
        metadata = {"ARROW:extension:name": "arrow.json", "ARROW:extension:metadata": ""}
        schema = table.schema.set(place, table.field("tools").with_metadata(metadata))
        return write_rows(folder, rows, name, schema)
    if name != "datasets.parquet":
        return write_rows(folder, CHATS, name)
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no type Json")
    text = datasets.Value("string")
    function = {"name": text, "arguments": datasets.Json()}
    message = {
        "role": text,
        "content": text,
        "reasoning_content": text,
        "name": text,
        "weight": datasets.Value("float64"),
        "tool_calls": datasets.List({"type": text, "function": function}),
    }
    features = {"messages": datasets.List(message), "tools": datasets.List(datasets.Json())}
    rows = [
        {**chat, "messages": [{key: part.get(key) for key in message} for part in chat["messages"]]}
        for chat in CHATS
    ]
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(folder / name)
    return folder / name


def tokens_digest(folder: Path, path: Path, file_type: FileType) -> str:
    """Return the digest of the tokens of conversations, their ends and their loss weights."""
    config = make_config(
        folder,
        path,
        type=file_type,
        fields="messages",
        chat_template=load_chat_template(folder / "tokenizer"),
        tokenizer=folder / "tokenizer" / "tokenizer.json",
        add_eos=False,
    )
    store = config.cache / tokenize_quietly(config).identity
    assert read_meta(store).n_documents == len(CHATS)
    files = (TOKENS_FILE, DOCUMENTS_FILE, WEIGHTS_FILE)
    return xxhash.xxh3_128_hexdigest(
        b"".join((store / "00000" / file).read_bytes() for file in files)
    )


@pytest.mark.parametrize("template", [ALL_VALUES, LAST_REASONS], ids=["values", "chat"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_give_the_tokens_of_json_lines(tmp_path: Path, name: str, template: str):
    write_tokenizer(tmp_path / "tokenizer", template)
    path = write_chats(tmp_path, name)
    expected = tokens_digest(tmp_path, write_rows(tmp_path, CHATS, "a.jsonl"), "json")
    assert tokens_digest(tmp_path, path, TABLES[name]) == expected


def test_lists_and_maps_keep_their_nulls(tmp_path: Path):
    schema = pa.schema(
        {"x": pa.list_(pa.int64()), "m": pa.map_(pa.string(), pa.string()), "n": pa.int64()}
    )
    rows = [{"x": [1, None], "m": [("a", "b"), ("c", None)], "n": None}]
    (record,) = read_records(write_rows(tmp_path, rows, "a.parquet", schema), "parquet")
    assert dict(record.values) == {"x": [1, None], "m": {"a": "b", "c": None}, "n": None}


def test_values_without_json_show_their_text_in_objects(tmp_path: Path):
    """E.g. the time of a message, which a template shows as transformers shows it: as the text of the Python value."""
    row = {
        "time": datetime.datetime(2024, 5, 17, 12, 30, tzinfo=datetime.UTC),
        "day": datetime.date(2024, 5, 17),
        "score": decimal.Decimal("0.50"),
        "image": b"\xff",
        "took": [datetime.timedelta(seconds=5), None],
        "number": 1,
        "ratio": 0.5,
        "flag": True,
    }
    expected = {
        "time": "2024-05-17 12:30:00+00:00",
        "day": "2024-05-17",
        "score": "0.50",
        "image": "b'\\xff'",
        "took": ["0:00:05", None],
        "number": 1,
        "ratio": 0.5,
        "flag": True,
    }
    path = write_rows(tmp_path, [{"messages": [row], "day": row["day"]}], "a.parquet")
    (record,) = read_records(path, "parquet")
    assert record.values["messages"] == [expected]
    # A column is no object: a date is still no text.
    assert record.values["day"] == row["day"]


def test_conversation_with_times_has_the_tokens_of_texts(tmp_path: Path):
    write_tokenizer(tmp_path / "tokenizer", ALL_VALUES)
    times = [datetime.datetime(2024, 5, 17, 12, 30, number) for number in range(len(CHATS))]
    chats = [
        {**chat, "messages": [{**message, "time": time} for message in chat["messages"]]}
        for chat, time in zip(CHATS, times)
    ]
    texts = [
        {**chat, "messages": [{**message, "time": str(time)} for message in chat["messages"]]}
        for chat, time in zip(CHATS, times)
    ]
    expected = tokens_digest(tmp_path, write_rows(tmp_path, texts, "a.jsonl"), "json")
    assert tokens_digest(tmp_path, write_rows(tmp_path, chats, "a.parquet"), "parquet") == expected


def json_type(item: Any) -> Any:
    """Return the Arrow schema of JSON texts, without the extension type that pyarrow 17 does not have."""
    metadata = {"ARROW:extension:name": "arrow.json", "ARROW:extension:metadata": ""}
    return pa.schema([pa.field("m", item, metadata=metadata)])


@pytest.mark.parametrize("how", ["extension", "metadata of the schema"])
def test_json_columns_are_parsed(tmp_path: Path, how: str):
    value = {"city": "Ulm", "days": None}
    rows = [{"m": json.dumps(value)}, {"m": None}]
    schema = json_type(pa.string())
    if how != "extension":
        features = {"info": {"features": {"m": {"_type": "Json"}}}}
        schema = pa.schema({"m": pa.string()}, {"huggingface": json.dumps(features)})
    records = read_records(write_rows(tmp_path, rows, "a.parquet", schema), "parquet")
    assert [record.values["m"] for record in records] == [value, None]


def test_malformed_json_column_names_row_and_column(tmp_path: Path):
    path = write_rows(tmp_path, [{"m": "{"}], "a.arrow", json_type(pa.string()))
    (record,) = read_records(path, "arrow")
    with pytest.raises(PrepError, match=r"row 1: column `m` has no value .*it is not JSON"):
        record.values["m"]


def test_json_columns_of_datasets_are_parsed(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no type Json")
    features = datasets.Features(
        {"messages": datasets.List({"role": datasets.Value("string"), "x": datasets.Json()})}
    )
    messages = [[{"role": "user", "x": {"city": "Ulm"}}], [{"role": "user", "x": [1, {"a": None}]}]]
    dataset = datasets.Dataset.from_dict({"messages": messages}, features=features)
    dataset.to_parquet(str(tmp_path / "a.parquet"))
    dataset.save_to_disk(str(tmp_path / "saved"))
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    types: Mapping[Path, FileType] = {tmp_path / "a.parquet": "parquet", arrow: "arrow"}
    for path, file_type in types.items():
        assert [record.values["messages"] for record in read_records(path, file_type)] == messages
