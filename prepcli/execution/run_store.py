"""Where a run writes its output: the protocol of a folder and of an object store.

Any number of processes work on one output, on one or several hosts, and exchange no messages. They share the state of
the run below `.prep/`:

    run.json      identity of the run, written before anything else
    source.json   inode and change time of the source's files when the run began
    done/N        note of the complete unit N
    part/N        folder only: note of the durable part of a large unit N
    claims/N      the process that works on unit N
    session       folder only: number of the session

1. The bytes and the places of a unit are a function of the plan. Units may be written twice: a claim only avoids double
   work.
2. A note marks a unit as durable. It is written after the bytes of the unit are. It is whole or absent, and has
   a checksum of itself.
3. The output gets its name in one step, once all units have notes and all other files are durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Protocol

from prepcli.core.errors import Option, PrepError, text
from prepcli.core.json_values import JsonObject

RUN_FILE = "run.json"
SOURCE_FILE = "source.json"
DONE_FOLDER = "done"
PART_FOLDER = "part"
CLAIMS_FOLDER = "claims"
PUBLISH = "publish"  # the claim of the process that publishes

Claim = AbstractContextManager[object]


class Store(Protocol):
    """The state and the name of one output.

    Names of state are relative to `.prep`, e.g. `done/7`.
    """

    @property
    def name(self) -> str:
        """Name of the output while it is incomplete, for messages."""
        ...

    def join(self, identity: Mapping[str, object], source: JsonObject, *, restart: bool) -> None:
        """Enter the run, and begin it if necessary.

        One identity has the output until it is published: of two processes with different identities, at most one
        enters, at any interleaving.

        Args:
            identity: Identity of the run. Runs with equal identities write equal bytes.
            source: State of the source, recorded by the first process.
            restart: Delete what an unfinished earlier run has written, unless its processes still run.

        Raises:
            PrepError: Another run has durable bytes here, or running processes.
        """
        ...

    def leave(self) -> None:
        """Leave the run. A killed process leaves it too."""
        ...

    def is_published(self) -> bool:
        """Return whether this run's output has its final name. Once true, it stays true.

        Raises:
            PrepError: The output can no longer be published.
        """
        ...

    def read(self, name: str) -> bytes | None:
        """Return state as it was written, whole, or None if it does not exist."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write state. A reader sees the old or the new content. It need not survive a power cut."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete state that exists."""
        ...

    def units_with(self, folder: str) -> AbstractSet[int]:
        """Return the numbers in the names `FOLDER/N` of existing state."""
        ...

    def claim(self, name: str) -> Claim | None:
        """Return the right to work on a unit, or None while another process has it.

        It ends with the context, and with the process.
        """
        ...


def other_run_error(
    name: str, earlier_identity: Mapping[str, object], run_identity: Mapping[str, object]
) -> PrepError:
    """Return the error for an unfinished output of another run, given its folder or URL."""
    is_same_request = earlier_identity.get("request") == run_identity.get("request")
    if is_same_request and earlier_identity.get("source") != run_identity.get("source"):
        why = "the source has changed since: its files have other sizes, times or headers"
    elif is_same_request:
        why = "it was started by another version of prep"
    else:
        why = f"it was started by `{earlier_identity.get('request')}`, this is `{run_identity.get('request')}`"
    hint = text("{} deletes it", Option("restart", True))
    return PrepError(f"{name} belongs to another run", why, hint)
