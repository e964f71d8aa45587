"""JSON Lines, lists of objects and CSV: lines are documents, with limits, and errors name the line."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from tests.helpers.corpus import change, make_config
from tests.helpers.slow_cases import slow_except
from trainer.data import chat_template
from trainer.data.chat_template import ChatTemplate
from trainer.data.files import hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import ReadOptions, Record, open_decompressed, read_lines
from trainer.data.readers.text_files import HEAD_NBYTES, read_elements
from trainer.data.store import MappedTokens
from trainer.data.tokenize import tokenize_files
from trainer.data.tokenize_config import TokenizeConfig

# JSON Lines: lines are documents, and errors name the line.


def read_json(path: Path) -> list[Record]:
    """Return the records of a file."""
    return [piece for piece in READERS["json"].read(hash_file(path)) if isinstance(piece, Record)]


def test_json_file_that_is_not_utf8_fails(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(PrepError) as caught:
        read_json(tmp_path / "a.jsonl")
    assert caught.value.why == "byte 24 is 0xff: invalid start byte"


def test_json_lines_are_records(tmp_path: Path):
    lines = [
        '\ufeff{"body": "one\\n"}',
        '{"body": "", "text": 3}',
        "",
        "  \r",
        '{"body": "\\ud83d\\ude00"}',
    ]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode())
    records = read_json(tmp_path / "a.jsonl")
    assert [record.values for record in records] == [
        {"body": "one\n"},
        {"body": "", "text": 3},
        {"body": "😀"},
    ]
    assert [record.place for record in records] == [
        f"{tmp_path}/a.jsonl:{number}" for number in (1, 2, 5)
    ]
    assert sum(record.nbytes for record in records) == (tmp_path / "a.jsonl").stat().st_size


def test_json_line_is_never_cut(tmp_path: Path):
    text = "word\n" * 300_000
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}'.replace("\n", "\\n"))
    assert [record.values for record in read_json(tmp_path / "a.jsonl")] == [{"text": text}]


@pytest.mark.parametrize(
    ("line", "what", "why"),
    [
        ('{"text": "a"', "not JSON", "Expecting ',' delimiter at character 13"),
        ("{", "not JSON", "Expecting property name enclosed in double quotes at character 2"),
        ("[" * 100_000, "not JSON", "it is nested too deep"),
        ('{"text": ' + "1" * 5000 + "}", "not JSON", "Exceeds the limit"),
        ('["a"]', "not an object but a list", "type `json` needs one object per line, or one list"),
        ('"a"', "not an object but a string", "type `json` needs one object per line, or one list"),
    ],
)
def test_error_names_the_invalid_json_line(tmp_path: Path, line: str, what: str, why: str):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(PrepError) as caught:
        read_json(path)
    assert caught.value.what == f"{path}:3: {what}"
    assert caught.value.why.startswith(why)


# A file that is one list of objects is read as JSON Lines with the same objects.

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


# CSV files: rows are records, and errors name the line.


def read_csv(path: Path, data: bytes, options: ReadOptions | None = None) -> list[Record]:
    """Return the records of a file with these bytes."""
    path.write_bytes(data)
    pieces = READERS["csv"].read(hash_file(path), options or ReadOptions())
    return [piece for piece in pieces if isinstance(piece, Record)]


def test_rows_are_records_with_their_first_line(tmp_path: Path):
    data = b'\xef\xbb\xbfid,text\r\n\r\n1,"one\r\ntwo"\r\n2,"a ""b"", c"\r\n'
    records = read_csv(tmp_path / "a.csv", data)
    assert [record.values for record in records] == [
        {"id": "1", "text": "one\r\ntwo"},
        {"id": "2", "text": 'a "b", c'},
    ]
    assert [record.place for record in records] == [f"{tmp_path}/a.csv:3", f"{tmp_path}/a.csv:5"]
    assert sum(record.nbytes for record in records) == len(data)


def test_tab_separates_columns_of_tsv_files(tmp_path: Path):
    (record,) = read_csv(tmp_path / "a.tsv", b"id\ttext\n1\ta, b\n")
    assert record.values == {"id": "1", "text": "a, b"}


def test_long_field_is_read_whole(tmp_path: Path):
    (record,) = read_csv(tmp_path / "a.csv", b"text\n" + b"a" * 300_000 + b"\n")
    assert record.values["text"] == "a" * 300_000


@pytest.mark.parametrize(
    ("row", "what", "why"),
    [
        (b"1\n", "a.csv:3: 1 field", "the header has 2"),
        (b"1,2,3\n", "a.csv:3: 3 fields", "the header has 2"),
        (b"1,\xe9\n", "a.csv:3: not UTF-8", "field 2 has the byte 0xe9"),
        (b'1,"a"b\n', "a.csv:3: not CSV", "',' expected after '\"'"),
    ],
)
def test_invalid_row_is_an_error_or_is_skipped(tmp_path: Path, row: bytes, what: str, why: str):
    data = b"id,text\n0,a\n" + row + b"2,b\n"
    with pytest.raises(PrepError) as caught:
        read_csv(tmp_path / "a.csv", data)
    assert (caught.value.what, caught.value.why) == (f"{tmp_path}/{what}", why)
    errors: list[PrepError] = []
    records = read_csv(tmp_path / "a.csv", data, ReadOptions(errors.append))
    assert [record.values["id"] for record in records] == ["0", "2"]
    assert [error.what for error in errors] == [f"{tmp_path}/{what}"]


def test_carriage_returns_as_line_ends_are_an_error(tmp_path: Path):
    with pytest.raises(PrepError) as raised:
        read_csv(tmp_path / "a.csv", b"id,text\r1,one\r2,two\r")
    assert raised.value.what == f"{tmp_path}/a.csv:1: not CSV"
    assert (
        raised.value.why == "it has a carriage return outside of quotes; lines end with a line feed"
    )
    assert raised.value.hint == f"`tr '\\r' '\\n' < {tmp_path}/a.csv > NEW` converts such line ends"


def test_error_names_the_line_of_an_unclosed_quote(tmp_path: Path):
    with pytest.raises(PrepError, match=r"a.csv:2: not CSV - unexpected end of data"):
        read_csv(tmp_path / "a.csv", b'id,text\n1,"a\n2,b\n')


@pytest.mark.parametrize(
    ("rows", "n_lines"),
    [(b'1,"a\n2,b\n3,c\n', 3), (b'1,"a\n2,b\n3,"c"\n4,d\n', 3), (b'1,"a\n2","b",c\n4,d\n', 2)],
)
def test_each_line_of_an_invalid_row_is_reported(tmp_path: Path, rows: bytes, n_lines: int):
    errors: list[PrepError] = []
    read_csv(tmp_path / "a.csv", b"id,text\n0,x\n" + rows, ReadOptions(errors.append))
    assert [error.what.partition(": ")[0] for error in errors] == [
        f"{tmp_path}/a.csv:{number}" for number in range(3, 3 + n_lines)
    ]
    assert errors[1].what.endswith("a line of the invalid row at line 3")


def test_invalid_header_is_never_skipped(tmp_path: Path):
    with pytest.raises(PrepError, match=r"a.csv:1: two columns are named `id`"):
        read_csv(tmp_path / "a.csv", b"id,id\n1,2\n", ReadOptions(lambda error: None))
    with pytest.raises(PrepError, match=r"a.csv:1: not UTF-8"):
        read_csv(tmp_path / "a.csv", b"id,\xff\n1,2\n", ReadOptions(lambda error: None))


# Lines and rows over the limit are errors with file and line, and are not held in memory.

LINE_LIMIT = 100

LONG = b"a" * 5000


def read_records(path: Path, data: bytes, options: ReadOptions) -> list[Record]:
    """Return the records of a file with these bytes."""
    path.write_bytes(data)
    reader = READERS["csv" if path.suffix in (".csv", ".tsv") else "json"]
    return [piece for piece in reader.read(hash_file(path), options) if isinstance(piece, Record)]


@pytest.mark.parametrize(
    "text",
    [b"", b"\n", b"abc", b"abc\n\nabcd\n", b"abcde\nab", b"abcde", b"abcd\n", b"ab\n" + LONG],
)
def test_read_lines_cuts_long_lines(text: bytes):
    lines = list(read_lines(io.BytesIO(text), 4))
    assert [line.nbytes for line in lines] == [len(line) for line in text.splitlines(keepends=True)]
    for line, whole in zip(lines, text.splitlines(keepends=True), strict=True):
        assert line.is_too_long == (len(whole.rstrip(b"\n")) > 4)
        assert line.content == (b"" if line.is_too_long else whole)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b'{"text": "b"}\n{"text": "' + LONG + b'"}\n{"text": "c"}\n'),
        ("a.csv", b"id,text\n1,b\n2," + LONG + b"\n3,c\n"),
    ],
)
def test_long_line_is_an_error_or_is_skipped(tmp_path: Path, name: str, data: bytes):
    number = 2 if name == "a.jsonl" else 3
    with pytest.raises(PrepError) as caught:
        read_records(tmp_path / name, data, ReadOptions(max_document_nbytes=LINE_LIMIT))
    assert caught.value.what in (
        f"{tmp_path / name}:{number}: too long",
        f"{tmp_path / name}:{number}: too large",
    )
    assert "`data.max_document_bytes` is 100" in caught.value.why
    assert "data.max_document_bytes=N" in caught.value.hint
    errors: list[PrepError] = []
    options = ReadOptions(errors.append, max_document_nbytes=LINE_LIMIT)
    records = read_records(tmp_path / name, data, options)
    assert [record.values["text"] for record in records] == ["b", "c"]
    assert [record.place for record in records] == [
        f"{tmp_path / name}:{number + step}" for step in (-1, 1)
    ]
    assert len(errors) == 1
    assert sum(record.nbytes for record in records) == len(data)


def test_row_of_many_lines_is_limited(tmp_path: Path):
    data = b'id,text\n1,"' + b"line\n" * 50 + b'"\n'
    with pytest.raises(PrepError, match=r"a\.csv:2: too large - it has 10\d bytes or more"):
        read_records(tmp_path / "a.csv", data, ReadOptions(max_document_nbytes=LINE_LIMIT))


def test_default_limit_is_64_mib():
    assert ReadOptions().max_document_nbytes == 64 << 20


COMPRESS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", slow_except(COMPRESS, [".zst"]))
def test_highly_compressed_stream_is_decompressed_in_parts(suffix: str):
    data = COMPRESS[suffix](bytes(200 << 20))
    limit = 64 << 20
    code = (
        "import io, resource, sys; from trainer.data.readers.reader import open_decompressed; "
        f"stream = open_decompressed(io.BytesIO(sys.stdin.buffer.read()), 'a', {suffix!r}); "
        "before = int(open('/proc/self/statm').read().split()[5]) * resource.getpagesize(); "
        f"resource.setrlimit(resource.RLIMIT_DATA, (before + {limit}, -1)); "
        "print(sum(len(block) for block in iter(lambda: stream.read(1 << 20), b'')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, check=False
    )
    assert done.stdout.split() == [str(200 << 20).encode()], done.stderr[-500:]


def test_frame_with_a_large_window_is_refused():
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    stream = io.BytesIO()
    with compressor.stream_writer(stream, closefd=False) as writer:
        writer.write(bytes(1000))
    with pytest.raises(PrepError, match=r"a\.zst cannot be decompressed - .*memory"):
        open_decompressed(io.BytesIO(stream.getvalue()), "a.zst", ".zst").read()


# Invalid lines: the first ones are reported with file and line, and one more than the limit is an error.

GOOD = '{"text": "the cat sat on the mat"}'

LINES = [GOOD, "{", '{"body": "x"}', "", '{"text": 3}', GOOD, '{"text": "\\ud800"}', "[]", GOOD]

N_BAD = 5


@pytest.fixture
def config(tmp_path: Path) -> TokenizeConfig:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    return make_config(tmp_path, tmp_path / "a.jsonl", type="json", fields="text")


def tokenize(config: TokenizeConfig) -> tuple[MappedTokens, list[str]]:
    """Return the tokens and the notes."""
    notes: list[str] = []
    return tokenize_files(config, progress=lambda *counts: None, note=notes.append), notes


def test_bad_lines_up_to_the_limit_are_skipped_and_reported(config: TokenizeConfig, tmp_path: Path):
    tokens, notes = tokenize(change(config, bad_lines=N_BAD))
    (tmp_path / "good.jsonl").write_text(f"{GOOD}\n" * 3)
    expected, _ = tokenize(change(config, paths=(str(tmp_path / "good.jsonl"),)))
    assert tokens.ids[:].tolist() == expected.ids[:].tolist()
    path = tmp_path / "a.jsonl"
    assert [note.partition(" (")[0] for note in notes[:4]] == [
        f"skipped {path}:2: not JSON",
        f"skipped {path}:3: no column `text`",
        f"skipped {path}:5: column `text` is not text",
        f"{N_BAD} invalid lines skipped",
    ]


@pytest.mark.parametrize("limit", [0, 1, N_BAD - 1])
def test_one_bad_line_more_than_the_limit_is_an_error(
    config: TokenizeConfig, tmp_path: Path, limit: int
):
    with pytest.raises(PrepError) as caught:
        tokenize(change(config, bad_lines=limit))
    bad_numbers = [2, 3, 5, 7, 8]
    assert caught.value.what.startswith(f"{tmp_path}/a.jsonl:{bad_numbers[limit]}: ")
    noun = "line" if limit == 1 else "lines"
    assert caught.value.what.endswith(f", after {limit} invalid {noun}") == bool(limit)


def test_limit_is_part_of_the_identity(config: TokenizeConfig):
    tokens, _ = tokenize(change(config, bad_lines=N_BAD))
    again, notes = tokenize(change(config, bad_lines=N_BAD + 1))
    assert tokens.identity != again.identity
    assert not any("earlier run" in note for note in notes)
    with pytest.raises(PrepError):
        tokenize(config)


def test_invalid_utf8_in_a_line_can_be_skipped(config: TokenizeConfig, tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(GOOD.encode() + b'\n{"text": "\xff"}\n{"text": "x"}')
    _, notes = tokenize(change(config, bad_lines=1, seq_length=2))
    assert (
        notes[0]
        == f"skipped {tmp_path}/a.jsonl:2 is not UTF-8 (byte 45 is 0xff: invalid start byte)"
    )


SHOWN = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"

REFUSED = f"{{% if messages[0].role == 'system' %}}{{{{ raise_exception('no system') }}}}{{% endif %}}{SHOWN}"

ENDLESS = REFUSED.replace(
    "{{ raise", "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2 + "{{ raise"
)

HUGE = REFUSED.replace("raise_exception('no system')", "'x' * 10**12")

N_REFUSED = 16


def bad_conversations(folder: Path, template: str, count: int) -> TokenizeConfig:
    """Return settings of conversations. A template refuses all but the last one."""
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    lines = [json.dumps({"messages": messages})] * count + [json.dumps({"messages": messages[1:]})]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    config = make_config(folder, folder / "chats.jsonl", type="json", fields="messages")
    chat = ChatTemplate("chat_template.jinja", template, ())
    return change(config, chat_template=chat, add_eos=False, seq_length=1, bad_lines=1000)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        pytest.param(ENDLESS, "it took more than 1 s of CPU time", marks=pytest.mark.slow),
        (HUGE, "it needs more than 512 MiB of memory"),
    ],
)
def test_records_beyond_a_limit_are_not_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, why: str
):
    monkeypatch.setattr(chat_template, "BASE_CPU_S", 1)
    with pytest.raises(PrepError) as caught:
        tokenize(bad_conversations(tmp_path, template, 1))
    what = "chat_template.jinja cannot render the messages"
    assert (caught.value.what, caught.value.why) == (what, why)


def test_other_refused_conversations_are_skipped(tmp_path: Path):
    _, notes = tokenize(bad_conversations(tmp_path, REFUSED, N_REFUSED))
    assert f"{N_REFUSED} invalid lines skipped" in notes
