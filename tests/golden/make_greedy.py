"""Writes greedy.json beside this file: what transformers generates greedily with the models of decoders/*.npz.

Run by hand with the `parity` extra installed: `python -m tests.golden.make_greedy`. Of each model prompts of several
lengths, those of an encoder's model for the encoder, and the tokens that follow; of a few prompts the most varied.
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
LENGTHS = (5, 1, 50)  # of prompts: short of, at, and beyond what windows and rotations were made for
MAX_NEW_TOKENS = 32
TRIES = 4


def compute(name: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What transformers adds to each prompt by itself."""
    from tests.helpers.torch_transformers import torch_model

    config, tensors = greedy_model(name)
    model = torch_model(config, tensors)
    return [_generate(model, prompt) for prompt in prompts]


def greedy_model(name: str) -> tuple[HFConfig, Tensors]:
    """A golden model with small embeddings."""
    golden = load(name)
    return golden.config, with_small_embeddings(golden.config, golden.tensors)


def with_small_embeddings(config: HFConfig, tensors: Tensors) -> Tensors:
    """With large ones, most of all where they are the head too, a token is followed by itself for ever."""
    vocab = config["vocab_size"]
    return {name: tensor * np.float32(0.1 if tensor.shape[0] == vocab else 1) for name, tensor in tensors.items()}


def _generate(model: Any, prompt: Sequence[int]) -> list[int]:
    """No token ends it. Its cache has as many layers as the encoder: a decoder of others does without."""
    import torch

    encodes = model.config.is_encoder_decoder
    tokens = torch.tensor([prompt])
    found = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, num_beams=1, max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=None, pad_token_id=0, use_cache=not encodes,
    )  # fmt: skip
    return found[0, 1 if encodes else len(prompt) :].tolist()


def greedy_entry(name: str) -> dict[str, list[list[int]]]:
    """The entry of a model."""
    from tests.helpers.torch_transformers import torch_model

    config, tensors = greedy_model(name)
    return generate_entry(torch_model(config, tensors), config["vocab_size"])


def generate_entry(model: Any, vocab: int) -> dict[str, list[list[int]]]:
    """A prompt of each length, and what the model adds to it."""
    found: dict[str, list[list[int]]] = {"prompts": [], "tokens": []}
    for length in LENGTHS:
        prompts = np.random.default_rng(length).integers(0, vocab, (TRIES, length)).tolist()
        each = ((prompt, _generate(model, prompt)) for prompt in prompts)
        prompt, tokens = max(each, key=lambda pair: len({*pair[1]}))
        found["prompts"].append(prompt)
        found["tokens"].append(tokens)
    return found


def main() -> None:
    import torch

    from tests.helpers.tiny_configs import GOLDEN

    torch.set_num_threads(1)
    lines = (f"{json.dumps(name)}: {json.dumps(greedy_entry(name), separators=(',', ':'))}" for name in GOLDEN)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
