"""The journal of a run: how many bytes of the plan's streams are durable, and the digests of those that are whole."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from prepcli.errors import PrepError
from prepcli.files import io_error


class Journal:
    """An append-only file: its first line says to what run it belongs, each further one what has become durable since.

    Streams are moved in one order, so what is durable is one number. A torn line is left out with what follows it, and
    the file is written anew when it is opened, since an append after a torn line would spoil both.
    """

    def __init__(self, path: Path, identity: str) -> None:
        """Open or begin the journal; PrepError if it belongs to another run, or cannot be read or written."""
        self.done_nbytes = 0
        self.digests: dict[int, str] = {}
        self._path = path
        fresh = path.with_suffix(".new")
        try:
            self._load(identity)
            self._fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._append({"run": identity})
            self.mark(self.done_nbytes, self.digests)
            fresh.rename(path)
        except OSError as error:
            raise io_error(path, error) from error

    def _load(self, identity: str) -> None:
        if not self._path.exists():
            return
        for at, line in enumerate(self._path.read_bytes().split(b"\n")[:-1]):
            match _parsed(line):
                case {"run": str(run)} if at == 0:
                    self._check(run, identity)
                case {"done": int(done), "digests": dict(digests)} if at > 0 and all(map(str.isdecimal, digests)):
                    self.done_nbytes = done
                    self.digests |= {int(number): digest for number, digest in digests.items()}
                case _:
                    return  # torn: what follows it was never promised

    def _check(self, run: str, identity: str) -> None:
        if run != identity:
            folder = self._path.parent.parent
            raise PrepError(
                f"{folder} belongs to another run", "its plan or its source differs", "`--restart` drops it"
            )

    def mark(self, done_nbytes: int, digests: dict[int, str]) -> None:
        """Record that the first bytes of the streams, and the digests of whole streams, are durable."""
        self.done_nbytes = done_nbytes
        self.digests = self.digests | digests
        self._append({"done": done_nbytes, "digests": digests})

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
