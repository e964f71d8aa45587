"""Tiny Hugging Face folders for the tests, written with the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from trainer.axes import bind
from trainer.families import family_of
from trainer.table import rows

GPT_NEO: dict[str, Any] = {
    "model_type": "gpt_neo", "vocab_size": 13, "hidden_size": 8, "num_layers": 3, "num_heads": 2,
    "max_position_embeddings": 6, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 16, "tie_word_embeddings": False,
}  # fmt: skip


def write_folder(folder: Path, files: Mapping[str, Mapping[str, np.ndarray]], config: object = None) -> Path:
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


def tensors_of(config: Mapping[str, Any], dtype: str = "float32") -> dict[str, np.ndarray]:
    """Random tensors of the config's model, in the order of its family's rows, layer by layer."""
    family = family_of(config)
    sizes = family.sizes(config)
    tied = config["tie_word_embeddings"]
    table = {
        path: bind(row, sizes) for path, row in rows(family, config).items() if not (tied and path == family.tie.leaf)
    }
    random = np.random.default_rng(0)
    return {
        name if name in family.unprefixed else family.prefix + name: random.standard_normal(row.source_shape).astype(
            dtype
        )
        for row in table.values()
        for name, _ in row.tensors()
    }


def write_model(
    folder: Path, config: Mapping[str, Any], dtype: str = "float32", n_files: int = 1
) -> dict[str, np.ndarray]:
    """A folder of the config's model in so many files; returns its tensors."""
    tensors = tensors_of(config, dtype)
    if n_files == 1:
        write_folder(folder, {"model.safetensors": tensors}, config)
        return tensors
    names = list(tensors)
    size = -(-len(names) // n_files)
    parts = [names[i : i + size] for i in range(0, len(names), size)]
    files = {
        f"model-{i:05}-of-{len(parts):05}.safetensors": {name: tensors[name] for name in part}
        for i, part in enumerate(parts, 1)
    }
    write_folder(folder, files, config)
    return tensors
