"""A tiny trained tokenizer, JSON files, and configs that tokenize them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.examples import ExampleSettings
from trainer.data.store import MappedTokens
from trainer.data.tokenize import tokenize_files
from trainer.data.tokenize_config import TokenizeConfig

EOS = 0
TEXT = "the cat sat on the mat.\n\nAnd then\n  the cat ate the hat, didn't it? 12 cats.\n"


def make_tokenizer(path: Path, vocab: int = 300) -> Path:
    """Write a byte-level BPE tokenizer like GPT-2's, trained on TEXT, with end-of-text id 0; return its path."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT * 20], trainer)
    tokenizer.save(str(path))
    return path


def encode(tokenizer: Path, text: str) -> list[int]:
    """Return the ids of a text, without special tokens."""
    return Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids


def write_json(path: Path, documents: Sequence[Any], column: str = "text") -> Path:
    """Write one JSON object per document; return the path."""
    path.write_text(
        "".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(documents))
    )
    return path


def make_config(folder: Path, *paths: Path | str, **changes: Any) -> TokenizeConfig:
    """Return a config for text files with the tokenizer `folder/tokenizer.json`; write it if it is missing.

    Args:
        folder: Folder of the tokenizer and the cache.
        *paths: Paths of the data.
        **changes: Attributes of the config or of its `ExampleSettings`.
    """
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        make_tokenizer(tokenizer)
    config = TokenizeConfig(
        type="text",
        paths=tuple(map(str, paths)),
        examples=ExampleSettings(eos_id=EOS),
        seq_length=8,
        tokenizer=tokenizer,
        vocab=300,
        cache=folder / "cache",
    )
    return change(config, **({"fields": "text"} if changes.get("type") == "json" else {}) | changes)


def change(config: TokenizeConfig, **changes: Any) -> TokenizeConfig:
    """Return a config with other attributes, or with other attributes of its `ExampleSettings`."""
    names = {field.name for field in fields(ExampleSettings)}
    settings = {name: value for name, value in changes.items() if name in names}
    others = {name: value for name, value in changes.items() if name not in names}
    return replace(config, examples=replace(config.examples, **settings), **others)


def tokenize_quietly(config: TokenizeConfig) -> MappedTokens:
    """Tokenize without progress and notes."""
    return tokenize_files(config, progress=lambda *counts: None, note=lambda text: None)
