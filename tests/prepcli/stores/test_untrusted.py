"""Tests of reading untrusted JSON, names and files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.core.json_values import parse_json, quote_name
from prepcli.stores.files import list_folder, read_small_file, stat_file

json_without_negatives_or_floats = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | st.integers(0, 10**19 - 1),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(value=json_without_negatives_or_floats)
def test_parse_json_matches_json_without_negatives_or_floats(value: object) -> None:
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_parse_json_other_numbers_become_minus_one() -> None:
    assert parse_json(b"[1, -1, -0, 9999999999999999999, 10000000000000000000, 1.5, 1e999]") == [
        1, -1, -1, 9999999999999999999, -1, 1.5, math.inf,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{", "its JSON is broken"),
        (b'{"a": 1, "b": 2, "a": 1}', "it names `a` twice"),
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"\xff", "its text is not UTF-8"),
        (b'{"\\ud800": 1}', "its text is not UTF-8"),
        (b"[" * 100_000, "its JSON is nested too deeply"),
        (b'{"a":' * 100_000, "its JSON is nested too deeply"),
    ],
)
def test_parse_json_rejects_invalid_json(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


@given(name=st.text())
def test_quote_name_is_short_and_printable(name: str) -> None:
    assert quote_name(name).isprintable()
    assert len(quote_name(name * 1000)) <= 1002
    assert quote_name("layers.0.w") == "`layers.0.w`"


def test_stat_file_and_list_folder_reject_wrong_paths(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"xyz")
    (tmp_path / "a").mkdir()
    assert list_folder(tmp_path) == ["a", "b"]
    assert stat_file(tmp_path / "b").st_size == 3
    with pytest.raises(PrepError, match="a is not a file"):
        stat_file(tmp_path / "a")
    with pytest.raises(PrepError, match=r"cannot read .*c"):
        stat_file(tmp_path / "c")
    with pytest.raises(PrepError, match=r"cannot read .*b"):
        list_folder(tmp_path / "b")


def test_read_small_file_rejects_large_and_special_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"xyz")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    assert read_small_file(tmp_path / "a", 3) == b"xyz"
    with pytest.raises(PrepError) as caught:
        read_small_file(tmp_path / "a", 2)
    assert (caught.value.what, caught.value.why) == (
        f"{tmp_path / 'a'} is too large",
        "it has 3 bytes, the limit is 2",
    )
    for name in ("pipe", "zeros"):
        with pytest.raises(PrepError, match="is not a file"):
            read_small_file(tmp_path / name, 3)
