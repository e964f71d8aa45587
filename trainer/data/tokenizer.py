"""Tokenizers with deterministic encoding: a tokenizer.json, a SentencePiece model, or files that transformers reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Tokenizer

from trainer.data.codecs import Codec, FastCodec, sentencepiece_codec, transformers_codec
from trainer.data.examples import TokenIds
from trainer.data.files import io_error
from trainer.models.errors import PrepError

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_SUFFIX = ".model"
SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model")  # with the ids of the library; other names may shift them
SETTINGS_FILE = "tokenizer_config.json"
VOCABULARY_FILES = ("vocab.json", "vocab.txt")  # of tokenizers that transformers builds
# Files that decide the ids of a tokenizer that transformers builds
TRANSFORMERS_FILES = (
    *(SETTINGS_FILE, *VOCABULARY_FILES, "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "config.json"),
)

EncodedT = TypeVar("EncodedT")


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer of one of the libraries.

    Attributes:
        path: Its file, or its folder.
        digest: XXH3-128 of its files.
        max_id: Its largest token id.
        codec: Its library.
    """

    path: Path
    digest: str
    max_id: int
    codec: Codec

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode each text by itself, without adding special tokens.

        Texts are spread over threads. Order and ids do not depend on the number of threads, nor on
        TOKENIZERS_PARALLELISM. A special token spelled out in a text becomes its id, except in a SentencePiece model.

        Args:
            texts: The texts.

        Returns:
            The ids of each text, uint32.

        Raises:
            PrepError: The tokenizer fails.
        """
        return [np.array(ids, np.uint32) for ids in self._encode(self.codec.encode_batch, texts)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[TokenIds, npt.NDArray[np.int64]]]:
        """Encode each text as `encode` does, and return where its tokens are.

        Args:
            texts: The texts.

        Returns:
            For each text its ids [T], uint32, and the start and end of each token in the text, in characters [T, 2].

        Raises:
            PrepError: The tokenizer fails.
        """
        encodings = self._encode(self.codec.encode_batch_with_offsets, texts) if texts else []
        return [(np.array(ids, np.uint32), np.array(offsets, np.int64).reshape(-1, 2)) for ids, offsets in encodings]

    def _encode(self, encode_batch: Callable[[list[str]], list[EncodedT]], texts: Sequence[str]) -> list[EncodedT]:
        try:
            return encode_batch(list(texts))
        except Exception as error:  # the libraries have no exception type of their own
            raise PrepError(f"{self.path} cannot encode the data", str(error), "`--set data.tokenizer=PATH`") from error

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt, with added special tokens; raise PrepError if the tokenizer fails."""
        try:
            return self.codec.encode_prompt(text)
        except Exception as error:  # the libraries have no exception type of their own
            raise PrepError(f"{self.path} cannot encode a prompt", str(error), "`--tokens 1,2,3` needs none") from error

    def decode(self, ids: Sequence[int], preceding_ids: Sequence[int] = ()) -> str:
        """Decode ids to text, without special tokens.

        Tokenizers strip a leading space. To keep it, the ids are decoded together with the preceding ids.

        Args:
            ids: The ids.
            preceding_ids: Ids that come before them, not part of the result.
        """
        prefix = self.codec.decode(list(preceding_ids))
        text = self.codec.decode([*preceding_ids, *ids])
        return text[len(prefix) :] if text.startswith(prefix) else self.codec.decode(list(ids))

    def check_in_vocab(self, token_id: int, vocab_size: int) -> None:
        """Raise PrepError unless an id of the data is below the model's vocabulary size without padding."""
        if token_id < vocab_size:
            return
        token = self.codec.token(token_id)
        what = f"id {token_id:,} ({token!r}) of {self.path} is not in the model's vocabulary"
        why = f"the vocabulary without padding has {vocab_size:,} tokens; the tokenizer has ids up to {self.max_id:,}"
        raise PrepError(what, why, "`--set data.tokenizer=PATH` with the tokenizer of the model")


def load_tokenizer(path: Path) -> TextTokenizer:
    """Load a tokenizer. Its truncation and padding are turned off, so that documents are encoded whole.

    Args:
        path: A tokenizer.json, a SentencePiece model with the suffix `.model`, or a folder. In a folder the first of
            these is used, or else the files of a tokenizer that transformers builds.

    Raises:
        PrepError: The file is missing, invalid, or encodes nondeterministically, or its library is not installed.
    """
    found = find_tokenizer(path)
    if found is None:
        raise _missing_tokenizer_error(path)
    if found.is_dir():
        return _load_from_transformers(found)
    try:
        data = found.read_bytes()
    except FileNotFoundError:
        raise _missing_tokenizer_error(path) from None
    except OSError as error:
        raise io_error(found, error) from error
    if found.suffix == SENTENCEPIECE_SUFFIX:
        codec = sentencepiece_codec(found, data, _read_settings(found.parent / SETTINGS_FILE))
    else:
        codec = _load_fast(found, data)
    return TextTokenizer(found, xxhash.xxh3_128_hexdigest(data), codec.max_id, codec)


def find_tokenizer(path: Path) -> Path | None:
    """Return the file or folder that `load_tokenizer` reads for a path; None if there is none.

    Args:
        path: A file, or a folder.
    """
    if not path.is_dir():
        return path if path.is_file() else None
    files = (path / name for name in (TOKENIZER_FILE, *SENTENCEPIECE_FILES))
    if (file := next((file for file in files if file.is_file()), None)) is not None:
        return file
    return path if any((path / name).is_file() for name in VOCABULARY_FILES) else None


def check_tokenizer_exists(path: Path) -> None:
    """Raise PrepError unless the path is a file, or a folder that contains a tokenizer."""
    if find_tokenizer(path) is None:
        raise _missing_tokenizer_error(path)


def _load_fast(file: Path, data: bytes) -> FastCodec:
    tokenizer = _parse_tokenizer(file, data)
    _check_deterministic(file, tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return FastCodec(tokenizer)


def _load_from_transformers(folder: Path) -> TextTokenizer:
    """Load the tokenizer that transformers builds; the version of transformers is part of its digest."""
    codec = transformers_codec(folder)
    digest = xxhash.xxh3_128(f"transformers {version('transformers')}".encode())
    for name in TRANSFORMERS_FILES:
        if (folder / name).is_file():
            data = (folder / name).read_bytes()
            digest.update(f"{name} {len(data)} ".encode() + data)
    return TextTokenizer(folder, digest.hexdigest(), codec.max_id, codec)


def _read_settings(path: Path) -> Mapping[str, Any]:
    """Return the content of a tokenizer_config.json; empty if there is none."""
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise PrepError(f"{path} is broken", str(error)) from error
    return settings if isinstance(settings, dict) else {}


def _parse_tokenizer(file: Path, data: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library has no exception type of its own
        raise PrepError(f"{file} is not a valid tokenizer", str(error), "`--set data.tokenizer=PATH`") from error


def _check_deterministic(file: Path, tokenizer: Tokenizer) -> None:
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        why = f"its model has dropout {dropout:g}, so that ids would differ from run to run"
        raise PrepError(f"{file} is not deterministic", why, f"set `model.dropout` to null in {file}")


def _missing_tokenizer_error(path: Path) -> PrepError:
    hint = "`--set data.tokenizer=PATH`"
    if not path.is_dir():
        why = f"looked for a {TOKENIZER_FILE} or a SentencePiece model, or a folder that has one"
        return PrepError(f"no tokenizer at {path}", why, hint)
    names = sorted(file.name for file in path.glob("*token*"))
    looked_for = f"looked for {TOKENIZER_FILE}, {', '.join(SENTENCEPIECE_FILES)}, {' and '.join(VOCABULARY_FILES)}"
    why = looked_for + (f"; found {', '.join(names)}" if names else "")
    return PrepError(f"{path} has no tokenizer", why, hint)
