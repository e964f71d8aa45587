"""Opener for a Hugging Face folder with safetensors files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from prepcli.core.errors import PrepError
from prepcli.formats import safetensors
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.torch_files import read_torch_folder
from prepcli.planning.arrays import Array
from prepcli.planning.manifest_fields import Manifest, TensorRecords
from prepcli.planning.tensor_match import TensorNames
from prepcli.sources.model_family import existing_config, find_config_path, read_folder_model
from prepcli.sources.source import (
    CONFIG,
    Source,
    SourceTensor,
    file_stamps,
    recorded_digests,
)
from prepcli.sources.source_hints import SourceHints
from prepcli.sources.unindexed import unindexed_entries
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


# Several tensors may be views of the same bytes. A file with more of them on one byte is refused, because each
# such tensor opens the file once more.
MAX_SHARING_TENSORS = 64


def open_torch(path: AnyPath, display_name: str, hints: SourceHints) -> Source:
    """Read the pickled tensor metadata and the config of a folder with PyTorch files. No pickled code is run.

    Args:
        path: The folder.
        display_name: Name of the checkpoint in messages.
        hints: User-supplied facts about the checkpoint.

    Raises:
        PrepError: A file is broken or not supported.
    """
    folder = read_torch_folder(path)
    config_path = find_config_path(hints, path, display_name)
    types = {tensor.name: (tensor.dtype, tensor.shape) for tensor in folder.tensors}
    model = read_folder_model(path, config_path, hints, types)
    blob_numbers, blobs = assign_blobs(folder.tensors, folder.files)
    tensors = tuple(
        SourceTensor(
            model.names.bare_name(tensor.name),
            tensor.dtype,
            tensor.shape,
            (tensor.in_file(blob),),
        )
        for tensor, blob in zip(folder.tensors, blob_numbers)
    )
    return Source(
        display_name=display_name,
        root=path,
        family=model.family,
        config=model.config,
        names=model.names,
        tensors=tensors,
        files=folder.files,
        file_stamps=file_stamps(folder.headers),
        small_files=model.side_files.copied,
        manifest=None,
        tensor_file_names=tuple(
            safetensors_file_name(folder.headers[tensor.file].file_name)
            for tensor in folder.tensors
        ),
        blobs=blobs,
        extra_entries=unindexed_entries(folder.unindexed),
        config_path=config_path,
        notes=tuple(header.remark for header in folder.headers if header.remark),
        left_files=model.side_files.left,
        omitted=model.side_files.omitted,
    )


def assign_blobs(
    tensors: Sequence[Array], files: Sequence[AnyPath]
) -> tuple[list[int], tuple[AnyPath, ...]]:
    """Assign each tensor a blob, i.e. a file that is opened on its own, in which no two tensors overlap.

    Tied tensors share bytes of a file. The file is then opened several times, and each of them has another blob.

    Args:
        tensors: Tensors in (file, offset) order.
        files: Files of the checkpoint, by file number.

    Returns:
        The blob number of each tensor, and the file of each blob. The first blob of each file has its number.

    Raises:
        PrepError: More than MAX_SHARING_TENSORS tensors share a byte.
    """
    blobs = list(files)
    blobs_of_file: list[list[int]] = [[number] for number in range(len(files))]
    ends = [0] * len(files)  # end of the last tensor of each blob
    blob_numbers: list[int] = []
    for tensor in tensors:
        # E.g. a tied embedding and head share bytes 0 to 100 of a file: the first one is in blob
        # 0, the second one in a separate blob, which is the same file again. The engine reads
        # each blob in ascending order and never twice.
        start, stop = tensor.byte_range
        candidates = blobs_of_file[tensor.file]
        blob = next(
            (number for number in candidates if ends[number] <= start or start == stop), len(blobs)
        )
        if blob == len(blobs):
            if len(candidates) == MAX_SHARING_TENSORS:
                why = f"more than {MAX_SHARING_TENSORS} tensors share byte {start:,}"
                hint = "clone the tensors in PyTorch, and `torch.save` them again"
                raise PrepError(f"{files[tensor.file].name} is not supported", why, hint)
            blobs.append(files[tensor.file])
            candidates.append(blob)
            ends.append(0)
        ends[blob] = max(ends[blob], stop)
        blob_numbers.append(blob)
    return blob_numbers, tuple(blobs)


def safetensors_file_name(torch_file_name: str) -> str:
    """Return the name of the output's safetensors file for tensors of a PyTorch file."""
    return re.sub(r"^pytorch_model", "model", Path(torch_file_name).stem) + ".safetensors"
