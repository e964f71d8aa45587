"""Records of added tokens: sizes and ids agree, and other records are one error."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from prepcli.core.errors import DamagedError, PrepError, UsageError
from prepcli.formats.added_tokens import (
    FLAGS,
    encode_record,
    insert_members,
    make_token,
    overlapping_texts,
    parse_record,
    read_token_list,
    remove_insertion,
)

ADDITION: dict[str, Any] = {
    "tokens": [{"id": 7, "content": "<a>"}, {"id": 8, "content": "<b>"}],
    "init": "mean",
    "true_vocab_size": 7,
    "padded_vocab_size": 8,
    "files": {"tokenizer.json": {"inserted": [[3, 9]], "before": "0" * 32, "after": "1" * 32}},
}


def record(**changes: Any) -> bytes:
    return json.dumps({"format": 1, "additions": [ADDITION | changes]}).encode()


def test_encoded_record_is_parsed_again():
    additions = parse_record(Path("r"), record())
    assert parse_record(Path("r"), encode_record(additions)) == additions
    assert additions[0].new_vocab_size == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padded_vocab_size": 6}, "7 tokens do not fit 6 rows"),
        ({"padded_vocab_size": 1 << 31}, "do not fit"),
        ({"true_vocab_size": 6}, "the token '<a>' has id 7, not 6"),
        ({"tokens": [{"id": 7, "content": "a"}, {"id": 7, "content": "b"}]}, "id 7, not 8"),
        ({"tokens": []}, "additions.0.tokens"),
        ({"more": 1}, "additions.0.more"),
    ],
)
def test_inconsistent_records_are_damaged(changes: dict[str, Any], message: str):
    with pytest.raises(DamagedError) as caught:
        parse_record(Path("r"), record(**changes))
    assert message in str(caught.value)


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


SCALARS = st.none() | st.booleans() | st.integers(0, 99) | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FORMATS: list[dict[str, Any]] = [{}, {"indent": 2}, {"indent": 1}, {"separators": (",", ":")}]


@given(VALUES, VALUES, st.booleans(), st.sampled_from(FORMATS), st.booleans(), st.data())
def test_insert_adds_members_and_removal_undoes_it(
    first: Any, last: Any, is_list: bool, form: dict[str, Any], ascii_only: bool, data: Any
):
    strategy = st.lists(VALUES, max_size=3)
    if not is_list:
        strategy = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
    old = data.draw(strategy)
    new = data.draw(strategy.filter(bool))
    if not is_list:
        new = {f"new {key}": value for key, value in new.items()}
    document = {"first": first, "tokens": old, "last": last}
    text = json.dumps(document, ensure_ascii=ascii_only, **form).encode()
    changed, inserted = insert_members(text, ("tokens",), new)
    assert json.loads(changed) == document | {"tokens": old + new if is_list else old | new}
    assert remove_insertion(changed, inserted) == text


def test_insert_refuses_a_key_of_the_object():
    with pytest.raises(ValueError, match=r"ids has 'b' already"):
        insert_members(b'{"ids": {"a": 1, "\\u0062": 2}}', ("ids",), {"c": 3, "b": 4})


def test_insert_keeps_the_indentation_of_a_list():
    text = json.dumps({"a": [{"id": 1}]}, indent=2).encode()
    changed, _ = insert_members(text, ("a",), [{"id": 2}])
    assert changed.decode() == json.dumps({"a": [{"id": 1}, {"id": 2}]}, indent=2)


def test_insert_adds_members_to_the_root():
    assert insert_members(b' {"a": 1} \n', (), {"b": [2]})[0] == b' {"a": 1,"b":[2]} \n'


@pytest.mark.parametrize(
    ("keys", "message"),
    [(("b",), "there is no b"), (("a",), "a is not a list"), (("a", "c"), "there is no c")],
)
def test_insert_needs_a_list_of_that_name(keys: tuple[str, ...], message: str):
    with pytest.raises(ValueError, match=message):
        insert_members(b'{"a": {}}', keys, [1])
