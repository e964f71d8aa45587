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
from prepcli.engine.no_follow import open_no_follow, read_no_follow
from prepcli.errors import PrepError


@dataclass(frozen=True, slots=True)
class StreamPrefix:
    """The durable first bytes of the stream that was cut short: how many on its left side, and the digest of what was
    written of them, in the tensor's order."""

    stream_number: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class JournalState:
    """What a journal promises: the bytes that are durable, digests of whole streams by their number in the plan, and
    the stream cut short. `session` names the processes at work when the journal was opened."""

    durable_nbytes: int
    digests: Mapping[int, str]
    prefix: StreamPrefix | None = None
    session: str = ""


EMPTY_JOURNAL_STATE = JournalState(0, {})


def read_journal(path: Path, run_id: str, division: str = "") -> JournalState:
    """Read what a journal promises: nothing if it does not exist or is of another division of the plan's streams.

    Raises:
        PrepError: It belongs to another run, or is a link.
        OSError: It cannot be read.
    """
    found = EMPTY_JOURNAL_STATE
    try:
        lines = read_no_follow(path).split(b"\n")[:-1]
    except FileNotFoundError:
        lines = []
    for at, line in enumerate(lines):
        match _parse_line(line):
            case {"run": str(run), "division": str(of), "session": str(session)} if at == 0:
                _check_run(path, run, run_id)
                if of != division:
                    break
                found = JournalState(0, {}, session=session)
            case {
                "done": int(done),
                "digests": dict(new),
                "prefix": cut,
            } if at > 0 and all(map(str.isdecimal, new)):
                digests = {**found.digests, **{int(number): digest for number, digest in new.items()}}
                found = JournalState(done, digests, _parse_prefix(cut), found.session)
            case _:
                break
    return found


def _parse_prefix(value: object) -> StreamPrefix | None:
    match value:
        case [int(number), int(nbytes), str(digest)]:
            return StreamPrefix(number, nbytes, digest)
    return None


def _check_run(path: Path, journal_run_id: str, run_id: str) -> None:
    if journal_run_id != run_id:
        folder = path.parent.parent
        raise PrepError(f"{folder} belongs to another run", "its plan or its source differs", "`--restart` drops it")


class Journal:
    """An append-only file: its first line says to what run it belongs, each further one what has become durable since.

    It is written anew when it is opened, since an append after a torn line would spoil both.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        division: str = "",
        stream_numbers: Sequence[int] | None = None,
        *,
        session: str = "",
        state: JournalState | None = None,
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
        self._path, self._numbers = path, stream_numbers
        fresh = path.with_suffix(path.suffix + ".new")
        try:
            marked = read_journal(path, run_id, division) if state is None else state
            self.done_nbytes = marked.durable_nbytes
            self.digests = self._by_position(marked.digests)
            self.prefix = self._prefix_by_position(marked.prefix)
            self._fd = open_no_follow(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            with contextlib.ExitStack() as on_error:
                on_error.callback(self.close)
                self._append({"run": run_id, "division": division, "session": session})
                self.record(self.done_nbytes, self.digests, self.prefix)
                fresh.rename(path)
                on_error.pop_all()
        except OSError as error:
            raise io_error(path, error) from error

    def _by_position(self, digests: Mapping[int, str]) -> dict[int, str]:
        if self._numbers is None:
            return dict(digests)
        return {at: digests[number] for at, number in enumerate(self._numbers) if number in digests}

    def _prefix_by_position(self, prefix: StreamPrefix | None) -> StreamPrefix | None:
        if prefix is None or self._numbers is None:
            return prefix
        return StreamPrefix(self._numbers.index(prefix.stream_number), prefix.nbytes, prefix.digest)

    def record(self, done_nbytes: int, digests: dict[int, str], prefix: StreamPrefix | None = None) -> None:
        """Record that these bytes of the streams are durable, streams counted by position in `numbers`."""
        self.done_nbytes = done_nbytes
        self.digests = self.digests | digests
        self.prefix = prefix
        last = max([*digests, prefix.stream_number if prefix else -1], default=-1)
        of = self._numbers or range(last + 1)
        cut = [of[prefix.stream_number], prefix.nbytes, prefix.digest] if prefix else None
        named = {of[at]: digest for at, digest in digests.items()}
        self._append({"done": done_nbytes, "digests": named, "prefix": cut})

    def _append(self, entry: dict[str, object]) -> None:
        data = seal_line(json.dumps(entry).encode())
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


def seal_line(content: bytes) -> bytes:
    """A line of a journal: a checksum and the content, which has no line break."""
    return xxhash.xxh3_64_hexdigest(content).encode() + b" " + content + b"\n"


def unseal_line(line: bytes) -> bytes | None:
    """The content of a line that `sealed` made, without its line break; None where the checksum does not fit."""
    checksum, _, content = line.partition(b" ")
    return content if checksum == xxhash.xxh3_64_hexdigest(content).encode() else None


def _parse_line(line: bytes) -> object:
    content = unseal_line(line)
    try:
        return None if content is None else json.loads(content)
    except ValueError:
        return None
