"""A Hugging Face folder as an output: files, headers, index and settings, loadable by transformers with no flag."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prepcli.convert import dumps
from prepcli.formats.safetensors_layout import Entry, FileLayout, index_json, lay_out
from prepcli.plan import Flat, OutFile, SmallFile
from prepcli.sources import CONFIG

INDEX = "model.safetensors.index.json"
Group = tuple[str, Sequence[Entry], int | None]  # file name, tensors in order, how deep in a page the first one lies


def laid_out(groups: Sequence[Group]) -> tuple[tuple[OutFile, ...], dict[str, Flat], tuple[FileLayout, ...]]:
    """The files, and where each tensor lies in them."""
    layouts = lay_out(groups)
    files = tuple(OutFile(layout.name, layout.size, layout.header) for layout in layouts)
    places = {t.name: Flat(t.file, t.offset) for layout in layouts for t in layout.tensors}
    return files, places, layouts


def settings(
    config: Mapping[str, Any], layouts: Sequence[FileLayout], copied: Iterable[Path], below: str = ""
) -> tuple[SmallFile, ...]:
    """config.json, the index if there are several files, and the files that are copied as they are."""
    files = [SmallFile(below + CONFIG, dumps(config))]
    if len(layouts) > 1:
        files.append(SmallFile(INDEX, index_json(layouts)))
    return (*files, *(SmallFile(below + path.name, copied_from=str(path)) for path in copied))
