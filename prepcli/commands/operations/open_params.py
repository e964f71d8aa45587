"""Open a checkpoint for computing with its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from prepcli.commands.operations.opening import common_options, open_checkpoint
from prepcli.core.observer import Observer
from prepcli.core.option_spec import PathLike
from prepcli.restore.digest_checks import check_without_checksums
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.source import Source
from trainer.run.params import OpenedModel, open_model


def open_params(
    located: LocatedCheckpoint,
    source: Source,
    mesh: str | None,
    *,
    verify: bool,
    observer: Observer,
) -> AbstractContextManager[OpenedModel]:
    """Open the parameters of a located checkpoint for a mesh.

    A checkpoint without checksums gives a warning.

    Args:
        located: The checkpoint.
        source: Its tensors.
        mesh: `dp,fsdp,mp` sizes or named axes. None means the first device.
        verify: Compare every byte with the checkpoint's checksums or digests.
        observer: Receives warnings and progress.
    """
    return open_model(
        source,
        located.files.path,
        mesh,
        verify=verify,
        on_unchecked=lambda: check_without_checksums(source, source.tensors, observer),
    )


@contextmanager
def open_parameters(
    checkpoint: PathLike,
    mesh: str | None,
    options: Mapping[str, Any],
    *,
    verify: bool,
    observer: Observer,
) -> Iterator[OpenedModel]:
    """Locate a checkpoint and open its parameters for a mesh. Close it at the end of the `with` block.

    Args:
        checkpoint: Folder, alias, hub id, or `gs://`/`s3://` URL.
        mesh: `dp,fsdp,mp` sizes or named axes. None means the first device.
        options: Options of the source. See `SourceOptions`.
        verify: Compare every byte with the checkpoint's checksums or digests.
        observer: Receives warnings and progress.
    """
    located, source = open_checkpoint(common_options(checkpoint, None, options), observer)
    with open_params(located, source, mesh, verify=verify, observer=observer) as opened:
        yield opened


def resolve_compute_dtype(dtype: str | None, opened: OpenedModel) -> str:
    """Return the dtype of a computation: the requested one, else bfloat16 if all parameters have it."""
    if dtype is not None:
        return dtype
    return "bfloat16" if opened.stored_dtypes() == {"bfloat16"} else "float32"
