"""The processes of a job: their number, and short texts that they exchange outside of the devices' network."""

from __future__ import annotations

from typing import Protocol


class ProcessGroup(Protocol):
    """The processes that run one command together.

    A name identifies a series of exchanges, e.g. "agreement". All processes must make the calls with one name in the
    same order. Two threads of a process must use different names.
    """

    @property
    def index(self) -> int:
        """Index of this process, from 0."""
        ...

    @property
    def count(self) -> int:
        """Number of processes."""
        ...

    def barrier(self, name: str) -> None:
        """Wait until all processes have called it. Raise PrepError if one of them is lost."""
        ...

    def gather(self, name: str, text: str) -> list[str]:
        """Return the texts of all processes by index on process 0, and an empty list elsewhere."""
        ...

    def broadcast(self, name: str, text: str) -> str:
        """Return the text of process 0 on all processes."""
        ...


class SingleProcess:
    """A group of one process."""

    index = 0
    count = 1

    def barrier(self, name: str) -> None:
        """Return at once."""

    def gather(self, name: str, text: str) -> list[str]:
        """Return the text."""
        return [text]

    def broadcast(self, name: str, text: str) -> str:
        """Return the text."""
        return text
