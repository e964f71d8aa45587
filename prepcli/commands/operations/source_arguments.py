"""Arguments about the tensor names of a source: the names of its files, or those of a map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.core.errors import Option, text, usage_error
from prepcli.sources.source import Source

if TYPE_CHECKING:
    from prepcli.planning.map_file import TensorMap


def check_verbatim(verbatim: bool | None, source: Source) -> None:
    """Raise UsageError for `verbatim` if the source was converted with the names of its family."""
    if verbatim and not source.family.is_verbatim:
        option = Option("verbatim", True)
        why = f"{source.display_name} was already converted with the tensor names of family {source.family.name}"
        hint = text("remove {}, or convert the original model", option)
        raise usage_error(text("{} has no effect", option), why, hint)


def read_map_option(path: Path | None, *, verbatim: bool | None) -> TensorMap | None:
    """Return the map in a file, or None without one. Raise UsageError if `verbatim` is set, too."""
    if path is None:
        return None
    if verbatim:
        what = text("{} and {} exclude each other", Option("map"), Option("verbatim", True))
        raise usage_error(what, "a map replaces the names of the file", "remove one of them")
    # Most conversions have no map, and no need of its parser.
    from prepcli.sources.mapped import read_map

    return read_map(path)
