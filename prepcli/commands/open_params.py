"""Open a located checkpoint for computing with its parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager

from prepcli.console.ui import Ui
from prepcli.restore.earlier_checkpoints import check_without_checksums
from prepcli.restore.params import OpenedModel, open_model
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source


def open_params(
    located: LocatedCheckpoint, source: Source, mesh: str | None, *, verify: bool, ui: Ui
) -> AbstractContextManager[OpenedModel]:
    """Open the parameters of a checkpoint for a mesh.

    A checkpoint without checksums gives a warning.

    Args:
        located: The checkpoint.
        source: Its tensors.
        mesh: `dp,fsdp,mp` sizes or named axes. None means the first device.
        verify: Compare every byte with the checkpoint's checksums or digests.
        ui: Receives warnings and progress.
    """
    return open_model(
        source,
        located.local_files.path,
        mesh,
        verify=verify,
        on_unchecked=lambda: check_without_checksums(source, source.tensors, ui),
    )
