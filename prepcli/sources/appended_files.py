"""Files of a second source after the files of a first one, e.g. the file of an adapter after the files of its base."""

from __future__ import annotations

from dataclasses import replace

from prepcli.algebra.gapped_regions import GappedRegion
from prepcli.algebra.grids import StridedPlacement
from prepcli.algebra.strided_copies import ChunkedLocation
from prepcli.planning.plan import Contiguous, Location, Strided
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
    placement = tuple(shift_location(location, count) for location in tensor.placement)
    made_from = tuple(shift_file_numbers(stored, count) for stored in tensor.made_from)
    return replace(tensor, placement=placement, made_from=made_from)


def shift_location(location: Location, count: int) -> Location:
    """Return a location with `count` added to the numbers of its files."""
    if isinstance(location, Contiguous | Strided):
        return replace(location, file=location.file + count)
    if isinstance(location, GappedRegion):
        return replace(location, region=_shift_region(location.region, count))
    return _shift_region(location, count)


def _shift_region(region: ChunkedLocation, count: int) -> ChunkedLocation:
    placement = region.placement
    if isinstance(placement, StridedPlacement):
        return replace(region, placement=replace(placement, file=placement.file + count))
    chunks: dict[tuple[int, ...], tuple[int, int]] = {}
    for index, (file, offset) in placement.chunks.items():
        chunks[index] = (file + count, offset)
    return replace(region, placement=replace(placement, chunks=chunks))
