"""Tensors of safetensors folders and of Orbax items as bytes, read by the libraries of these formats."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

# dtype code of safetensors, shape, bytes
StoredTensor = tuple[str, tuple[int, ...], bytes]


def write_safetensors(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write a safetensors file. Any name and dtype code of the format is possible."""
    header: dict[str, object] = {}
    end = 0
    for name, (code, shape, data) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    payload = b"".join(data for _, _, data in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def safetensors_bytes(folder: Path) -> dict[str, StoredTensor]:
    """Read every tensor of a Hugging Face folder with the safetensors library."""
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in deserialize(path.read_bytes()):
            assert name not in tensors
            tensors[name] = (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
    return tensors


def orbax_bytes(item: Path) -> dict[str, bytes]:
    """Restore a verbatim item with Orbax, and return the bytes of each tensor by its name in the source.

    The manifest lists the numbers of each stacked leaf, in the order of its first dims.
    """
    import orbax.checkpoint as ocp

    manifest = json.loads((item / "prep-manifest.json").read_text())
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree: Mapping[str, Any] = checkpointer.restore(item.absolute())
    tensors: dict[str, bytes] = {}
    for path, leaf in tree["params"].items():
        numbers = manifest["stacked"].get(path, [])
        # No path ends with a slash: the leaf of `a/` is `a/~2`.
        template = re.sub(r"/~\d+$", "/", path)
        if numbers:
            # A suffix such as `~2` is part of the leaf's path only.
            template = path.partition("~")[0]
        for index in itertools.product(*(range(len(run)) for run in numbers)):
            name = template
            for run, i in zip(numbers, index):
                name = name.replace("*", str(run[i]), 1)
            tensors[name] = np.ascontiguousarray(np.asarray(leaf)[index]).tobytes()
    return tensors
