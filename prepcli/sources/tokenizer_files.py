"""The tokenizer in a tokenizer.json or in a SentencePiece model, to look up tokens and to split texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from prepcli.core.errors import GET_AGAIN_HINT
from prepcli.formats.tokenizer_files import (
    check_normalizer_growth,
    has_space_suffix,
    library_errors,
    load_fast_tokenizer,
    load_sentencepiece,
    normalizer_growth,
    read_added_texts,
)
from prepcli.stores.paths import AnyPath

ANOTHER_TOKENIZER_HINT = "use another tokenizer"
# SentencePiece writes spaces as this character.
SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class JsonTokenizer:
    """A tokenizer of the `tokenizers` library, without truncation and padding.

    Attributes:
        path: Its file.
        tokenizer: The tokenizer.
        growth: Maximum number of output bytes per input byte of the normalizer.
    """

    path: AnyPath
    tokenizer: Tokenizer
    growth: float

    @property
    def size(self) -> int:
        """Largest id plus one, with added tokens."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def added_contents(self) -> list[str]:
        """Texts of the added tokens."""
        return [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]

    def token_id(self, content: str) -> int | None:
        """Return the id of a token, or None for an unknown text."""
        return self.tokenizer.token_to_id(content)

    def normalize(self, content: str) -> str:
        """Return the text of a token as it is searched if it has `normalized`."""
        normalizer = self.tokenizer.normalizer
        if normalizer is None:
            return content
        check_normalizer_growth(self.growth, len(content), str(self.path), ANOTHER_TOKENIZER_HINT)
        with library_errors(f"{self.path} cannot normalize the tokens", ANOTHER_TOKENIZER_HINT):
            return normalizer.normalize_str(content)

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ids of each text, without adding special tokens."""
        num_chars = max(map(len, texts), default=0)
        check_normalizer_growth(self.growth, num_chars, str(self.path), ANOTHER_TOKENIZER_HINT)
        with library_errors(f"{self.path} cannot encode the tokens", ANOTHER_TOKENIZER_HINT):
            encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [tuple(encoding.ids) for encoding in encodings]


def parse_tokenizer(path: AnyPath, data: bytes) -> JsonTokenizer:
    """Return the tokenizer in the bytes of a tokenizer.json."""
    with library_errors(f"{path} is not a valid tokenizer", GET_AGAIN_HINT):
        tokenizer = load_fast_tokenizer(path, data)
        growth = normalizer_growth(data)
    return JsonTokenizer(path, tokenizer, growth)


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
        """Return the ids of each text. Special tokens and the added space are left out."""
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
    """Return the tokenizer in the bytes of a SentencePiece model."""
    with library_errors(f"{path} is not a SentencePiece model", GET_AGAIN_HINT):
        processor = load_sentencepiece(path, data)
        return SentencePieceTokenizer(
            path, processor, read_added_texts(data), has_space_suffix(data)
        )
