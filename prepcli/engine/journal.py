"""The journal of a process: its durable streams, with their digests. Durable bytes are synced to the disk.

Each line is a checksum, a space and a JSON object. Reading stops at the first line with a wrong checksum, such
as a torn last line. Journals of earlier versions have no checksums and count as empty.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from prepcli.core.errors import Option, PrepError, text
from prepcli.engine.no_follow import open_no_follow, read_no_follow
from prepcli.stores.files import io_error


@dataclass(frozen=True, slots=True)
class StreamPrefix:
    """The durable first bytes of a partly written stream.

    Attributes:
        stream_number: Number of the stream in the plan, e.g. 17. In the journal of a process it is
            the position among its streams.
        nbytes: Number of bytes, as they are read.
        digest: Digest of the bytes as they are written, in the tensor's order.
    """

    stream_number: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class JournalState:
    """The durable state recorded by a journal.

    Attributes:
        durable_nbytes: Number of durable bytes over all streams.
        digests: Digests of complete streams, by number in the plan.
        prefix: The partly durable stream.
        session: Identifies the processes at work when the journal was opened.
    """

    durable_nbytes: int
    digests: Mapping[int, str]
    prefix: StreamPrefix | None = None
    session: str = ""


EMPTY_JOURNAL_STATE = JournalState(0, {})


def read_journal(path: Path, run_id: str, *, division: str = "") -> JournalState:
    """Read the durable state recorded by a journal.

    Args:
        path: The journal.
        run_id: The run of the expected journal.
        division: How the plan's streams are divided among processes.

    Returns:
        The state, or empty if the journal does not exist or is of another division.

    Raises:
        PrepError: It belongs to another run, or is a link.
        OSError: It cannot be read.
    """
    # A journal of two lines, without the checksum before each:
    #   {"run": "xxh3:9f…", "division": "2 without ", "session": "process 17 on host since …"}
    #   {"done": 9437184, "digests": {"0": "51…"}, "prefix": [3, 1048576, "c0…"]}
    # Stream 0 is complete, and the first MiB of stream 3. The text after the last line break is a torn
    # line, or empty.
    state = EMPTY_JOURNAL_STATE
    try:
        lines = read_no_follow(path).split(b"\n")[:-1]
    except FileNotFoundError:
        lines = []
    for line_number, line in enumerate(lines):
        match _parse_line(line):
            case {"run": str(run), "division": str(journal_division), "session": str(session)} if (
                line_number == 0
            ):
                _check_run(path, run, run_id)
                # The numbers of another division's streams belong to other processes now. Their digests
                # are in `division.json`.
                if journal_division != division:
                    break
                state = JournalState(0, {}, session=session)
            case {
                "done": int(done_nbytes),
                "digests": dict(new_digests),
                "prefix": prefix,
                # `done` and `prefix` replace the values of the previous line. `digests` are added to the earlier ones.
            } if line_number > 0 and all(map(str.isdecimal, new_digests)):
                digests = dict(state.digests)
                for number, digest in new_digests.items():
                    digests[int(number)] = digest
                state = JournalState(done_nbytes, digests, _parse_prefix(prefix), state.session)
            case _:
                break
    return state


def _parse_prefix(value: object) -> StreamPrefix | None:
    """Parse the `prefix` of a journal line, or None if it has another form."""
    match value:
        case [int(number), int(nbytes), str(digest)]:
            return StreamPrefix(number, nbytes, digest)
    return None


def _check_run(path: Path, journal_run_id: str, run_id: str) -> None:
    """Raise PrepError if a journal belongs to another run."""
    if journal_run_id != run_id:
        folder = path.parent.parent
        raise PrepError(
            f"{folder} belongs to another run",
            "its plan or its source differs",
            text("{} deletes it", Option("restart", True)),
        )


class Journal:
    """An append-only journal file.

    Its first line identifies the run. Each further line records new durable bytes. The file is rewritten
    when it is opened, because a line appended to a torn line would be lost.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        *,
        division: str = "",
        stream_numbers: Sequence[int] | None = None,
        session: str = "",
        state: JournalState | None = None,
    ) -> None:
        """Open or create the journal.

        Args:
            path: The journal.
            run_id: The run of the journal.
            division: How the plan's streams are divided among processes.
            stream_numbers: Numbers in the plan of this process's streams, in processing order, or None for all streams.
            session: Identifies the present group of processes.
            state: The durable state to start from, or None for the state of the existing journal.

        Raises:
            PrepError: It belongs to another run, or cannot be read or written.
        """
        # The new journal is complete before it replaces the old one: a kill leaves one or the other.
        self._path = path
        self._numbers = stream_numbers
        temporary = path.with_suffix(path.suffix + ".new")
        try:
            initial_state = state
            if initial_state is None:
                initial_state = read_journal(path, run_id, division=division)
            self.done_nbytes = initial_state.durable_nbytes
            # The digests have positions among this process's streams as keys, not numbers in the plan.
            self.digests = dict(initial_state.digests)
            self.prefix = initial_state.prefix
            if stream_numbers is not None:
                self.digests = {}
                for position, number in enumerate(stream_numbers):
                    if number in initial_state.digests:
                        self.digests[position] = initial_state.digests[number]
                if self.prefix:
                    position = stream_numbers.index(self.prefix.stream_number)
                    self.prefix = replace(self.prefix, stream_number=position)
            self._fd = open_no_follow(
                temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            )
            with contextlib.ExitStack() as cleanup:
                cleanup.callback(self.close)
                self._append({"run": run_id, "division": division, "session": session})
                self.record(self.done_nbytes, self.digests, prefix=self.prefix)
                temporary.rename(path)
                cleanup.pop_all()
        except OSError as error:
            raise io_error(path, error) from error

    def record(
        self, done_nbytes: int, digests: dict[int, str], *, prefix: StreamPrefix | None = None
    ) -> None:
        """Record durable bytes.

        Args:
            done_nbytes: Number of durable bytes over all streams.
            digests: Digests of newly complete streams, by position among this process's streams.
            prefix: The partly durable stream.

        Raises:
            PrepError: The journal cannot be written.
        """
        self.done_nbytes = done_nbytes
        self.digests = self.digests | digests
        self.prefix = prefix
        # Without stream numbers, a stream's position is its number.
        last_position = max(digests, default=-1)
        if prefix:
            last_position = max(last_position, prefix.stream_number)
        numbers = self._numbers or range(last_position + 1)
        prefix_entry = None
        if prefix:
            prefix_entry = [numbers[prefix.stream_number], prefix.nbytes, prefix.digest]
        digests_by_number = {numbers[position]: digest for position, digest in digests.items()}
        self._append({"done": done_nbytes, "digests": digests_by_number, "prefix": prefix_entry})

    def _append(self, entry: dict[str, object]) -> None:
        """Append a line, and make it durable."""
        # A kill during the write leaves a torn line, and readers stop at a line with a wrong checksum.
        data = seal_line(json.dumps(entry).encode())
        try:
            # `os.write` may write a part of the line.
            while data:
                data = data[os.write(self._fd, data) :]
            os.fdatasync(self._fd)
        except OSError as error:
            raise io_error(self._path, error) from error

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            os.close(self._fd)


def seal_line(content: bytes) -> bytes:
    """Return a journal line: checksum, content and a line break. The content must not contain line breaks."""
    return xxhash.xxh3_64_hexdigest(content).encode() + b" " + content + b"\n"


def unseal_line(line: bytes) -> bytes | None:
    """Return the content of a journal line without its line break, or None if the checksum does not match."""
    checksum, _, content = line.partition(b" ")
    if checksum != xxhash.xxh3_64_hexdigest(content).encode():
        return None
    return content


def _parse_line(line: bytes) -> object:
    """Return the JSON value of a journal line, or None if the line is damaged."""
    content = unseal_line(line)
    if content is None:
        return None
    try:
        return json.loads(content)
    except ValueError:
        return None
