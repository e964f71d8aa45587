"""Opener for a Hugging Face folder with safetensors or PyTorch files, and the parts that all openers share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prepcli.core.errors import PrepError
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.registry import FORMATS
from prepcli.planning.arrays import Array
from prepcli.planning.libraries import scaled_digests
from prepcli.planning.manifest_fields import NOTHING, Manifest, ScaleRecord
from prepcli.planning.plan import SourceFile
from prepcli.sources.dropped_tensors import unindexed_entries
from prepcli.sources.locate import LocatedCheckpoint
from prepcli.sources.model_family import FolderModel, find_config_path, read_folder_model
from prepcli.sources.references import SourceHints
from prepcli.sources.source import (
    Source,
    SourceTensor,
    file_position,
    file_stamps,
    recorded_digests,
)
from prepcli.sources.tensor_match import TensorNames
from prepcli.stores.paths import AnyPath

# Several tensors may be views of the same bytes. A file with more of them on one byte is refused, because each
# such tensor opens the file once more.
MAX_SHARING_TENSORS = 64


def read(located: LocatedCheckpoint, hints: SourceHints) -> Source:
    """Read the headers and the config of a folder. Of PyTorch files, no pickled code is run.

    Raises:
        PrepError: A file is broken or not supported.
    """
    path = located.files.path
    row = FORMATS[located.kind]
    assert row.read_files is not None
    stored = row.read_files(path)
    config_path = find_config_path(hints, path, located.display_name)
    types = {tensor.name: (tensor.dtype, tensor.shape) for tensor in stored.tensors}
    manifest = located.manifest if row.has_recorded_headers else None
    model = read_folder_model(located, config_path, hints, types, manifest=manifest)
    arrays: Sequence[Array] = stored.tensors
    numbers, blobs = assign_blobs(arrays, stored.files)
    has_shared_bytes = len(blobs) > len(stored.files)
    if has_shared_bytes:
        arrays = [array.in_file(number) for array, number in zip(arrays, numbers)]
    source = make_source(
        replace(located, manifest=manifest),
        model,
        file_tensors(arrays, model.names, manifest),
        stored.files,
        file_stamps(stored.headers),
    )
    names = [safetensors_file_name(header.file_name) for header in stored.headers]
    return replace(
        source,
        tensor_file_names=tuple(names[tensor.file] for tensor in stored.tensors),
        blobs=blobs if has_shared_bytes else (),
        extra_entries=unindexed_entries(stored.unindexed) if stored.unindexed else (),
        notes=tuple(header.remark for header in stored.headers if header.remark),
    )


def make_source(
    located: LocatedCheckpoint,
    model: FolderModel,
    tensors: Iterable[SourceTensor],
    files: Sequence[AnyPath],
    stamps: Sequence[SourceFile],
) -> Source:
    """Return the source of a located checkpoint. An opener adds the facts that only its format has."""
    return Source(
        display_name=located.display_name,
        root=located.files.path,
        family=model.family,
        config=model.config,
        names=model.names,
        tensors=tuple(tensors),
        files=tuple(files),
        file_stamps=tuple(stamps),
        small_files=model.side_files.copied,
        manifest=located.manifest,
        config_path=model.config_path,
        left_files=model.side_files.left,
        omitted=model.side_files.omitted,
    )


def file_tensors(
    arrays: Iterable[Array], names: TensorNames, manifest: Manifest | None
) -> tuple[SourceTensor, ...]:
    """Return the tensors of files under the names of the family, with the digests in the manifest."""
    records = (manifest or NO_MANIFEST).tensors
    tensors: list[SourceTensor] = []
    for array in arrays:
        digests = recorded_digests(records, array.name)
        name = names.bare_name(array.name)
        tensors.append(SourceTensor(name, array.dtype, array.shape, (array,), digests))
    return tuple(tensors)


def with_recorded_digests(
    tensors: Iterable[SourceTensor],
    names: TensorNames,
    manifest: Manifest | None,
    scale_records: Mapping[str, ScaleRecord] = NOTHING,
) -> tuple[SourceTensor, ...]:
    """Return the tensors of a tree in the order of their bytes, with the digests in the manifest.

    A tensor with a scale record is read as it is stored, and has the digests of the scaled values.
    """
    records = (manifest or NO_MANIFEST).tensors
    recorded: list[SourceTensor] = []
    for tensor in sorted(tensors, key=file_position):
        name = names.full_name(tensor.name)
        digests = recorded_digests(records, name)
        if name in scale_records:
            digests = scaled_digests(scale_records[name], tensor.shape[0])
        recorded.append(replace(tensor, digests=digests))
    return tuple(recorded)


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


def safetensors_file_name(file_name: str) -> str:
    """Return the name of the output's safetensors file for tensors of a file, e.g. of `pytorch_model.bin`."""
    if file_name.endswith(".safetensors"):
        return file_name
    return re.sub(r"^pytorch_model", "model", Path(file_name).stem) + ".safetensors"
