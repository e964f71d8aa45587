"""Script that writes greedy.json beside this file: greedy output of transformers for the models of decoders/*.npz.

Run it by hand with the `parity` extra installed: `python -m tests.golden.make_greedy [NAME …]`. For each model the file
has prompts of several lengths (sources, if it has an encoder) and the new tokens. Of a few random prompts per length it
keeps the one with the most varied output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from prepcli.commands.testing.tiny_model import (
    Tensors,
    greedy_samples,
    greedy_tokens,
    with_small_embeddings,
)
from prepcli.models.parameters import HFConfig, read_size
from tests.golden.make_decoders import load

FILE = Path(__file__).parent / "greedy.json"


def compute(name: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Generate tokens for each prompt with transformers, one prompt at a time."""
    from prepcli.commands.testing.tiny_model import torch_model

    config, tensors = greedy_model(name)
    model = torch_model(config, tensors)
    return [greedy_tokens(model, prompt) for prompt in prompts]


def greedy_model(name: str) -> tuple[HFConfig, Tensors]:
    """Return the config and tensors of a golden model with small embeddings."""
    golden = load(name)
    return golden.config, with_small_embeddings(golden.config, golden.tensors)


def greedy_entry(name: str) -> dict[str, list[list[int]]]:
    """Return the entry of a model."""
    from prepcli.commands.testing.tiny_model import torch_model

    config, tensors = greedy_model(name)
    return greedy_samples(torch_model(config, tensors), read_size(config, "vocab_size", 1))


def main() -> None:
    """Write the entries of the models that the command line names, or of all, and keep the others."""
    import torch

    from tests.helpers.tiny_configs import GOLDEN

    torch.set_num_threads(1)
    entries = json.loads(FILE.read_text())
    for name in sys.argv[1:] or GOLDEN:
        entries[name] = greedy_entry(name)
    lines = [
        f"{json.dumps(name)}: {json.dumps(entries[name], separators=(',', ':'))}" for name in GOLDEN
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
