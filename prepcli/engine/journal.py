"""The journal of a process: how many bytes of its streams are durable, and the digests of those that are whole."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prepcli.engine.files import io_error
from prepcli.errors import PrepError


@dataclass(frozen=True, slots=True)
class Marked:
    """What a journal promises: bytes of its process's streams in their order, digests by their number in the plan."""

    nbytes: int
    digests: Mapping[int, str]


def read_journal(path: Path, identity: str, division: str = "") -> Marked:
    """What is durable by a journal: nothing where there is none, or one of another division of the plan's streams.

    PrepError if it belongs to another run; OSError if it cannot be read.
    """
    nbytes, digests = 0, dict[int, str]()
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        lines = []
    for at, line in enumerate(lines):
        match _parsed(line):
            case {"run": str(run), "division": str(of)} if at == 0:
                _check(path, run, identity)
                if of != division:
                    break
            case {"done": int(done), "digests": dict(found)} if at > 0 and all(map(str.isdecimal, found)):
                nbytes = done
                digests |= {int(number): digest for number, digest in found.items()}
            case _:
                break  # torn: what follows it was never promised
    return Marked(nbytes, digests)


def _check(path: Path, run: str, identity: str) -> None:
    if run != identity:
        folder = path.parent.parent
        raise PrepError(f"{folder} belongs to another run", "its plan or its source differs", "`--restart` drops it")


class Journal:
    """An append-only file: its first line says to what run it belongs, each further one what has become durable since.

    Streams are moved in one order, so what is durable is one number. A torn line is left out with what follows it, and
    the file is written anew when it is opened, since an append after a torn line would spoil both.
    """

    def __init__(self, path: Path, identity: str, division: str = "", numbers: Sequence[int] | None = None) -> None:
        """Open or begin the journal; PrepError if it belongs to another run, or cannot be read or written.

        `division` says how the plan's streams are divided among processes; `numbers` are those of this one by their
        number in the plan, in the order in which they are moved: None for all of them.
        """
        self._path, self._numbers = path, numbers
        fresh = path.with_suffix(path.suffix + ".new")
        try:
            marked = read_journal(path, identity, division)
            self.done_nbytes = marked.nbytes
            self.digests = self._by_position(marked.digests)
            self._fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
            with contextlib.ExitStack() as on_error:
                on_error.callback(self.close)
                self._append({"run": identity, "division": division})
                self.mark(self.done_nbytes, self.digests)
                fresh.rename(path)
                on_error.pop_all()
        except OSError as error:
            raise io_error(path, error) from error

    def _by_position(self, digests: Mapping[int, str]) -> dict[int, str]:
        if self._numbers is None:
            return dict(digests)
        return {at: digests[number] for at, number in enumerate(self._numbers) if number in digests}

    def mark(self, done_nbytes: int, digests: dict[int, str]) -> None:
        """Record that the first bytes of the streams, and the digests of whole streams, are durable."""
        self.done_nbytes = done_nbytes
        self.digests = self.digests | digests
        of = self._numbers or range(max(digests, default=-1) + 1)
        self._append({"done": done_nbytes, "digests": {of[at]: digest for at, digest in digests.items()}})

    def _append(self, entry: dict[str, object]) -> None:
        data = json.dumps(entry).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fdatasync(self._fd)
        except OSError as error:
            raise io_error(self._path, error) from error

    def close(self) -> None:
        """Let go of the file."""
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None
