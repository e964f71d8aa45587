"""The encoders of text: tokenizers, SentencePiece and transformers.

Their errors and their memory are handled by `prepcli.formats.tokenizer_files`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonValue
from prepcli.formats.tokenizer_files import load_sentencepiece
from prepcli.stores.files import open_regular_file

# Ids, and the start and end of each token in characters.
EncodedText = tuple[list[int], list[tuple[int, int]]]
# Tokenizer classes of transformers with `add_bos_token` or `add_eos_token` on by default.
BEGINS_PROMPTS = ("CodeLlamaTokenizer",)
ENDS_PROMPTS = ("T5Tokenizer",)


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
        """Encode as `encode_batch` does, and return where each token is in its text.

        Offsets are the start and end of each token in characters.
        """
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the special tokens added by the tokenizer."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without special tokens."""
        ...

    def token(self, token_id: int) -> str | None:
        """Return the text of a token, or None for an unknown id."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the tokenizer does not have it."""
        ...

    def special_ids(self, ids: Collection[int]) -> set[int]:
        """Return the ids of special tokens among known ids. `decode` omits them."""
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
        return [
            encoding.ids
            for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def encode_batch_with_offsets(self, texts: list[str]) -> list[EncodedText]:
        """Encode each text by itself, in threads, and return ids and offsets."""
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

    def special_ids(self, ids: Collection[int]) -> set[int]:
        """Return the ids of special added tokens among `ids`."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token_id for token_id in ids if token_id in added and added[token_id].special}


@dataclass(frozen=True, slots=True)
class SentencePieceCodec:
    """A SentencePiece model.

    Control symbols such as `</s>` in a text are encoded as ordinary characters.

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
        """Encode each text by itself, and return ids and offsets."""
        mappings = self.processor.encode_as_offset_mapping(texts)
        return [(mapping["ids"], mapping["offsets"]) for mapping in mappings]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the begin and end tokens of the settings."""
        return self.processor.encode(
            text, out_type=int, add_bos=self.adds_bos, add_eos=self.adds_eos
        )

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without control symbols.

        Ids beyond the vocabulary of the file are ignored: the vocabulary of T5 models is larger.
        """
        return self.processor.decode([token_id for token_id in ids if token_id <= self.max_id])

    def token(self, token_id: int) -> str | None:
        """Return the text of a token."""
        if token_id > self.max_id:
            return None
        return self.processor.id_to_piece(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the model does not have it.

        The library returns the id of `<unk>` for every unknown token.
        """
        token_id = self.processor.piece_to_id(token)
        if token_id == self.processor.unk_id():
            return None
        return token_id

    def special_ids(self, ids: Collection[int]) -> set[int]:
        """Return the ids of control symbols among `ids`."""
        return {token_id for token_id in ids if self.processor.is_control(token_id)}


@dataclass(frozen=True, slots=True)
class TransformersCodec:
    """A transformers tokenizer, loaded with `trust_remote_code=False`."""

    tokenizer: Any

    @property
    def max_id(self) -> int:
        """Largest token id, of added tokens too."""
        return max(self.tokenizer.get_vocab().values(), default=0)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by itself."""
        if not texts:
            return []
        return self.tokenizer(texts, add_special_tokens=False, truncation=False, padding=False)[
            "input_ids"
        ]

    def encode_batch_with_offsets(self, texts: list[str]) -> list[EncodedText]:
        """Encode each text by itself, and return ids and offsets.

        Tokenizers written in Python have no offsets. They raise NotImplementedError.
        """
        options = {"add_special_tokens": False, "truncation": False, "padding": False}
        encoded = self.tokenizer(texts, return_offsets_mapping=True, **options)
        return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the special tokens of the tokenizer."""
        return self.tokenizer(text, truncation=False, padding=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without special tokens."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def token(self, token_id: int) -> str | None:
        """Return the text of a token."""
        return self.tokenizer.convert_ids_to_tokens(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token."""
        return self.tokenizer.get_vocab().get(token)

    def special_ids(self, ids: Collection[int]) -> set[int]:
        """Return the ids of special tokens among `ids`."""
        return {*ids} & {*self.tokenizer.all_special_ids}


def sentencepiece_codec(
    file: Path, data: bytes, settings: Mapping[str, JsonValue]
) -> SentencePieceCodec:
    """Return the codec of a SentencePiece model.

    Args:
        file: The file, for errors.
        data: Its content.
        settings: Content of the tokenizer_config.json in the same folder, empty without that file.
            `add_bos_token` and `add_eos_token` set the tokens around a prompt.

    Raises:
        PrepError: The extra `sentencepiece` is not installed.
        Exception: The file is not such a model. The library defines no exception type.
    """
    processor = load_sentencepiece(file, data)
    class_name = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    return SentencePieceCodec(
        processor,
        adds_bos=bool(settings.get("add_bos_token", class_name in BEGINS_PROMPTS)),
        adds_eos=bool(settings.get("add_eos_token", class_name in ENDS_PROMPTS)),
    )


def transformers_codec(folder: Path) -> TransformersCodec:
    """Return the codec of a tokenizer built by transformers.

    Raises:
        PrepError: The extra `hf` is not installed, or a file is a pointer of Git LFS.
        Exception: transformers cannot read the tokenizer without its code. It raises errors of many
            types.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        what = f"cannot read the tokenizer of {folder}"
        raise PrepError(
            what, "transformers is not installed", "`pip install 'prepcli[hf]'`"
        ) from error
    # transformers opens the files by itself.
    for path in sorted(folder.iterdir()):
        if path.is_file():
            open_regular_file(path).close()
    return TransformersCodec(
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    )
