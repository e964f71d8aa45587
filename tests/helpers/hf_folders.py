"""Folders of any tensors for the tests, written with the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_hf_folder(folder: Path, files: Mapping[str, Mapping[str, np.ndarray]], config: object = None) -> Path:
    """A folder of these files, with an index if there are several, and a config.json if there is a config."""
    folder.mkdir(parents=True)
    for name, tensors in files.items():
        save_file(dict(tensors), folder / name)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": {tensor: name for name, held in files.items() for tensor in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
