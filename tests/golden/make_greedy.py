"""Script that writes greedy.json beside this file: greedy output of transformers for the models of decoders/*.npz.

Run it by hand with the `parity` extra installed: `python -m tests.golden.make_greedy`. For each model the file has
prompts of several lengths (sources, if it has an encoder) and the new tokens. Of a few random prompts per length it
keeps the one with the most varied output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.make_decoders import load
from tests.helpers.tiny_transformers import Tensors
from trainer.models.parameters import HFConfig

FILE = Path(__file__).parent / "greedy.json"
LENGTHS = (5, 1, 50)  # lengths of prompts, below and beyond sliding windows and the positions of pretraining
MAX_NEW_TOKENS = 32
TRIES = 4


def compute(name: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Generate tokens for each prompt with transformers, one prompt at a time."""
    from tests.helpers.torch_transformers import torch_model

    config, tensors = greedy_model(name)
    model = torch_model(config, tensors)
    return [_generate(model, prompt) for prompt in prompts]


def greedy_model(name: str) -> tuple[HFConfig, Tensors]:
    """Return the config and tensors of a golden model with small embeddings."""
    golden = load(name)
    return golden.config, with_small_embeddings(golden.config, golden.tensors)


def with_small_embeddings(config: HFConfig, tensors: Tensors) -> Tensors:
    """Scale embeddings down; with large ones, above all if the head is tied, a token predicts itself forever."""
    vocab = config["vocab_size"]
    return {name: tensor * np.float32(0.1 if tensor.shape[0] == vocab else 1) for name, tensor in tensors.items()}


def _generate(model: Any, prompt: Sequence[int]) -> list[int]:
    """Generate without end tokens.

    The cache of transformers has as many layers as the encoder, so that a deeper decoder is run without a cache.
    """
    import torch

    encodes = model.config.is_encoder_decoder
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, num_beams=1, max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=None, pad_token_id=0, use_cache=not encodes,
    )  # fmt: skip
    return output[0, 1 if encodes else len(prompt) :].tolist()


def greedy_entry(name: str) -> dict[str, list[list[int]]]:
    """Return the entry of a model."""
    from tests.helpers.torch_transformers import torch_model

    config, tensors = greedy_model(name)
    return generate_entry(torch_model(config, tensors), config["vocab_size"])


def generate_entry(model: Any, vocab: int) -> dict[str, list[list[int]]]:
    """Return one prompt of each length with its new tokens."""
    entry: dict[str, list[list[int]]] = {"prompts": [], "tokens": []}
    for length in LENGTHS:
        prompts = np.random.default_rng(length).integers(0, vocab, (TRIES, length)).tolist()
        outputs = ((prompt, _generate(model, prompt)) for prompt in prompts)
        prompt, tokens = max(outputs, key=lambda pair: len({*pair[1]}))
        entry["prompts"].append(prompt)
        entry["tokens"].append(tokens)
    return entry


def main() -> None:
    """Write the entries of all models."""
    import torch

    from tests.helpers.tiny_configs import GOLDEN

    torch.set_num_threads(1)
    lines = (f"{json.dumps(name)}: {json.dumps(greedy_entry(name), separators=(',', ':'))}" for name in GOLDEN)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
