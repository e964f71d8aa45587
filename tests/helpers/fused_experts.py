"""Experts of a model in one tensor per matrix, as transformers 5 stores them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

SEPARATE = ("gate_proj", "up_proj", "down_proj")
# Family -> the names of an expert's gate, up and down matrices.
EXPERT_NAMES = {"qwen3_moe": SEPARATE, "deepseek_v3": SEPARATE, "mixtral": ("w1", "w3", "w2")}


def fuse_experts(tensors: Mapping[str, np.ndarray], family: str) -> dict[str, np.ndarray]:
    """Return the tensors with one for the gate and up matrices of all experts, and one for the down matrices."""
    gate, up, down = EXPERT_NAMES[family]
    experts: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    fused: dict[str, np.ndarray] = {}
    for stored_name, tensor in tensors.items():
        name = stored_name.replace("block_sparse_moe.", "mlp.")
        match = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            fused[name] = tensor
        else:
            module = experts.setdefault(match[1], {})
            module.setdefault(int(match[2]), {})[match[3]] = tensor
    for module, matrices in experts.items():
        ordered = [matrices[number] for number in range(len(matrices))]
        both = [np.concatenate([expert[gate], expert[up]]) for expert in ordered]
        fused[f"{module}.experts.gate_up_proj"] = np.stack(both)
        fused[f"{module}.experts.down_proj"] = np.stack([expert[down] for expert in ordered])
    return fused
