"""Documents out of files: all of the text, cut where tokens do not notice, and errors that say where."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from trainer.data import documents
from trainer.data.documents import TextChunk, read_text_chunks, split_text
from trainer.data.files import DataFile, FileType, hash_file
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import TextFields

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3 = pre_tokenizers.Split(
    Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "isolated",
)
LINES = st.lists(st.text(st.sampled_from("ab1.'\n\n  \r\t\u3000\u00a0\u2028\u0301é日😀"), max_size=12), min_size=4)


def in_pieces(text: bytes, chunk_nbytes: int = 7) -> list[TextChunk]:
    chunks = (text[low : low + chunk_nbytes] for low in range(0, len(text), chunk_nbytes))
    return list(split_text(Path("t.txt"), chunks))


def pieces_of(path: Path, type: FileType = "json", column: str = "text") -> list[TextChunk]:
    return list(read_text_chunks(hash_file(path), type, TextFields((column,))))


@pytest.fixture(scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "TEXT_CHUNK_NBYTES", 40)
        yield


@given(st.text(max_size=400), st.integers(1, 100))
@pytest.mark.usefixtures("small_pieces")
def test_pieces_are_the_text_in_order_and_small(text: str, chunk_nbytes: int):
    found = in_pieces(text.encode(), chunk_nbytes)
    assert "".join(piece.text for piece in found) == text.removeprefix("\ufeff")
    assert sum(piece.nbytes for piece in found) == len(text.encode())
    assert max(piece.nbytes for piece in found) <= 40
    assert [piece.ends_document for piece in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.usefixtures("small_pieces")
@given(st.text(max_size=400), st.integers(1, 100), st.integers(1, 100))
def test_pieces_do_not_depend_on_how_the_file_is_read(text: str, one: int, other: int):
    assert in_pieces(text.encode(), one) == in_pieces(text.encode(), other)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("splitter", [GPT2, LLAMA3], ids=["gpt2", "llama3"])
@given(lines=LINES)
def test_the_best_cuts_part_the_text_where_pre_tokenisers_do(splitter: pre_tokenizers.PreTokenizer, lines: list[str]):
    text = "\n".join(lines)
    data = text.encode()
    whole = [word for word, _ in splitter.pre_tokenize_str(text)]
    for found in documents.CUT_PATTERNS[0].finditer(data):
        parts = data[: found.end()].decode(), data[found.end() :].decode()
        assert [word for part in parts for word, _ in splitter.pre_tokenize_str(part)] == whole


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("a" * 25 + "\nbb\n\n  " + "b" * 30, "a" * 25 + "\n"),  # a better newline before a later one
        (" \n = Title = \n \n The game", " \n = Title = \n \n The game"),
        (" = A title = \n \n The game is long \n It was on and on", " = A title = \n \n The game is long \n"),
        ("a" * 25 + "\n\n\n\n" + "b" * 30, "a" * 25 + "\n\n\n\n"),  # no newline between visible characters
        ("a" * 25 + "\n\u3000\u3000" + "b" * 30, "a" * 25 + "\n"),
        ("a\n" + "b" * 30 + " c" + "d" * 30, "a\n" + "b" * 30),  # newlines in the first half do not count
        ("é" * 19 + "a" + "é" * 30, "é" * 19 + "a"),
    ],
)
def test_where_a_text_is_cut(text: str, first: str):
    assert in_pieces(text.encode())[0].text == first


def test_a_text_file_is_one_document(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    assert pieces_of(tmp_path / "a.txt", "text") == [TextChunk("one\r\n\r\ntwo\n", 14, True)]


@pytest.mark.parametrize("good", [b"abc\n", b"abc\n" * 200_000])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe9 ", b"\xe2\x82"])
def test_text_that_is_not_utf8(tmp_path: Path, good: bytes, bad: bytes):
    path = tmp_path / "a.txt"
    path.write_bytes(good + bad)
    with pytest.raises(PrepError) as caught:
        pieces_of(path, "text")
    assert caught.value.what == f"{path} is not UTF-8"
    assert caught.value.why.startswith(f"byte {len(good):,} is 0x{bad[0]:02x}: ")


def test_json_that_is_not_utf8(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(PrepError) as caught:
        pieces_of(tmp_path / "a.jsonl")
    assert caught.value.why == "byte 24 is 0xff: invalid start byte"


def test_lines_are_documents(tmp_path: Path):
    lines = ['\ufeff{"body": "one\\n"}', '{"body": "", "text": 3}', "", "  \r", '{"body": "\\ud83d\\ude00"}']
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode())
    found = pieces_of(tmp_path / "a.jsonl", column="body")
    assert [(piece.text, piece.ends_document) for piece in found] == [("one\n", True), ("", True), ("😀", True)]
    assert sum(piece.nbytes for piece in found) == (tmp_path / "a.jsonl").stat().st_size


def test_a_line_is_never_cut(tmp_path: Path):
    text = "word\n" * 300_000
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}'.replace("\n", "\\n"))
    assert [piece.text for piece in pieces_of(tmp_path / "a.jsonl")] == [text]


@pytest.mark.parametrize(
    ("line", "what", "why"),
    [
        ('{"text": "a"', "not JSON", "Expecting ',' delimiter at character 13"),
        ("{", "not JSON", "Expecting property name enclosed in double quotes at character 2"),
        ("[" * 100_000, "not JSON", "it is nested too deep"),
        ('{"text": ' + "1" * 5000 + "}", "not JSON", "Exceeds the limit"),
        ('["a"]', "not an object but a list", "type `json` reads one object a line"),
        ('"a"', "not an object but a text", "type `json` reads one object a line"),
        ('{"body": "a", "id": 1}', "no column `text`", "its columns: `body`, `id`"),
        ("{}", "no column `text`", "its columns: none"),
        ('{"text": null}', "column `text` is no text", "it is null"),
        ('{"text": ["a"]}', "column `text` is no text", "it is a list"),
        ('{"text": {}}', "column `text` is no text", "it is an object"),
        ('{"text": true}', "column `text` is no text", "it is a truth value"),
        ('{"text": 1.5}', "column `text` is no text", "it is a number"),
        ('{"text": "\\ud83d"}', "column `text` is no text", "it has half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, what: str, why: str):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(PrepError) as caught:
        pieces_of(path)
    assert caught.value.what == f"{path}:3: {what}"
    assert caught.value.why.startswith(why)


@pytest.mark.parametrize("type", ["text", "json"])
def test_a_file_that_changes_meanwhile(tmp_path: Path, type: FileType):
    path = tmp_path / "a"
    path.write_text('{"text": "a"}\n')
    before = hash_file(path)
    path.write_text('{"text": "b"}\n')
    with pytest.raises(PrepError, match="a changed while it was read"):
        list(read_text_chunks(before, type, TextFields(("text",))))


def test_a_file_that_goes_meanwhile(tmp_path: Path):
    gone = DataFile(tmp_path / "a.txt", 1, "x")
    with pytest.raises(PrepError, match=r"cannot read or write .*a.txt - No such file"):
        list(read_text_chunks(gone, "text", TextFields(())))


def test_pieces_are_read_one_by_one():
    endless = itertools.repeat(b"a line of text\n" * 1000)
    found = split_text(Path("t.txt"), endless)
    assert all(next(found).nbytes <= documents.TEXT_CHUNK_NBYTES for _ in range(50))
