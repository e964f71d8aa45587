"""A tokenizer.json with deterministic encoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Encoding, Tokenizer

from trainer.data.examples import TokenIds
from trainer.data.files import io_error
from trainer.models.errors import PrepError

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer of the `tokenizers` library.

    Attributes:
        path: Its tokenizer.json.
        digest: XXH3-128 of the file.
        max_id: Its largest token id.
        tokenizer: The library's tokenizer, without truncation and padding.
    """

    path: Path
    digest: str
    max_id: int
    tokenizer: Tokenizer

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Encode each text by itself, without adding special tokens.

        Texts are spread over threads. Order and ids do not depend on the number of threads, nor on
        TOKENIZERS_PARALLELISM. A special token spelled out in a text becomes its id.

        Args:
            texts: The texts.

        Returns:
            The ids of each text, uint32.

        Raises:
            PrepError: The tokenizer fails.
        """
        return [np.array(encoding.ids, np.uint32) for encoding in self._encode(self.tokenizer.encode_batch_fast, texts)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[TokenIds, npt.NDArray[np.int64]]]:
        """Encode each text as `encode` does, and return where its tokens are.

        Args:
            texts: The texts.

        Returns:
            For each text its ids [T], uint32, and the start and end of each token in the text, in characters [T, 2].

        Raises:
            PrepError: The tokenizer fails.
        """
        encodings = self._encode(self.tokenizer.encode_batch, texts) if texts else []
        return [
            (np.array(encoding.ids, np.uint32), np.array(encoding.offsets, np.int64).reshape(-1, 2))
            for encoding in encodings
        ]

    def _encode(self, encode_batch: Callable[..., list[Encoding]], texts: Sequence[str]) -> list[Encoding]:
        try:
            return encode_batch(list(texts), add_special_tokens=False)
        except Exception as error:  # the library has no exception type of its own
            raise PrepError(f"{self.path} cannot encode the data", str(error), "`--set data.tokenizer=PATH`") from error

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt, with added special tokens; raise PrepError if the tokenizer fails."""
        try:
            return self.tokenizer.encode(text).ids
        except Exception as error:  # the library has no exception type of its own
            raise PrepError(f"{self.path} cannot encode a prompt", str(error), "`--tokens 1,2,3` needs none") from error

    def decode(self, ids: Sequence[int], preceding_ids: Sequence[int] = ()) -> str:
        """Decode ids to text, without special tokens.

        Tokenizers strip a leading space. To keep it, the ids are decoded together with the preceding ids.

        Args:
            ids: The ids.
            preceding_ids: Ids that come before them, not part of the result.
        """
        prefix = self.tokenizer.decode(list(preceding_ids))
        text = self.tokenizer.decode([*preceding_ids, *ids])
        return text[len(prefix) :] if text.startswith(prefix) else self.tokenizer.decode(list(ids))

    def check_in_vocab(self, token_id: int, vocab_size: int) -> None:
        """Raise PrepError unless an id of the data is below the model's vocabulary size without padding."""
        if token_id < vocab_size:
            return
        token = self.tokenizer.id_to_token(token_id)
        what = f"id {token_id:,} ({token!r}) of {self.path} is not in the model's vocabulary"
        why = f"the vocabulary without padding has {vocab_size:,} tokens; the tokenizer has ids up to {self.max_id:,}"
        raise PrepError(what, why, "`--set data.tokenizer=PATH` with the tokenizer of the model")


def load_tokenizer(path: Path) -> TextTokenizer:
    """Load a tokenizer.json; its truncation and padding are turned off, so that documents are encoded whole.

    Args:
        path: The file, or a folder that contains a tokenizer.json.

    Raises:
        PrepError: The file is missing, invalid, or encodes nondeterministically.
    """
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise _missing_tokenizer_error(path) from None
    except OSError as error:
        raise io_error(file, error) from error
    tokenizer = _parse_tokenizer(file, data)
    _check_deterministic(file, tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    max_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    return TextTokenizer(path=file, digest=xxhash.xxh3_128_hexdigest(data), max_id=max_id, tokenizer=tokenizer)


def check_tokenizer_exists(path: Path) -> None:
    """Raise PrepError unless the path is a file or a folder that contains a tokenizer.json."""
    if not (path / TOKENIZER_FILE if path.is_dir() else path).is_file():
        raise _missing_tokenizer_error(path)


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
        why = f"looked for a {TOKENIZER_FILE}, or a folder that has one"
        return PrepError(f"no tokenizer at {path}", why, hint)
    names = sorted(file.name for file in path.glob("*token*"))
    why = f"looked for {TOKENIZER_FILE}" + (f"; found {', '.join(names)}" if names else "")
    return PrepError(f"{path} has no {TOKENIZER_FILE}", why, hint)
