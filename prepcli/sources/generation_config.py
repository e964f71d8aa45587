"""The tokens that end a text, as the files of a model name them."""

from __future__ import annotations

from pathlib import Path

from prepcli.sources.source import read_config
from trainer.models.json_types import HFConfig

GENERATION_CONFIG_FILE = "generation_config.json"


def folder_eos_token_ids(config: HFConfig, folder: Path, vocab: int) -> tuple[int, ...]:
    """Return the token ids that end a text, by the generation_config.json of a folder if it has one."""
    file = folder / GENERATION_CONFIG_FILE
    return model_eos_token_ids(config, file if file.is_file() else None, vocab)


def model_eos_token_ids(
    config: HFConfig, generation_config: Path | None, vocab: int
) -> tuple[int, ...]:
    """Return the token ids that end a text, from generation_config.json or else config.json.

    Ids outside of the vocabulary are dropped, e.g. [2, 99] -> (2,) in a vocabulary of 8 tokens.

    Args:
        config: The model's config.json.
        generation_config: Its generation_config.json. None if it has none.
        vocab: Vocabulary size.
    """
    eos = config.get("eos_token_id")
    # The order of transformers' `generate`. The end of a chat turn is often an id that only
    # generation_config.json lists.
    if generation_config is not None:
        eos = read_config(generation_config).get("eos_token_id", eos)
    if isinstance(eos, list):
        listed = eos
    else:
        listed = [eos]
    # `type` instead of `isinstance`: True is not a token id.
    return tuple(token for token in listed if type(token) is int and 0 <= token < vocab)
