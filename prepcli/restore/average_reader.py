"""`AverageReader`: reads the moving averages (EMA) of the parameters in place of the parameters."""

from __future__ import annotations

from types import TracebackType

from prepcli.engine.checkpoint_store import LeafSpec
from prepcli.planning.state_names import PARAMS
from prepcli.restore.item_reader import BoxArrays, ItemReader
from prepcli.sources.averages import AVERAGE_SLOT


class AverageReader:
    """CheckpointReader of the parameters' moving averages (EMA), under the names of the parameters.

    Attributes:
        manifest: Manifest of the checkpoint.
        leaves: Shape, dtype and read unit of each parameter's average, by the dotted name of the parameter.
        is_remote: Whether the data files are on a server.
    """

    def __init__(self, reader: ItemReader) -> None:
        """Wrap the reader of an item with moving averages of all parameters."""
        self._reader = reader
        self.manifest = reader.manifest
        self.is_remote = reader.is_remote
        prefix = f"{AVERAGE_SLOT}."
        self.leaves: dict[str, LeafSpec] = {}
        for name, leaf in reader.leaves.items():
            if name.startswith(prefix):
                self.leaves[f"{PARAMS}.{name.removeprefix(prefix)}"] = leaf

    @property
    def read_nbytes(self) -> int:
        """Bytes read so far."""
        return self._reader.read_nbytes

    def __enter__(self) -> AverageReader:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._reader.close()

    def read(self, name: str, parts: BoxArrays) -> None:
        """Fill each array with its box of a parameter's average. See `ItemReader.read`."""
        self._reader.read(f"{AVERAGE_SLOT}.{name.removeprefix(f'{PARAMS}.')}", parts)

    def stop_reads(self) -> None:
        """Drop the remaining requests of all reads. See `ItemReader.stop_reads`."""
        self._reader.stop_reads()
