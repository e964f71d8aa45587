"""The small files of a checkpoint that computing needs: the tokenizer, and the tokens that end a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prepcli.errors import PrepError
from prepcli.sources.source import Source, read_config

GENERATION_CONFIG_FILE = "generation_config.json"


def find_source_tokenizer(source: Source) -> Path | None:
    """Return the tokenizer of a checkpoint, a file or a folder that `load_tokenizer` reads; None if it has none."""
    from trainer.data.tokenizer import find_tokenizer

    folders = dict.fromkeys(path.parent for path in source.small_files)
    return next(filter(None, map(find_tokenizer, folders)), None)


def tokenizer_path(source: Source, option: Path | None, *, purpose: str) -> Path:
    """Return the tokenizer of an option, or else of the checkpoint.

    Args:
        source: The checkpoint.
        option: Value of `--tokenizer`.
        purpose: What the tokenizer is for, such as "encode the data".

    Raises:
        PrepError: There is none.
    """
    path = option or find_source_tokenizer(source)
    if path is None:
        why = f"there is no tokenizer.json or SentencePiece model to {purpose} with"
        raise PrepError(f"{source.display_name} has no tokenizer", why, "`--tokenizer PATH`")
    return path


def eos_token_ids(source: Source, vocab: int) -> tuple[int, ...]:
    """Return the token ids that end a text; see `model_eos_token_ids`."""
    path = next((path for path in source.small_files if path.name == GENERATION_CONFIG_FILE), None)
    return model_eos_token_ids(source.config, path, vocab)


def model_eos_token_ids(config: Mapping[str, Any], generation_config: Path | None, vocab: int) -> tuple[int, ...]:
    """Return the token ids that end a text, from generation_config.json or else config.json.

    Ids outside of the vocabulary are left out.

    Args:
        config: The model's config.json.
        generation_config: Its generation_config.json; None if it has none.
        vocab: Vocabulary size.
    """
    eos = (read_config(generation_config) if generation_config else {}).get("eos_token_id", config.get("eos_token_id"))
    ids = (token_id for token_id in (eos if isinstance(eos, list) else [eos]) if type(token_id) is int)
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab)
