"""Journal: recorded state is restored, whatever a crash appended to or cut from the file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.engine.journal import (
    Journal,
    JournalState,
    StreamPrefix,
    read_journal,
    seal_line,
    unseal_line,
)

QUIET = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
RECORDS = [(10, {0: "a"}), (25, {}), (25, {}), (40, {1: "b", 2: "c"})]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "out.partial" / ".prep").mkdir(parents=True)
    return tmp_path / "out.partial" / ".prep" / "journal"


def reopen(path: Path, identity: str = "run") -> tuple[int, dict[int, str]]:
    journal = Journal(path, identity)
    journal.close()
    return journal.done_nbytes, journal.digests


def write_records(path: Path) -> bytes:
    journal = Journal(path, "run")
    for done_nbytes, digests in RECORDS:
        journal.record(done_nbytes, digests)
    journal.close()
    return path.read_bytes()


def test_new_journal_is_empty(path: Path):
    assert reopen(path) == (0, {})
    assert reopen(path) == (0, {})


def test_journal_restores_records(path: Path):
    write_records(path)
    assert reopen(path) == reopen(path) == (40, {0: "a", 1: "b", 2: "c"})


def test_reopened_journal_appends_records(path: Path):
    write_records(path)
    journal = Journal(path, "run")
    journal.record(99, {3: "d"})
    journal.close()
    assert reopen(path) == (99, {0: "a", 1: "b", 2: "c", 3: "d"})


@QUIET
@given(
    st.integers(0, 400),
    st.sampled_from([b"", b"\0" * 50, b"\0\n", b'{"done": 1e9', b'{"done": 99', b"\xff\xfe\n"]),
)
def test_truncated_journal_keeps_complete_records(path: Path, length: int, appended: bytes):
    path.unlink(missing_ok=True)
    content = write_records(path)
    path.write_bytes(content[:length] + appended)
    lines = content[:length].count(b"\n")
    # The first line identifies the run, and the second line records no bytes.
    records = [(0, {}), *RECORDS][: max(0, lines - 1)]
    expected = (
        records[-1][0] if records else 0,
        {number: text for _, digests in records for number, text in digests.items()},
    )
    assert reopen(path) == expected
    assert reopen(path) == expected  # it was rewritten without the torn line


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b"[]",
        b"7",
        b"{}",
        b'{"done": 9, "digests": {"3": "a"}, "prefix": null}',
        seal_line(b"[]"),
        seal_line(b'{"done": "9", "digests": {}, "prefix": null}'),
        seal_line(b'{"done": 9}'),
        seal_line(b'{"done": 9, "digests": {"x": "a"}, "prefix": null}'),
        seal_line(b"{"),
    ],
)
def test_journal_ignores_lines_after_an_invalid_one(path: Path, line: bytes):
    lines = write_records(path).splitlines()
    path.write_bytes(b"\n".join([*lines[:3], line.strip(), *lines[3:], b""]))
    assert reopen(path) == (10, {0: "a"})


@pytest.mark.parametrize(
    "first",
    [b"", b"\n", b"7\n", b"[]\n", b'{"done": 9, "digests": {}}\n', b'{"run": 5}\n', b"\0" * 9],
)
def test_journal_without_first_line_is_empty(path: Path, first: bytes):
    path.write_bytes(first + b'{"done": 40, "digests": {}}\n')
    assert reopen(path) == (0, {})


def test_journal_ignores_lines_with_any_flipped_bit(path: Path):
    content = write_records(path)
    records = [(0, {}), (0, {}), *RECORDS]
    for position in range(len(content)):
        path.write_bytes(
            content[:position]
            + bytes([content[position] ^ (1 << position % 8)])
            + content[position + 1 :]
        )
        line = content[:position].count(b"\n")
        expected = {
            number: text for _, digests in records[:line] for number, text in digests.items()
        }
        state = read_journal(path, "run")
        assert (state.durable_nbytes, state.digests) == (
            records[line - 1][0] if line else 0,
            expected,
        )


def test_journal_of_earlier_versions_is_empty(path: Path):
    path.write_bytes(b'{"run": "run", "division": ""}\n{"done": 40, "digests": {"0": "a"}}\n')
    assert read_journal(path, "run") == JournalState(0, {})


def test_journal_keeps_the_last_prefix(path: Path):
    journal = Journal(path, "run", division="3 without ", stream_numbers=(4, 7, 9), session="one")
    journal.record(10, {0: "a"}, prefix=StreamPrefix(1, 6, "b"))
    journal.close()
    state = read_journal(path, "run", division="3 without ")
    assert state == JournalState(10, {4: "a"}, StreamPrefix(7, 6, "b"), "one")
    reopened_journal = Journal(
        path, "run", division="3 without ", stream_numbers=(4, 7, 9), session="two"
    )
    reopened_journal.close()
    assert reopened_journal.prefix == StreamPrefix(1, 6, "b")
    assert read_journal(path, "run", division="3 without ").session == "two"


def test_journal_starts_with_given_state(path: Path):
    write_records(path)
    Journal(path, "run", state=JournalState(25, {1: "b"})).close()
    assert read_journal(path, "run") == JournalState(25, {1: "b"})


def test_journal_rejects_and_keeps_another_runs_file(path: Path):
    before = write_records(path)
    with pytest.raises(PrepError, match=r"out\.partial belongs to another run") as raised:
        Journal(path, "other")
    assert "--restart" in raised.value.hint
    assert path.read_bytes() == before


def test_crash_during_rewrite_keeps_the_old_journal(path: Path, monkeypatch):
    write_records(path)
    with monkeypatch.context() as patched:

        def crash(*args: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            Journal(path, "run")
    assert reopen(path) == (40, {0: "a", 1: "b", 2: "c"})


def test_record_syncs_each_line(path: Path, monkeypatch):
    journal = Journal(path, "run")
    lines: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: lines.append(path.read_bytes().count(b"\n")))
    for done_nbytes, digests in RECORDS:
        journal.record(done_nbytes, digests)
    journal.close()
    assert lines == [3, 4, 5, 6]


@pytest.mark.parametrize("free_nbytes", [0, 7])
def test_record_on_full_disk_keeps_earlier_records(path: Path, monkeypatch, free_nbytes: int):
    write_records(path)
    journal = Journal(path, "run")
    real, free_counts = os.write, iter([free_nbytes] if free_nbytes else [])

    def write(fd: int, data: bytes) -> int:
        if count := next(free_counts, 0):
            return real(fd, data[:count])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(PrepError, match="disk that holds journal is full"):
            journal.record(99, {3: "d"})
    journal.record(120, {4: "e"})  # a line after a torn one may be lost, but none before it
    journal.close()
    done_nbytes, digests = reopen(path)
    assert done_nbytes in (40, 120)
    assert {0: "a", 1: "b", 2: "c"}.items() <= digests.items()
    assert (done_nbytes == 40) == (4 not in digests)


def test_record_continues_short_writes(path: Path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    write_records(path)
    assert reopen(path) == (40, {0: "a", 1: "b", 2: "c"})
    assert all(json.loads(unseal_line(line) or b"") for line in path.read_bytes().splitlines())


def test_journal_names_a_path_that_is_not_writable(tmp_path: Path):
    with pytest.raises(PrepError, match=r"cannot read or write .*journal"):
        Journal(tmp_path / "absent" / "journal", "run")
    (tmp_path / "journal").mkdir()
    with pytest.raises(PrepError, match=r"journal cannot be used - it is not a regular file"):
        Journal(tmp_path / "journal", "run")


# Several processes


def test_journal_stores_stream_numbers_of_the_plan(path: Path):
    journal = Journal(path, "run", division="3 without ", stream_numbers=(4, 7, 9))
    journal.record(10, {0: "a", 2: "c"})
    journal.close()
    assert read_journal(path, "run", division="3 without ") == JournalState(10, {4: "a", 9: "c"})
    reopened_journal = Journal(path, "run", division="3 without ", stream_numbers=(4, 7, 9))
    reopened_journal.close()
    assert (reopened_journal.done_nbytes, reopened_journal.digests) == (10, {0: "a", 2: "c"})


def test_journal_of_another_process_count_is_ignored(path: Path):
    write_records(path)
    assert read_journal(path, "run", division="2 without ") == JournalState(0, {})
    journal = Journal(path, "run", division="2 without ")
    journal.close()
    assert (journal.done_nbytes, journal.digests) == (0, {})


def test_journal_without_streams_reads_back_empty(path: Path):
    journal = Journal(path, "run", division="8 without ", stream_numbers=())
    journal.record(0, {})
    journal.close()
    assert read_journal(path, "run", division="8 without ") == JournalState(0, {})


def test_read_journal_accepts_no_file_rejects_another_run(path: Path):
    assert read_journal(path, "run") == JournalState(0, {})
    write_records(path)
    with pytest.raises(PrepError, match="belongs to another run"):
        read_journal(path, "other")
