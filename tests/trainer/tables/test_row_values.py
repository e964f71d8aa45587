"""Rows of Parquet and Arrow files have the values of the same rows in JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpus import make_config, tokenize_quietly
from tests.trainer.data.readers.test_arrow_file import read_records
from tests.trainer.data.test_chat import write_tokenizer
from trainer.data.chat_template import load_chat_template
from trainer.data.store import read_meta
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import FileType

pa = pytest.importorskip("pyarrow")

TOOL_CALLS = "{% for message in messages %}{{ message | tojson }}{% endfor %}"


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
        with ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize(("name", "file_type"), [("a.parquet", "parquet"), ("a.arrow", "arrow")])
def test_structs_have_no_keys_of_other_rows(tmp_path: Path, name: str, file_type: FileType):
    records = read_records(write_rows(tmp_path, ROWS, name), file_type)
    assert [dict(record.values) for record in records] == ROWS


def test_tables_give_the_tokens_of_json_lines(tmp_path: Path):
    folder = write_tokenizer(tmp_path / "tokenizer", TOOL_CALLS)
    stores: list[bytes] = []
    types: Mapping[str, FileType] = {"a.jsonl": "json", "a.parquet": "parquet"}
    for name, file_type in types.items():
        config = make_config(
            tmp_path,
            write_rows(tmp_path, ROWS, name),
            type=file_type,
            fields="messages",
            chat_template=load_chat_template(folder),
            tokenizer=folder / "tokenizer.json",
            add_eos=False,
        )
        store = config.cache / tokenize_quietly(config).identity
        stores.append((store / "tokens.bin").read_bytes())
        assert read_meta(store).n_documents == len(ROWS)
    assert stores[0] == stores[1]


def test_lists_and_maps_keep_their_nulls(tmp_path: Path):
    schema = pa.schema(
        {"x": pa.list_(pa.int64()), "m": pa.map_(pa.string(), pa.string()), "n": pa.int64()}
    )
    rows = [{"x": [1, None], "m": [("a", "b"), ("c", None)], "n": None}]
    (record,) = read_records(write_rows(tmp_path, rows, "a.parquet", schema), "parquet")
    assert dict(record.values) == {"x": [1, None], "m": {"a": "b", "c": None}, "n": None}


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
