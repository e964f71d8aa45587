"""Tokenizing again after an interruption: it continues, and the store has the same bytes."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.corpus import change, make_config
from trainer.data import encode, store_journal
from trainer.data.readers import text_file
from trainer.data.tokenize import TokenizeConfig, tokenize_files

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "then", "ate", "the hat", "didn't it")
FIELDS = "[question], answer"
LINES_PER_FILE = 40

KILLED_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from tests.trainer.data.test_resume_tokens import make_records_config, use_small_batches
from trainer.data.tokenize import tokenize_files

use_small_batches(setattr)
folder, calls = Path(sys.argv[1]), int(sys.argv[2])

def has_saved_state():
    return any(path.read_bytes().count(b"\\n") > 1 for path in folder.glob("cache/*/journal.jsonl"))

def progress(done, total, n_tokens):
    global calls
    calls -= 1
    if calls < 0:
        while not has_saved_state():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

tokenize_files(make_records_config(folder), progress=progress, note=print)
"""


class InterruptionError(BaseException):
    """Ends tokenizing as an interruption by the user does."""


def use_small_batches(set_attribute: Any) -> None:
    """Encode small batches, and save the state after each one that follows a saved one."""
    set_attribute(encode, "ENCODE_BATCH_NBYTES", 500)
    set_attribute(text_file, "TEXT_CHUNK_NBYTES", 200)
    set_attribute(store_journal, "INTERVAL_S", 0.0)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_batches(monkeypatch.setattr)


def make_records_config(folder: Path, **changes: Any) -> TokenizeConfig:
    """Return a config of three files of prompts and answers, with invalid lines."""
    rng = random.Random(0)
    for name in "abc" if not (folder / "a.jsonl").exists() else "":
        rows = [
            [" ".join(rng.choices(WORDS, k=rng.randint(1, 9))) for _ in range(2)]
            for _ in range(LINES_PER_FILE)
        ]
        lines = [
            f'{{"question": "{question}", "answer": "{answer}"}}\n' for question, answer in rows
        ]
        lines.insert(rng.randint(0, LINES_PER_FILE), "{\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    paths = [folder / f"{name}.jsonl" for name in "abc"]
    return make_config(
        folder, *paths, **{"type": "json", "fields": FIELDS, "bad_lines": 3} | changes
    )


def read_store(config: TokenizeConfig) -> dict[str, bytes]:
    """Return the files of the only folder in a cache."""
    (store,) = (path for path in config.cache.iterdir() if path.is_dir())
    return {path.name: path.read_bytes() for path in sorted(store.iterdir())}


def tokenize(
    config: TokenizeConfig, notes: list[str] | None = None, stop_after: int | None = None
) -> list[int]:
    """Tokenize, and stop at progress report `stop_after`. Return the bytes done at each earlier report."""
    done: list[int] = []

    def progress(nbytes: int, total: int, n_tokens: int) -> None:
        if len(done) == stop_after:
            raise InterruptionError
        done.append(nbytes)

    tokenize_files(config, progress=progress, note=(notes if notes is not None else []).append)
    return done


CONFIGS: dict[str, dict[str, Any]] = {
    "prompts": {},
    "limit": {"max_examples": 70},
    "text": {"type": "text", "fields": "", "bad_lines": 0},
}


def write_as_lists(config: TokenizeConfig) -> None:
    """Replace the files of records by lists of the same records, with another invalid one."""
    for path in map(Path, config.paths):
        lines = path.read_text().replace("{\n", "3\n").splitlines()
        path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


@pytest.mark.parametrize("name", [*CONFIGS, pytest.param("lists", marks=pytest.mark.slow)])
def test_interrupted_run_continues_with_the_same_bytes(tmp_path: Path, name: str):
    config = make_records_config(tmp_path, **CONFIGS.get(name, {}))
    if name == "lists":
        write_as_lists(config)
    whole = change(config, cache=tmp_path / "whole")
    n_calls = len(tokenize(whole))
    assert n_calls > 12
    for stops in ([1], [2], [n_calls // 2], [n_calls - 1], [n_calls // 4] * 3):
        case = change(config, cache=tmp_path / f"cache-{'-'.join(map(str, stops))}")
        for stop in stops:
            with pytest.raises(InterruptionError):
                tokenize(case, stop_after=stop)
        notes: list[str] = []
        done = tokenize(case, notes)
        assert done[0] > 0 or stops[0] < 3
        assert any(note.startswith("continuing after ") for note in notes) == (done[0] > 0)
        assert read_store(case) == read_store(whole)


def test_complete_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The state after each batch is saved, however long the disk takes for the one before."""
    monkeypatch.setattr(
        store_journal.StoreJournal, "is_due", lambda self: self._wait_for_write() is None
    )
    config = make_records_config(tmp_path)
    whole_notes: list[str] = []
    n_calls = len(tokenize(change(config, cache=tmp_path / "whole"), whole_notes))
    with pytest.raises(InterruptionError):
        tokenize(config, stop_after=n_calls - 2)
    notes: list[str] = []
    tokenize(config, notes)
    assert [note for note in whole_notes if note.startswith("skipped ")]
    assert all("c.jsonl" in note for note in notes if note.startswith("skipped "))
    assert "3 invalid lines skipped" in notes


def run_killed(folder: Path, calls: int) -> int:
    """Tokenize in a process that kills itself after a saved state and `calls` progress reports. Return its exit code.

    Args:
        folder: Folder of the data and the cache.
        calls: Progress reports before the kill, at least 1: no state is saved before the second
            report.
    """
    command = [sys.executable, "-c", KILLED_SCRIPT, str(folder), str(calls)]
    return subprocess.run(command, check=False, capture_output=True).returncode


def check_kills(folder: Path, calls: list[int]) -> None:
    """Kill one run after the other, then compare the store with that of an undisturbed run."""
    config = make_records_config(folder)
    whole = change(config, cache=folder / "whole")
    tokenize(whole)
    for number in calls:
        assert run_killed(folder, number) == -signal.SIGKILL
        assert len([path for path in config.cache.iterdir() if path.is_dir()]) == 1
    assert tokenize(config)[0] > 0
    assert read_store(config) == read_store(whole)


def test_killed_runs_continue_with_the_same_bytes(tmp_path: Path):
    check_kills(tmp_path, [2, 4])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_runs_killed_at_random_continue(tmp_path: Path, seed: int):
    rng = random.Random(seed)
    check_kills(tmp_path, [rng.randint(1, 3) for _ in range(3)])
