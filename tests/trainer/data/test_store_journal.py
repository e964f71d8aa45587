"""The journal of a store: a later run continues from the last state whose bytes are right."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.token_stores import NAME
from trainer.data import store_journal
from trainer.data.examples import FileStart, ReadPosition
from trainer.data.partial_folders import partial_name
from trainer.data.store_journal import JOURNAL_FILE, StoreJournal, read_journal
from trainer.data.store_writer import TokenWriter, build_store


class InterruptionError(BaseException):
    """Stops a build as a kill does: the partial store stays."""


def interrupted_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write three states of an incomplete store, of 1 to 3 documents of 2 tokens; return the store."""

    def fill(writer: TokenWriter) -> None:
        for number in range(1, 4):
            writer.append(np.array([number, number], np.uint32), ends=[2])
            writer.commit(ReadPosition(number, 10 * number, FileStart()))
            writer._journal._wait_for_write()  # pyright: ignore[reportPrivateUsage]
        writer.append(np.array([9], np.uint32))
        raise InterruptionError

    monkeypatch.setattr(store_journal, "INTERVAL_S", 0.0)
    with pytest.raises(InterruptionError):
        build_store(folder / NAME, "uint16", fill)
    (partial,) = folder.glob(f"{NAME}.*.partial")
    return partial


def continued(folder: Path, dtype: str = "uint16") -> tuple[int, int, list[str]]:
    """Complete a store without more tokens; return the tokens and examples it began with, and its files."""
    begun: list[tuple[int, int]] = []
    build_store(
        folder / NAME,
        dtype,
        lambda writer: begun.append((writer.n_tokens, writer.position.n_examples)),
    )
    return *begun[0], sorted(path.name for path in (folder / NAME).iterdir())


def test_build_continues_from_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    interrupted_store(tmp_path, monkeypatch)
    assert continued(tmp_path) == (6, 3, ["documents.bin", "meta.json", "tokens.bin"])
    ids = np.frombuffer((tmp_path / NAME / "tokens.bin").read_bytes(), "<u2")
    assert ids.tolist() == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("offset", "expected"), [(1, (0, 0)), (5, (2, 1)), (9, (4, 2))])
def test_changed_bytes_end_the_restored_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, expected: tuple[int, int]
):
    partial = interrupted_store(tmp_path, monkeypatch)
    data = bytearray((partial / "tokens.bin").read_bytes())
    data[offset] ^= 1
    (partial / "tokens.bin").write_bytes(data)
    assert continued(tmp_path)[:2] == expected


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", JOURNAL_FILE])
def test_cut_off_files_end_the_restored_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    partial = interrupted_store(tmp_path, monkeypatch)
    sizes = {
        "tokens.bin": 11,
        "documents.bin": 23,
        JOURNAL_FILE: (partial / JOURNAL_FILE).stat().st_size - 1,
    }
    (partial / name).write_bytes((partial / name).read_bytes()[: sizes[name]])
    assert continued(tmp_path)[:2] == (4, 2)


def test_tokens_of_another_dtype_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    interrupted_store(tmp_path, monkeypatch)
    assert continued(tmp_path, "uint32")[:2] == (0, 0)


def test_store_with_the_most_tokens_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    partial = interrupted_store(tmp_path, monkeypatch)
    shorter = tmp_path / partial_name(NAME)
    shorter.mkdir()
    for path in partial.iterdir():
        (shorter / path.name).write_bytes(path.read_bytes())
    lines = (shorter / JOURNAL_FILE).read_bytes().splitlines(keepends=True)
    (shorter / JOURNAL_FILE).write_bytes(b"".join(lines[:2]))
    assert continued(tmp_path)[:2] == (6, 3)


def test_store_of_a_running_process_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    partial = interrupted_store(tmp_path, monkeypatch)
    running = partial.rename(tmp_path / partial_name(NAME))
    before = {path.name: path.read_bytes() for path in running.iterdir()}
    assert continued(tmp_path)[:2] == (6, 3)
    assert {path.name: path.read_bytes() for path in running.iterdir()} == before


def test_line_cut_by_a_crash_is_ignored_and_a_reopened_journal_keeps_one_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    partial = interrupted_store(tmp_path, monkeypatch)
    states = read_journal(partial)
    (partial / JOURNAL_FILE).write_bytes((partial / JOURNAL_FILE).read_bytes() + b'{"meta": {')
    assert read_journal(partial) == states
    StoreJournal(partial, [], states[-1]).close()
    assert read_journal(partial) == states[-1:]


@pytest.mark.parametrize("kind", ["fifo", "device", "deep"])
def test_path_that_is_not_a_journal_is_ignored(tmp_path: Path, kind: str):
    path = tmp_path / "journal.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b'{"meta":' * 100_000 + b"\n")
    assert read_journal(tmp_path) == []
