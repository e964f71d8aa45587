"""Lists of tokens to add: their forms, and the errors of invalid ones."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from prepcli.core.errors import PrepError, UsageError
from prepcli.formats.added_tokens import FLAGS, make_token, overlapping_texts, read_token_list


def write_list(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("data", [b"<a>\n b\n", b"<a>\r\n b\r\n", b"<a>\n b"])
def test_lines_are_tokens_with_their_spaces(tmp_path: Path, data: bytes):
    tokens = read_token_list(write_list(tmp_path, "tokens.txt", data))
    assert [token["content"] for token in tokens] == ["<a>", " b"]


@pytest.mark.parametrize("name", ["t.txt", "t.json"])
def test_byte_order_mark_is_no_part_of_a_token(tmp_path: Path, name: str):
    content = '["<a>"]' if name == "t.json" else "<a>\n"
    tokens = read_token_list(write_list(tmp_path, name, content.encode("utf-8-sig")))
    assert [token["content"] for token in tokens] == ["<a>"]


def test_json_lists_have_strings_and_objects(tmp_path: Path):
    items = ["<a>", {"content": "é", "special": True, "lstrip": True}]
    tokens = read_token_list(write_list(tmp_path, "t.json", json.dumps(items).encode()))
    assert tokens == (make_token("<a>"), make_token("é", {"special": True, "lstrip": True}))


@pytest.mark.parametrize("is_special", [False, True])
def test_defaults_are_those_of_the_library(is_special: bool):
    token = make_token("x", {"special": is_special})
    expected = AddedToken("x", special=is_special)
    assert {name: token[name] for name in FLAGS} == {
        name: getattr(expected, name) for name in FLAGS
    }


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("t.txt", b"", "it has no token"),
        ("t.txt", b"a\n\nb\n", "empty tokens: number 2 of the list"),
        ("t.txt", b"a\nb\xff\n", "line 2 is not UTF-8"),
        ("t.txt", b"x\ny\nx\n", "it has tokens twice: 'x'"),
        ("t.txt", b"<a>\n<a>b\n", "'<a>b' contains '<a>'"),
        ("t.json", b"[", "it is not JSON"),
        ("t.json", b"{}", "it is not a JSON list"),
        ("t.json", b"[]", "it has no token"),
        ("t.json", b"[3]", "item 1 is neither a string nor an object"),
        ("t.json", b'["a", {"special": true}]', "item 2 is neither"),
        ("t.json", b'[{"content": "a", "id": 3}]', "item 1 has the unknown key 'id'"),
        ("t.json", b'[{"content": "a", "special": 1}]', "`special` of item 1 is 1"),
        ("t.json", b'["\\ud800"]', "it is not JSON"),
        ("t.json", b"\xff", "it is not JSON"),
    ],
)
def test_invalid_lists_are_refused(tmp_path: Path, name: str, data: bytes, message: str):
    with pytest.raises(UsageError) as caught:
        read_token_list(write_list(tmp_path, name, data))
    assert message in caught.value.why
    assert "t." in caught.value.what


@pytest.mark.parametrize(
    ("name", "data", "hint"),
    [
        ("t.txt", b"<a>\n<a>b\n", "remove one token of each pair"),
        ("t.json", b'[{"content": "a", "id": 3}]', "supported keys: content, "),
    ],
)
def test_invalid_lists_have_a_hint(tmp_path: Path, name: str, data: bytes, hint: str):
    with pytest.raises(UsageError) as caught:
        read_token_list(write_list(tmp_path, name, data))
    assert caught.value.hint.startswith(hint)


TEXTS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=5, unique=True)


@given(TEXTS, TEXTS)
def test_overlaps_are_all_pairs_of_text_and_part(new: list[str], others: list[str]):
    expected: set[str] = set()
    for first, second in [*itertools.product(new, others), *itertools.product(others, new)]:
        if first != second and second in first:
            expected.add(f"{first!r} contains {second!r}")
    actual = overlapping_texts(new, others)
    assert set(actual) == expected
    assert len(actual) == len(expected)


@pytest.mark.parametrize("name", ["missing.txt", "folder.txt"])
def test_unreadable_lists_are_one_error(tmp_path: Path, name: str):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(PrepError):
        read_token_list(tmp_path / name)


def test_tokens_of_a_pipe_are_read(tmp_path: Path):
    # A shell passes `<(...)` as the path of an open pipe.
    reader, writer = os.pipe()
    os.write(writer, b"<a>\n<b>\n")
    os.close(writer)
    tokens = read_token_list(Path(f"/dev/fd/{reader}"))
    os.close(reader)
    assert [token["content"] for token in tokens] == ["<a>", "<b>"]


@pytest.mark.parametrize("path", ["/dev/zero", "/dev", "absent"])
def test_list_other_than_a_file_or_pipe_is_an_error(path: str):
    with pytest.raises(PrepError):
        read_token_list(Path(path))
