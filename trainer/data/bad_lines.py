"""A limit on the skipped invalid lines of a dataset."""

from __future__ import annotations

from collections.abc import Callable

from trainer.models.errors import PrepError

SHOWN = 3  # skipped lines that are reported, with file and line


class BadLines:
    """Handler of errors of single records: it reports the first ones, and fails if there are more than a limit.

    Attributes:
        count: Invalid records so far.
    """

    def __init__(self, limit: int, note: Callable[[str], None], *, count: int = 0) -> None:
        """Start at a number of invalid records.

        Args:
            limit: Records that may be invalid.
            note: Called with messages for the user.
            count: Invalid records that an earlier run has reported.
        """
        self._limit, self._note, self.count = limit, note, count

    def __call__(self, error: PrepError) -> None:
        """Count an invalid record; raise PrepError if it is one more than the limit."""
        self.count += 1
        if self.count <= self._limit:
            if self.count <= SHOWN:
                self._note(f"skipped {error.what} ({error.why})")
        elif self._limit:
            why = f"`data.bad_lines` is {self._limit:,}; the next one: {error.why}"
            raise PrepError(f"{error.what}, and {self._limit:,} invalid lines before", why, error.hint) from error
        else:
            raise error

    def report(self) -> None:
        """Report the number of skipped records, if there are any."""
        if self.count:
            self._note(f"{self.count:,} invalid line{'' if self.count == 1 else 's'} skipped")
