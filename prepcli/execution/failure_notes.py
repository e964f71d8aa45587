"""Failure notes: how a process that fails tells the processes that share its work, also those that join later.

`failed.I` says why process I failed. It stays until process I joins again. `heard.J` lists the notes that were there
when process J last ended. To process J, a note of process I is

- `NEW` if it was written after J joined: a failure of this attempt;
- `OLD` if `heard.J` lists it: a failure of an earlier attempt, which J has reported already;
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

from prepcli.errors import PrepError
from prepcli.planning.shares import Share

FAILED_STEM, HEARD_STEM = "failed", "heard"
MAX_NOTE_NBYTES = 1 << 16  # of a note


class FailureAge(Enum):
    """When a failure happened, as far as a process can tell."""

    NEW = "new"
    UNSURE = "unsure"
    OLD = "old"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why another process failed, and when."""

    error: PrepError
    age: FailureAge


class FailureNotes:
    """The failure notes in a folder, as one process of a plan sees them from the moment it joins."""

    def __init__(self, folder: Path, plan: str, share: Share) -> None:
        """Withdraw this process's own note, and remember the others that are there. Raises OSError."""
        self._folder, self._share = folder, share
        self._identity = {"plan": plan, "count": share.count}
        (folder / f"{FAILED_STEM}.{share.index}").unlink(missing_ok=True)
        heard = _read_note(folder / f"{HEARD_STEM}.{share.index}")
        self._heard_stamps = heard.content if heard and isinstance(heard.content, dict) else {}
        self._stamps_at_join = self._stamps()
        self.joined_at_s = time.monotonic()

    def find(self, index: int) -> Failure | None:
        """The failure of process `index`, if it left a note about this plan."""
        name = f"{FAILED_STEM}.{index}"
        note = _read_note(self._folder / name)
        if note is None or (error := self._to_error(note, index)) is None:
            return None
        if note.stamp == self._heard_stamps.get(name):
            return Failure(error, FailureAge.OLD)
        return Failure(error, FailureAge.UNSURE if note.stamp == self._stamps_at_join.get(name) else FailureAge.NEW)

    @contextlib.contextmanager
    def recording_errors(self) -> Iterator[None]:
        """Leave a note if the block raises. A process that was stopped leaves none: it is expected back."""
        try:
            yield
        except Exception as error:
            self._write_failure(error)
            raise

    def record_heard(self) -> None:
        """Record which notes are there when this process ends, whether or not it reported them."""
        if stamps := self._stamps():
            with contextlib.suppress(OSError):
                _write_note(self._folder / f"{HEARD_STEM}.{self._share.index}", {**stamps})

    def _write_failure(self, error: Exception) -> None:
        if self._share.count == 1:
            return
        told = error if isinstance(error, PrepError) else PrepError(f"{type(error).__name__}: {error}")
        content = {**self._identity, "what": told.what, "why": told.why, "hint": told.hint}
        path = self._folder / f"{FAILED_STEM}.{self._share.index}"
        try:
            _write_note(path, content)
        except OSError:
            with contextlib.suppress(OSError):  # a full disk still takes an empty file
                os.close(_create_file(path))

    def _to_error(self, note: _Note, index: int) -> PrepError | None:
        found = note.content
        if not isinstance(found, dict):
            return PrepError(f"process {index} failed", "it could not say why: see its own output")
        if any(found.get(key) != value for key, value in self._identity.items()):
            return None
        return PrepError(f"process {index} failed: {found.get('what')}", str(found.get("why")), str(found.get("hint")))

    def _stamps(self) -> dict[str, str]:
        """What tells each note from earlier and later ones of the same process."""
        own = f"{FAILED_STEM}.{self._share.index}"
        found = {path.name: _read_note(path) for path in self._folder.glob(f"{FAILED_STEM}.*") if path.name != own}
        return {name: note.stamp for name, note in found.items() if note is not None}


@dataclass(frozen=True, slots=True)
class _Note:
    """A JSON file as it was read: None as content where that is damaged."""

    stamp: str
    content: Any


def _read_note(path: Path) -> _Note | None:
    """A note; None where there is none."""
    try:
        with path.open("rb") as file:
            found, data = os.fstat(file.fileno()), file.read(MAX_NOTE_NBYTES)
    except OSError:
        return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    return _Note(f"{found.st_ino}.{found.st_mtime_ns}", content)


def _write_note(path: Path, content: dict[str, str | int]) -> None:
    """Write a file that others see whole or not at all."""
    fresh = path.with_name(f"new.{path.name}")
    with open(_create_file(fresh), "w") as file:
        json.dump(content, file)
    os.replace(fresh, path)


def _create_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
