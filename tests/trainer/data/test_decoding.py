"""Pieces of generated text, and the stop texts that end it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prepcli.formats.tokenizer_files import (
    LibraryTokenizer,
    load_fast_tokenizer,
    load_sentencepiece,
)
from tests.helpers.tokenizer_folders import train_tokenizer
from trainer.data.incremental_decoder import IncrementalDecoder, StopFinder
from trainer.data.tokenizer import TextTokenizer, load_tokenizer

# Property tests: the pieces of a text add up to the text of all tokens, and no piece ends within a character.

# The character that stands for a space in SentencePiece.
SPACE = "\u2581"


BYTES = [f"<0x{byte:02X}>" for byte in b"\xe4\xb8\xad\xf0\x9f\x98\x80A\xff"]


def with_special_tokens(model: models.Model, decoder: decoders.Decoder | None) -> Tokenizer:
    """Return a tokenizer with the special token <s> after the vocabulary."""
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def byte_level_bpe() -> Tokenizer:
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return with_special_tokens(models.BPE(vocab, []), decoders.ByteLevel())


def sentencepiece_bpe() -> Tokenizer:
    """Return a tokenizer with the decoder of LLaMA's, which decodes a run of bytes at once."""
    words = ["<unk>", SPACE, f"{SPACE}a", "b", f"{SPACE}{SPACE}", "\u4e2d", *BYTES]
    model = models.BPE(
        {word: index for index, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True
    )
    parts = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    return with_special_tokens(model, decoders.Sequence(parts))


def unigram() -> Tokenizer:
    words = ["<unk>", SPACE, f"{SPACE}a", "b", f"{SPACE}{SPACE}c", "\u4e2d"]
    return with_special_tokens(
        models.Unigram([(word, -1.0) for word in words], 0), decoders.Metaspace()
    )


def sentencepiece_library() -> LibraryTokenizer:
    """Return a model of the library `sentencepiece` without byte tokens."""
    model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    types = model_pb2.ModelProto.SentencePiece
    words = (SPACE, f"{SPACE}a", "b", f"{SPACE}{SPACE}", f"{SPACE}{SPACE}c", "\u4e2d")
    proto = model_pb2.ModelProto()
    for word, kind in (
        ("<unk>", types.UNKNOWN),
        ("<s>", types.CONTROL),
        *((word, types.NORMAL) for word in words),
    ):
        proto.pieces.add(piece=word, score=-1.0, type=kind)
    return load_sentencepiece(Path("tokenizer.model"), proto.SerializeToString())


def word_level() -> Tokenizer:
    return with_special_tokens(
        models.WordLevel({"<unk>": 0, "a": 1, "bc": 2, ".": 3}, "<unk>"), None
    )


def word_piece() -> Tokenizer:
    words = ["[UNK]", "a", "##b", ".", "n't", "'", "do", "##s"]
    model = models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    return with_special_tokens(model, decoders.WordPiece(cleanup=True))


BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    function.__name__: function
    for function in (byte_level_bpe, sentencepiece_bpe, unigram, word_level, word_piece)
}


@cache
def make_tokenizer(kind: str) -> TextTokenizer:
    """Return a tokenizer of a kind."""
    if kind == "sentencepiece_library":
        codec = sentencepiece_library()
    else:
        codec = load_fast_tokenizer(Path("tokenizer.json"), BUILDERS[kind]().to_str().encode())
    return TextTokenizer(Path("tokenizer.json"), "", codec.max_id, codec)


def decode_in_pieces(
    tokenizer: TextTokenizer, chunks: list[list[int]], preceding_ids: list[int]
) -> list[str]:
    """Return the piece of each chunk, and the rest of the text."""
    decoder = IncrementalDecoder(tokenizer.codec.decode, tokenizer.codec.token, preceding_ids)
    return [*map(decoder.push, chunks), decoder.finish()]


@pytest.mark.parametrize("kind", [*BUILDERS, "sentencepiece_library"])
@given(data=st.data())
def test_pieces_add_up_to_the_text_of_all_tokens(kind: str, data: st.DataObject):
    tokenizer = make_tokenizer(kind)
    ids = st.integers(0, tokenizer.max_id)
    chunks = data.draw(st.lists(st.lists(ids, min_size=1, max_size=4), max_size=12), "chunks")
    preceding_ids = data.draw(st.lists(ids, max_size=5), "preceding ids")
    pieces = decode_in_pieces(tokenizer, chunks, preceding_ids)
    assert "".join(pieces) == tokenizer.decode(
        [token_id for chunk in chunks for token_id in chunk], preceding_ids
    )


@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20)
)
def test_characters_of_several_bytes_are_never_split(text: str):
    """Each token is one byte."""
    tokenizer, pre_tokenizer = (
        make_tokenizer("byte_level_bpe"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    )
    chars = "".join(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    ids = [tokenizer.codec.token_id(char) for char in chars]
    pieces = decode_in_pieces(
        tokenizer, [[token_id] for token_id in ids if token_id is not None], []
    )
    assert (len(ids), "".join(pieces)) == (len(text.encode()), text)
    assert not any("\ufffd" in piece for piece in pieces)


def test_special_token_does_not_end_a_run_of_bytes():
    tokenizer = make_tokenizer("sentencepiece_bpe")
    ids = [tokenizer.codec.token_id(token) or 0 for token in (*BYTES[:2], "<s>", BYTES[2])]
    assert decode_in_pieces(tokenizer, [ids[:3], ids[3:]], []) == ["", "", "\u4e2d"]


def test_each_chunk_of_tokens_returns_its_text():
    tokenizer = make_tokenizer("word_level")
    assert decode_in_pieces(tokenizer, [[1], [2, 3], [1]], [2]) == [" a", " bc .", " a", ""]


def test_spaces_before_a_word_are_kept():
    tokenizer = make_tokenizer("sentencepiece_library")
    ids = [tokenizer.codec.token_id(token) for token in ("b", SPACE, f"{SPACE}a")]
    assert decode_in_pieces(
        tokenizer, [[token_id] for token_id in ids if token_id is not None], []
    ) == [*("b", "", "  a", "")]


# Stop texts end with the same token as `stop_strings` of transformers.


def tokenizer_of(folder: Path, kind: str) -> TextTokenizer:
    """Return a tokenizer of a kind with the special token `<s>`."""
    train_tokenizer(kind, 1).save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def first_stop(
    tokenizer: TextTokenizer, stops: list[str], prompt: list[int], ids: list[int]
) -> int | None:
    """Return the number of new tokens up to the end of the first stop text."""
    find = StopFinder(stops, tokenizer, prompt)
    return next((count for count, token in enumerate(ids, 1) if find(token)), None)


def test_stop_text_may_be_spread_over_tokens(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path, "byte-level")
    ids = [tokenizer.codec.token_id(letter) for letter in "abxyd"]
    assert None not in ids
    tokens = [token for token in ids if token is not None]
    assert first_stop(tokenizer, ["bxy"], [], tokens) == 4
    assert first_stop(tokenizer, ["zz", "x"], [], tokens) == 3
    assert first_stop(tokenizer, ["zz"], [], tokens) is None


def test_stop_text_may_begin_but_not_end_in_the_prompt(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path, "byte-level")
    (prompt,) = tokenizer.encode(["x\n"])
    (ids,) = tokenizer.encode(["a\n"])
    assert first_stop(tokenizer, ["\n\n", "x\n", "\na"], prompt.tolist(), ids.tolist()) == 1
    assert first_stop(tokenizer, ["long enough", "\n"], prompt.tolist(), ids.tolist()) == 2


def test_stop_text_may_be_a_special_token(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path, "byte-level")
    special = tokenizer.codec.token_id("<s>")
    assert special is not None
    (ids,) = tokenizer.encode(["ab"])
    assert first_stop(tokenizer, ["<s>"], [], [*ids.tolist(), special]) == len(ids) + 1


@pytest.mark.parametrize("kind", ["byte-level"])
def test_stop_texts_equal_those_of_transformers(tmp_path: Path, kind: str):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    tokenizer = tokenizer_of(tmp_path, kind)
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    rng = random.Random(0)
    num_found = 0
    for _ in range(60):
        ids = [rng.randint(2, tokenizer.max_id) for _ in range(16)]
        text = tokenizer.decode(ids)
        start = rng.randrange(len(text))
        # Bytes without the rest of their character have no text to search for.
        stops = [
            part
            for part in (text[start : start + rng.randint(1, 6)], "\n\n")
            if "\ufffd" not in part
        ]
        criterion = transformers.StopStringCriteria(reference, stops)
        ends = (
            count
            for count in range(5, 17)
            if criterion(torch.tensor([ids[:count]]), torch.zeros(1, 1)).item()
        )
        expected = next(ends, None)
        found = first_stop(tokenizer, stops, ids[:4], ids[4:])
        assert found == (expected and expected - 4), (stops, ids)
        num_found += expected is not None
    assert num_found > 20
