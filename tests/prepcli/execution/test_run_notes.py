"""Small files of a run with a checksum."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.execution.run_notes import read_json_record, write_json_record


def test_write_json_record_replaces_the_file(tmp_path: Path):
    path = tmp_path / "run.json"
    assert read_json_record(path) is None
    for count in (1, 2):
        write_json_record(path, {"count": count})
        assert read_json_record(path) == {"count": count}
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize(
    "data", [b"{", b"[]", b"[" * 100_000, b'{"count": 1, "checksum": "0"}', b"\xff"]
)
def test_read_json_record_refuses_damaged_content(tmp_path: Path, data: bytes):
    (tmp_path / "note").write_bytes(data)
    with pytest.raises(PrepError, match="is damaged"):
        read_json_record(tmp_path / "note")


def test_record_that_is_a_link_or_a_fifo_is_refused(tmp_path: Path):
    (tmp_path / "target").write_bytes(b"{}")
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(PrepError):
            read_json_record(tmp_path / name)
        with pytest.raises(PrepError):
            write_json_record(tmp_path / name, {})
    assert (tmp_path / "target").read_bytes() == b"{}"
