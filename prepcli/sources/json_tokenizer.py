"""The tokenizer in a tokenizer.json, to look up tokens and to split texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from prepcli.core.errors import GET_AGAIN_HINT
from prepcli.formats.tokenizer_files import (
    check_normalizer_growth,
    library_errors,
    load_fast_tokenizer,
    normalizer_growth,
)
from prepcli.stores.paths import AnyPath

ANOTHER_TOKENIZER_HINT = "use another tokenizer"


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
        """Return the text of a token as it is searched if it has `normalized`.

        Raises:
            PrepError: The normalizer fails.
        """
        normalizer = self.tokenizer.normalizer
        if normalizer is None:
            return content
        check_normalizer_growth(self.growth, len(content), str(self.path), ANOTHER_TOKENIZER_HINT)
        with library_errors(f"{self.path} cannot normalize the tokens", ANOTHER_TOKENIZER_HINT):
            return normalizer.normalize_str(content)

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ids of each text, without adding special tokens.

        Raises:
            PrepError: The tokenizer fails.
        """
        num_chars = max(map(len, texts), default=0)
        check_normalizer_growth(self.growth, num_chars, str(self.path), ANOTHER_TOKENIZER_HINT)
        with library_errors(f"{self.path} cannot encode the tokens", ANOTHER_TOKENIZER_HINT):
            encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [tuple(encoding.ids) for encoding in encodings]


def parse_tokenizer(path: AnyPath, data: bytes) -> JsonTokenizer:
    """Return the tokenizer in the bytes of a tokenizer.json.

    Args:
        path: Its file, for messages.
        data: The bytes.

    Raises:
        PrepError: The bytes are no tokenizer, or its ids differ from run to run.
    """
    with library_errors(f"{path} is not a valid tokenizer", GET_AGAIN_HINT):
        tokenizer = load_fast_tokenizer(path, data)
        growth = normalizer_growth(data)
    return JsonTokenizer(path, tokenizer, growth)
