"""Inspect checkpoints."""

from __future__ import annotations

from prepcli.api.session import silent_ui
from prepcli.commands.inspect import InspectRequest, read_checkpoint
from prepcli.inspection.contents import count_parameters
from prepcli.operations.operation import public
from prepcli.operations.option_spec import PathLike
from prepcli.operations.results import Inspection, TensorSummary


@public
def inspect(
    checkpoint: PathLike,
    *,
    revision: str | None = None,
    offline: bool = False,
    stream: bool = False,
) -> Inspection:
    """List the tensors of a checkpoint. Reads headers and indices only.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        revision: Branch, tag or commit on the hub.
        offline: Use only the hub's cache.
        stream: Read from the hub without a local copy.

    Returns:
        Name, shape, dtype and size of every tensor, and the number of parameters.

    Raises:
        UsageError: An argument is invalid.
        DamagedError: A header, an index or other metadata is damaged.
        PrepError: The checkpoint cannot be read.
    """
    request = InspectRequest(str(checkpoint), revision=revision, offline=offline, stream=stream)
    _, contents = read_checkpoint(request, request.checkpoint, revision, silent_ui("inspect"))
    tensors = (
        TensorSummary(entry.name, entry.shape, entry.dtype, entry.nbytes)
        for entry in contents.entries
    )
    return Inspection(
        contents.display_name, contents.kind, tuple(tensors), count_parameters(contents)
    )
