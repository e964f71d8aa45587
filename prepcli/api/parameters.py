"""Open the parameters of a checkpoint for a caller instead of a command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prepcli.api.session import silent_ui
from prepcli.commands.open_params import open_params
from prepcli.console.progress import Progress
from prepcli.operations.conversion import common_options, open_checkpoint
from prepcli.operations.option_spec import PathLike
from prepcli.restore.params import OpenedModel


@contextmanager
def open_parameters(
    checkpoint: PathLike,
    mesh: str | None,
    options: Mapping[str, Any],
    *,
    verify: bool,
    progress: Progress | None,
) -> Iterator[OpenedModel]:
    """Open a checkpoint for reading its parameters onto a mesh, and close it at the end of the `with` block.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        mesh: `dp,fsdp,mp` sizes or named axes. None means the first device.
        options: Options of the source. See `SourceOptions`.
        verify: Compare every byte with the checkpoint's checksums or digests.
        progress: Receives the bytes downloaded or checked, or None.
    """
    ui = silent_ui("load-params", progress)
    located, source = open_checkpoint(common_options(checkpoint, None, options), ui)
    with open_params(located, source, mesh, verify=verify, ui=ui) as opened:
        yield opened
