"""The libraries that encode text: tokenizers, SentencePiece, and transformers for tokenizers of other files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from trainer.models.errors import PrepError

EncodedText = tuple[list[int], list[tuple[int, int]]]  # ids, and the start and end of each token in characters
ENDS_PROMPTS = ("T5Tokenizer",)  # classes that put the end token after a text, unless their settings say otherwise


class Codec(Protocol):
    """Encoder and decoder of a tokenizer. It raises the errors of its library."""

    @property
    def max_id(self) -> int:
        """Largest token id."""
        ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by itself, without adding special tokens."""
        ...

    def encode_batch_with_offsets(self, texts: list[str]) -> list[EncodedText]:
        """Encode as `encode_batch` does; return ids, and start and end of each token in the text, in characters."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the special tokens that the tokenizer adds."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without special tokens."""
        ...

    def token(self, token_id: int) -> str | None:
        """Return the text of a token; None for an unknown id."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; None if the tokenizer lacks it."""
        ...


@dataclass(frozen=True, slots=True)
class FastCodec:
    """A tokenizer of the `tokenizers` library, without truncation and padding."""

    tokenizer: Tokenizer

    @property
    def max_id(self) -> int:
        """Largest token id, of added tokens too."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by itself, in threads."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_batch_with_offsets(self, texts: list[str]) -> list[EncodedText]:
        """Encode each text by itself, in threads; return ids and offsets."""
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the tokens of the post-processor."""
        return self.tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without special tokens."""
        return self.tokenizer.decode(ids)

    def token(self, token_id: int) -> str | None:
        """Return the text of a token."""
        return self.tokenizer.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token."""
        return self.tokenizer.token_to_id(token)


@dataclass(frozen=True, slots=True)
class SentencePieceCodec:
    """A SentencePiece model. Control symbols such as `</s>` that are spelled out in a text are encoded as text.

    Attributes:
        processor: The library's processor.
        adds_bos: Put the begin token before a prompt.
        adds_eos: Put the end token after a prompt.
    """

    processor: Any
    adds_bos: bool = False
    adds_eos: bool = False

    @property
    def max_id(self) -> int:
        """Largest token id."""
        return self.processor.get_piece_size() - 1

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by itself, in threads."""
        return self.processor.encode(texts, out_type=int)

    def encode_batch_with_offsets(self, texts: list[str]) -> list[EncodedText]:
        """Encode each text by itself; return ids and offsets."""
        mappings = self.processor.encode_as_offset_mapping(texts)
        return [(mapping["ids"], mapping["offsets"]) for mapping in mappings]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the begin and end tokens of the settings."""
        return self.processor.encode(text, out_type=int, add_bos=self.adds_bos, add_eos=self.adds_eos)

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without control symbols, and without ids that only a model has, as T5 does."""
        return self.processor.decode([token_id for token_id in ids if token_id <= self.max_id])

    def token(self, token_id: int) -> str | None:
        """Return the text of a token."""
        return self.processor.id_to_piece(token_id) if token_id <= self.max_id else None

    def token_id(self, token: str) -> int | None:
        """Return the id of a token; the library has the id of the unknown token for an unknown one."""
        token_id = self.processor.piece_to_id(token)
        return None if token_id == self.processor.unk_id() else token_id


@dataclass(frozen=True, slots=True)
class TransformersCodec:
    """A tokenizer of transformers, without its code from a hub."""

    tokenizer: Any

    @property
    def max_id(self) -> int:
        """Largest token id, of added tokens too."""
        return max(self.tokenizer.get_vocab().values(), default=0)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by itself."""
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=False, truncation=False, padding=False)["input_ids"]

    def encode_batch_with_offsets(self, texts: list[str]) -> list[EncodedText]:
        """Encode each text by itself; return ids and offsets. Tokenizers written in Python have no offsets."""
        options = {"add_special_tokens": False, "truncation": False, "padding": False}
        encoded = self.tokenizer(texts, return_offsets_mapping=True, **options)
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the special tokens of the tokenizer."""
        return self.tokenizer(text, truncation=False, padding=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token(self, token_id: int) -> str | None:
        """Return the text of a token."""
        return self.tokenizer.convert_ids_to_tokens(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token."""
        return self.tokenizer.get_vocab().get(token)


def sentencepiece_codec(file: Path, data: bytes, settings: Mapping[str, Any]) -> SentencePieceCodec:
    """Return the codec of a SentencePiece model.

    Args:
        file: The file, for errors.
        data: Its content.
        settings: Content of the tokenizer_config.json beside it; empty without one. `add_bos_token` and
            `add_eos_token` set the tokens around a prompt.

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
    class_name = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    return SentencePieceCodec(
        processor,
        adds_bos=bool(settings.get("add_bos_token")),
        adds_eos=bool(settings.get("add_eos_token", class_name in ENDS_PROMPTS)),
    )


def transformers_codec(folder: Path) -> TransformersCodec:
    """Return the codec of a folder whose tokenizer transformers builds from other files.

    Raises:
        PrepError: The extra `hf` is not installed.
        Exception: transformers cannot read the tokenizer without its code. It raises errors of many types.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        what = f"cannot read the tokenizer of {folder}"
        raise PrepError(what, "transformers is not installed", "`pip install 'prepcli[hf]'`") from error
    return TransformersCodec(AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
