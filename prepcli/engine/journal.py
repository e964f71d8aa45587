"""The journal of a process: which of its streams are durable, with their digests.

Each line is a checksum, a space and a JSON object. A line whose checksum does not fit ends the journal: it and what
follows it promise nothing. So do journals of earlier versions, whose lines have no checksum.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from prepcli.engine.files import io_error
from prepcli.engine.own_files import open_own, read_own
from prepcli.errors import PrepError


@dataclass(frozen=True, slots=True)
class Prefix:
    """The durable first bytes of the stream that was cut short: how many on its left side, and the digest of what was
    written of them, in the tensor's order."""

    number: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Marked:
    """What a journal promises: the bytes that are durable, digests of whole streams by their number in the plan, and
    the stream cut short. `session` names the processes at work when the journal was opened."""

    nbytes: int
    digests: Mapping[int, str]
    prefix: Prefix | None = None
    session: str = ""


NOTHING = Marked(0, {})


def read_journal(path: Path, identity: str, division: str = "") -> Marked:
    """Read what a journal promises: nothing if it does not exist or is of another division of the plan's streams.

    Raises:
        PrepError: It belongs to another run, or is a link.
        OSError: It cannot be read.
    """
    found = NOTHING
    try:
        lines = read_own(path).split(b"\n")[:-1]
    except FileNotFoundError:
        lines = []
    for at, line in enumerate(lines):
        match _parsed(line):
            case {"run": str(run), "division": str(of), "session": str(session)} if at == 0:
                _check(path, run, identity)
                if of != division:
                    break
                found = Marked(0, {}, session=session)
            case {
                "done": int(done),
                "digests": dict(new),
                "prefix": cut,
            } if at > 0 and all(map(str.isdecimal, new)):
                digests = {**found.digests, **{int(number): digest for number, digest in new.items()}}
                found = Marked(done, digests, _prefix(cut), found.session)
            case _:
                break
    return found


def _prefix(cut: object) -> Prefix | None:
    match cut:
        case [int(number), int(nbytes), str(digest)]:
            return Prefix(number, nbytes, digest)
    return None


def _check(path: Path, run: str, identity: str) -> None:
    if run != identity:
        folder = path.parent.parent
        raise PrepError(f"{folder} belongs to another run", "its plan or its source differs", "`--restart` drops it")


class Journal:
    """An append-only file: its first line says to what run it belongs, each further one what has become durable since.

    It is written anew when it is opened, since an append after a torn line would spoil both.
    """

    def __init__(
        self,
        path: Path,
        identity: str,
        division: str = "",
        numbers: Sequence[int] | None = None,
        *,
        session: str = "",
        kept: Marked | None = None,
    ) -> None:
        """Open or create the journal.

        Args:
            path: Where it is.
            identity: The run that it belongs to.
            division: How the plan's streams are divided among processes.
            numbers: This process's streams by their number in the plan, in the order in which they are moved; None for
                all streams.
            session: The processes that work together now.
            kept: What stays durable; None for all that the journal promises.

        Raises:
            PrepError: It belongs to another run, or cannot be read or written.
        """
        self._path, self._numbers = path, numbers
        fresh = path.with_suffix(path.suffix + ".new")
        try:
            marked = read_journal(path, identity, division) if kept is None else kept
            self.done_nbytes = marked.nbytes
            self.digests = self._by_position(marked.digests)
            self.prefix = self._prefix_by_position(marked.prefix)
            self._fd = open_own(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            with contextlib.ExitStack() as on_error:
                on_error.callback(self.close)
                self._append({"run": identity, "division": division, "session": session})
                self.mark(self.done_nbytes, self.digests, self.prefix)
                fresh.rename(path)
                on_error.pop_all()
        except OSError as error:
            raise io_error(path, error) from error

    def _by_position(self, digests: Mapping[int, str]) -> dict[int, str]:
        if self._numbers is None:
            return dict(digests)
        return {at: digests[number] for at, number in enumerate(self._numbers) if number in digests}

    def _prefix_by_position(self, prefix: Prefix | None) -> Prefix | None:
        if prefix is None or self._numbers is None:
            return prefix
        return Prefix(self._numbers.index(prefix.number), prefix.nbytes, prefix.digest)

    def mark(self, done_nbytes: int, digests: dict[int, str], prefix: Prefix | None = None) -> None:
        """Record that these bytes of the streams are durable, streams counted by position in `numbers`."""
        self.done_nbytes = done_nbytes
        self.digests = self.digests | digests
        self.prefix = prefix
        last = max([*digests, prefix.number if prefix else -1], default=-1)
        of = self._numbers or range(last + 1)
        cut = [of[prefix.number], prefix.nbytes, prefix.digest] if prefix else None
        named = {of[at]: digest for at, digest in digests.items()}
        self._append({"done": done_nbytes, "digests": named, "prefix": cut})

    def _append(self, entry: dict[str, object]) -> None:
        data = sealed(json.dumps(entry).encode())
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


def sealed(content: bytes) -> bytes:
    """A line of a journal: a checksum and the content, which has no line break."""
    return xxhash.xxh3_64_hexdigest(content).encode() + b" " + content + b"\n"


def unsealed(line: bytes) -> bytes | None:
    """The content of a line that `sealed` made, without its line break; None where the checksum does not fit."""
    checksum, _, content = line.partition(b" ")
    return content if checksum == xxhash.xxh3_64_hexdigest(content).encode() else None


def _parsed(line: bytes) -> object:
    content = unsealed(line)
    try:
        return None if content is None else json.loads(content)
    except ValueError:
        return None
