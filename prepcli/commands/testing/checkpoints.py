"""Small Hugging Face checkpoints, written and read whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from prepcli.core.json_values import HFConfig
from prepcli.engine.fills import numpy_dtype
from prepcli.formats.safetensors import (
    INDEX_FILE,
    encode_index,
    lay_out_files,
    read_safetensors_folder,
    split_into_shards,
)


def write_checkpoint(
    folder: Path, config: HFConfig, tensors: dict[str, np.ndarray], files: int = 2
) -> Path:
    """Write a Hugging Face folder with config, tokenizer files, and about `files` shards with an index."""
    folder.mkdir(parents=True)
    entries = [
        (name, value.dtype.name, value.shape, value.nbytes) for name, value in tensors.items()
    ]
    # Rounded up, e.g. 10 bytes in 3 files: 4 per file. Tensors are not split, so the number of files may differ.
    limit = -(-sum(e[3] for e in entries) // files)
    layouts = lay_out_files(
        [(name, group, None) for name, group in split_into_shards(entries, limit)]
    )
    for layout in layouts:
        data = b"".join(tensors[t.name].tobytes() for t in layout.tensors)
        (folder / layout.name).write_bytes(layout.header + data)
    if len(layouts) > 1:
        (folder / INDEX_FILE).write_bytes(encode_index(layouts))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"_from_model_config": true}')
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return folder


def read_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """Read every tensor of a Hugging Face folder."""
    contents = read_safetensors_folder(folder)
    files = [(folder / header.file_name).read_bytes() for header in contents.headers]
    return {
        tensor.name: np.frombuffer(
            files[tensor.file][tensor.offset : tensor.offset + tensor.nbytes],
            numpy_dtype(tensor.dtype),
        ).reshape(tensor.shape)
        for tensor in contents.tensors
    }
