"""A tokenizer.json, read so that a text always gives the same ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import Tokenizer

from trainer.data.files import io_error
from trainer.models.errors import PrepError

TOKENIZER_FILE = "tokenizer.json"
TokenIds = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer; `digest` is the XXH3-128 of its file, `max_id` the largest id that it can give."""

    path: Path
    digest: str
    max_id: int
    tokenizer: Tokenizer

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of each text by itself, nothing put before or after it. PrepError if the tokenizer gives up.

        Texts are spread over threads; order and ids are the same with any number of them, and with
        TOKENIZERS_PARALLELISM=false. A special token that a text spells out becomes its id.
        """
        try:
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library has no type of its own
            raise PrepError(f"{self.path} cannot encode the data", str(error), "`--set data.tokenizer=PATH`") from error
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that a model goes on from, with what the tokenizer puts before and after one. PrepError if
        the tokenizer gives up."""
        try:
            return self.tokenizer.encode(text).ids
        except Exception as error:  # the library has no type of its own
            raise PrepError(f"{self.path} cannot encode a prompt", str(error), "`--tokens 1,2,3` needs none") from error

    def decode(self, ids: Sequence[int], preceding_ids: Sequence[int] = ()) -> str:
        """What ids say, special ones left out, where those of `after` come before them: tokenizers take off the space
        that a text begins with."""
        before = self.tokenizer.decode(list(preceding_ids))
        whole = self.tokenizer.decode([*preceding_ids, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(list(ids))

    def check_in_vocab(self, token_id: int, vocab_size: int) -> None:
        """PrepError if `top`, an id of the data, is none of the model's true vocabulary."""
        if token_id < vocab_size:
            return
        what = f"id {token_id:,} ({self.tokenizer.id_to_token(token_id)!r}) of {self.path} is not in the model's vocabulary"
        why = f"the true vocabulary, padding apart, is {vocab_size:,}; the tokenizer has ids up to {self.max_id:,}"
        raise PrepError(what, why, "`--set data.tokenizer=PATH` with the tokenizer of the model")


def load_tokenizer(path: Path) -> TextTokenizer:
    """Read a tokenizer.json, or the one of a folder. PrepError if it is missing, broken, or random.

    Truncation and padding that the file asks for are turned off: a document is encoded as a whole.
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
    return TextTokenizer(file, xxhash.xxh3_128_hexdigest(data), max_id, tokenizer)


def check_tokenizer_exists(path: Path) -> None:
    """Check that a tokenizer.json, or a folder that has one, exists. Raises PrepError."""
    if not (path / TOKENIZER_FILE if path.is_dir() else path).is_file():
        raise _missing_tokenizer_error(path)


def _parse_tokenizer(file: Path, data: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the library has no type of its own
        raise PrepError(f"{file} is no tokenizer", str(error), "`--set data.tokenizer=PATH`") from error


def _check_deterministic(file: Path, tokenizer: Tokenizer) -> None:
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        why = f"its model has dropout {dropout:g}, so that ids would differ from run to run"
        raise PrepError(f"{file} encodes at random", why, f"set `model.dropout` to null in {file}")


def _missing_tokenizer_error(path: Path) -> PrepError:
    if not path.is_dir():
        why = f"looked for a {TOKENIZER_FILE}, or a folder that has one"
        return PrepError(f"no tokenizer at {path}", why, "`--set data.tokenizer=PATH`")
    found = sorted(each.name for each in path.glob("*token*"))
    why = f"looked for {TOKENIZER_FILE}; found {', '.join(found)}" if found else f"looked for {TOKENIZER_FILE}"
    return PrepError(f"{path} has no {TOKENIZER_FILE}", why, "`--set data.tokenizer=PATH`")
