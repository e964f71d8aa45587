"""Opener for a Hugging Face folder with safetensors files."""

from __future__ import annotations

from collections.abc import Iterable

from prepcli.formats import safetensors
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.planning.arrays import Array
from prepcli.planning.manifest_fields import Manifest, TensorRecords
from prepcli.planning.tensor_match import TensorNames
from prepcli.sources.dropped_tensors import unindexed_entries
from prepcli.sources.model_family import existing_config, read_folder_model
from prepcli.sources.references import SourceHints
from prepcli.sources.source import (
    CONFIG,
    Source,
    SourceTensor,
    file_stamps,
    recorded_digests,
)
from prepcli.stores.paths import AnyPath


def open_safetensors(
    path: AnyPath, display_name: str, hints: SourceHints, manifest: Manifest | None
) -> Source:
    """Read the headers, config and manifest of a folder with safetensors files.

    Args:
        path: The folder.
        display_name: Name of the checkpoint in messages.
        hints: User-supplied facts about the checkpoint.
        manifest: Manifest of an output of prep, else None.

    Raises:
        PrepError: A file is broken or not supported.
    """
    folder = safetensors.read_safetensors_folder(path)
    config_path = existing_config(path / CONFIG, hints)
    if hints.config_path:
        config_path = hints.resolve_config_path(path, display_name)
    types = {tensor.name: (tensor.dtype, tensor.shape) for tensor in folder.tensors}
    model = read_folder_model(path, config_path, hints, types, manifest=manifest)
    records = (manifest or NO_MANIFEST).tensors
    return Source(
        display_name=display_name,
        root=path,
        family=model.family,
        config=model.config,
        names=model.names,
        tensors=file_tensors(folder.tensors, model.names, records),
        files=tuple(path / header.file_name for header in folder.headers),
        file_stamps=file_stamps(folder.headers),
        small_files=model.side_files.copied,
        manifest=manifest,
        tensor_file_names=tuple(folder.headers[tensor.file].file_name for tensor in folder.tensors),
        extra_entries=unindexed_entries(folder.unindexed),
        config_path=config_path,
        left_files=model.side_files.left,
        omitted=model.side_files.omitted,
    )


def file_tensors(
    tensors: Iterable[Array], names: TensorNames, records: TensorRecords
) -> tuple[SourceTensor, ...]:
    """Return the tensors of safetensors files as source tensors.

    Args:
        tensors: Tensors of the headers.
        names: Naming scheme of the tensors in the files.
        records: The manifest's records of the tensors. Empty without a manifest.
    """
    source_tensors: list[SourceTensor] = []
    for tensor in tensors:
        digests = recorded_digests(records, tensor.name)
        name = names.bare_name(tensor.name)
        source_tensors.append(SourceTensor(name, tensor.dtype, tensor.shape, (tensor,), digests))
    return tuple(source_tensors)
