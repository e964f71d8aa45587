"""The libraries of tokenizers in a child process: tokenizers and SentencePiece.

Each class loads a tokenizer of its library. `prepcli.formats.tokenizer_files` calls its methods from the parent.
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Bytes of texts that are encoded at once by a thread.
BATCH_NBYTES = 1 << 18

# Ids, and the start and end of each token in characters.
EncodedText = tuple[list[int], list[tuple[int, int]]]


class Codec(ABC):
    """A tokenizer of a library.

    Attributes:
        is_threaded: Whether several threads encode at once, and leave other threads to the library.
    """

    is_threaded = False

    @abstractmethod
    def describe(self) -> tuple[int, list[str], float | None]:
        """Return the largest id plus one, the texts of added tokens, and the dropout of the model."""

    @abstractmethod
    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by itself, without adding special tokens."""

    @abstractmethod
    def encode_texts_with_offsets(self, texts: list[str]) -> list[EncodedText]:
        """Encode as `encode_texts` does, and return where each token is in its text."""

    @abstractmethod
    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the special tokens added by the tokenizer."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without special tokens."""

    @abstractmethod
    def token(self, token_id: int) -> str | None:
        """Return the text of a token, or None for an unknown id."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the tokenizer does not have it."""

    @abstractmethod
    def special_ids(self, ids: list[int]) -> list[int]:
        """Return the ids of special tokens among known ids. `decode` omits them."""

    def normalize(self, text: str) -> str:
        """Return the text of an added token as it is searched."""
        return text

    def encode(self, lengths: list[int], data: bytes) -> tuple[list[int], bytes]:
        """Encode texts.

        Args:
            lengths: Bytes of each text.
            data: The texts in UTF-8, joined.

        Returns:
            The number of ids of each text, and the ids as uint32, joined.
        """
        counts: list[int] = []
        joined = array("I")
        batches = [*_batches(lengths, data)]
        num_threads = 1
        if self.is_threaded:
            num_threads = max(1, min(len(batches), len(os.sched_getaffinity(0))))
        with ThreadPoolExecutor(num_threads) as executor:
            for batch_counts, ids in executor.map(self._encode_joined, batches):
                counts += batch_counts
                joined += ids
        return counts, joined.tobytes()

    def _encode_joined(self, texts: list[str]) -> tuple[list[int], array[int]]:
        encoded = self.encode_texts(texts)
        return [len(ids) for ids in encoded], array("I", itertools.chain.from_iterable(encoded))

    def encode_with_offsets(
        self, lengths: list[int], data: bytes
    ) -> tuple[list[int], bytes, bytes]:
        """Encode texts as `encode` does, and return the start and end of each token in characters, as int64 too."""
        counts: list[int] = []
        joined = array("I")
        places = array("q")
        for texts in _batches(lengths, data):
            for ids, offsets in self.encode_texts_with_offsets(texts):
                counts.append(len(ids))
                joined.extend(ids)
                places.extend(itertools.chain.from_iterable(offsets))
        return counts, joined.tobytes(), places.tobytes()


def _batches(lengths: Sequence[int], data: bytes) -> Iterator[list[str]]:
    """Yield joined texts in lists of about BATCH_NBYTES."""
    texts: list[str] = []
    start = batch_start = 0
    for length in lengths:
        texts.append(data[start : start + length].decode("utf-8", "surrogatepass"))
        start += length
        if start - batch_start >= BATCH_NBYTES:
            yield texts
            texts = []
            batch_start = start
    if texts:
        yield texts


class FastCodec(Codec):
    """A tokenizer of the `tokenizers` library, without truncation and padding.

    The library spreads the texts of a call over its threads, without Python's lock, and then converts the ids with it.
    Several calls at once keep the cores busy.
    """

    is_threaded = True

    def __init__(self, data: bytes) -> None:
        """Load the bytes of a tokenizer.json."""
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_buffer(data)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._added = self._tokenizer.get_added_tokens_decoder()

    def describe(self) -> tuple[int, list[str], float | None]:
        """Return the size, the texts of added tokens in the order of their ids, and the dropout."""
        size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = [token.content for token in self._added.values()]
        return size, added, getattr(self._tokenizer.model, "dropout", None)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by itself, in threads."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_texts_with_offsets(self, texts: list[str]) -> list[EncodedText]:
        """Encode each text by itself, in threads, and return ids and offsets."""
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the tokens of the post-processor."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without special tokens."""
        return self._tokenizer.decode(ids)

    def token(self, token_id: int) -> str | None:
        """Return the text of a token."""
        return self._tokenizer.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token."""
        return self._tokenizer.token_to_id(token)

    def special_ids(self, ids: list[int]) -> list[int]:
        """Return the ids of special added tokens among `ids`."""
        return [
            token_id
            for token_id in ids
            if token_id in self._added and self._added[token_id].special
        ]

    def normalize(self, text: str) -> str:
        """Return the text as the normalizer writes it."""
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return text
        return normalizer.normalize_str(text)


class SentencePieceCodec(Codec):
    """A SentencePiece model.

    Control symbols such as `</s>` in a text are encoded as ordinary characters.
    """

    def __init__(self, data: bytes, adds_bos: bool = False, adds_eos: bool = False) -> None:
        """Load the bytes of a model.

        Args:
            data: The bytes.
            adds_bos: Put the begin token before a prompt.
            adds_eos: Put the end token after a prompt.
        """
        from sentencepiece import SentencePieceProcessor

        self._processor: Any = SentencePieceProcessor()
        self._processor.LoadFromSerializedProto(data)
        self._adds = {"add_bos": adds_bos, "add_eos": adds_eos}

    def describe(self) -> tuple[int, list[str], float | None]:
        """Return the number of pieces. The file has the texts of the added ones."""
        return self._processor.get_piece_size(), [], None

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Encode each text by itself, in threads."""
        return self._processor.encode(texts, out_type=int)

    def encode_texts_with_offsets(self, texts: list[str]) -> list[EncodedText]:
        """Encode each text by itself, and return ids and offsets."""
        mappings = self._processor.encode_as_offset_mapping(texts)
        return [(mapping["ids"], mapping["offsets"]) for mapping in mappings]

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text with the begin and end tokens of the settings."""
        return self._processor.encode(text, out_type=int, **self._adds)

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, without control symbols.

        Ids beyond the vocabulary of the file are ignored: the vocabulary of T5 models is larger.
        """
        size = self._processor.get_piece_size()
        return self._processor.decode([token_id for token_id in ids if token_id < size])

    def token(self, token_id: int) -> str | None:
        """Return the text of a token."""
        if token_id >= self._processor.get_piece_size():
            return None
        return self._processor.id_to_piece(token_id)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the model does not have it."""
        token_id = self._processor.piece_to_id(token)
        # The library returns the id of `<unk>` for each unknown token.
        if self._processor.id_to_piece(token_id) != token:
            return None
        return token_id

    def special_ids(self, ids: list[int]) -> list[int]:
        """Return the ids of control symbols among `ids`."""
        return [token_id for token_id in ids if self._processor.is_control(token_id)]
