"""The libraries that encode text: tokenizers, SentencePiece and transformers.

Tokenizer files are untrusted. `library_errors` turns every failure of a library into a PrepError.
`check_normalizer_growth` bounds the memory for normalized text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from trainer.models.errors import Key, PrepError, Text
from trainer.models.json_types import JsonObject, JsonValue

# Ids, and the start and end of each token in characters.
EncodedText = tuple[list[int], list[tuple[int, int]]]
# Tokenizer classes of transformers with `add_eos_token` on by default.
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
    """Return the codec of a folder with a tokenizer that only transformers can build.

    Raises:
        PrepError: The extra `hf` is not installed.
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
    return TransformersCodec(
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    )


# Module of the exception that a panic of Rust code raises. It is no `Exception`.
PANIC_MODULE = "pyo3_runtime"
MAX_CHARS = 300


@contextmanager
def library_errors(what: str, hint: str) -> Iterator[None]:
    """Turn every error of a library in the block into a PrepError.

    A panic of Rust is a BaseException, so `except Exception` does not catch it. The cause of
    a panic is an error in the tokenizer file that the library does not check.

    Args:
        what: The failed operation, for the message.
        hint: How to correct it.

    Raises:
        PrepError: The block raised an error.
    """
    try:
        yield
    except PrepError:
        raise
    except Exception as error:
        # The libraries have no exception type of their own.
        first_line = str(error).partition("\n")[0]
        raise PrepError(what, first_line[:MAX_CHARS], hint) from error
    except BaseException as error:
        if type(error).__module__ != PANIC_MODULE:
            raise
        raise PrepError(what, f"its library stopped with: {error!s:.{MAX_CHARS}}", hint) from error


# The `tokenizers` library allocates the normalized text without a limit, and aborts the process if
# the allocation fails. A tokenizer of some kilobytes can request any amount: each of k nested
# replacements multiplies the text. The growth is therefore computed before a text is encoded.
# Ordinary normalizers replace a space by the three bytes of U+2581, which is far below this factor.
MAX_GROWTH = 16
# Maximum normalized bytes of a text if the normalizer grows texts more than that.
MAX_GROWN_NBYTES = 1 << 28


def normalizer_growth(tokenizer_json: bytes) -> float:
    """Return an upper bound of the normalized bytes per byte of text, for a valid tokenizer.json.

    Changes by Unicode tables are not counted: they are small, and no file can change them.
    """
    return _max_growth(json.loads(tokenizer_json).get("normalizer"))


def check_normalizer_growth(growth: float, num_chars: int, file: str) -> None:
    """Raise PrepError if a normalizer may turn a text of `num_chars` characters into a huge one.

    Called before encoding: the library aborts the process if an allocation fails.
    """
    if growth <= MAX_GROWTH or growth * num_chars <= MAX_GROWN_NBYTES:
        return
    why = f"it may turn each byte into {growth:.3g} bytes, and a text has {num_chars:,} characters"
    raise PrepError(
        f"the normalizer of {file} enlarges texts too much",
        why,
        Text(Key("data.tokenizer", "PATH", is_override=True), " with another tokenizer"),
    )


def _max_growth(normalizer: JsonValue) -> float:
    """Return how many bytes a normalizer makes of one byte at most."""
    if not isinstance(normalizer, dict):
        return 1.0
    if normalizer.get("type") == "Sequence":
        growth = 1.0
        steps = normalizer.get("normalizers")
        if isinstance(steps, list):
            for step in steps:
                growth *= _max_growth(step)
        return growth
    if normalizer.get("type") == "Prepend":
        return 1.0 + _text_nbytes(normalizer.get("prepend"))
    if normalizer.get("type") == "Replace":
        return max(1.0, _replacement_growth(normalizer))
    return 1.0


def _replacement_growth(normalizer: JsonObject) -> float:
    """Return the bytes of a replacement for each byte of its pattern.

    A regular expression may match the empty text between any two bytes. Its replacement is then
    added to each byte.
    """
    content = _text_nbytes(normalizer.get("content"))
    pattern = normalizer.get("pattern")
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        return content / max(1, _text_nbytes(pattern["String"]))
    return 1.0 + content


def _text_nbytes(value: JsonValue) -> int:
    """Return the number of UTF-8 bytes of a text, 0 for another value."""
    if not isinstance(value, str):
        return 0
    return len(value.encode("utf-8", "surrogatepass"))
