"""The small files of a checkpoint that computing needs: the tokenizer, and the tokens that end a text."""

from __future__ import annotations

from pathlib import Path

from prepcli.errors import Option, PrepError, text
from prepcli.option_spec import PathLike
from prepcli.sources.generation_config import GENERATION_CONFIG_FILE, model_eos_token_ids
from prepcli.sources.source import Source


def find_source_tokenizer(source: Source) -> Path | None:
    """Return the path of a checkpoint's tokenizer for `load_tokenizer`. None if the checkpoint has no tokenizer."""
    from trainer.data.tokenizer import find_tokenizer

    # Several files share a folder. A dict drops duplicates and, unlike a set, keeps the order of the source.
    folders = dict.fromkeys(file.path.parent for file in source.small_files if file.is_at_top)
    return next(filter(None, map(find_tokenizer, folders)), None)


def tokenizer_path(source: Source, option: PathLike | None, *, purpose: str) -> Path:
    """Return the tokenizer of an option, or else of the checkpoint.

    Args:
        source: The checkpoint.
        option: Value of the option `tokenizer`.
        purpose: What the tokenizer is for, such as "encode the data".

    Raises:
        PrepError: There is none.
    """
    path = Path(option) if option is not None else find_source_tokenizer(source)
    if path is None:
        why = f"there is no tokenizer.json or SentencePiece model to {purpose} with"
        hint = text("{}", Option("tokenizer", "PATH"))
        raise PrepError(f"{source.display_name} has no tokenizer", why, hint)
    return path


def eos_token_ids(source: Source, vocab: int) -> tuple[int, ...]:
    """Return the token ids that end a text. See `model_eos_token_ids`."""
    files = [file.path for file in source.small_files if file.name == GENERATION_CONFIG_FILE]
    return model_eos_token_ids(source.config, files[0] if files else None, vocab)
