"""Files of a second source after the files of a first one, e.g. the file of an adapter after the files of its base."""

from __future__ import annotations

from dataclasses import replace

from prepcli.sources.source import Source, SourceTensor
from prepcli.stores.buffers import Blob
from prepcli.stores.paths import AnyPath


def append_files(source: Source, other: Source) -> Source:
    """Return a source with the files of another one after its own.

    Its tensors stay the same. To add a tensor of the other source, see `shift_file_numbers`.
    """
    blobs: tuple[AnyPath | Blob, ...] = ()
    if source.blobs or other.blobs:
        blobs = (*source.byte_sources, *other.byte_sources)
    return replace(
        source,
        files=(*source.files, *other.files),
        file_stamps=(*source.file_stamps, *other.file_stamps),
        blobs=blobs,
    )


def shift_file_numbers(tensor: SourceTensor, count: int) -> SourceTensor:
    """Return a tensor with `count` added to the numbers of the files that store it.

    Placements name files by number. After the files 0 to 2 of one source, file 0 of an appended source is file 3.
    """
    placement = tuple(location.moved(count) for location in tensor.placement)
    made_from = tuple(shift_file_numbers(stored, count) for stored in tensor.made_from)
    return replace(tensor, placement=placement, made_from=made_from)
