"""Tiny quantised LLaMA checkpoints, and the values of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.quantized_formats import FORMATS, Arrays
from tests.helpers.tiny_checkpoints import LLAMA, checkpoint_tensors, write_checkpoint


def make_quantized(
    folder: Path,
    name: str,
    *,
    base: dict[str, Any] = LLAMA,
    change: Callable[[Arrays], object] = lambda stored: None,
    **settings: Any,
) -> dict[str, np.ndarray]:
    """Write a checkpoint with quantised projections; return the values of all tensors.

    Args:
        folder: Folder to write.
        name: Format, a key of FORMATS.
        base: Content of config.json.
        change: Changes the stored tensors before they are written.
        **settings: Fields to change in the quantisation config.
    """
    kind = FORMATS[name]
    rng = np.random.default_rng(1)
    stored: Arrays = {}
    values: dict[str, np.ndarray] = {}
    for full_name, array in checkpoint_tensors(base, "bfloat16", False, False).items():
        if not full_name.endswith("_proj.weight"):
            stored[full_name] = array
            values[full_name] = array
            continue
        prefix = full_name.removesuffix("weight")
        parts, values[full_name] = kind.quantize(rng, (array.shape[0], array.shape[1]))
        stored |= {prefix + end: part for end, part in parts.items()}
    change(stored)
    config = {
        **base,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization_config": {**kind.settings, **settings},
    }
    write_checkpoint(folder, config, stored)
    return values


def make_mxfp4_experts(folder: Path, exponents: int = 250) -> None:
    """Write a model of unknown type with MXFP4 experts."""
    rng = np.random.default_rng(0)
    stored: Arrays = {"model.norm.weight": np.ones(64, np.float32)}
    for layer in range(2):
        for name, rows, columns in (("gate_up_proj", 96, 64), ("down_proj", 64, 96)):
            prefix = f"model.layers.{layer}.mlp.experts.{name}_"
            shape = (4, rows, columns // 32)
            stored[f"{prefix}blocks"] = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
            stored[f"{prefix}scales"] = rng.integers(0, exponents, shape, dtype=np.uint8)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    write_checkpoint(folder, {"model_type": "unheard_of", "quantization_config": settings}, stored)
