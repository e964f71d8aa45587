"""A folder of PyTorch's own files as the hub had them before safetensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from prepcli.errors import PrepError
from prepcli.formats.torch_files import TorchTensor, read_folder
from prepcli.planning.accounting import names_of
from prepcli.planning.plan import Flat, SourceFile, Strided
from prepcli.sources.hints import Given
from prepcli.sources.source import Source, SourceTensor, read_config, small_files
from trainer.models.registry import family_of

MOST_SHARING = 64  # tensors that have a byte of one file together: each opens the file once more


def open_torch(path: Path, name: str, given: Given) -> Source:
    """Read pickles and settings, run nothing. PrepError names what is broken or not understood."""
    folder = read_folder(path)
    config = read_config(given.config_file(path, name))
    family = family_of(config)
    names = names_of(family, config, [t.name for t in folder.tensors])
    numbers, blobs = numbered(folder.tensors, folder.files)
    tensors = tuple(
        SourceTensor(names.bare(t.name), t.dtype, t.shape, (side_of(t, number),))
        for t, number in zip(folder.tensors, numbers)
    )
    facts = tuple(SourceFile(c.file_name, c.size, c.mtime_ns, c.digest) for c in folder.checkpoints)
    held = tuple(output_name(folder.checkpoints[t.file].file_name) for t in folder.tensors)
    small = small_files(path)
    return Source(name, path, family, config, names, tensors, folder.files, facts, small, None, held, blobs=blobs)


def side_of(tensor: TorchTensor, number: int) -> Flat | Strided:
    """Where the tensor lies, in blob `number`."""
    if tensor.steps is None:
        return Flat(number, tensor.offset)
    return Strided(number, tensor.offset, tensor.steps)


def numbered(tensors: Sequence[TorchTensor], files: Sequence[Path]) -> tuple[list[int], tuple[Path, ...]]:
    """The blob of each tensor, and all blobs: the files, and for tensors that share bytes, as tied ones do, the same
    file again. Tensors are given in (file, offset) order."""
    blobs = list(files)
    again: list[list[int]] = [[number] for number in range(len(files))]  # of each file its blobs
    ends = [0] * len(files)
    found: list[int] = []
    for tensor in tensors:
        low, high = tensor.span
        free = next((number for number in again[tensor.file] if ends[number] <= low or low == high), len(blobs))
        if free == len(blobs):
            if len(again[tensor.file]) == MOST_SHARING:
                why = f"over {MOST_SHARING} tensors have byte {low:,} of it together"
                raise PrepError(f"{files[tensor.file].name} is not a usable PyTorch file", why)
            blobs.append(files[tensor.file])
            again[tensor.file].append(free)
            ends.append(0)
        ends[free] = max(ends[free], high)
        found.append(free)
    return found, tuple(blobs)


def output_name(name: str) -> str:
    """What a file of safetensors is called that takes the place of one of PyTorch's."""
    return re.sub(r"^pytorch_model", "model", Path(name).stem) + ".safetensors"
