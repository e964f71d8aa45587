"""A tiny trained tokenizer, JSON files, and configs that tokenize them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.store import MappedTokens
from trainer.data.tokenize import TokenizeConfig, tokenize_files

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
    path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(documents)))
    return path


def make_config(folder: Path, *paths: Path | str, **changes: Any) -> TokenizeConfig:
    """Return a config for text files with the tokenizer `folder/tokenizer.json`; write it if it is missing."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        make_tokenizer(tokenizer)
    defaults: dict[str, Any] = {
        "type": "text",
        "fields": "text",
        "seq_length": 8,
        "tokenizer": tokenizer,
        "eos_id": EOS,
        "vocab": 300,
        "cache": folder / "cache",
    }
    return TokenizeConfig(paths=tuple(map(str, paths)), **{**defaults, **changes})


def tokenize_quietly(config: TokenizeConfig) -> MappedTokens:
    """Tokenize without progress and notes."""
    return tokenize_files(config, progress=lambda done, total: None, note=lambda text: None)
