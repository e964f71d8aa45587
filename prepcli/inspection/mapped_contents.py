"""Contents of a checkpoint under the names of its model, through a map or a layout that the user names."""

from __future__ import annotations

from pathlib import Path

from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.orbax_chunks import StoredRange
from prepcli.inspection.checkpoint_contents import MAX_PATH_PARTS, CheckpointContents, TensorEntry
from prepcli.planning.map_file import TensorMap
from prepcli.planning.plan import location_copies
from prepcli.planning.tensors import itemsize
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.opening import open_source
from prepcli.sources.source import SourceTensor


def read_mapped_contents(
    located: LocatedCheckpoint,
    config_path: Path | None,
    tensor_map: TensorMap | None,
    layout: str | None = None,
) -> CheckpointContents:
    """Return the contents of a checkpoint with the targets of a map or a layout as its tensors.

    Args:
        located: Result of `locate`.
        config_path: The user's config.json, or a folder with one, if any.
        tensor_map: The map, or None for a layout.
        layout: Name of the layout of another library.

    Raises:
        PrepError: The checkpoint is broken, or the map or layout does not fit it.
    """
    source = open_source(located, config_path, verbatim=None, tensor_map=tensor_map, layout=layout)
    entries = [_tensor_entry(source.file_name(tensor), tensor) for tensor in source.tensors]
    return CheckpointContents(
        display_name=source.display_name,
        # The names and shapes are those of a Hugging Face folder, in whatever format they are stored.
        kind="safetensors",
        folder=source.root,
        entries=tuple(entries),
        files=source.files,
        config=source.config,
        manifest=NO_MANIFEST,
        blobs=source.blobs,
    )


def _tensor_entry(name: str, tensor: SourceTensor) -> TensorEntry:
    first_element = ((0, 1),) * len(tensor.shape)
    copies = location_copies(
        tensor.placement,
        tensor.shape,
        item_nbytes=itemsize(tensor.dtype),
        box=first_element,
    )
    copy = next(copies)
    return TensorEntry(
        name,
        tuple(name.split(".", MAX_PATH_PARTS - 1)),
        tensor.dtype,
        tensor.shape,
        tensor.shape,
        {},
        StoredRange(copy.file, copy.file_offset, tensor.nbytes),
        tensor.placement,
    )
