"""A file that is one list of objects is read as JSON Lines with the same objects."""

from __future__ import annotations

import gzip
import json
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from trainer.data.files import hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import ReadOptions, Record
from trainer.data.readers.text_files import HEAD_NBYTES, read_elements

LIMIT = 64 << 20
SCALARS = st.none() | st.booleans() | st.integers() | st.text('a"\\/[]{},:\n\u2028é😀', max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.text('k"\\]}', max_size=2), values)
    ),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.text("ab,]", max_size=2), VALUES, max_size=3), max_size=5)
LAYOUTS = st.fixed_dictionaries(
    {
        "indent": st.none() | st.integers(0, 2),
        "ensure_ascii": st.booleans(),
        "separators": st.sampled_from([(",", ":"), (" , ", " : ")]),
    }
)


def cut_blocks(data: bytes, nbytes: int) -> Iterator[bytes]:
    """Yield bytes in blocks. The first one has the opening bracket."""
    first = data.index(b"[") + 1
    yield data[:first]
    for start in range(first, len(data), nbytes):
        yield data[start : start + nbytes]


def read_data(
    data: bytes, name: str = "a.json", options: ReadOptions | None = None
) -> tuple[list[Record], list[PrepError]]:
    """Return the records and the errors of a file. The errors of its list are the last ones."""
    errors: list[PrepError] = []
    options = options or ReadOptions(errors.append)
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            for piece in READERS["json"].read(hash_file(path), options):
                assert isinstance(piece, Record)
                records.append(piece)
        except PrepError as error:
            errors.append(error)
    return records, errors


@given(ROWS, LAYOUTS, st.sampled_from(["", "\ufeff", "\n \t\r\n"]), st.integers(1, 7))
def test_list_has_the_elements_of_json_loads(
    rows: list[Any], layout: dict[str, Any], start: str, nbytes: int
):
    data = (start + json.dumps(rows, **layout) + "\n").encode()
    elements = list(read_elements("a.json", cut_blocks(data, nbytes), LIMIT))
    assert [json.loads(element.content) for element in elements] == rows
    for element in elements:
        assert data[element.start :].startswith(element.content)
    records, errors = read_data(data)
    assert [record.values for record in records] == rows
    assert not errors


@given(
    ROWS.filter(bool),
    LAYOUTS,
    st.lists(
        st.tuples(
            st.floats(0, 1), st.integers(0, 3), st.sampled_from(["", '"', "\\", *"[]{},: \n1x"])
        ),
        min_size=1,
        max_size=3,
    ),
)
@example([{"a": 1}], {}, [(1.0, 0, "]")])
@example([{"a": 1}, {}], {}, [(0.0, 0, "[")])
def test_mutated_list_is_read_only_if_json_loads_reads_it(
    rows: list[Any], layout: dict[str, Any], mutations: list[tuple[float, int, str]]
):
    text = json.dumps(rows, **layout)
    for position, n_removed, inserted in mutations:
        index = int(position * len(text))
        text = text[:index] + inserted + text[index + n_removed :]
    if not text.lstrip().startswith("["):
        return
    records, errors = read_data(text.encode())
    try:
        values = json.loads(text)
    except ValueError:
        assert errors
    else:
        assert [record.values for record in records] == [v for v in values if isinstance(v, dict)]
        assert len(records) + len(errors) == len(values)


def test_records_of_a_list_are_numbered(tmp_path: Path):
    rows = [{"text": "a"}, {"text": "b", "n": [1, {"x": "]"}]}, {"text": "c"}]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    records = list(READERS["json"].read(hash_file(tmp_path / "a.json")))
    assert [record.place for record in records if isinstance(record, Record)] == [
        f"{tmp_path}/a.json, record {number}" for number in (1, 2, 3)
    ]
    # The line feed and the bracket after the last element count for it.
    assert sum(record.nbytes for record in records) == (tmp_path / "a.json").stat().st_size


@pytest.mark.parametrize(
    ("data", "n_records", "what", "why"),
    [
        ('{"a": 1},]', 1, ", record 2: not JSON", "there is no value between two commas, or"),
        (
            '{"a": 1},, {"a": 2}]',
            2,
            ", record 2: not JSON",
            "there is no value between two commas, or",
        ),
        ('{"a": 1} {"a": 2}]', 0, ", record 1: not JSON", "Extra data at character 10"),
        ('{"a": 1},\n  {"a" 2}]', 1, ", record 2: not JSON", "delimiter at character 6"),
        ('{"a": 1}}, {"a": 2}]', 1, ", record 1: not JSON", "Extra data at character 9"),
        ('{"a": 1], {"a": 2}]', 1, ", record 1: not JSON", "Expecting ',' delimiter"),
        ('{"a": 1}, 3]', 1, ", record 2: not an object but a number", "type `json` needs one"),
        ('{"a": 1}, ["a"], {}]', 2, ", record 2: not an object but a list", "type `json` needs"),
        ("[" * 100_000 + "]" * 100_001, 0, ", record 1: not JSON", "it is nested too deep"),
        ('{"a": 1}, {"a": "\udcff"}]', 1, ", record 2 is not UTF-8", "byte 18 is 0xff"),
        ('{"a": 1}, {"a": 2}', 1, ": the list is cut off", "the file ends in record 2, without"),
        ('{"a": 1}, {"a": "2]', 1, ": the list is cut off", "the file ends in record 2, without"),
        ("[" * 1_000_000, 0, ": the list is cut off", "the file ends in record 1, without"),
        ("", 0, ": the list is cut off", "the file ends in record 1, without"),
        ('{"a": 1}]\n[{"a": 2}]', 1, ": the file continues after its list", "the list ends with"),
        ("]\0", 0, ": the file continues after its list", "text follows at byte 2"),
    ],
)
def test_broken_list_has_one_error(data: str, n_records: int, what: str, why: str):
    records, errors = read_data(b"[" + data.encode(errors="surrogateescape"))
    assert len(records) == n_records
    assert len(errors) == 1
    assert errors[0].what.endswith(f"a.json{what}")
    assert why in errors[0].why


def test_empty_list_has_no_record():
    assert read_data(b" [ \n ] ") == ([], [])


def test_compressed_list_is_read():
    rows = [{"text": "word " * 9_000} for _ in range(40)]
    data = json.dumps(rows).encode()
    records, errors = read_data(
        gzip.compress(data[:90_000]) + gzip.compress(data[90_000:]), "a.jsonl.gz"
    )
    assert [record.values for record in records] == rows
    assert not errors


def test_long_element_is_an_error_and_is_not_held():
    def blocks() -> Iterator[bytes]:
        yield b'[{"a": "b"}, {"a": "'
        for _ in range(500):
            yield b'\\"]}' * (HEAD_NBYTES // 4)
        yield b'"}, {"a": "c"}]'

    tracemalloc.start()
    try:
        elements = list(read_elements("a.json", blocks(), 1000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [element.is_too_long for element in elements] == [False, True, False]
    assert sum(element.nbytes for element in elements) == sum(map(len, blocks()))
    assert peak < 8 * HEAD_NBYTES
    data = b'[{"a": "b"}, {"a": "' + b"c" * 5000 + b'"}, {"a": "d"}]'
    errors: list[PrepError] = []
    records, _ = read_data(data, options=ReadOptions(errors.append, max_document_nbytes=100))
    assert [record.values for record in records] == [{"a": "b"}, {"a": "d"}]
    assert [error.what.partition("a.json, ")[2] for error in errors] == ["record 2: too long"]
