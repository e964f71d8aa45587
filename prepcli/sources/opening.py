"""Opening of a checkpoint folder, by the opener for its format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from prepcli.formats.detect import Kind, detect
from prepcli.planning.plan import SourceFile
from prepcli.remote.placeholders import RemoteCheckpoint, rename_in_errors
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.openers.flax_tree import open_easylm, open_flax
from prepcli.sources.openers.meta_folder import open_meta
from prepcli.sources.openers.orbax_item import open_orbax
from prepcli.sources.openers.safetensors_folder import open_safetensors
from prepcli.sources.openers.torch_folder import open_torch
from prepcli.sources.source import Source
from prepcli.sources.source_hints import NO_HINTS, SourceHints

OPENERS: Mapping[Kind, Callable[[Path, str, SourceHints], Source]] = {
    "safetensors": open_safetensors,
    "flax": open_flax,
    "easylm": open_easylm,
    "torch": open_torch,
    "meta": open_meta,
    "orbax": open_orbax,
}


def open_source(path: Path, display_name: str, hints: SourceHints = NO_HINTS) -> Source:
    """Read the headers and settings of a checkpoint, but no weights.

    Args:
        path: Folder or file of the checkpoint.
        display_name: Name of the checkpoint in messages.
        hints: User-supplied facts about the checkpoint.

    Raises:
        PrepError: The checkpoint is broken, or its format is not supported.
    """
    return OPENERS[detect(path, display_name)](path, display_name, hints)


def open_located(located: LocatedCheckpoint, display_name: str, config_path: Path | None = None) -> Source:
    """Read the headers and settings of a located checkpoint, local or remote.

    Args:
        located: Result of `locate`.
        display_name: Name of the checkpoint in messages.
        config_path: The user's config.json, or a folder with one, if any.

    Raises:
        PrepError: The checkpoint is broken, or its format is not supported.
    """
    remote, hints = located.remote, SourceHints(config_path, located.part)
    if remote is None:
        return open_source(located.path, display_name, hints)
    with rename_in_errors(remote.placeholder_folder, display_name):
        return _with_remote_blobs(open_source(located.path, display_name, hints), remote)


def _with_remote_blobs(source: Source, remote: RemoteCheckpoint) -> Source:
    """Replace the placeholder files of a source by the remote files that its tensors are read from."""
    blobs = remote.blobs(source.files, source.blobs)
    stamps = tuple(
        SourceFile(stamp.path, blob.file.size, 0, blob.file.digest) for stamp, blob in zip(source.file_stamps, blobs)
    )
    return replace(source, file_stamps=stamps, blobs=blobs)
