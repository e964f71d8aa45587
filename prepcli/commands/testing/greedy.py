"""Greedy output of transformers for tiny models.

With large embeddings, above all if the head is tied, a token predicts itself forever. `with_small_embeddings` scales
them down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prepcli.commands.testing.tiny_transformers import Tensors
from prepcli.commands.testing.torch_transformers import exact_log
from prepcli.core.json_types import HFConfig

# Lengths of prompts: below and beyond sliding windows and the positions of pretraining.
LENGTHS = (5, 1, 50)
MAX_NEW_TOKENS = 32
# Random prompts per length. The one with the most varied output is used.
TRIES = 4


def with_small_embeddings(config: HFConfig, tensors: Tensors) -> Tensors:
    """Return the tensors with embeddings and heads multiplied by 0.1."""
    vocab = config["vocab_size"]
    return {
        name: tensor * np.float32(0.1 if tensor.shape[:1] == (vocab,) else 1)
        for name, tensor in tensors.items()
    }


def greedy_tokens(model: Any, prompt: Sequence[int]) -> list[int]:
    """Return MAX_NEW_TOKENS greedy tokens after a prompt. No token ends the text.

    Encoder-decoder models run without a KV cache, because the cache of transformers has the layers of the encoder.

    Args:
        model: A model of transformers.
        prompt: Token ids, or the source if the model has an encoder.
    """
    import torch

    encodes = model.config.is_encoder_decoder
    tokens = torch.tensor([prompt])
    with exact_log():
        output = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, num_beams=1,
            max_new_tokens=MAX_NEW_TOKENS, eos_token_id=None, pad_token_id=0, use_cache=not encodes,
        )  # fmt: skip
    return output[0, 1 if encodes else len(prompt) :].tolist()


def greedy_samples(model: Any, vocab: int) -> dict[str, list[list[int]]]:
    """Return a random prompt of each length under `prompts`, and the greedy tokens after it under `tokens`."""
    samples: dict[str, list[list[int]]] = {"prompts": [], "tokens": []}
    for length in LENGTHS:
        prompts = np.random.default_rng(length).integers(0, vocab, (TRIES, length)).tolist()
        outputs = ((prompt, greedy_tokens(model, prompt)) for prompt in prompts)
        prompt, tokens = max(outputs, key=lambda pair: len({*pair[1]}))
        samples["prompts"].append(prompt)
        samples["tokens"].append(tokens)
    return samples
