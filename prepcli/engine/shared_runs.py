"""Share runs between the files of a source and of an output, on file systems with reflinks such as XFS and btrfs.

A shared run takes no disk space and no time to write. A later change of one file leaves the blocks of the other one.
"""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.files import Files, RunReader, RunWriter
from prepcli.engine.permute import needs_permute
from prepcli.planning.slabs import LONG_RUN_NBYTES, PAGE, Slab
from prepcli.stores.buffers import ByteArray


@dataclass(frozen=True, slots=True)
class SharedRun:
    """A run of a slab that the output shares with the source, except for the blocks at its ends.

    Attributes:
        source: The files of the source.
        sink: The files of the output.
        read: The run in the source.
        write: The run in the output.
        start: First shared byte of the run.
        stop: End of the shared bytes.
    """

    source: Files
    sink: Files
    read: StridedCopy
    write: StridedCopy
    start: int
    stop: int

    def read_bytes(self, into: ByteArray) -> ByteArray:
        """Read the run as the output has it. See `RunReader.read_run`."""
        # Another program may write to the source at any time. The output keeps the bytes of the moment in which the
        # run was shared, so the digest of the shared bytes is computed from the output.
        page_offset = self.read.file_offset % PAGE
        data = into[page_offset : page_offset + self.read.width]
        start, stop = self.start, self.stop
        self.source.read_at(self.read.file, self.read.file_offset, data[:start])
        self.sink.read_at(self.write.file, self.write.file_offset + start, data[start:stop])
        self.source.read_at(self.read.file, self.read.file_offset + stop, data[stop:])
        return data

    def write_ends(self, data: ByteArray) -> None:
        """Write the bytes of the run that are not shared. Raises PrepError."""
        for start, stop in ((0, self.start), (self.stop, data.size)):
            if start < stop:
                offset = self.write.file_offset + start
                end = StridedCopy(0, self.write.file, offset, stop - start)
                self.sink.write((end,), data[start:stop])


class RunSharing:
    """Shares the runs of slabs between two sets of files, where their file system can."""

    def __init__(self, source: RunReader, sink: RunWriter | None) -> None:
        """Keep the files. Only files of this machine can be shared."""
        self._source = source
        self._sink = sink
        # Numbers of the source files that cannot be shared with the output
        self._unshared: set[int] = set()

    def share(self, slab: Slab, *, is_changed: bool) -> SharedRun | None:
        """Share the whole blocks of a slab, or return None if its bytes have to be read and written.

        `is_changed` says whether the values change on the way.

        Raises:
            PrepError: A file cannot be opened.
        """
        source = self._source
        sink = self._sink
        if not isinstance(source, Files) or not isinstance(sink, Files):
            return None
        # Files that are read back stay in the page cache. Shared blocks would be read from the disk twice.
        if sink.is_read_back or is_changed or not (slab.reads and slab.writes):
            return None
        if needs_permute(slab.reads) or needs_permute(slab.writes):
            return None
        read = slab.reads[0]
        write = slab.writes[0]
        if (read.file_offset - write.file_offset) % PAGE or read.file in self._unshared:
            return None
        # Only whole blocks can be shared. e.g. bytes 5,000 to 150,000 of a file: from 8,192 to 147,456
        start = -write.file_offset % PAGE
        stop = slab.nbytes - (write.file_offset + slab.nbytes) % PAGE
        if stop - start < LONG_RUN_NBYTES:
            return None
        source_blocks = StridedCopy(0, read.file, read.file_offset + start, stop - start)
        blocks = StridedCopy(0, write.file, write.file_offset + start, stop - start)
        if not sink.share(blocks, source, source_blocks):
            self._unshared.add(read.file)
            return None
        return SharedRun(source, sink, read, write, start, stop)
