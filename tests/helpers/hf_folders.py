"""Writer of Hugging Face folders with any tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_hf_folder(
    folder: Path, files: Mapping[str, Mapping[str, np.ndarray]], config: object = None
) -> Path:
    """Write safetensors files, with an index if there are several and a config.json if `config` is not None."""
    folder.mkdir(parents=True)
    for name, tensors in files.items():
        save_file(dict(tensors), folder / name)
    if len(files) > 1:
        index = {
            "metadata": {},
            "weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
