"""Multimodal models as transformers writes them, with values that need no torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.stored_tensors import StoredTensor, write_safetensors

FOLDER = Path(__file__).parents[1] / "golden" / "towers"
# Names of both versions of transformers, M-RoPE in two layouts, tied heads, and scaled embeddings.
TYPES = ("gemma3", "internvl", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl")
PROCESSOR = "preprocessor_config.json"


def read_golden(model_type: str) -> dict[str, Any]:
    """Return the config, the shapes of the tensors, tokens and logits of a model."""
    return json.loads((FOLDER / f"{model_type}.json").read_text())


def model_values(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Return random float32 tensors: the values of a tensor depend on its name alone."""
    values: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        if len(shape) < 2:
            # Scales of norms are around 1, biases around 0.
            values[name] = 0.2 * noise + name.endswith("weight")
        elif "embed" in name:
            values[name] = 0.5 * noise
        else:
            values[name] = 0.8 * noise / np.sqrt(shape[-1])
    return {name: value.astype(np.float32) for name, value in values.items()}


def stored(values: Mapping[str, np.ndarray]) -> dict[str, StoredTensor]:
    """Return float32 tensors as a safetensors file has them."""
    return {name: ("F32", value.shape, value.tobytes()) for name, value in values.items()}


def write_model(model_type: str, folder: Path = Path("m")) -> dict[str, StoredTensor]:
    """Write a folder with a multimodal model and the settings of its processor, and return the tensors."""
    golden = read_golden(model_type)
    tensors = stored(model_values(golden["shapes"]))
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    # The indent is another one than prep's, so that a copy differs from a new file.
    (folder / "config.json").write_text(json.dumps(golden["config"], indent=7))
    (folder / PROCESSOR).write_text('{"image_mean":  [0.5]}')
    return tensors
