"""Hugging Face folders with a tokenizer.json of each kind, trained on random words with the tokenizers library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

KINDS = ("byte-level", "byte-fallback", "unigram", "wordpiece", "wordlevel")
SPECIAL = ["<unk>", "<s>"]
VOCAB = 320


def random_texts(seed: int, count: int = 40) -> list[str]:
    """Return texts of words with ASCII and other letters."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdeäß", k=rng.randint(1, 7))) for _ in range(30)]
    return [" ".join(rng.choices(words, k=rng.randint(1, 8))) for _ in range(count)]


def train_tokenizer(kind: str, seed: int) -> Tokenizer:
    """Return a tokenizer with about VOCAB tokens or less."""
    texts = random_texts(seed)
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=seed % 2 == 0)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    elif kind == "byte-fallback":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=tokens, show_progress=False)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=VOCAB, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
    elif kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.WordLevelTrainer(
            vocab_size=VOCAB, special_tokens=SPECIAL, show_progress=False
        )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_model(
    folder: Path,
    kind: str = "byte-level",
    seed: int = 0,
    base: dict[str, Any] = LLAMA,
    *,
    padding: int = 0,
    **changes: Any,
) -> Tokenizer:
    """Write a checkpoint with a tokenizer and its settings, and return the tokenizer.

    Args:
        folder: Folder to write.
        kind: One of KINDS.
        seed: Seed of the words.
        base: Content of config.json.
        padding: Rows without a token.
        **changes: See `make_checkpoint`.
    """
    tokenizer = train_tokenizer(kind, seed)
    size = tokenizer.get_vocab_size()
    make_checkpoint(folder, base, vocab_size=size + padding, **changes)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=seed % 2 == 0)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            "0": {
                "content": "<unk>",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
        },
        "unk_token": "<unk>",
        "bos_token": "<s>",
    }
    special = {"bos_token": "<s>", "unk_token": "<unk>"}
    write_json(folder / "tokenizer_config.json", settings)
    write_json(folder / "special_tokens_map.json", special)
    write_json(folder / "added_tokens.json", {})
    return tokenizer


def write_json(path: Path, value: object) -> None:
    """Write JSON as transformers does."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def side_files(folder: Path) -> dict[str, bytes]:
    """Return the content of the files of the tokenizer, by name."""
    contents: dict[str, bytes] = {}
    for path in sorted(folder.glob("*token*.json")):
        contents[path.name] = path.read_bytes()
    return contents
