"""The small files of a checkpoint that computing needs: the tokenizer, and the defaults of generation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prepcli.core.errors import Option, PrepError, text
from prepcli.core.option_spec import PathLike
from prepcli.sources.generation_config import (
    GENERATION_CONFIG_FILE,
    GenerationDefaults,
    generation_defaults,
)
from prepcli.sources.source import Source
from prepcli.stores.paths import fetch_copies, local_copy


def find_source_tokenizer(source: Source) -> Path | None:
    """Return the path of a checkpoint's tokenizer for `load_tokenizer`. None if the checkpoint has no tokenizer."""
    from trainer.data.tokenizer import find_tokenizer

    # Several files share a folder. A dict drops duplicates and, unlike a set, keeps the order of the source.
    files = [file.path for file in source.small_files if file.is_at_top]
    fetch_copies(files)
    folders = dict.fromkeys(local_copy(path).parent for path in files)
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


def source_generation_defaults(
    source: Source, vocab: int, *, note: Callable[[str], None] = lambda line: None
) -> GenerationDefaults:
    """Return the end tokens and rules of a checkpoint for generation. See `generation_defaults`.

    Args:
        source: The checkpoint.
        vocab: Vocabulary size.
        note: Called with a line about the rules, and one about the fields that are not supported.
    """
    files = [
        local_copy(file.path) for file in source.small_files if file.name == GENERATION_CONFIG_FILE
    ]
    defaults = generation_defaults(source.config, files[0] if files else None, vocab)
    for line in defaults.notes:
        note(line)
    return defaults
