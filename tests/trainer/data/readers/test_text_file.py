"""Text files: no text is lost, cuts keep the tokens, and errors name the offset."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from prepcli.core.errors import PrepError
from trainer.data.files import hash_file
from trainer.data.readers import READERS, text_files
from trainer.data.readers.reader import TextChunk
from trainer.data.readers.text_files import split_text

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3 = pre_tokenizers.Split(
    Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "isolated",
)
LINES = st.lists(
    st.text(st.sampled_from("ab1.'\n\n  \r\t\u3000\u00a0\u2028\u0301é日😀"), max_size=12),
    min_size=4,
)


def chunks_of_text(text: bytes, block_nbytes: int = 7) -> list[TextChunk]:
    """Split a text, read in blocks of `block_nbytes`."""
    blocks = (text[low : low + block_nbytes] for low in range(0, len(text), block_nbytes))
    return list(split_text(Path("t.txt"), blocks))


def read_text(path: Path) -> Sequence[object]:
    """Read a text file."""
    return list(READERS["text"].read(hash_file(path)))


@pytest.fixture(scope="module")
def small_chunks():
    """Set the chunk size to 40 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "TEXT_CHUNK_NBYTES", 40)
        yield


@given(st.text(max_size=400), st.integers(1, 100))
@pytest.mark.usefixtures("small_chunks")
def test_split_text_keeps_text_in_bounded_chunks(text: str, block_nbytes: int):
    chunks = chunks_of_text(text.encode(), block_nbytes)
    assert "".join(chunk.text for chunk in chunks) == text.removeprefix("\ufeff")
    assert sum(chunk.nbytes for chunk in chunks) == len(text.encode())
    assert max(chunk.nbytes for chunk in chunks) <= 40
    assert [chunk.starts_document for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert [chunk.ends_document for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.usefixtures("small_chunks")
@given(st.text(max_size=400), st.integers(1, 100), st.integers(1, 100))
def test_split_text_does_not_depend_on_block_size(text: str, first_nbytes: int, second_nbytes: int):
    assert chunks_of_text(text.encode(), first_nbytes) == chunks_of_text(
        text.encode(), second_nbytes
    )


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("splitter", [GPT2, LLAMA3], ids=["gpt2", "llama3"])
@given(lines=LINES)
def test_best_cuts_agree_with_pre_tokenizers(
    splitter: pre_tokenizers.PreTokenizer, lines: list[str]
):
    text = "\n".join(lines)
    data = text.encode()
    words = [word for word, _ in splitter.pre_tokenize_str(text)]
    for match in text_files.CUT_PATTERNS[0].finditer(data):
        parts = data[: match.end()].decode(), data[match.end() :].decode()
        assert [word for part in parts for word, _ in splitter.pre_tokenize_str(part)] == words


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("text", "first"),
    [
        # The newline between visible characters is taken, not the later one.
        ("a" * 25 + "\nbb\n\n  " + "b" * 30, "a" * 25 + "\n"),
        (" \n = Title = \n \n The game", " \n = Title = \n \n The game"),
        (
            " = A title = \n \n The game is long \n It was on and on",
            " = A title = \n \n The game is long \n",
        ),
        # No newline is between visible characters.
        ("a" * 25 + "\n\n\n\n" + "b" * 30, "a" * 25 + "\n\n\n\n"),
        ("a" * 25 + "\n\u3000\u3000" + "b" * 30, "a" * 25 + "\n"),
        # Newlines in the first half of a chunk are ignored.
        ("a\n" + "b" * 30 + " c" + "d" * 30, "a\n" + "b" * 30),
        ("é" * 19 + "a" + "é" * 30, "é" * 19 + "a"),
    ],
)
def test_split_text_cuts_at_best_place(text: str, first: str):
    assert chunks_of_text(text.encode())[0].text == first


def test_text_file_is_one_document(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    assert read_text(tmp_path / "a.txt") == [TextChunk("one\r\n\r\ntwo\n", 14, True, True)]


@pytest.mark.parametrize("good", [b"abc\n", b"abc\n" * 200_000])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe9 ", b"\xe2\x82"])
def test_text_file_that_is_not_utf8_fails(tmp_path: Path, good: bytes, bad: bytes):
    path = tmp_path / "a.txt"
    path.write_bytes(good + bad)
    with pytest.raises(PrepError) as caught:
        read_text(path)
    assert caught.value.what == f"{path} is not UTF-8"
    assert caught.value.why.startswith(f"byte {len(good):,} is 0x{bad[0]:02x}: ")


def test_split_text_reads_lazily():
    endless = itertools.repeat(b"a line of text\n" * 1000)
    chunks = split_text(Path("t.txt"), endless)
    assert all(next(chunks).nbytes <= text_files.TEXT_CHUNK_NBYTES for _ in range(50))
