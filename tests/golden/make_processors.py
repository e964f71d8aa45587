"""Script that writes processors.json beside this file: logits after the processors of transformers' `generate`.

Run it by hand with the `parity` extra installed: `python -m tests.golden.make_processors`. Each case has fields of a
generation config. The logits of each case are those before the next token of each row of TOKENS.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "processors.json"
VOCAB = 12
EOS = 7
PROMPT_LENGTH = 4
# Each row has a prompt of four tokens and two new tokens.
TOKENS = [[5, 6, 7, 5, 2, 6], [1, 2, 3, 1, 2, 11]]
MAX_NEW_TOKENS = 3
CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 3},
    "min_length": {"min_length": 7},
    "suppress_tokens": {"suppress_tokens": [3, 8]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [3, 8]},
    "sequence_bias": {"sequence_bias": [[[4], 1.5], [[2, 6, 9], -2.0], [[2, 11, 9], 3.0]]},
    "bad_words_ids": {"bad_words_ids": [[4], [2, 3], [2, 11, 5], [EOS]]},
    "forced_eos_token_id": {"forced_eos_token_id": EOS},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": [1, 1.5]},
    "late_decay": {"exponential_decay_length_penalty": [2, 1.5]},
    "remove_invalid_values": {"bad_words_ids": [[4]], "remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, "do_sample": True},
    "top_k": {"do_sample": True, "temperature": 0.7, "top_k": 3},
    "top_p": {"do_sample": True, "temperature": 0.7, "top_p": 0.6},
    "min_p": {"do_sample": True, "temperature": 1.4, "min_p": 0.2},
    "all_filters": {
        "do_sample": True,
        "temperature": 1.4,
        "top_k": 8,
        "top_p": 0.95,
        "min_p": 0.15,
        "repetition_penalty": 1.2,
        "bad_words_ids": [[4]],
    },
}


def raw_logits() -> np.ndarray:
    """Return the logits [B, V] before the processors."""
    return np.random.default_rng(3).normal(0, 2, (len(TOKENS), VOCAB)).astype(np.float32)


def processed_probabilities(fields: dict[str, Any]) -> list[list[float]]:
    """Return the probabilities [B, V] after the processors of transformers."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    # its mixins do not fit their own protocols for a type checker
    model: Any = LlamaForCausalLM(config)
    options = {"top_k": 0, **fields}
    if not fields.get("do_sample"):
        options.pop("top_k")
    generation_config = GenerationConfig(
        eos_token_id=EOS,
        max_new_tokens=MAX_NEW_TOKENS,
        max_length=PROMPT_LENGTH + MAX_NEW_TOKENS,
        **options,
    )
    model._prepare_special_tokens(generation_config, device=torch.device("cpu"))
    tokens = torch.tensor(TOKENS)
    processors = model._get_logits_processor(
        generation_config=generation_config,
        input_ids_seq_length=PROMPT_LENGTH,
        encoder_input_ids=tokens[:, :PROMPT_LENGTH],
        device="cpu",
        model_kwargs={},
    )
    scores = processors(tokens, torch.tensor(raw_logits()))
    return torch.softmax(scores.double(), -1).tolist()


def main() -> None:
    """Write the probabilities of all cases."""
    lines: list[str] = []
    for name, fields in CASES.items():
        rows = [[float(f"{value:.9g}") for value in row] for row in processed_probabilities(fields)]
        lines.append(f"{json.dumps(name)}: {json.dumps(rows)}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
