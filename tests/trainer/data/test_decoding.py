"""Pieces of generated text, and the stop texts that end it."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import socket
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prepcli.commands.cli.main import main
from prepcli.commands.operations.generate import read_prompts
from prepcli.core.errors import FAILED, PrepError
from prepcli.formats import tokenizer_files
from prepcli.formats.tokenizer_files import (
    LibraryTokenizer,
    load_fast_tokenizer,
    load_sentencepiece,
)
from tests.helpers.slow_cases import slow_except
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


# Tokenizers that are not trusted: panics of the library, growing texts and special files are errors.

BROKEN_MAP = base64.b64encode(b"\x10\0\0\0" + b"\xff" * 16 + b"abc").decode()


def replace_by(pattern: dict[str, str], content: str) -> dict[str, Any]:
    """Return a normalizer or decoder that replaces a pattern."""
    return {"type": "Replace", "pattern": pattern, "content": content}


def write_parts(folder: Path, parts: dict[str, Any]) -> Path:
    """Write a tokenizer of three words with some other parts; return its file."""
    plain = json.loads(
        Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")).to_str()
    )
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(plain | parts))
    return path


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "[X]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {},
}
PANICS = {
    "fixed length of 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "broken map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": BROKEN_MAP}},
    "backtracking": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(a+)+$"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
}


@pytest.mark.parametrize("parts", PANICS.values(), ids=PANICS)
def test_panic_of_the_library_is_an_error(tmp_path: Path, parts: dict[str, Any]):
    path, text = write_parts(tmp_path, parts), "a" * 40 + "b"
    for call in ("encode", "encode_with_offsets"):
        with pytest.raises(PrepError, match=r"tokenizer.json cannot encode the data"):
            getattr(load_tokenizer(path), call)([text, text])
    with pytest.raises(PrepError, match=r"tokenizer.json cannot encode a prompt"):
        load_tokenizer(path).encode_prompt(text)


def test_unknown_token_of_a_template_is_an_error(tmp_path: Path):
    path = write_parts(tmp_path, {"post_processor": TEMPLATE})
    with pytest.raises(PrepError, match=r"cannot encode a prompt - .*no entry found"):
        load_tokenizer(path).encode_prompt("a")


def test_panic_of_a_decoder_is_an_error(tmp_path: Path):
    path = write_parts(
        tmp_path, {"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 2**62}}
    )
    with pytest.raises(PrepError, match=r"tokenizer.json cannot decode"):
        load_tokenizer(path).decode([0, 1])


def test_interrupt_in_the_library_stays_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = load_tokenizer(write_parts(tmp_path, {}))

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tokenizer.codec), "encode_prompt", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode_prompt("a")


def charsmap(texts: bytes) -> dict[str, Any]:
    """Return a normalizer with a map that replaces `a` by the first text."""
    units = [0] * 256
    # `a` is 97. Its unit has the offset 3, so that its leaf is the unit 97 ^ 3 = 98, with the start of the text.
    units[97] = 3 << 10 | 1 << 8 | 97
    units[98] = 1 << 31
    data = struct.pack("<I256I", 4 * len(units), *units) + texts
    encoded = base64.b64encode(data).decode()
    return {"type": "Precompiled", "precompiled_charsmap": encoded}


LONG_MAP = charsmap(b"a" * 1000 + b"\0")
GROWTH = {
    "precompiled maps": {"type": "Sequence", "normalizers": [LONG_MAP, LONG_MAP]},
    "long replacement": replace_by({"String": "a"}, "x" * 1_000_000),
    "long replacement of a pattern": replace_by({"Regex": "."}, "x" * 1_000_000),
    "sequence": {
        "type": "Sequence",
        "normalizers": [replace_by({"String": "a"}, "aa") for _ in range(60)],
    },
    "nested sequences": {
        "type": "Sequence",
        "normalizers": [
            {
                "type": "Sequence",
                "normalizers": [replace_by({"String": "a"}, "aaaa") for _ in range(10)],
            }
            for _ in range(3)
        ],
    },
}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the limits of memory and time a hundredth, or a second."""
    monkeypatch.setattr(tokenizer_files, "BASE_MEMORY_NBYTES", 200 << 20)
    monkeypatch.setattr(tokenizer_files, "CALL_CPU_S", 1)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", slow_except(GROWTH, ["precompiled maps"]))
def test_normalizer_that_grows_texts_is_an_error(tmp_path: Path, name: str):
    tokenizer = load_tokenizer(write_parts(tmp_path, {"normalizer": GROWTH[name]}))
    with pytest.raises(PrepError, match=r"it needs more than 2[0-9][0-9] MiB of memory"):
        tokenizer.encode(["a" * 100_000])
    with pytest.raises(PrepError, match=r"it needs more than 2[0-9][0-9] MiB of memory"):
        tokenizer.encode_prompt("a" * 100_000)
    # A new process encodes the next text.
    assert tokenizer.spelling(0) == "a"


def test_decoder_that_grows_texts_is_an_error(tmp_path: Path, small_limits: None):
    decoder = replace_by({"String": "a"}, "x" * 1_000_000)
    tokenizer = load_tokenizer(write_parts(tmp_path, {"decoder": decoder}))
    with pytest.raises(PrepError, match=r"it needs more than 2[0-9][0-9] MiB of memory"):
        tokenizer.decode([0] * 100_000)


def test_ordinary_normalizers_take_long_texts(tmp_path: Path):
    steps = [
        {"type": "Prepend", "prepend": "▁"},
        replace_by({"String": " "}, "▁"),
        replace_by({"Regex": " {2,}"}, "▁"),
        {"type": "NFKC"},
        {"type": "Lowercase"},
    ]
    tokenizer = load_tokenizer(
        write_parts(tmp_path, {"normalizer": {"type": "Sequence", "normalizers": steps}})
    )
    (ids,) = tokenizer.encode(["a " * 2_000_000])
    assert ids.tolist() == [2]


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [Path.mkdir, make_fifo, make_socket, link_to_zeros])
@pytest.mark.parametrize("tokenizer_name", ["tokenizer.model", "vocab.json"])
def test_settings_beside_a_tokenizer_are_regular_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, tokenizer_name: str
):
    # A socket's name has a length limit, so the path must be relative.
    monkeypatch.chdir(tmp_path)
    Path(tokenizer_name).write_text("{}")
    make(Path("tokenizer_config.json"))
    with pytest.raises(PrepError, match=r"tokenizer_config.json is not a file"):
        load_tokenizer(Path())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "its JSON is nested more than 100 levels"),
        ("{", "Expecting"),
        ("[]", "it is \\[\\]"),
    ],
)
def test_invalid_settings_of_a_sentencepiece_model_are_errors(tmp_path: Path, text: str, why: str):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(PrepError, match=f"tokenizer_config.json is not .* - {why}"):
        load_tokenizer(tmp_path)


def test_panic_ends_a_command_with_one_json_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint

    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("model"), LLAMA)
    write_parts(Path("model"), {"pre_tokenizer": {"type": "FixedLength", "length": 0}})
    assert main(["generate", "model", "--prompt", "a b", "--json"]) == FAILED
    result = json.loads(capsys.readouterr().out)
    assert result["error"]["what"] == "model/tokenizer.json cannot encode a prompt"


@pytest.mark.parametrize("make", [make_fifo, link_to_zeros, Path.mkdir])
def test_prompts_are_read_from_regular_files_only(tmp_path: Path, make: Any):
    make(tmp_path / "prompts.txt")
    with pytest.raises(PrepError, match="is not a file"):
        list(read_prompts(str(tmp_path / "prompts.txt")))


def test_ordinary_maps_take_long_texts(tmp_path: Path):
    """The map nmt_nfkc, which T5 and XLM-R use: U+FDFA of 3 bytes becomes 33 bytes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model_pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c", "b c a"]),
        model_writer=stream,
        vocab_size=8,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    model = model_pb2.ModelProto.FromString(stream.getvalue())
    encoded = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
    normalizer = {"type": "Precompiled", "precompiled_charsmap": encoded}
    tokenizer = load_tokenizer(write_parts(tmp_path, {"normalizer": normalizer}))
    (ids,) = tokenizer.encode(["\ufdfa" * 300_000])
    assert ids.tolist() == [2]
