"""A Hugging Face folder as an output: files, headers, index and settings, loadable by transformers with no flag."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prepcli.formats.safetensors import INDEX, SINGLE
from prepcli.formats.safetensors_layout import Entry, FileLayout, index_json, lay_out
from prepcli.planning.plan import Flat, OutFile, SmallFile
from prepcli.sources.links import side_file
from prepcli.sources.source import CONFIG, Source, SourceTensor

Group = tuple[str, Sequence[Entry], int | None]  # file name, tensors in order, how deep in a page the first one lies


def with_rows(tensor: SourceTensor, rows: int) -> tuple[tuple[int, ...], int]:
    """Shape and bytes of a tensor with so many rows; a 0-d tensor has none to change."""
    if not tensor.shape:
        return (), tensor.nbytes
    row_nbytes = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
    return (rows, *tensor.shape[1:]), row_nbytes * rows


def entries(source: Source, tensors: Iterable[SourceTensor], rows: Mapping[str, int]) -> list[Entry]:
    """The tensors as a header lists them, each with the rows that it has there."""
    return [(source.names.full(t.name), t.dtype, *with_rows(t, rows[t.name])) for t in tensors]


def laid_out(groups: Sequence[Group]) -> tuple[tuple[OutFile, ...], dict[str, Flat], tuple[FileLayout, ...]]:
    """The files, and where each tensor lies in them."""
    layouts = lay_out(groups)
    files = tuple(OutFile(layout.name, layout.size, layout.header) for layout in layouts)
    places = {t.name: Flat(t.file, t.offset) for layout in layouts for t in layout.tensors}
    return files, places, layouts


def copied(paths: Iterable[Path], root: Path, below: str = "") -> tuple[SmallFile, ...]:
    """Files that are copied as they are from the checkpoint `root`. PrepError for a link that leaves it."""
    return tuple(_copied(path, side_file(path, root), below) for path in paths)


def _copied(path: Path, real: Path, below: str) -> SmallFile:
    found = real.stat()
    return SmallFile(below + path.name, copied_from=str(real), stamp=(found.st_size, found.st_mtime_ns))


def settings(
    config: Mapping[str, Any], layouts: Sequence[FileLayout], beside: Iterable[SmallFile], below: str = ""
) -> tuple[SmallFile, ...]:
    """config.json, the index if there are several files, and the files that are copied as they are."""
    return (SmallFile(below + CONFIG, dumps(config)), *index_files(layouts), *beside)


def index_files(layouts: Sequence[FileLayout]) -> tuple[SmallFile, ...]:
    """The index, if there are several files or one of another name."""
    if len(layouts) > 1 or any(layout.name != SINGLE for layout in layouts):
        return (SmallFile(INDEX, index_json(layouts)),)
    return ()


def dumps(content: object) -> bytes:
    """JSON as the settings of a model are stored."""
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
