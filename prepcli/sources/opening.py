"""Opening of a located checkpoint, by the opener for its format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from prepcli.planning.plan import SourceFile
from prepcli.remote.placeholders import RemoteCheckpoint
from prepcli.sources.folders import Kind
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.openers.flax_tree import open_easylm, open_flax
from prepcli.sources.openers.meta_folder import open_meta
from prepcli.sources.openers.orbax_item import open_orbax
from prepcli.sources.openers.peft_folder import open_adapter_alone
from prepcli.sources.openers.safetensors_folder import open_safetensors
from prepcli.sources.openers.torch_folder import open_torch
from prepcli.sources.source import Source
from prepcli.sources.source_hints import SourceHints

OPENERS: Mapping[Kind, Callable[[Path, str, SourceHints], Source]] = {
    "safetensors": open_safetensors,
    "flax": open_flax,
    "easylm": open_easylm,
    "torch": open_torch,
    "meta": open_meta,
    "orbax": open_orbax,
    "adapter": open_adapter_alone,
}


def open_source(located: LocatedCheckpoint, config_path: Path | None = None) -> Source:
    """Read the headers and settings of a located checkpoint, but no weights.

    Args:
        located: Result of `locate`.
        config_path: The user's config.json, or a folder with one, if any.

    Raises:
        PrepError: The checkpoint is broken.
    """
    local_files, display_name = located.local_files, located.display_name
    with local_files.rename_in_errors(display_name):
        source = OPENERS[located.kind](local_files.path, display_name, SourceHints(config_path, located.part))
        return source if local_files.remote is None else _with_remote_blobs(source, local_files.remote)


def _with_remote_blobs(source: Source, remote: RemoteCheckpoint) -> Source:
    """Replace the placeholder files of a source by the remote files that its tensors are read from."""
    blobs = remote.blobs(source.files, source.blobs)
    stamps = tuple(
        SourceFile(stamp.path, blob.file.size, 0, blob.file.digest) for stamp, blob in zip(source.file_stamps, blobs)
    )
    return replace(source, file_stamps=stamps, blobs=blobs)
