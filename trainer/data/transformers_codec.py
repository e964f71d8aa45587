"""Tokenizers that transformers builds, in a child process."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from prepcli.formats.tokenizer_codecs import Codec, EncodedText


class TransformersCodec(Codec):
    """A transformers tokenizer, loaded with `trust_remote_code=False`."""

    def __init__(self, folder: str) -> None:
        """Load the tokenizer of a folder."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )

    def describe(self) -> tuple[int, list[str], float | None]:
        """Return the size with added tokens."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1, [], None

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by itself."""
        options = {"add_special_tokens": False, "truncation": False, "padding": False}
        return self._tokenizer(texts, **options)["input_ids"]

    def encode_texts_with_offsets(self, texts: list[str]) -> list[EncodedText]:
        """Encode each text by itself, and return ids and offsets.

        Tokenizers written in Python have no offsets. They raise NotImplementedError.
        """
        options = {"add_special_tokens": False, "truncation": False, "padding": False}
        encoded = self._tokenizer(texts, return_offsets_mapping=True, **options)
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the special tokens of the tokenizer."""
        return self._tokenizer(text, truncation=False, padding=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without special tokens."""
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def token(self, token_id: int) -> str | None:
        """Return the text of a token."""
        return self._tokenizer.convert_ids_to_tokens(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token."""
        return self._tokenizer.get_vocab().get(token)

    def special_ids(self, ids: list[int]) -> list[int]:
        """Return the ids of special tokens among `ids`."""
        return [token_id for token_id in ids if token_id in self._tokenizer.all_special_ids]
