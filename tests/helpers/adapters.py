"""Adapters in the format of PEFT, written without peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import load_file, save_file

from prepcli.formats.manifest import MANIFEST_FILE, encode_manifest

RANK, ALPHA = 3, 7.0
PREFIX = "base_model.model."


def make_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], **settings: Any
) -> dict[str, np.ndarray]:
    """Write an adapter with random matrices for modules with weights [out, in]; return its tensors."""
    random = np.random.default_rng(1)
    tensors: dict[str, np.ndarray] = {}
    for module, (num_outputs, num_inputs) in shapes.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = random.standard_normal(
            (RANK, num_inputs), np.float32
        )
        tensors[f"{PREFIX}{module}.lora_B.weight"] = random.standard_normal(
            (num_outputs, RANK), np.float32
        )
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    plain = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": targets,
    }
    (folder / "adapter_config.json").write_text(json.dumps(plain | settings))
    return tensors


def write_adapter_manifest(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the manifest that `prep export` writes beside an adapter of a model with this config."""
    tensors: dict[str, Any] = {}
    for name, values in load_file(folder / "adapter_model.safetensors").items():
        digest = xxhash.xxh3_128_hexdigest(values.tobytes())
        tensors[name] = {
            "dtype": str(values.dtype),
            "shape": values.shape,
            "digests": [[0, len(values), digest]],
        }
    content = {
        "kind": "adapter",
        "request": "prep export run",
        "plan": "xxh3:0",
        "config": config,
        "tensors": tensors,
        "prefixed": True,
        "tied": False,
    }
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(content))
