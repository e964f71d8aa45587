"""Hugging Face folders with a SentencePiece model alone, trained on a few sentences."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

from tests.helpers.lazy_modules import lazy_module
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS, LLAMA, make_checkpoint
from tests.helpers.tokenizer_folders import write_json

sentencepiece = lazy_module("sentencepiece")

Kind = Literal["bpe", "unigram", "word"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? We see 12345 of them.",
    "def f(x): return {x: 1}  # naïve café, 東京 and Привет мир",
    "the banana bandana aaaa abababab aabbaabb, the theme of the other mother",
] * 20
FILES = {"bpe": "tokenizer.model", "unigram": "spiece.model"}
BASES: dict[str, dict[str, Any]] = {"bpe": LLAMA, "unigram": FAMILY_CONFIGS["t5"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "bpe": {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>"},
    "unigram": {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "pad_token": "<pad>"},
}


def train(kind: Kind, **settings: Any) -> bytes:
    """Return a model with the settings of LLaMA (BPE with bytes) or of T5 (unigram), or with whole words.

    Further settings are those of the trainer of SentencePiece.
    """
    special = {"bpe": {"byte_fallback": True}, "unigram": {"pad_id": 3}, "word": {}}
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=kind,
        vocab_size=40 if kind == "word" else 400,
        hard_vocab_limit=False,
        minloglevel=2,
        **(special[kind] | settings),
    )
    return model.getvalue()


def load(data: bytes) -> Any:
    """Return the library's processor of a model."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(data)
    return processor


def write_model(folder: Path, kind: Kind, *, padding: int = 0, **changes: Any) -> bytes:
    """Write a checkpoint with a SentencePiece model and its settings, and return the model.

    Args:
        folder: Folder to write.
        kind: `bpe` for LLaMA, `unigram` for T5.
        padding: Rows without a token.
        **changes: See `make_checkpoint`.
    """
    data = train(kind)
    size = load(data).get_piece_size()
    make_checkpoint(folder, BASES[kind], vocab_size=size + padding, **changes)
    (folder / FILES[kind]).write_bytes(data)
    write_json(folder / "tokenizer_config.json", SETTINGS[kind])
    write_json(folder / "special_tokens_map.json", {"unk_token": "<unk>"})
    write_json(folder / "added_tokens.json", {"<unk>": 0})
    return data
