"""The journal of a run: how many bytes of the plan's streams are durable, and the digests of those that are whole."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from prepcli.errors import PrepError


class Journal:
    """An append-only file: its first line says to what run it belongs, each further one what has become durable since.

    Streams are moved in one order, so what is durable is one number. A torn last line is left out, and the file is
    written anew when it is opened, since an append after a torn line would spoil both.
    """

    def __init__(self, path: Path, identity: str) -> None:
        """Open or begin the journal; PrepError if it belongs to another run."""
        self.done_nbytes = 0
        self.digests: dict[int, str] = {}
        self._path = path
        self._load(identity)
        fresh = path.with_suffix(".new")
        self._fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._append({"run": identity})
        self.mark(self.done_nbytes, self.digests)
        fresh.rename(path)

    def _load(self, identity: str) -> None:
        if not self._path.exists():
            return
        entries = []
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            try:
                entries.append(json.loads(line))
            except ValueError:
                break  # torn: what follows it was never promised
        if not entries:
            return
        if entries[0].get("run") != identity:
            folder = self._path.parent.parent
            raise PrepError(
                f"{folder} belongs to another run", "its plan or its source differs", "`--restart` drops it"
            )
        for entry in entries[1:]:
            self.done_nbytes = entry["done"]
            self.digests |= {int(number): digest for number, digest in entry["digests"].items()}

    def mark(self, done_nbytes: int, digests: dict[int, str]) -> None:
        """Record that the first bytes of the streams, and the digests of whole streams, are durable."""
        self.done_nbytes = done_nbytes
        self.digests = self.digests | digests
        self._append({"done": done_nbytes, "digests": digests})

    def _append(self, entry: dict[str, object]) -> None:
        os.write(self._fd, json.dumps(entry).encode() + b"\n")
        os.fdatasync(self._fd)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
