"""Positions in the examples of a dataset, from which reading continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FileStart:
    """Counts of a dataset before the first example of one of its files.

    Attributes:
        file: Index of the file.
        n_examples: Examples of the files before it.
        n_documents: Documents of the files before it, of a source and a target one.
        n_bad_lines: Skipped invalid records of the files before it.
    """

    file: int = 0
    n_examples: int = 0
    n_documents: int = 0
    n_bad_lines: int = 0


@dataclass(frozen=True, slots=True)
class ReadPosition:
    """A number of examples at the start of a dataset.

    Attributes:
        n_examples: The number.
        nbytes: Their share of the bytes of all files.
        start: Start of the file that the next example is read from.
    """

    n_examples: int = 0
    nbytes: int = 0
    start: FileStart = FileStart()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ReadPosition:
        """Return the position that `dataclasses.asdict` made the values of; raise TypeError for other keys."""
        return cls(**{**values, "start": FileStart(**values["start"])})
