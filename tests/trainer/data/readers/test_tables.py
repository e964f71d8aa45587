"""Parquet and Arrow files: rows are records with the values of JSON Lines, and malformed files are errors."""

from __future__ import annotations

import datetime
import decimal
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from prepcli.core.errors import PrepError
from prepcli.core.sandbox import Sandbox
from tests.helpers.corpus import make_config, tokenize_quietly
from tests.helpers.data_formats import write_arrow_files
from tests.helpers.hostile_tables import (
    INVALID_TABLES,
    file_bytes,
    parquet_bytes,
    stream_bytes,
    text_batch,
)
from tests.helpers.slow_cases import slow_except
from tests.trainer.data.chat_templates import LAST_REASONS
from tests.trainer.data.test_chat import write_tokenizer
from trainer.data.chat_template import load_chat_template
from trainer.data.files import hash_file
from trainer.data.find_files import resolve_type
from trainer.data.readers import READERS, table_files
from trainer.data.readers.reader import ReadOptions, Record
from trainer.data.store import DOCUMENTS_FILE, TOKENS_FILE, WEIGHTS_FILE, read_meta
from trainer.data.table_batches import UnsupportedTypeError, values_nbytes
from trainer.recipe.text_fields import FileType

# Parquet and Arrow files: rows are records, and errors name the row and the column.

ROWS = [{"id": str(i), "text": f"cat {i}"} for i in range(20)]

TYPES: Mapping[str, FileType] = {
    "a.parquet": "parquet",
    "file.arrow": "arrow",
    "stream.arrow": "arrow",
}


def read_records(path: Path, file_type: FileType) -> list[Record]:
    return [
        piece for piece in READERS[file_type].read(hash_file(path)) if isinstance(piece, Record)
    ]


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_records_that_count_the_bytes_of_the_file(tmp_path: Path, name: str):
    write_arrow_files(tmp_path, ROWS)
    records = read_records(tmp_path / name, TYPES[name])
    assert [dict(record.values) for record in records] == ROWS
    assert [record.place for record in records[::19]] == [
        f"{tmp_path}/{name}, row {number}" for number in (1, 20)
    ]
    nbytes, size = sum(record.nbytes for record in records), (tmp_path / name).stat().st_size
    assert size - 100 < nbytes <= size


@pytest.mark.parametrize("name", TYPES)
def test_error_names_the_damaged_file(tmp_path: Path, name: str):
    write_arrow_files(tmp_path, ROWS)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(PrepError, match=rf"{name} cannot be read as (Parquet|Arrow) after row \d+"):
        read_records(path, TYPES[name])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "it is null"),
        (b"a", "it is a value of type bytes"),
    ],
)
def test_error_names_row_and_column_of_a_value_without_text(tmp_path: Path, text: Any, why: str):
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([{"text": text}]), path)
    with pytest.raises(PrepError) as caught:
        tokenize_quietly(make_config(tmp_path, path, type="parquet", fields="text"))
    assert (caught.value.what, caught.value.why) == (
        f"{path}, row 1: column `text` is not text",
        why,
    )


def test_missing_column_error_lists_the_other_columns(tmp_path: Path):
    path, *_ = write_arrow_files(tmp_path, ROWS)
    with pytest.raises(PrepError) as caught:
        tokenize_quietly(make_config(tmp_path, path, type="parquet", fields="body"))
    assert (caught.value.what, caught.value.why) == (
        f"{path}, row 1: no column `body`",
        "its columns: `id`, `text`",
    )


@pytest.mark.parametrize("name", TYPES)
def test_file_changed_after_hashing_fails(tmp_path: Path, name: str):
    write_arrow_files(tmp_path, ROWS)
    before = hash_file(tmp_path / name)
    write_arrow_files(tmp_path, [{**row, "text": row["text"].upper()} for row in ROWS])
    with pytest.raises(PrepError, match="changed while it was read"):
        list(READERS[TYPES[name]].read(before))


# Rows of Parquet and Arrow files have the values of the same rows in JSON Lines.

# It shows all keys and values of a row. Arrow has one order of keys for all objects of a column.
ALL_VALUES = (
    "{{ tools | tojson }}{% for message in messages %}{{ message | dictsort | tojson }}{% endfor %}"
)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a turn that calls a tool."""
    return {"role": "assistant", "tool_calls": [{"name": name, "arguments": arguments}]}


CALL_ROWS = [
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
    records = read_records(write_rows(tmp_path, CALL_ROWS, name), file_type)
    assert [dict(record.values) for record in records] == CALL_ROWS


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


# Malformed Parquet and Arrow files are errors with the file and the row, in bounded memory, and never a signal.

FORMATS: dict[str, Callable[[pa.RecordBatch], bytes]] = {"stream": stream_bytes, "file": file_bytes}


def read_table(path: Path, data: bytes, options: ReadOptions | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file with these bytes."""
    path.write_bytes(data)
    reader = READERS[resolve_type([path], "auto")]
    pieces = reader.read(hash_file(path), options or ReadOptions())
    return [dict(piece.values) for piece in pieces if isinstance(piece, Record)]


# By default each table is a stream.
@pytest.mark.parametrize("file_format", slow_except(FORMATS, ["stream"]))
@pytest.mark.parametrize("name", INVALID_TABLES)
def test_error_names_the_row_of_an_offset_outside_its_buffer(
    tmp_path: Path, name: str, file_format: str
):
    path = tmp_path / "a.arrow"
    data = INVALID_TABLES[name].corrupt(FORMATS[file_format])
    with pytest.raises(PrepError, match=r"a\.arrow, row 2: invalid"):
        read_table(path, data)
    errors: list[PrepError] = []
    assert read_table(path, data, ReadOptions(errors.append))
    assert [error.what for error in errors] == [f"{path}, row 2: invalid"]


@pytest.mark.parametrize("suffix", slow_except(["parquet", "arrow"], ["parquet"]))
def test_error_names_the_row_of_text_that_is_not_utf8(tmp_path: Path, suffix: str):
    batch = text_batch([0, 3, 4, 7], b"cat\xffsat")
    path = tmp_path / f"a.{suffix}"
    data = parquet_bytes(batch) if suffix == "parquet" else stream_bytes(batch)
    with pytest.raises(PrepError, match=rf"a\.{suffix}, row 2: invalid - .*UTF"):
        read_table(path, data)
    assert [row["text"] for row in read_table(path, data, ReadOptions(lambda error: None))] == [
        "cat",
        "sat",
    ]


@pytest.mark.parametrize("suffix", slow_except(["parquet", "arrow"], ["arrow"]))
def test_two_columns_of_one_name_are_an_error(tmp_path: Path, suffix: str):
    batch = pa.RecordBatch.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    data = parquet_bytes(batch) if suffix == "parquet" else stream_bytes(batch)
    with pytest.raises(PrepError, match="two columns are named `text`"):
        read_table(tmp_path / f"a.{suffix}", data)


def test_file_without_columns_is_refused(tmp_path: Path):
    table = pa.table({"a": [1, 2]}).select([])
    data = parquet_bytes(pa.RecordBatch.from_arrays([], schema=table.schema))
    with pytest.raises(PrepError, match="it has no columns"):
        read_table(tmp_path / "a.parquet", data)


def test_deeply_nested_type_is_refused(tmp_path: Path):
    kind = pa.int8()
    for _ in range(40):
        kind = pa.list_(kind)
    batch = pa.RecordBatch.from_arrays([pa.nulls(1, kind)], names=["text"])
    with pytest.raises(PrepError, match="nested more than 32 levels deep"):
        read_table(tmp_path / "a.arrow", stream_bytes(batch))


def test_value_that_python_cannot_represent_is_an_error(tmp_path: Path):
    dates = pa.array([2**31 - 1], pa.int32()).view(pa.date32())
    with pytest.raises(PrepError, match=r"row 1: column `text` has no value in Python"):
        read_table(
            tmp_path / "a.arrow", stream_bytes(pa.RecordBatch.from_arrays([dates], names=["text"]))
        )


@pytest.mark.parametrize("suffix", slow_except(["parquet", "arrow"], ["arrow"]))
def test_row_over_the_limit_is_an_error_or_is_skipped(tmp_path: Path, suffix: str):
    batch = pa.RecordBatch.from_arrays([pa.array(["cat", "a" * 2000, "sat"])], names=["text"])
    path = tmp_path / f"a.{suffix}"
    data = parquet_bytes(batch) if suffix == "parquet" else stream_bytes(batch)
    with pytest.raises(PrepError, match=r"row 2: too large - it has 2,008 bytes") as caught:
        read_table(path, data, ReadOptions(max_document_nbytes=1000))
    assert caught.value.why.endswith("`data.max_document_bytes` is 1,000")
    options = ReadOptions(lambda error: None, max_document_nbytes=1000)
    assert [row["text"] for row in read_table(path, data, options)] == ["cat", "sat"]


def _many_nulls() -> pa.RecordBatch:
    """Return a batch with a list of 2^31 - 1 nulls in a few bytes."""
    array = pa.Array.from_buffers(
        pa.list_(pa.null()),
        1,
        [None, pa.py_buffer(b"\0\0\0\0\xff\xff\xff\x7f")],
        children=[pa.nulls(2**31 - 1)],
    )
    return pa.RecordBatch.from_arrays([array], names=["text"])


def _repeated_text() -> pa.RecordBatch:
    """Return a batch with a list of one long text, 10,000 times."""
    indices = pa.array([0] * 10_000, pa.int32())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["a" * 1_000_000]))
    array = pa.ListArray.from_arrays(pa.array([0, 10_000], pa.int32()), texts)
    return pa.RecordBatch.from_arrays([array], names=["text"])


@pytest.mark.parametrize("make_batch", slow_except([_many_nulls, _repeated_text], [_repeated_text]))
def test_compressed_row_with_a_huge_value_is_refused(
    tmp_path: Path, make_batch: Callable[[], pa.RecordBatch]
):
    with pytest.raises(PrepError, match=r"row 1: too large - it has 1\d,\d{3},\d{3},\d{3} bytes"):
        read_table(tmp_path / "a.arrow", stream_bytes(make_batch(), compression="zstd"))


def test_rows_of_one_dictionary_are_read_in_bounded_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """100 MB of texts, decoded with 32 MiB for a part and 8 rows."""
    monkeypatch.setattr(table_files, "DECODING_NBYTES", 32 << 20)
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0] * 100, pa.int32()), pa.array(["a" * 1_000_000])
    )
    batch = pa.RecordBatch.from_arrays([texts], names=["text"])
    options = ReadOptions(max_document_nbytes=2_000_000)
    rows = read_table(tmp_path / "a.arrow", stream_bytes(batch), options)
    assert [len(row["text"]) for row in rows] == [1_000_000] * 100


@pytest.mark.parametrize("suffix", slow_except(["parquet", "arrow"], ["parquet"]))
def test_page_over_the_memory_limit_is_refused(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(table_files, "DECODING_NBYTES", 32 << 20)
    batch = pa.RecordBatch.from_arrays([pa.array(["a" * 60_000_000])], names=["text"])
    path = tmp_path / f"a.{suffix}"
    data = (
        parquet_bytes(batch, compression="zstd")
        if suffix == "parquet"
        else stream_bytes(batch, compression="zstd")
    )
    with pytest.raises(
        PrepError, match=r"after row 0 - .* needs more than 41,554,432 bytes of memory"
    ) as caught:
        read_table(path, data, ReadOptions(max_document_nbytes=1_000_000))
    assert "data.max_document_bytes" in caught.value.hint


def test_end_of_the_process_between_two_parts_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The kernel may kill the process to free memory. Another one must not read the first rows again."""
    boxes: list[Sandbox] = []

    class KeptSandbox(Sandbox):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            boxes.append(self)

    monkeypatch.setattr(table_files, "Sandbox", KeptSandbox)
    path = tmp_path / "a.arrow"
    batch = pa.RecordBatch.from_arrays([pa.array(["a" * 3_000_000] * 4)], names=["text"])
    path.write_bytes(stream_bytes(batch))
    rows = READERS["arrow"].read(hash_file(path), ReadOptions())
    next(rows)
    (box,) = boxes
    box._children[0].stop()
    with pytest.raises(PrepError, match="after row 1 - the process that decodes it was ended"):
        list(rows)


# Estimated sizes of Arrow values count what they become, not the bytes that they share.

ENTRIES = pa.array([[("a", 1)], [("b", 2), ("cc", 3)]], pa.map_(pa.string(), pa.int64()))

UNION = pa.UnionArray.from_sparse(
    pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]
)


@pytest.mark.parametrize(
    ("array", "nbytes"),
    [
        (pa.array(["a", "bcd", None]), 3 * 8 + 4),
        (pa.array(["aaa", "b" * 100, None], pa.string_view()), 3 * 8 + 103),
        (pa.array(["aaa", "b", "aaa"]).dictionary_encode(), 3 * (8 + 3)),
        (pa.array([1, 2], pa.int8()), 2 * 8),
        (pa.nulls(5), 5 * 8),
        (pa.array([[1, 2], [3], None]), 3 * 8 + 3 * 8),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))[1:], 8 + 2 * 8),
        (pa.array([{"a": "xx"}, {"a": "y"}])[1:], 8 + 8 + 1),
        (ENTRIES[1:], 8 + 2 * (8 + 8 + 8) + 3),
        (pa.array([b"1" * 16], pa.uuid()), 16),
    ],
)
def test_values_nbytes_counts_elements_at_every_depth(array: Any, nbytes: int):
    assert values_nbytes(array) == nbytes


@pytest.mark.parametrize("array", [pa.array([[1]], pa.list_view(pa.int64())), UNION])
def test_values_nbytes_refuses_other_types(array: Any):
    with pytest.raises(UnsupportedTypeError, match="are not supported"):
        values_nbytes(array)


def test_child_process_imports_few_modules():
    """It reads untrusted files, so it holds little code and starts fast."""
    script = (
        "import sys; import trainer.data.table_batches;"
        "print(sum(name.startswith(('prepcli', 'trainer')) for name in sys.modules),"
        " 'pydantic' in sys.modules, 'jax' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert int(output[0]) <= 10
    assert output[1:] == ["False", "False"]
