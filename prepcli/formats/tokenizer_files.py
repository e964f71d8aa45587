"""Files of tokenizers: their names and limits, their libraries, and guards for files of any origin.

The libraries raise errors of any type, and one of them aborts the process if an allocation fails. The growth of texts
by a normalizer is therefore computed before a text is encoded. SentencePiece models are read and extended as bytes.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prepcli.core.errors import GET_AGAIN_HINT, PrepError
from prepcli.core.json_values import JsonObject, JsonValue
from prepcli.stores.paths import AnyPath

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
# The `tokenizers` library allocates the normalized text without a limit, and aborts the process if
# the allocation fails. A tokenizer of some kilobytes can request any amount: each of k nested
# replacements multiplies the text. The growth is therefore computed before a text is encoded.
# Ordinary normalizers replace a space by the three bytes of U+2581, which is far below this factor.
MAX_GROWTH = 16
# Maximum normalized bytes of a text if the normalizer grows texts more than that.
MAX_GROWN_NBYTES = 1 << 28
# Each map reads the whole text. Tokenizers have one map, of the SentencePiece model that they were made from.
MAX_MAPS = 16
# Longest keys that are searched one by one. Longer keys count with the longest text of the map.
MAX_SEARCHED_NBYTES = 2
BLOCK_NBYTES = 1 << 20
# A unit of the trie (Darts-clone, double array) has 32 bits: label in 0-7, leaf flag in 8, wide flag in 9, offset from
# 10 on. The unit of a leaf holds its value in 0-30, with bit 31 set.
LABEL_MASK = np.uint32(1 << 31 | 0xFF)
VALUE_MASK = np.uint32((1 << 31) - 1)
LEAF_FLAG = np.uint32(1 << 8)
WIDE_FLAG = np.uint32(1 << 9)
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


def load_fast_tokenizer(file: AnyPath, data: bytes) -> Tokenizer:
    """Return the tokenizer in the bytes of a tokenizer.json, without truncation and padding.

    Args:
        file: Its file, for messages.
        data: The bytes. An error of the library is raised as it is: see `library_errors`.

    Raises:
        PrepError: Its ids differ from run to run.
    """
    from tokenizers import Tokenizer

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


def normalizer_growth(tokenizer_json: bytes) -> float:
    """Return an upper bound of the normalized bytes per byte of text, for a valid tokenizer.json.

    Changes by the Unicode tables of the library are not counted: they are small, and no file can change them. A
    `Precompiled` normalizer has its own table, which is counted.

    Raises:
        ValueError: A map is malformed, or there are too many.
    """
    growth = 1.0
    num_maps = 0
    for step in _iter_steps(json.loads(tokenizer_json).get("normalizer")):
        if step.get("type") == "Precompiled":
            num_maps += 1
        if num_maps > MAX_MAPS:
            raise ValueError(f"it has more than {MAX_MAPS} precompiled maps in its normalizer")
        growth *= _max_growth(step)
    return growth


def check_normalizer_growth(growth: float, num_chars: int, file: str, hint: str) -> None:
    """Raise PrepError if a normalizer may turn a text of `num_chars` characters into a huge one.

    Called before encoding: the library aborts the process if an allocation fails.

    Args:
        growth: Result of `normalizer_growth`.
        num_chars: Length of the text.
        file: Name of the tokenizer.
        hint: How to correct it.
    """
    if growth <= MAX_GROWTH or growth * num_chars <= MAX_GROWN_NBYTES:
        return
    why = f"it may turn each byte into {growth:.3g} bytes, and a text has {num_chars:,} characters"
    raise PrepError(f"the normalizer of {file} enlarges texts too much", why, hint)


def _iter_steps(normalizer: JsonValue) -> Iterator[JsonObject]:
    """Yield the normalizers of nested sequences in order, or a single normalizer."""
    if not isinstance(normalizer, dict):
        return
    if normalizer.get("type") != "Sequence":
        yield normalizer
        return
    steps = normalizer.get("normalizers")
    if isinstance(steps, list):
        for step in steps:
            yield from _iter_steps(step)


def _max_growth(normalizer: JsonObject) -> float:
    """Return how many bytes a normalizer makes of one byte at most."""
    if normalizer.get("type") == "Precompiled":
        encoded = normalizer.get("precompiled_charsmap")
        if not isinstance(encoded, str):
            return 1.0
        return charsmap_growth(encoded)
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


def charsmap_growth(encoded: str) -> float:
    """Return an upper bound of the bytes that a map makes of one byte.

    For example, the map of T5 replaces the 3 bytes of U+FDFA by 33 bytes: its growth is 11.

    Args:
        encoded: The map in base64: the bytes of the trie as uint32, the trie, and texts that end with NUL.

    Raises:
        ValueError: It is malformed.
    """
    data = base64.b64decode(encoded)
    try:
        (trie_nbytes,) = struct.unpack_from("<I", data)
        units = np.frombuffer(data, "<u4", count=trie_nbytes // 4, offset=4)
    except (struct.error, ValueError) as error:
        raise ValueError("its precompiled map is too short") from error
    texts = data[4 + trie_nbytes :]
    growth = max(1.0, _longest_text(texts) / (MAX_SEARCHED_NBYTES + 1))
    for key_nbytes, starts in _short_keys(units):
        growth = max(growth, _longest_text_from(texts, starts) / key_nbytes)
    return growth


def _longest_text(texts: bytes) -> int:
    """Return the most bytes between two NULs."""
    octets = np.frombuffer(texts, np.uint8)
    longest = 0
    last_stop = -1
    for first in range(0, octets.size, BLOCK_NBYTES):
        stops = first + np.flatnonzero(octets[first : first + BLOCK_NBYTES] == 0)
        if stops.size:
            longest = max(longest, int(np.diff(stops, prepend=last_stop).max()) - 1)
            last_stop = int(stops[-1])
    return max(longest, octets.size - last_stop - 1)


def _longest_text_from(texts: bytes, starts: np.ndarray) -> int:
    """Return the most bytes from one of the starts to the next NUL. The starts are sorted."""
    longest = 0
    stop = -1
    for start in starts.tolist():
        # A start before the last NUL found has the same one, so each byte is searched once.
        if start > stop:
            stop = texts.find(b"\0", start)
            if stop < 0:
                stop = len(texts)
        longest = max(longest, stop - start)
    return longest


def _short_keys(units: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each number of key bytes up to MAX_SEARCHED_NBYTES, and the starts of the texts of such keys, sorted."""
    if not units.size:
        return
    labels = units & LABEL_MASK
    # A step from a node by a key byte leads to the unit `node ^ byte`, which must have this byte as its label.
    positions = np.flatnonzero((labels >= 1) & (labels <= 0xFF)).astype(np.uint32)
    parents = positions ^ labels[positions]
    children = positions ^ _offsets(units[positions])
    has_leaf = (units[positions] & LEAF_FLAG != 0) & (children < units.size)
    nodes = _offsets(units[:1])
    for key_nbytes in range(1, MAX_SEARCHED_NBYTES + 1):
        is_reached = np.isin(parents, nodes)
        leaves = children[is_reached & has_leaf]
        yield key_nbytes, np.unique(units[leaves] & VALUE_MASK)
        nodes = children[is_reached]


def _offsets(units: np.ndarray) -> np.ndarray:
    """Return the offset of each unit. A wide one is in units of 256."""
    offsets = units >> np.uint32(10)
    return np.where(units & WIDE_FLAG, offsets << np.uint32(8), offsets)


def encode_pieces(texts: Iterable[str]) -> bytes:
    """Return user-defined pieces with score 0, to append to a model.

    >>> encode_pieces(["ab"]).hex(" ")
    '0a 0b 0a 02 61 62 15 00 00 00 00 18 04'
    """
    return b"".join(map(_encode_piece, texts))


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


def _encode_piece(text: str) -> bytes:
    message = _with_length(TEXT_FIELD, text.encode())
    message += _encode_key(SCORE_FIELD, FOUR_BYTES) + struct.pack("<f", 0.0)
    message += _encode_key(TYPE_FIELD, VARINT) + _encode_varint(USER_DEFINED)
    return _with_length(PIECES_FIELD, message)


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
