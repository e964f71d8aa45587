"""Script that writes decoders/*.npz beside this file: tiny models and the results of transformers for them.

Run it by hand with the `parity` extra installed: `python -m tests.golden.make_decoders [NAME …]`. A file has the
tensors, a right-padded batch `short` with its logits, and a batch `long` with logits, loss and gradients. Both batches
have a source if the model has an encoder. All values are float32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.commands.testing.tiny_model import has_encoder, random_batch, random_tensors
from prepcli.models.parameters import HFConfig
from tests.helpers.tiny_configs import DENSE_FAMILIES, GOLDEN

FOLDER = Path(__file__).parent / "decoders"
LENGTHS = (7, 4)  # lengths of the rows of `short`
# Length of the row of `long`: more than the positions of pretraining, 64, and than all windows.
LONG_LENGTH = 80
# Length of the row of `long` for the first families.
FIRST_LONG_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Golden:
    """The content of a file; `short` and `long` are batches, `short` without targets."""

    config: HFConfig
    tensors: Mapping[str, np.ndarray]
    short: Mapping[str, np.ndarray]
    short_logits: np.ndarray
    long: Mapping[str, np.ndarray]
    long_logits: np.ndarray
    loss: float
    gradients: Mapping[str, np.ndarray]


def compute(config: HFConfig, long_length: int = FIRST_LONG_LENGTH) -> Golden:
    """Compute the content of a file with transformers, with a row of `long_length` tokens in `long`."""
    from prepcli.commands.testing.tiny_model import (
        torch_gradients,
        torch_logits,
        torch_model,
    )

    tensors, shape = (
        random_tensors(config),
        {"vocab": config["vocab_size"], "has_source": has_encoder(config)},
    )
    short, long = (
        random_batch(rows=2, length=7, seed=1, **shape),
        random_batch(rows=1, length=long_length, seed=2, **shape),
    )
    short = {name: array for name, array in short.items() if name not in ("targets", "weights")}
    model = torch_model(config, tensors)
    loss, gradients = torch_gradients(model, long)
    long_logits = torch_logits(model, long, (long_length,))
    return Golden(
        config,
        tensors,
        short,
        torch_logits(model, short, LENGTHS),
        long,
        long_logits,
        loss,
        gradients,
    )


def long_length(name: str) -> int:
    """Return the number of tokens of `long` in the file of a config."""
    return LONG_LENGTH if name in DENSE_FAMILIES else FIRST_LONG_LENGTH


def save(golden: Golden, path: Path) -> None:
    """Write a file for `load`."""
    groups = {"tensor": golden.tensors, "long": golden.long, "gradient": golden.gradients}
    tokens = golden.short["tokens"]
    groups["short"] = {name: array for name, array in golden.short.items() if name != "tokens"}
    arrays: dict[str, Any] = {
        f"{group}:{name}": array for group, named in groups.items() for name, array in named.items()
    }
    text = np.array(json.dumps(golden.config))
    np.savez_compressed(
        path, config=text, short=tokens, short_logits=golden.short_logits, long_logits=golden.long_logits,
        loss=np.float32(golden.loss), **arrays,
    )  # fmt: skip


def load(name: str) -> Golden:
    """Read the file of a config."""
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = dict(file)

    def group(prefix: str) -> dict[str, np.ndarray]:
        return {
            key.removeprefix(prefix): array
            for key, array in arrays.items()
            if key.startswith(prefix)
        }

    single = {key: arrays[key] for key in ("short_logits", "long_logits")}
    short = {"tokens": arrays["short"]} | group("short:")
    return Golden(
        config=json.loads(str(arrays["config"])), tensors=group("tensor:"), short=short, long=group("long:"),
        gradients=group("gradient:"), loss=float(arrays["loss"]), **single,
    )  # fmt: skip


def main() -> None:
    """Write the files of the configs that the command line names, or of all."""
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or GOLDEN:
        save(compute(GOLDEN[name], long_length(name)), FOLDER / f"{name}.npz")


if __name__ == "__main__":
    main()
