"""Text files and compressed ones: no text is lost, cuts keep the tokens, and files must not change."""

from __future__ import annotations

import ast
import gzip
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

import trainer
from prepcli.core.errors import PrepError
from tests.helpers.corpus import (
    EOS,
    TEXT,
    make_config,
    make_tokenizer,
    tokenize_quietly,
    write_json,
)
from tests.helpers.data_formats import Rows, write_arrow_files, write_csv_files, write_json_files
from tests.helpers.slow_cases import slow_except
from trainer.data.examples import Example, ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.files import DataFile, hash_file
from trainer.data.readers import READERS, text_files
from trainer.data.readers.reader import TextChunk
from trainer.data.readers.text_files import split_text
from trainer.data.records import RecordSettings, ShardReader, divide_files
from trainer.data.store import read_meta
from trainer.recipe.data_table import Data
from trainer.recipe.text_fields import DataType, FileType

# Text files: no text is lost, cuts keep the tokens, and errors name the offset.

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


# Compressed data files: they are read to their end, and damage is an error.

LINES_OF_TEXT = "a line of text\n" * 40_000

COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_text_is_decompressed_and_counted_in_bytes_of_the_file(tmp_path: Path, suffix: str):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](LINES_OF_TEXT.encode()))
    chunks = [
        piece for piece in READERS["text"].read(hash_file(path)) if isinstance(piece, TextChunk)
    ]
    assert "".join(chunk.text for chunk in chunks) == LINES_OF_TEXT
    assert len(chunks) > 1
    assert sum(chunk.nbytes for chunk in chunks) == path.stat().st_size


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "garbage", "tail"])
def test_error_names_the_damaged_file(tmp_path: Path, suffix: str, damage: str):
    data = COMPRESS[suffix](LINES_OF_TEXT.encode())
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(
        {"cut": data[:-9], "garbage": b"no compressed bytes", "tail": data + b"more"}[damage]
    )
    with pytest.raises(PrepError, match=rf"a.txt{suffix} cannot be decompressed"):
        list(READERS["text"].read(hash_file(path)))


@pytest.mark.parametrize("n_zeros", slow_except([1, 100_000], [100_000]))
def test_zeros_after_a_member_of_gzip_are_skipped(tmp_path: Path, n_zeros: int):
    member = gzip.compress(LINES_OF_TEXT.encode())
    path = tmp_path / "a.txt.gz"
    path.write_bytes(2 * (member + bytes(n_zeros)))
    text = "".join(
        piece.text
        for piece in READERS["text"].read(hash_file(path))
        if isinstance(piece, TextChunk)
    )
    assert text == gzip.decompress(path.read_bytes()).decode() == 2 * LINES_OF_TEXT


def test_file_of_zeros_is_no_gzip_file(tmp_path: Path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(bytes(100))
    with pytest.raises(PrepError, match=r"a\.txt\.gz cannot be decompressed"):
        list(READERS["text"].read(hash_file(path)))


def test_compressed_file_changed_after_hashing_fails(tmp_path: Path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n'))
    before = hash_file(path)
    path.write_bytes(gzip.compress(b'{"text": "b"}\n'))
    with pytest.raises(PrepError, match="changed while it was read"):
        list(READERS["json"].read(before))


# Data files: they are identified by their content, and must not change while they are read.


def test_hash_file_returns_size_and_digest(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc" * 1_000_000)
    file = hash_file(path)
    assert (file.nbytes, file.digest) == (3_000_000, xxhash.xxh3_128_hexdigest(b"abc" * 1_000_000))


def test_hash_file_fails_for_empty_file(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(PrepError) as caught:
        hash_file(tmp_path / "a.txt")
    assert (caught.value.what, caught.value.why) == (
        f"{tmp_path}/a.txt is empty",
        "looked for text, found 0 bytes",
    )


@pytest.mark.parametrize("data_type", ["text", "json", "csv"])
def test_file_changed_after_hashing_fails(tmp_path: Path, data_type: FileType):
    path = tmp_path / "a"
    path.write_text('{"text": "a"}\n')
    before = hash_file(path)
    path.write_text('{"text": "b"}\n')
    with pytest.raises(PrepError, match="a changed while it was read"):
        list(READERS[data_type].read(before))


def test_file_removed_after_hashing_fails(tmp_path: Path):
    removed = DataFile(tmp_path / "a.txt", 1, "x")
    with pytest.raises(PrepError, match=r"cannot read or write .*a.txt - No such file"):
        list(READERS["text"].read(removed))


# Reading examples: files in order, and no more of them than asked for.


def write_files(folder: Path) -> list[Path]:
    """Write two files of three and two lines."""
    return [
        write_json(folder / "a.jsonl", ["a", "b", "c"]),
        write_json(folder / "b.jsonl", ["d", "e"]),
    ]


def record_settings(limit: int) -> RecordSettings:
    """Return settings with a limit."""
    return RecordSettings(vocab=9, limit=limit)


def read_examples(paths: Sequence[Path], file_type: FileType, limit: int) -> Iterator[Example]:
    """Yield the examples of files, in one shard."""
    files = [hash_file(path) for path in paths]
    layout = divide_files(files, file_type, min_nbytes=1 << 20, max_shards=1)
    settings_of_examples = ExampleSettings(fields="text" if file_type == "json" else "")
    builder = compile_fields(settings_of_examples, vocab=9)
    reader = ShardReader(files, file_type, builder, record_settings(limit), layout, print)
    for shard, example in reader.read(lambda shard: True):
        assert shard == 0
        yield example


def read_texts(paths: list[Path], limit: int) -> list[object]:
    """Return the texts of the examples of files."""
    examples = read_examples(paths, "json", limit)
    return [segment.content for example in examples for segment in example.target]


@pytest.mark.parametrize(
    ("limit", "texts"), [(0, "abcde"), (2, "ab"), (3, "abc"), (4, "abcd"), (9, "abcde")]
)
def test_read_examples_stops_at_the_limit(tmp_path: Path, limit: int, texts: str):
    assert read_texts(write_files(tmp_path), limit) == [*texts]


def test_file_that_is_not_read_to_its_end_is_checked(tmp_path: Path):
    path = write_files(tmp_path)[0]
    examples = read_examples([path], "json", 1)
    next(examples)
    path.write_text(path.read_text().replace("c", "x"))
    with pytest.raises(PrepError, match=r"a\.jsonl changed while it was read"):
        next(examples)


def test_limit_counts_a_long_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.data.readers.text_files.TEXT_CHUNK_NBYTES", 40)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("word\n" * 50)
    paths = [tmp_path / name for name in ("a.txt", "b.txt")]
    examples = list(read_examples(paths, "text", 1))
    assert (
        "".join(str(part.content) for example in examples for part in example.target)
        == "word\n" * 50
    )
    assert len(examples) > 1


# The same records give the same tokens, whatever the type and the compression of their file.


ROWS = [{"id": str(i), "text": f'{TEXT[:i]}, "é" 😀\n{i}'} for i in range(23)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def digests(folder: Path, tokenizer: Path, path: Path) -> object:
    """Return the digests of the store that a file gives."""
    config = make_config(
        folder,
        path,
        type="auto",
        fields="text",
        seq_length=1,
        tokenizer=tokenizer,
        cache=folder / path.name[::-1],
    )
    meta = read_meta(config.cache / tokenize_quietly(config).identity)
    return [shard.digests for shard in meta.shards.values()]


@pytest.mark.parametrize("write", [write_csv_files, write_arrow_files], ids=["csv", "arrow"])
def test_files_of_all_types_give_equal_stores(
    write: Callable[[Path, Rows], list[Path]], tmp_path: Path, tokenizer: Path
):
    if write is write_arrow_files:
        pytest.importorskip("pyarrow")
    expected, *others = (
        digests(tmp_path, tokenizer, path) for path in write_json_files(tmp_path, ROWS)
    )
    assert others == [expected] * 5
    for path in write(tmp_path, ROWS):
        assert digests(tmp_path, tokenizer, path) == expected, path.name


def test_store_from_ids_equals_store_from_text(tmp_path: Path, tokenizer: Path):
    (path, *_) = write_json_files(tmp_path, ROWS)
    config = make_config(
        tmp_path, path, type="json", fields="text", seq_length=1, tokenizer=tokenizer
    )
    ids = np.array(tokenize_quietly(config).ids[:])
    assert ids[-1] == EOS
    np.save(tmp_path / "a.npy", ids.astype(np.int64))
    np.save(tmp_path / "b.npy", ids)
    ids.astype("<u2").tofile(tmp_path / "c.bin")
    expected = digests(tmp_path, tokenizer, path)
    assert [
        digests(tmp_path, tokenizer, tmp_path / name) for name in ("a.npy", "b.npy", "c.bin")
    ] == [expected] * 3


# The table of readers, and the types that recipes know.

TRAINER = Path(trainer.__path__[0])


def test_every_type_of_data_has_a_reader():
    assert set(READERS) == set(get_args(FileType)) == {*get_args(DataType)} - {"auto"}


def test_every_type_of_data_is_documented():
    page = (TRAINER.parent / "docs" / "how-to" / "data.md").read_text()
    description = Data.model_fields["type"].description or ""
    for name, reader in READERS.items():
        assert f"| `{name}` |" in page
        assert f"`{name}`" in description
        for suffix in reader.suffixes + reader.other_suffixes:
            assert f"`{suffix}`" in page


def test_suffixes_of_readers_differ():
    suffixes = [
        suffix for reader in READERS.values() for suffix in reader.suffixes + reader.other_suffixes
    ]
    assert len({*suffixes}) == len(suffixes)


def test_no_module_compares_with_a_type_of_data():
    for path in TRAINER.rglob("*.py"):
        compares = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Compare)
        ]
        constants = [
            node.value
            for compare in compares
            for node in ast.walk(compare)
            if isinstance(node, ast.Constant)
        ]
        assert not {*READERS} & {*constants}, path
