"""Opener for a Hugging Face folder with safetensors files."""

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
    """Read the headers, config and manifest of a folder with safetensors files.

    Args:
        path: The folder.
        display_name: Name of the checkpoint in messages.
        hints: User-supplied facts about the checkpoint.

    Raises:
        PrepError: A file is broken or not supported.
    """
    folder = safetensors.read_safetensors_folder(path)
    config = read_config(hints.resolve_config_path(path, display_name) if hints.config_path else path / CONFIG)
    family = family_of(config)
    manifest = read_manifest(path)
    names = detect_names(family, config, full_names=[tensor.name for tensor in folder.tensors])
    records = (manifest or {}).get("tensors", {})
    tensors = tuple(
        SourceTensor(
            names.bare_name(tensor.name),
            tensor.dtype,
            tensor.shape,
            (Contiguous(tensor.file, tensor.offset),),
            recorded_digests(records, tensor.name),
        )
        for tensor in folder.tensors
    )
    return Source(
        display_name=display_name,
        root=path,
        family=family,
        config=config,
        names=names,
        tensors=tensors,
        files=tuple(path / header.file_name for header in folder.headers),
        file_stamps=tuple(
            SourceFile(header.file_name, header.size, header.mtime_ns, header.digest) for header in folder.headers
        ),
        small_files=small_files(path),
        manifest=manifest,
        tensor_file_names=tuple(header.file_name for header in folder.headers for _ in header.tensors),
    )
