"""Processors of the SentencePiece library from the bytes of a model."""

from __future__ import annotations

from typing import Any

from prepcli.core.errors import PrepError
from prepcli.stores.paths import AnyPath


def load_sentencepiece(file: AnyPath, data: bytes) -> Any:
    """Return the library's processor of a SentencePiece model.

    Args:
        file: The file, for errors.
        data: Its content.

    Raises:
        PrepError: The extra `sentencepiece` is not installed.
        Exception: The file is not such a model. The library defines no exception type.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ModuleNotFoundError as error:
        hint = "`pip install 'prepcli[sentencepiece]'`"
        raise PrepError(f"cannot read {file}", "sentencepiece is not installed", hint) from error
    processor = SentencePieceProcessor()
    processor.LoadFromSerializedProto(data)
    return processor
