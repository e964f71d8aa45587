"""A folder of safetensors files as the hub has them."""

from __future__ import annotations

from pathlib import Path

from prepcli.formats import safetensors
from prepcli.formats.manifest import read_manifest
from prepcli.planning.accounting import names_of
from prepcli.planning.plan import Flat, SourceFile
from prepcli.sources.hints import Given
from prepcli.sources.source import CONFIG, Source, SourceTensor, read_config, recorded, small_files
from trainer.models.registry import family_of


def open_folder(path: Path, name: str, given: Given) -> Source:
    """Read headers and settings. PrepError names what is broken or not understood."""
    folder = safetensors.read_folder(path)
    config = read_config(given.config_file(path, name) if given.config else path / CONFIG)
    family = family_of(config)
    manifest = read_manifest(path)
    names = names_of(family, config, [t.name for t in folder.tensors])
    said = (manifest or {}).get("tensors", {})
    tensors = tuple(
        SourceTensor(names.bare(t.name), t.dtype, t.shape, (Flat(t.file, t.offset),), recorded(said, t.name))
        for t in folder.tensors
    )
    facts = tuple(SourceFile(h.file_name, h.size, h.mtime_ns, h.digest) for h in folder.headers)
    files = tuple(path / h.file_name for h in folder.headers)
    held = tuple(h.file_name for h in folder.headers for _ in h.tensors)
    return Source(name, path, family, config, names, tensors, files, facts, small_files(path), manifest, held)
