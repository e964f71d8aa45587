"""The view of a training run in a notebook: one output that is replaced, and lines above it."""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence
from typing import Any, Literal

from prepcli.core.errors import PrepError, text, usage_error
from prepcli.core.observer import (
    NORMAL,
    Line,
    Observer,
    OneProcessObserver,
    Progress,
    RunObserver,
    SilentObserver,
    observer_of,
)

# Columns of the view. A notebook does not tell the width of its outputs.
WIDTH = 100


class NotebookBlock:
    """Lines in one output of a notebook. `draw` replaces them."""

    width = WIDTH

    def __init__(self) -> None:
        """Display an empty output.

        Raises:
            PrepError: IPython is not installed.
        """
        self._display: Any = _import_display()
        self._handle: Any = self._display.display(self._display.HTML(""), display_id=True)

    def draw(self, lines: Sequence[Line]) -> None:
        """Replace the lines."""
        joined = "\n".join("".join(segment for segment, _ in line) for line in lines)
        # Outside of a notebook, e.g. in a script, IPython returns no handle.
        if self._handle is not None:
            self._handle.update(self._display.HTML(f"<pre>{html.escape(joined)}</pre>"))

    def close(self) -> None:
        """Leave the last lines in the notebook."""


class NotebookObserver(OneProcessObserver):
    """RunObserver that prints notes and warnings, and shows a run in one output of a notebook."""

    __slots__ = ()

    def __init__(self) -> None:
        """Check that IPython is installed.

        Raises:
            PrepError: It is not.
        """
        super().__init__(SilentObserver())
        _import_display()

    def note(self, text: str, level: int = NORMAL) -> None:
        """Print a line."""
        if level <= NORMAL:
            print(text)

    def warn(self, text: str) -> None:
        """Print a warning."""
        print(f"warning: {text}")

    def open_live_block(self) -> NotebookBlock:
        """Return a new output of the notebook."""
        return NotebookBlock()


def run_observer_of(progress: Progress | Observer | Literal["notebook"] | None) -> RunObserver:
    """Return the RunObserver for the argument `progress` of an operation.

    Raises:
        UsageError: It is another text than `notebook`.
        PrepError: It is `notebook`, and IPython is not installed.
    """
    if isinstance(progress, str):
        if progress != "notebook":
            what = f"progress={progress!r} is invalid"
            raise usage_error(what, "the only text is 'notebook'", 'progress="notebook"')
        return NotebookObserver()
    if isinstance(progress, RunObserver):
        return progress
    return OneProcessObserver(observer_of(progress))


def _import_display() -> Any:
    """Return the module `IPython.display`."""
    try:
        return importlib.import_module("IPython.display")
    except ImportError as error:
        what = '`progress="notebook"` needs a notebook'
        why = "IPython is not installed in this environment"
        raise PrepError(what, why, text("remove `progress`, or pip install ipython")) from error
