"""A folder of safetensors files as the hub has them."""

from __future__ import annotations

from pathlib import Path

from prepcli.formats import safetensors
from prepcli.formats.manifest import read_manifest
from prepcli.planning.accounting import detect_names
from prepcli.planning.plan import Contiguous, SourceFile
from prepcli.sources.source import CONFIG, Source, SourceTensor, read_config, recorded_digests, small_files
from prepcli.sources.source_hints import SourceHints
from trainer.models.registry import family_of


def open_safetensors(path: Path, display_name: str, hints: SourceHints) -> Source:
    """Read headers and settings. PrepError names what is broken or not understood."""
    folder = safetensors.read_safetensors_folder(path)
    config = read_config(hints.resolve_config_path(path, display_name) if hints.config_path else path / CONFIG)
    family = family_of(config)
    manifest = read_manifest(path)
    names = detect_names(family, config, [t.name for t in folder.tensors])
    said = (manifest or {}).get("tensors", {})
    tensors = tuple(
        SourceTensor(
            names.bare_name(t.name), t.dtype, t.shape, (Contiguous(t.file, t.offset),), recorded_digests(said, t.name)
        )
        for t in folder.tensors
    )
    facts = tuple(SourceFile(h.file_name, h.size, h.mtime_ns, h.digest) for h in folder.headers)
    files = tuple(path / h.file_name for h in folder.headers)
    held = tuple(h.file_name for h in folder.headers for _ in h.tensors)
    return Source(display_name, path, family, config, names, tensors, files, facts, small_files(path), manifest, held)
