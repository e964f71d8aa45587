"""The tokenizer in a SentencePiece model, to look up tokens and to split texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prepcli.core.errors import GET_AGAIN_HINT
from prepcli.formats.tokenizer_files import (
    has_space_suffix,
    library_errors,
    load_sentencepiece,
    read_added_texts,
)
from prepcli.stores.paths import AnyPath

# SentencePiece writes spaces as this character.
SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class SentencePieceTokenizer:
    """A SentencePiece model.

    Attributes:
        path: Its file.
        processor: The library's processor.
        added_contents: Texts of the unknown, control and user-defined pieces.
        has_space_suffix: Whether the space of a word follows the word.
    """

    path: AnyPath
    processor: Any
    added_contents: list[str]
    has_space_suffix: bool = False

    @property
    def size(self) -> int:
        """Number of pieces."""
        return self.processor.get_piece_size()

    def token_id(self, content: str) -> int | None:
        """Return the id of a piece, or None for an unknown text."""
        token_id = self.processor.piece_to_id(content)
        # The library returns the id of `<unk>` for each unknown text.
        if self.processor.id_to_piece(token_id) != content:
            return None
        return token_id

    def normalize(self, content: str) -> str:
        """Return the text unchanged: user-defined pieces are found before a text is normalized."""
        return content

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ids of each text. Special tokens and the added space are left out.

        Raises:
            PrepError: The library fails.
        """
        with library_errors(f"{self.path} cannot encode the tokens", GET_AGAIN_HINT):
            encoded: list[list[int]] = self.processor.encode(list(texts), out_type=int)
        space = self.token_id(SPACE)
        pieces: list[tuple[int, ...]] = []
        for ids in encoded:
            pieces.append(self._without_space(ids, space))
        return pieces

    def _without_space(self, ids: Sequence[int], space: int | None) -> tuple[int, ...]:
        """Return the ids of a text without the added space before or after it. A text of one id stays."""
        if len(ids) < 2:
            return tuple(ids)
        if self.has_space_suffix and ids[-1] == space:
            return tuple(ids[:-1])
        if not self.has_space_suffix and ids[0] == space:
            return tuple(ids[1:])
        return tuple(ids)


def parse_sentencepiece(path: AnyPath, data: bytes) -> SentencePieceTokenizer:
    """Return the tokenizer in the bytes of a SentencePiece model.

    Args:
        path: Its file, for messages.
        data: The bytes.

    Raises:
        PrepError: The bytes are no model, or the extra `sentencepiece` is not installed.
    """
    with library_errors(f"{path} is not a SentencePiece model", GET_AGAIN_HINT):
        processor = load_sentencepiece(path, data)
        return SentencePieceTokenizer(
            path, processor, read_added_texts(data), has_space_suffix(data)
        )
