"""From a folder to a Source, by what the folder holds."""

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
    """Read headers and settings of a checkpoint, no weights; messages call it `name`. PrepError names what is broken
    or not understood."""
    return OPENERS[detect(path, display_name)](path, display_name, hints)


def open_located(located: LocatedCheckpoint, display_name: str, config_path: Path | None = None) -> Source:
    """The same of what was located, be it here or far away; `config` is what the user says that it is of."""
    remote, given = located.remote, SourceHints(config_path, located.part)
    if remote is None:
        return open_source(located.path, display_name, given)
    with rename_in_errors(remote.placeholder_folder, display_name):
        return _from_afar(open_source(located.path, display_name, given), remote)


def _from_afar(source: Source, remote: RemoteCheckpoint) -> Source:
    """A source that was opened by what stands for its files, with tensors read from the files themselves."""
    blobs = remote.blobs(source.files, source.blobs)
    facts = tuple(SourceFile(fact.path, b.file.size, 0, b.file.digest) for fact, b in zip(source.file_stamps, blobs))
    return replace(source, file_stamps=facts, blobs=blobs)
