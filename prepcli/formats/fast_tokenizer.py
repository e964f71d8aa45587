"""Tokenizers of the `tokenizers` library from the bytes of a tokenizer.json."""

from __future__ import annotations

from tokenizers import Tokenizer

from prepcli.core.errors import PrepError
from prepcli.stores.paths import AnyPath


def load_fast_tokenizer(file: AnyPath, data: bytes) -> Tokenizer:
    """Return the tokenizer in the bytes of a tokenizer.json, without truncation and padding.

    Args:
        file: Its file, for messages.
        data: The bytes. An error of the library is raised as it is: see `library_errors`.

    Raises:
        PrepError: Its ids differ from run to run.
    """
    tokenizer = Tokenizer.from_buffer(data)
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        why = f"its model has dropout {dropout:g}, so that ids would differ from run to run"
        raise PrepError(
            f"{file} is not deterministic", why, f"set `model.dropout` to null in {file}"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
