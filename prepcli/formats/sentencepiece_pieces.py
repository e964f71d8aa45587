"""The pieces of a SentencePiece model, as bytes of its protobuf message.

A model is one message `ModelProto`. Its field 1 is the list of pieces: `piece` (1, text), `score` (2, float32) and
`type` (3). A parser appends the entries of a list in the order of the bytes. Further bytes at the end of the file are
therefore further pieces, and all other bytes stay.

Source: `sentencepiece_model.proto` of SentencePiece.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

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
