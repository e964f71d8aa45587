"""A folder to train in: a recipe, a text, and a tiny Llama with a tokenizer."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

WORDS = [f"w{number}" for number in range(131)]
# The schedule has a length of its own, so that runs with other `train.steps` share compiled steps.
RECIPE = """\
seed = 3
mesh = "1,2,4"
[model]
path = "tiny-init"
[data]
type = "text"
path = "text.txt"
seq_length = 16
holdout = 0.1
[batch]
size = 8
[optimizer]
lr = 1e-2
warmup_steps = 2
decay_steps = 12
[train]
steps = 12
log_every = 1
[checkpoint]
every = 3
"""


def write_tokenizer(folder: Path, words: Sequence[str] = WORDS) -> None:
    """Write a tokenizer with one token per word."""
    vocab = {word: number for number, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": words[0]}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))


def make_training_folder(config: Mapping[str, Any] = LLAMA) -> None:
    """Write a recipe, a text, a Hugging Face model with this config and its init to the current folder."""
    shutil.copytree(_template(json.dumps(config)).name, ".", dirs_exist_ok=True)


@cache
def _template(config: str) -> tempfile.TemporaryDirectory[str]:
    """Return a training folder that tests only copy; a copy takes a fiftieth of the time of a conversion."""
    # The folder is deleted when this process exits.
    folder = tempfile.TemporaryDirectory(prefix="prep-training-")
    with contextlib.chdir(folder.name):
        _write_training_folder(json.loads(config))
    return folder


def _write_training_folder(config: dict[str, Any]) -> None:
    """Write a checkpoint, a tokenizer, data and a recipe to the current folder."""
    make_checkpoint(Path("tiny"), config)
    write_tokenizer(Path("tiny"))
    assert main(["save-init", "tiny", "--pad-vocab", "8", "--mesh", "1,2,4", "-q"]) == OK
    numbers = np.cumsum(np.random.default_rng(0).integers(0, 3, 3000)) % len(WORDS)
    Path("text.txt").write_text(" ".join(WORDS[number] for number in numbers))
    Path("recipe.toml").write_text(RECIPE)
