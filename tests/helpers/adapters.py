"""Adapters in the format of PEFT, written without peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

RANK, ALPHA = 3, 7.0
PREFIX = "base_model.model."


def make_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], **settings: Any) -> dict[str, np.ndarray]:
    """Write an adapter with random matrices for modules with weights [out, in]; return its tensors."""
    random = np.random.default_rng(1)
    tensors: dict[str, np.ndarray] = {}
    for module, (num_outputs, num_inputs) in shapes.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = random.standard_normal((RANK, num_inputs), np.float32)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = random.standard_normal((num_outputs, RANK), np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | settings))
    return tensors
