"""A checkpoint of transformers' Trainer, written without torch and without a training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from prepcli.formats.torch_archive import encode_object
from prepcli.formats.torch_pickle import PickledValue, StoredTensor
from prepcli.models.module_order import optimizer_groups
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

SETTINGS: dict[str, PickledValue] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}


def make_trainer_checkpoint(folder: Path, step: int) -> None:
    """Write a small LLaMA with constant moments of AdamW."""
    tensors = make_checkpoint(folder, LLAMA, "float32", vocab_size=256, hidden_size=64)
    groups = optimizer_groups("llama", tensors)
    entries: dict[int, PickledValue] = {}
    for number, name in enumerate(groups.numbered):
        moment = np.full(tensors[name].shape, 0.25, np.float32)
        entries[number] = {
            "step": StoredTensor(f"{number}.0", "float32", (), np.float32(step).tobytes()),
            "exp_avg": StoredTensor(f"{number}.1", "float32", moment.shape, moment.tobytes()),
            "exp_avg_sq": StoredTensor(f"{number}.2", "float32", moment.shape, moment.tobytes()),
        }
    num_decayed = len(groups.decayed)
    decayed: PickledValue = list(range(num_decayed))
    not_decayed: PickledValue = list(range(num_decayed, len(entries)))
    root: PickledValue = {
        "state": entries,
        "param_groups": [
            {**SETTINGS, "weight_decay": 0.1, "params": decayed},
            {**SETTINGS, "weight_decay": 0.0, "params": not_decayed},
        ],
    }
    ((_, content),) = encode_object(root).constant_ranges
    (folder / "optimizer.pt").write_bytes(content)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
