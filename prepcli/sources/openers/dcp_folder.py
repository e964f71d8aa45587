"""Opener for torch distributed checkpoints: each tensor is a set of boxes in the files of the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from prepcli.engine.digest import digest_pieces
from prepcli.errors import PrepError
from prepcli.formats.file_records import bytes_between
from prepcli.formats.manifest import NO_MANIFEST, Manifest
from prepcli.formats.torch_dcp import DcpBox, DcpFolder, DcpTensor, read_dcp_folder
from prepcli.planning.grids import ChunkGrid, StridedPlacement
from prepcli.planning.plan import Contiguous, DroppedTensor, Locations, SourceFile
from prepcli.planning.state_names import OPT_STATE_RULE
from prepcli.planning.strided_copies import ChunkedLocation
from prepcli.planning.tensors import itemsize
from prepcli.sources.model_family import find_config_path, read_folder_model
from prepcli.sources.source import Source, SourceTensor, recorded_digests
from prepcli.sources.source_hints import SourceHints
from trainer.models.axis_map import AxisMap, SizedAxis, TensorDim
from trainer.models.boxes import Range, strides

# Names in the state dicts of `get_state_dict`.
MODEL_PREFIX = "model."
STATE_PREFIX = "optimizer.state."
COUNTER_SUFFIX = ".step"
NOT_A_TENSOR_RULE = "not a tensor"


def open_dcp(
    path: Path, display_name: str, hints: SourceHints, manifest: Manifest | None
) -> Source:
    """Read the metadata and the config of a torch distributed checkpoint.

    Args:
        path: The folder.
        display_name: Name of the checkpoint in messages.
        hints: User-supplied facts about the checkpoint.
        manifest: Manifest of an output of prep, else None.

    Raises:
        PrepError: A file is broken or not supported.
    """
    folder, state = _split_state(read_dcp_folder(path))
    config_path = find_config_path(hints, path, display_name)
    types = {tensor.name: (tensor.dtype, tensor.shape) for tensor in folder.tensors}
    model = read_folder_model(path, config_path, hints, types)
    tensors: list[SourceTensor] = []
    for tensor in sorted(folder.tensors, key=_file_position):
        name = model.names.bare_name(tensor.name)
        digests = recorded_digests((manifest or NO_MANIFEST).tensors, model.names.full_name(name))
        tensors.append(
            SourceTensor(name, tensor.dtype, tensor.shape, box_locations(tensor), digests)
        )
    return Source(
        display_name=display_name,
        root=path,
        family=model.family,
        config=model.config,
        names=model.names,
        tensors=tuple(tensors),
        files=folder.files,
        file_stamps=_written_stamps(folder, state) if manifest else _file_stamps(folder),
        small_files=tuple(file for file in model.copied_files if file not in folder.files),
        manifest=manifest,
        extra_entries=tuple(_extra_entries(folder, state)),
        config_path=config_path,
        left_files=model.left_files,
    )


def _split_state(folder: DcpFolder) -> tuple[DcpFolder, tuple[DcpTensor, ...]]:
    """Return a training checkpoint as its model under the names of the model, and the tensors of the optimizer.

    A checkpoint without optimizer state is returned as it is.
    """
    state = tuple(tensor for tensor in folder.tensors if tensor.name.startswith(STATE_PREFIX))
    if not state:
        return folder, ()
    model: list[DcpTensor] = []
    for tensor in folder.tensors:
        if tensor.name.startswith(MODEL_PREFIX):
            model.append(replace(tensor, name=tensor.name.removeprefix(MODEL_PREFIX)))
    return replace(folder, tensors=tuple(model)), state


def _extra_entries(folder: DcpFolder, state: Sequence[DcpTensor]) -> Iterator[DroppedTensor]:
    """Yield the unused content: the optimizer state as a whole, and values that are no tensors."""
    if state:
        nbytes = sum(math.prod(tensor.shape) * itemsize(tensor.dtype) for tensor in state)
        yield DroppedTensor(STATE_PREFIX.removesuffix("."), nbytes, OPT_STATE_RULE)
    for name in folder.non_tensors:
        yield DroppedTensor(name, 0, NOT_A_TENSOR_RULE)


def box_locations(tensor: DcpTensor) -> Locations:
    """Return the location of each box of a tensor.

    Raises:
        PrepError: The elements of a box have gaps in its file.
    """
    if not tensor.boxes:
        return (Contiguous(0, 0),)
    return tuple(_box_location(tensor, box) for box in tensor.boxes)


def _box_location(tensor: DcpTensor, box: DcpBox) -> Contiguous | ChunkedLocation:
    """Return the location of a box. It is a leaf with one chunk that stores a part of the tensor.

    E.g. rows 4 to 6 of a tensor [7, 6] are a leaf [3, 6]. Its axis map has the extent 7 and the start 4 in dim 0.
    """
    if box.shape == tensor.shape and box.byte_strides is None:
        return Contiguous(box.file, box.offset)
    order = _dims_in_memory(tensor, box)
    axes = [SizedAxis(f"d{dim}", extent) for dim, extent in enumerate(box.shape)]
    source_dims: list[TensorDim] = []
    for axis, extent, start in zip(axes, tensor.shape, box.start):
        source_dims.append(TensorDim(extent, start, (axis,)))
    axis_map = AxisMap(
        tensor.name,
        tuple((axes[dim],) for dim in order),
        (tensor.name,),
        tuple(source_dims),
    )
    shape = tuple(box.shape[dim] for dim in order)
    zeros = (0,) * len(shape)
    placement = StridedPlacement(box.file, box.offset, zeros, zeros)
    return ChunkedLocation(axis_map, (), ChunkGrid(shape, shape), placement, itemsize(tensor.dtype))


def _dims_in_memory(tensor: DcpTensor, box: DcpBox) -> list[int]:
    """Return the dims of a box from the outermost to the innermost in its file."""
    dims = list(range(len(box.shape)))
    steps = box.byte_strides
    if steps is None:
        return dims
    dims.sort(key=lambda dim: (-steps[dim], box.shape[dim]))
    shape = [box.shape[dim] for dim in dims]
    for dim, step in zip(dims, strides(shape, itemsize(tensor.dtype))):
        if box.shape[dim] > 1 and steps[dim] != step:
            why = f"the elements of its box at {list(box.start)} are not stored one after another"
            hint = "save contiguous tensors"
            raise PrepError(f"{tensor.name} is not supported", why, hint)
    return dims


def _file_position(tensor: DcpTensor) -> tuple[int, int]:
    return min(((box.file, box.offset) for box in tensor.boxes), default=(0, 0))


def _file_stamps(folder: DcpFolder) -> tuple[SourceFile, ...]:
    """Return size and time of each file. The metadata that points into them has one digest."""
    stamps: list[SourceFile] = []
    for path in folder.files:
        stat = path.stat()
        stamps.append(SourceFile(path.name, stat.st_size, stat.st_mtime_ns, folder.digest))
    return tuple(stamps)


def _written_stamps(folder: DcpFolder, state: Sequence[DcpTensor]) -> tuple[SourceFile, ...]:
    """Return the stamps of files that prep wrote. Each has the digest of the file's bytes outside of tensors."""
    ranges_by_file: dict[int, list[Range]] = {number: [] for number in range(len(folder.files))}
    # Counters are constants of the plan, and no streams.
    moments = [tensor for tensor in state if not tensor.name.endswith(COUNTER_SUFFIX)]
    for tensor in (*folder.tensors, *moments):
        for box in tensor.boxes:
            nbytes = math.prod(box.shape) * itemsize(tensor.dtype)
            ranges_by_file[box.file].append((box.offset, box.offset + nbytes))
    stamps: list[SourceFile] = []
    for number, path in enumerate(folder.files):
        stat = path.stat()
        content = bytes_between(path, sorted(ranges_by_file[number]), stat.st_size)
        stamps.append(SourceFile(path.name, stat.st_size, stat.st_mtime_ns, digest_pieces(content)))
    return tuple(stamps)
