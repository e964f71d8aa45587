"""The journal: what was marked comes back, whatever a crash left behind it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.engine.journal import Journal, JournalState, StreamPrefix, read_journal, seal_line, unseal_line
from prepcli.errors import PrepError

QUIET = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MARKS = [(10, {0: "a"}), (25, {}), (25, {}), (40, {1: "b", 2: "c"})]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "out.partial" / ".prep").mkdir(parents=True)
    return tmp_path / "out.partial" / ".prep" / "journal"


def reopened(path: Path, identity: str = "run") -> tuple[int, dict[int, str]]:
    journal = Journal(path, identity)
    journal.close()
    return journal.done_nbytes, journal.digests


def filled(path: Path) -> bytes:
    journal = Journal(path, "run")
    for done, digests in MARKS:
        journal.record(done, digests)
    journal.close()
    return path.read_bytes()


def test_a_new_journal_has_nothing(path: Path):
    assert reopened(path) == (0, {})
    assert reopened(path) == (0, {})


def test_what_was_marked_comes_back(path: Path):
    filled(path)
    assert reopened(path) == reopened(path) == (40, {0: "a", 1: "b", 2: "c"})


def test_marks_after_reopening_add_to_those_before(path: Path):
    filled(path)
    journal = Journal(path, "run")
    journal.record(99, {3: "d"})
    journal.close()
    assert reopened(path) == (99, {0: "a", 1: "b", 2: "c", 3: "d"})


@QUIET
@given(st.integers(0, 400), st.sampled_from([b"", b"\0" * 50, b"\0\n", b'{"done": 1e9', b'{"done": 99', b"\xff\xfe\n"]))
def test_a_journal_cut_anywhere_has_the_marks_that_are_whole(path: Path, length: int, behind: bytes):
    path.unlink(missing_ok=True)
    whole = filled(path)
    path.write_bytes(whole[:length] + behind)
    lines = whole[:length].count(b"\n")
    marks = [(0, {}), *MARKS][: max(0, lines - 1)]  # the first line is the run's name, the second marks nothing
    expected = (
        marks[-1][0] if marks else 0,
        {number: text for _, digests in marks for number, text in digests.items()},
    )
    assert reopened(path) == expected
    assert reopened(path) == expected  # it was written anew, without what was torn


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
def test_nothing_counts_from_a_line_on_that_is_not_ours(path: Path, line: bytes):
    lines = filled(path).splitlines()
    path.write_bytes(b"\n".join([*lines[:3], line.strip(), *lines[3:], b""]))
    assert reopened(path) == (10, {0: "a"})


@pytest.mark.parametrize(
    "first", [b"", b"\n", b"7\n", b"[]\n", b'{"done": 9, "digests": {}}\n', b'{"run": 5}\n', b"\0" * 9]
)
def test_a_journal_whose_first_line_was_lost_begins_anew(path: Path, first: bytes):
    path.write_bytes(first + b'{"done": 40, "digests": {}}\n')
    assert reopened(path) == (0, {})


def test_journal_ignores_lines_with_any_flipped_bit(path: Path):
    whole = filled(path)
    marks = [(0, {}), (0, {}), *MARKS]
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        line = whole[:at].count(b"\n")
        expected = {number: text for _, digests in marks[:line] for number, text in digests.items()}
        found = read_journal(path, "run")
        assert (found.durable_nbytes, found.digests) == (marks[line - 1][0] if line else 0, expected)


def test_journal_of_earlier_versions_promises_nothing(path: Path):
    path.write_bytes(b'{"run": "run", "division": ""}\n{"done": 40, "digests": {"0": "a"}}\n')
    assert read_journal(path, "run") == JournalState(0, {})


def test_journal_keeps_the_prefix_of_the_last_mark(path: Path):
    journal = Journal(path, "run", "3 without ", (4, 7, 9), session="one")
    journal.record(10, {0: "a"}, StreamPrefix(1, 6, "b"))
    journal.close()
    found = read_journal(path, "run", "3 without ")
    assert found == JournalState(10, {4: "a"}, StreamPrefix(7, 6, "b"), "one")
    again = Journal(path, "run", "3 without ", (4, 7, 9), session="two")
    again.close()
    assert again.prefix == StreamPrefix(1, 6, "b")
    assert read_journal(path, "run", "3 without ").session == "two"


def test_journal_begins_with_what_is_kept(path: Path):
    filled(path)
    Journal(path, "run", state=JournalState(25, {1: "b"})).close()
    assert read_journal(path, "run") == JournalState(25, {1: "b"})


def test_a_journal_of_another_run_is_refused_and_stays(path: Path):
    before = filled(path)
    with pytest.raises(PrepError, match=r"out\.partial belongs to another run") as caught:
        Journal(path, "other")
    assert "--restart" in caught.value.hint
    assert path.read_bytes() == before


def test_a_crash_while_it_is_written_anew_leaves_the_old_one(path: Path, monkeypatch):
    filled(path)
    with monkeypatch.context() as patched:

        def crash(*args: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            Journal(path, "run")
    assert reopened(path) == (40, {0: "a", 1: "b", 2: "c"})


def test_every_mark_is_durable_before_it_counts(path: Path, monkeypatch):
    journal = Journal(path, "run")
    lines: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: lines.append(path.read_bytes().count(b"\n")))
    for done, digests in MARKS:
        journal.record(done, digests)
    journal.close()
    assert lines == [3, 4, 5, 6]


@pytest.mark.parametrize("room", [0, 7])
def test_a_full_disk_is_said_so_and_what_was_marked_stays(path: Path, monkeypatch, room: int):
    filled(path)
    journal = Journal(path, "run")
    real, rooms = os.write, iter([room] if room else [])

    def write(fd: int, data: bytes) -> int:
        if left := next(rooms, 0):
            return real(fd, data[:left])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(PrepError, match="disk that holds journal is full"):
            journal.record(99, {3: "d"})
    journal.record(120, {4: "e"})  # behind a torn line it may be lost, but nothing before it
    journal.close()
    done, digests = reopened(path)
    assert done in (40, 120)
    assert {0: "a", 1: "b", 2: "c"}.items() <= digests.items()
    assert (done == 40) == (4 not in digests)


def test_counts_that_are_short_are_gone_on_with(path: Path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    filled(path)
    assert reopened(path) == (40, {0: "a", 1: "b", 2: "c"})
    assert all(json.loads(unseal_line(line) or b"") for line in path.read_bytes().splitlines())


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path):
    with pytest.raises(PrepError, match=r"cannot read or write .*journal"):
        Journal(tmp_path / "absent" / "journal", "run")
    (tmp_path / "journal").mkdir()
    with pytest.raises(PrepError, match=r"journal is not used - it is not a regular file"):
        Journal(tmp_path / "journal", "run")


# Of several processes


def test_digests_are_kept_by_the_number_that_streams_have_in_the_plan(path: Path):
    journal = Journal(path, "run", "3 without ", (4, 7, 9))
    journal.record(10, {0: "a", 2: "c"})
    journal.close()
    assert read_journal(path, "run", "3 without ") == JournalState(10, {4: "a", 9: "c"})
    again = Journal(path, "run", "3 without ", (4, 7, 9))
    again.close()
    assert (again.done_nbytes, again.digests) == (10, {0: "a", 2: "c"})


def test_a_journal_of_another_division_promises_nothing(path: Path):
    filled(path)
    assert read_journal(path, "run", "2 without ") == JournalState(0, {})
    journal = Journal(path, "run", "2 without ")
    journal.close()
    assert (journal.done_nbytes, journal.digests) == (0, {})


def test_a_process_with_nothing_to_do_has_a_journal_too(path: Path):
    journal = Journal(path, "run", "8 without ", ())
    journal.record(0, {})
    journal.close()
    assert read_journal(path, "run", "8 without ") == JournalState(0, {})


def test_reading_a_journal_of_another_run_is_refused_and_one_that_is_not_there_is_empty(path: Path):
    assert read_journal(path, "run") == JournalState(0, {})
    filled(path)
    with pytest.raises(PrepError, match="belongs to another run"):
        read_journal(path, "other")
