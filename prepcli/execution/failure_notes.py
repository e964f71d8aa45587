"""Failure notes: a failed process reports to the other processes of its output, also to later ones.

`failed.I` says why process I failed. It stays until process I joins again. `heard.J` lists the notes that existed when
process J last ended. To process J, a note of process I is

- `NEW` if it was written after J joined: a failure of this attempt,
- `OLD` if `heard.J` lists it: a failure of an earlier attempt, which J has reported already,
- `UNSURE` otherwise: either J joined after I had failed, or all processes are started again and I has not joined yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from prepcli.core.errors import PrepError
from prepcli.core.json_values import load_json
from prepcli.engine.no_follow import open_no_follow
from prepcli.planning.shares import Share
from prepcli.stores.files import open_regular_file

FAILED_STEM = "failed"
HEARD_STEM = "heard"
MAX_NOTE_NBYTES = 1 << 16


class FailureAge(Enum):
    """Age of a failure, as far as a process can determine it."""

    NEW = "new"
    UNSURE = "unsure"
    OLD = "old"


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of another process: the error and its age."""

    error: PrepError
    age: FailureAge


class FailureNotes:
    """The failure notes in a folder, as one process of a plan sees them from the moment it joins."""

    def __init__(self, folder: Path, plan: str, *, share: Share) -> None:
        """Delete this process's own note, and remember the existing notes. Raises OSError."""
        self._folder = folder
        self._share = share
        self._identity = {"plan": plan, "count": share.count}
        (folder / f"{FAILED_STEM}.{share.index}").unlink(missing_ok=True)
        heard = _read_note(folder / f"{HEARD_STEM}.{share.index}")
        self._heard_stamps = heard.content if heard and isinstance(heard.content, dict) else {}
        self._stamps_at_join = self._note_stamps()
        self.joined_at_s = time.monotonic()

    def find(self, index: int) -> Failure | None:
        """Return the failure of process `index`, or None if it left no note about this plan."""
        name = f"{FAILED_STEM}.{index}"
        note = _read_note(self._folder / name)
        if note is None or (error := self._note_to_error(note, index)) is None:
            return None
        age = FailureAge.NEW
        if note.stamp == self._heard_stamps.get(name):
            age = FailureAge.OLD
        elif note.stamp == self._stamps_at_join.get(name):
            age = FailureAge.UNSURE
        return Failure(error, age)

    @contextlib.contextmanager
    def recording_errors(self) -> Iterator[None]:
        """Write a note if the block raises. A stopped process writes none: it is expected to return."""
        try:
            yield
        except Exception as error:
            self._write_failure(error)
            raise

    def record_heard(self) -> None:
        """Record which notes exist when this process ends. Its next start treats them as old."""
        if stamps := self._note_stamps():
            with contextlib.suppress(OSError, PrepError):
                _write_note(self._folder / f"{HEARD_STEM}.{self._share.index}", {**stamps})

    def _write_failure(self, error: Exception) -> None:
        if self._share.count == 1:
            return
        content = {**self._identity, "what": f"{type(error).__name__}: {error}"}
        content |= {"why": "", "hint": ""}
        if isinstance(error, PrepError):
            content |= {"what": error.what, "why": error.why, "hint": error.hint}
        path = self._folder / f"{FAILED_STEM}.{self._share.index}"
        try:
            _write_note(path, content)
        except (OSError, PrepError):
            with contextlib.suppress(OSError, PrepError):  # a full disk still takes an empty file
                os.close(_create_file(path))

    def _note_to_error(self, note: _Note, index: int) -> PrepError | None:
        content = note.content
        if not isinstance(content, dict):
            return PrepError(
                f"process {index} failed",
                "the file with its error is damaged",
                "see the output of that process",
            )
        if any(content.get(key) != value for key, value in self._identity.items()):
            return None
        return PrepError(
            f"process {index} failed: {content.get('what')}",
            str(content.get("why")),
            str(content.get("hint")),
        )

    def _note_stamps(self) -> dict[str, str]:
        """Return a stamp (inode and time) of each note. Two notes of one process have different stamps."""
        own_name = f"{FAILED_STEM}.{self._share.index}"
        stamps: dict[str, str] = {}
        for path in self._folder.glob(f"{FAILED_STEM}.*"):
            note = _read_note(path)
            # None: the process has just joined again, and deleted its note
            if note is not None and path.name != own_name:
                stamps[path.name] = note.stamp
        return stamps


@dataclass(frozen=True, slots=True)
class _Note:
    """A JSON file of one process for the other ones.

    Attributes:
        stamp: Inode and time of the file, e.g. `8912.1700000000000`. It differs between two notes of one process.
        content: The parsed JSON, or None if the file is damaged.
    """

    stamp: str
    content: Any


def _read_note(path: Path) -> _Note | None:
    """Return a note, or None if it does not exist."""
    try:
        with open_regular_file(path) as file:
            file_stat = os.fstat(file.fileno())
            data = file.read(MAX_NOTE_NBYTES)
    except (OSError, PrepError):
        return None
    try:
        content = load_json(data)
    except ValueError:
        content = None
    # Each note is a new file: another inode, or the same inode with a later time.
    return _Note(f"{file_stat.st_ino}.{file_stat.st_mtime_ns}", content)


def _write_note(path: Path, content: dict[str, str | int]) -> None:
    """Write a file that other processes see completely or not at all. It need not be durable."""
    # A note concerns running processes only, so no sync. After a power cut all of them start again.
    new_path = path.with_name(f"new.{path.name}")
    with open(_create_file(new_path), "w") as file:
        json.dump(content, file)
    os.replace(new_path, path)


def _create_file(path: Path) -> int:
    return open_no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
