"""Files of tokenizers: their names and limits, and their libraries in a child process.

A file of any origin can make its library loop, panic, or allocate any amount: a normalizer of some kilobytes multiplies
each text. SentencePiece models are also read and extended as bytes.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import GET_AGAIN_HINT, PrepError
from prepcli.core.sandbox import MIB, Limits, Sandbox, SandboxError
from prepcli.stores.paths import AnyPath

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
SENTENCEPIECE_SUFFIX = ".model"
# Files with the ids of the library. Under other names, e.g. `sentencepiece.bpe.model` of XLM-R,
# transformers shifts the ids of the library by one.
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")
# Vocabularies of tokenizers that transformers builds.
VOCABULARY_FILES = ("vocab.json", "vocab.txt")
# Far above any tokenizer, and below what a small machine can hold.
MAX_TOKENIZER_NBYTES = 1_000_000_000
# Module of the exception that a panic of Rust code raises. It is no `Exception`.
PANIC_MODULE = "pyo3_runtime"
MAX_CHARS = 300
ANOTHER_TOKENIZER_HINT = "use another tokenizer"
# SentencePiece writes spaces as this character.
SPACE = "\u2581"
# Classes of a child process.
FAST_CODEC = "prepcli.formats.tokenizer_codecs:FastCodec"
SENTENCEPIECE_CODEC = "prepcli.formats.tokenizer_codecs:SentencePieceCodec"
# Limits of the child process. The `tokenizers` library needs about 100 bytes for each byte of a text, and a few times
# the size of its file.
BASE_MEMORY_NBYTES = 2048 * MIB
MEMORY_PER_FILE_BYTE = 32
# Encoding with offsets takes about 280 bytes per byte of a text with one token per byte.
MEMORY_PER_TEXT_BYTE = 512
# CPU time to load a tokenizer. transformers may have to convert it.
LOAD_CPU_S = 600
# CPU time of a call, and bytes of text that a second more is for: far slower than any tokenizer.
CALL_CPU_S = 60
TEXT_NBYTES_PER_CPU_S = 10_000
# Wire types of protobuf. The key of a field has its number in the upper bits and its wire type in the lowest three.
VARINT = 0
EIGHT_BYTES = 1
LENGTH = 2
FOUR_BYTES = 5
FIXED_NBYTES = {EIGHT_BYTES: 8, FOUR_BYTES: 4}
PIECES_FIELD = 1
TRAINER_FIELD = 2
SPACE_SUFFIX_FIELD = 24  # of the settings of the trainer: `treat_whitespace_as_suffix`
TEXT_FIELD = 1
SCORE_FIELD = 2
TYPE_FIELD = 3
# Types of pieces. The texts of the last three are found before a model splits the other text.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
# A byte of a varint has 7 bits. The highest bit says that another byte follows.
CONTINUED = 0x80
MAX_VARINT_NBYTES = 10


class LibraryTokenizer:
    """A tokenizer of a library, in a child process. Its methods raise `SandboxError`: see `library_errors`.

    Attributes:
        size: Largest id plus one, with added tokens.
        added_contents: Texts of the added tokens, of a tokenizer.json only.
    """

    def __init__(self, class_name: str, *arguments: Any, file_nbytes: int = 0) -> None:
        """Load a tokenizer.

        Args:
            class_name: Module and name of a `prepcli.formats.tokenizer_codecs.Codec`.
            *arguments: Its arguments.
            file_nbytes: Size of the file.

        Raises:
            SandboxError: The library cannot load it.
        """
        self._memory_nbytes = BASE_MEMORY_NBYTES + MEMORY_PER_FILE_BYTE * file_nbytes
        limits = Limits(self._memory_nbytes, LOAD_CPU_S)
        self._codec = Sandbox(class_name, arguments, limits=limits)
        self.size, self.added_contents, self.dropout = self._call("describe")

    @property
    def max_id(self) -> int:
        """Largest token id, of added tokens too."""
        return max(0, self.size - 1)

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Encode each text by itself, in threads, without adding special tokens."""
        if not texts:
            return []
        counts, ids = self._call_with_texts("encode", texts)
        return np.split(np.array(np.frombuffer(ids, np.uint32)), np.cumsum(counts[:-1]))

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]]:
        """Encode as `encode` does, and return the start and end of each token in characters [T, 2]."""
        if not texts:
            return []
        counts, ids, offsets = self._call_with_texts("encode_with_offsets", texts)
        ends = np.cumsum(counts[:-1])
        split_ids = np.split(np.array(np.frombuffer(ids, np.uint32)), ends)
        places = np.array(np.frombuffer(offsets, np.int64)).reshape(-1, 2)
        return list(zip(split_ids, np.split(places, ends), strict=True))

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the special tokens added by the tokenizer."""
        return self._call("encode_prompt", text, text_nbytes=len(text))[0]

    def normalize(self, text: str) -> str:
        """Return the text of an added token as it is searched."""
        return self._call("normalize", text, text_nbytes=len(text))[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, without special tokens."""
        return self._call("decode", [int(token_id) for token_id in ids], text_nbytes=len(ids))[0]

    def token(self, token_id: int) -> str | None:
        """Return the text of a token, or None for an unknown id."""
        return self._call("token", int(token_id))[0]

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the tokenizer does not have it."""
        return self._call("token_id", token)[0]

    def special_ids(self, ids: Iterable[int]) -> set[int]:
        """Return the ids of special tokens among known ids. `decode` omits them."""
        return set(self._call("special_ids", [int(token_id) for token_id in ids])[0])

    def _call_with_texts(self, method: str, texts: Sequence[str]) -> list[Any]:
        blocks = [text.encode("utf-8", "surrogatepass") for text in texts]
        data = b"".join(blocks)
        return self._call(method, [len(block) for block in blocks], data, text_nbytes=len(data))

    def _call(self, method: str, *arguments: Any, text_nbytes: int = 0) -> list[Any]:
        limits = Limits(
            self._memory_nbytes + MEMORY_PER_TEXT_BYTE * text_nbytes,
            CALL_CPU_S + text_nbytes // TEXT_NBYTES_PER_CPU_S,
        )
        return self._codec.call(method, *arguments, limits=limits)


def load_fast_tokenizer(file: AnyPath, data: bytes) -> LibraryTokenizer:
    """Return the tokenizer in the bytes of a tokenizer.json, without truncation and padding.

    Raises:
        PrepError: Its ids differ from run to run.
        SandboxError: The library cannot load it.
    """
    tokenizer = LibraryTokenizer(FAST_CODEC, data, file_nbytes=len(data))
    if tokenizer.dropout:
        why = (
            f"its model has dropout {tokenizer.dropout:g}, so that ids would differ from run to run"
        )
        raise PrepError(
            f"{file} is not deterministic", why, f"set `model.dropout` to null in {file}"
        )
    return tokenizer


def load_sentencepiece(
    file: AnyPath, data: bytes, *, adds_bos: bool = False, adds_eos: bool = False
) -> LibraryTokenizer:
    """Return the tokenizer of a SentencePiece model.

    Raises:
        PrepError: The extra `sentencepiece` is not installed.
        SandboxError: The file is not such a model.
    """
    if importlib.util.find_spec("sentencepiece") is None:
        hint = "`pip install 'prepcli[sentencepiece]'`"
        raise PrepError(f"cannot read {file}", "sentencepiece is not installed", hint)
    return LibraryTokenizer(SENTENCEPIECE_CODEC, data, adds_bos, adds_eos, file_nbytes=len(data))


@contextmanager
def library_errors(what: str, hint: str) -> Iterator[None]:
    """Turn every error of a library in the block into a PrepError."""
    try:
        yield
    except PrepError:
        raise
    except Exception as error:
        # The libraries have no exception type of their own.
        why = str(error).partition("\n")[0][:MAX_CHARS]
        if isinstance(error, SandboxError) and error.type_name.startswith(PANIC_MODULE):
            # An error in the file that the library does not check.
            why = f"its library stopped with: {error!s:.{MAX_CHARS}}"
        raise PrepError(what, why, hint) from error


def encode_pieces(texts: Iterable[str]) -> bytes:
    """Return user-defined pieces with score 0, to append to a model.

    >>> encode_pieces(["ab"]).hex(" ")
    '0a 0b 0a 02 61 62 15 00 00 00 00 18 04'
    """
    pieces: list[bytes] = []
    for text in texts:
        message = _with_length(TEXT_FIELD, text.encode())
        message += _encode_key(SCORE_FIELD, FOUR_BYTES) + struct.pack("<f", 0.0)
        message += _encode_key(TYPE_FIELD, VARINT) + _encode_varint(USER_DEFINED)
        pieces.append(_with_length(PIECES_FIELD, message))
    return b"".join(pieces)


def read_added_texts(data: bytes) -> list[str]:
    """Return the texts of the unknown, control and user-defined pieces of a model.

    Raises:
        ValueError: The bytes are not a model.
    """
    texts: list[str] = []
    for number, piece in _read_fields(data):
        if number != PIECES_FIELD or not isinstance(piece, bytes):
            continue
        fields = dict(_read_fields(piece))
        text = fields.get(TEXT_FIELD, b"")
        if fields.get(TYPE_FIELD, NORMAL) in (UNKNOWN, CONTROL, USER_DEFINED):
            if not isinstance(text, bytes):
                raise ValueError("the text of a piece has another type")
            texts.append(text.decode())
    return texts


def has_space_suffix(data: bytes) -> bool:
    """Return whether a model writes the space of a word after the word instead of before it.

    Raises:
        ValueError: The bytes are not a model.
    """
    for number, trainer in _read_fields(data):
        if number == TRAINER_FIELD and isinstance(trainer, bytes):
            return dict(_read_fields(trainer)).get(SPACE_SUFFIX_FIELD, 0) == 1
    return False


def _read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message. Raise ValueError if the message ends early."""
    position = 0
    while position < len(data):
        key, position = _read_varint(data, position)
        number, wire_type = divmod(key, 8)
        if wire_type == VARINT:
            value, position = _read_varint(data, position)
            yield number, value
            continue
        nbytes = FIXED_NBYTES.get(wire_type)
        if wire_type == LENGTH:
            nbytes, position = _read_varint(data, position)
        if nbytes is None:
            raise ValueError(f"field {number} has the wire type {wire_type}")
        if position + nbytes > len(data):
            raise ValueError("it ends within a field")
        yield number, data[position : position + nbytes]
        position += nbytes


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a varint and the position after it. Raise ValueError if there is none."""
    value = 0
    for number, octet in enumerate(data[position : position + MAX_VARINT_NBYTES]):
        value |= (octet % CONTINUED) << 7 * number
        if octet < CONTINUED:
            return value, position + number + 1
    raise ValueError("it ends within a number")


def _with_length(number: int, data: bytes) -> bytes:
    return _encode_key(number, LENGTH) + _encode_varint(len(data)) + data


def _encode_key(number: int, wire_type: int) -> bytes:
    return _encode_varint(8 * number + wire_type)


def _encode_varint(value: int) -> bytes:
    octets = bytearray()
    while value >= CONTINUED:
        octets.append(value % CONTINUED | CONTINUED)
        value //= CONTINUED
    octets.append(value)
    return bytes(octets)


@dataclass(frozen=True, slots=True)
class VocabularyTokenizer:
    """A tokenizer.json or a SentencePiece model with a readable vocabulary.

    Attributes:
        path: Its file.
        library: The tokenizer of the library.
        added_contents: Texts that are found before the other text is split. Of a model its unknown, control and
            user-defined pieces.
        hint: How to correct a file that cannot encode a text.
        is_sentencepiece: Whether it is a SentencePiece model.
        has_space_suffix: Whether the space of a word follows the word.
    """

    path: AnyPath
    library: LibraryTokenizer
    added_contents: list[str]
    hint: str = ANOTHER_TOKENIZER_HINT
    is_sentencepiece: bool = False
    has_space_suffix: bool = False

    @property
    def size(self) -> int:
        """Largest id plus one, with added tokens."""
        return self.library.size

    def token_id(self, content: str) -> int | None:
        """Return the id of a token, or None for an unknown text."""
        return self.library.token_id(content)

    def normalize(self, content: str) -> str:
        """Return the text of a token as it is searched if it has `normalized`.

        User-defined pieces of SentencePiece are found before a text is normalized.
        """
        with library_errors(f"{self.path} cannot normalize the tokens", self.hint):
            return self.library.normalize(content)

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the ids of each text, without special tokens and the space that SentencePiece adds."""
        with library_errors(f"{self.path} cannot encode the tokens", self.hint):
            encoded = [tuple(ids.tolist()) for ids in self.library.encode(texts)]
        if not self.is_sentencepiece:
            return encoded
        space = self.token_id(SPACE)
        # Without the added space before or after a text. A text of one id stays.
        for number, ids in enumerate(encoded):
            if len(ids) > 1 and self.has_space_suffix and ids[-1] == space:
                encoded[number] = ids[:-1]
            elif len(ids) > 1 and not self.has_space_suffix and ids[0] == space:
                encoded[number] = ids[1:]
        return encoded


def parse_tokenizer(path: AnyPath, data: bytes) -> VocabularyTokenizer:
    """Return the tokenizer in the bytes of a tokenizer.json, or of a SentencePiece model."""
    if path.name in SENTENCEPIECE_FILES:
        with library_errors(f"{path} is not a SentencePiece model", GET_AGAIN_HINT):
            return VocabularyTokenizer(
                path,
                load_sentencepiece(path, data),
                read_added_texts(data),
                hint=GET_AGAIN_HINT,
                is_sentencepiece=True,
                has_space_suffix=has_space_suffix(data),
            )
    with library_errors(f"{path} is not a valid tokenizer", GET_AGAIN_HINT):
        library = load_fast_tokenizer(path, data)
    return VocabularyTokenizer(path, library, library.added_contents)
