"""From a folder to a Source, by what the folder holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from prepcli.formats.detect import Kind, detect
from prepcli.planning.plan import SourceFile
from prepcli.remote.placeholders import Remote, told_of
from prepcli.sources.hints import NOTHING, Given
from prepcli.sources.locate import Located
from prepcli.sources.openers.flax_tree import open_flax, open_stream
from prepcli.sources.openers.meta_folder import open_meta
from prepcli.sources.openers.orbax_item import open_item
from prepcli.sources.openers.safetensors_folder import open_folder
from prepcli.sources.openers.torch_folder import open_torch
from prepcli.sources.source import Source

OPENERS: Mapping[Kind, Callable[[Path, str, Given], Source]] = {
    "safetensors": open_folder,
    "flax": open_flax,
    "easylm": open_stream,
    "torch": open_torch,
    "meta": open_meta,
    "orbax": open_item,
}


def open_source(path: Path, name: str, given: Given = NOTHING) -> Source:
    """Read headers and settings of a checkpoint, no weights; messages call it `name`. PrepError names what is broken
    or not understood."""
    return OPENERS[detect(path, name)](path, name, given)


def open_located(located: Located, name: str, config: Path | None = None) -> Source:
    """The same of what was located, be it here or far away; `config` is what the user says that it is of."""
    remote, given = located.remote, Given(config, located.part)
    if remote is None:
        return open_source(located.path, name, given)
    with told_of(remote.mirror, name):
        return _from_afar(open_source(located.path, name, given), remote)


def _from_afar(source: Source, remote: Remote) -> Source:
    """A source that was opened by what stands for its files, with tensors read from the files themselves."""
    blobs = remote.blobs(source.files, source.blobs)
    facts = tuple(SourceFile(fact.path, b.file.size, 0, b.file.digest) for fact, b in zip(source.facts, blobs))
    return replace(source, facts=facts, blobs=blobs)
