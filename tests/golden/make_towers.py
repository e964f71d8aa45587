"""Script that writes towers/*.json beside this file: tiny multimodal models of transformers and their logits of text.

Run it by hand with the `parity` extra installed: `python -m tests.golden.make_towers`. A file has the config.json,
the shape of each tensor of `save_pretrained`, and the logits of the whole model for some text tokens. The values of
the tensors come from `tests.helpers.towers.model_values`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.make_architectures import make_model, read_header
from tests.helpers.towers import FOLDER, TYPES, model_values

# Above the ids of images and sounds.
FIRST_TOKEN = 10
LENGTH = 7
# Rotated pairs of heads with 16 elements, by position.
MROPE_SECTIONS = {"qwen2_5_vl": [2, 3, 3], "qwen3_vl": [4, 2, 2]}


def describe(model_type: str) -> dict[str, Any]:
    """Return the config, the shapes, tokens and logits of a tiny model."""
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(model_type).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        if sections := MROPE_SECTIONS.get(model_type):
            config["text_config"]["rope_parameters"]["mrope_section"] = sections
        (folder / "config.json").write_text(json.dumps(config))
        header = read_header(folder / "model.safetensors")
        shapes = {tensor: entry["shape"] for tensor, entry in header.items()}
        save_file(model_values(shapes), folder / "model.safetensors", {"format": "pt"})
        vocab = config["text_config"]["vocab_size"]
        tokens = np.random.default_rng(0).integers(FIRST_TOKEN, vocab, LENGTH).tolist()
        logits = compute_logits(folder, [tokens])[0]
    return {
        "config": config,
        "shapes": shapes,
        "tokens": tokens,
        "logits": np.round(logits.astype(float), 6).tolist(),
    }


def compute_logits(folder: Path, tokens: list[list[int]]) -> np.ndarray:
    """Return the float32 logits [B, T, V] of the whole model in a folder, for text alone."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    model_class = _model_class(config)
    model = model_class.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()


def _model_class(config: Any) -> Any:
    """Return the class of transformers that a multimodal config names."""
    import transformers

    (name,) = config.architectures
    return getattr(transformers, name)


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for model_type in TYPES:
        text = json.dumps(describe(model_type), separators=(",", ":"))
        (FOLDER / f"{model_type}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
