"""A folder of PyTorch's own files as the hub had them before safetensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from prepcli.errors import PrepError
from prepcli.formats.torch_files import TorchTensor, read_torch_folder
from prepcli.planning.accounting import detect_names
from prepcli.planning.plan import Contiguous, SourceFile, Strided
from prepcli.sources.source import Source, SourceTensor, read_config, small_files
from prepcli.sources.source_hints import SourceHints
from trainer.models.registry import family_of

MAX_SHARING_TENSORS = 64  # tensors that have a byte of one file together: each opens the file once more


def open_torch(path: Path, display_name: str, hints: SourceHints) -> Source:
    """Read pickles and settings, run nothing. PrepError names what is broken or not understood."""
    folder = read_torch_folder(path)
    config = read_config(hints.resolve_config_path(path, display_name))
    family = family_of(config)
    names = detect_names(family, config, [t.name for t in folder.tensors])
    numbers, blobs = assign_blobs(folder.tensors, folder.files)
    tensors = tuple(
        SourceTensor(names.bare_name(t.name), t.dtype, t.shape, (placement_of(t, number),))
        for t, number in zip(folder.tensors, numbers)
    )
    facts = tuple(SourceFile(c.file_name, c.size, c.mtime_ns, c.digest) for c in folder.headers)
    held = tuple(safetensors_file_name(folder.headers[t.file].file_name) for t in folder.tensors)
    small = small_files(path)
    return Source(
        display_name, path, family, config, names, tensors, folder.files, facts, small, None, held, blobs=blobs
    )


def placement_of(tensor: TorchTensor, blob: int) -> Contiguous | Strided:
    """Where the tensor lies, in blob `number`."""
    if tensor.byte_strides is None:
        return Contiguous(blob, tensor.offset)
    return Strided(blob, tensor.offset, tensor.byte_strides)


def assign_blobs(tensors: Sequence[TorchTensor], files: Sequence[Path]) -> tuple[list[int], tuple[Path, ...]]:
    """The blob of each tensor, and all blobs: the files, and for tensors that share bytes, as tied ones do, the same
    file again. Tensors are given in (file, offset) order."""
    blobs = list(files)
    again: list[list[int]] = [[number] for number in range(len(files))]  # of each file its blobs
    ends = [0] * len(files)
    found: list[int] = []
    for tensor in tensors:
        low, high = tensor.byte_range
        free = next((number for number in again[tensor.file] if ends[number] <= low or low == high), len(blobs))
        if free == len(blobs):
            if len(again[tensor.file]) == MAX_SHARING_TENSORS:
                why = f"over {MAX_SHARING_TENSORS} tensors have byte {low:,} of it together"
                raise PrepError(f"{files[tensor.file].name} is not a usable PyTorch file", why)
            blobs.append(files[tensor.file])
            again[tensor.file].append(free)
            ends.append(0)
        ends[free] = max(ends[free], high)
        found.append(free)
    return found, tuple(blobs)


def safetensors_file_name(torch_file_name: str) -> str:
    """What a file of safetensors is called that takes the place of one of PyTorch's."""
    return re.sub(r"^pytorch_model", "model", Path(torch_file_name).stem) + ".safetensors"
