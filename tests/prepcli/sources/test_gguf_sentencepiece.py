"""SentencePiece tokenizers of GGUF files, compared with SentencePiece and with transformers."""

from __future__ import annotations

import io
import json
import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.formats.gguf import GgufArray
from prepcli.sources import gguf_tokenizer
from tests.helpers.gguf_files import make_gguf
from tests.helpers.lazy_modules import lazy_module

gguf = lazy_module("gguf")
sentencepiece = lazy_module("sentencepiece")
transformers = lazy_module("transformers")
CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? We see 12345 of them.",
    "def f(x):\n\n    return {x: 1}  # naïve café, 東京 and Привет мир\t\r\n",
    "the banana bandana aaaa abababab aabbaabb, the theme of the other mother",
] * 20
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "  two spaces  inside   and after  ",
    "\n \n\tx",
    "e\u0301cole \u00e9cole \U0001f600 \U0001f468\u200d\U0001f469 Ω≈ç√ 한국어 \x00\x7f",
    "<0x41> <0x0A>literal bytes",
    "\u2581lower one eighth block\u2581",
    "aaaaaaaa ababababa thethethe bananabandana",
]
SPECIAL = re.compile("(<unk>|<s>|</s>|<tool>)")
USER_DEFINED_PIECES = ("<tool>",)
GEMMA_PIECES = ("\n\n", "\u2581\u2581", "\u2581\u2581\u2581")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*, prefix: bool = True, symbols: Sequence[str] = USER_DEFINED_PIECES) -> Any:
    """Train a model with the settings of LLaMA 2, write it to `tokenizer.model`, and return its processor."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=[*symbols],
        minloglevel=2,
    )
    Path("tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def piece_type(processor: Any, number: int) -> int:
    """Return the type of a piece, as llama.cpp's converter does."""
    if processor.is_unknown(number):
        return UNKNOWN
    if processor.is_control(number):
        return CONTROL
    if processor.is_byte(number):
        return BYTE
    # The trainer puts user-defined pieces before the bytes.
    if number < processor.piece_to_id("<0x00>"):
        return USER_DEFINED
    return NORMAL


def tokens_of(processor: Any) -> list[str]:
    """Return the tokens as llama.cpp's converter writes them, with spaces in user-defined ones."""
    tokens: list[str] = []
    for number in range(processor.vocab_size()):
        token = processor.id_to_piece(number)
        if piece_type(processor, number) == USER_DEFINED:
            token = token.replace("\u2581", " ")
        tokens.append(token)
    return tokens


def write_metadata(
    writer: Any,
    processor: Any,
    *,
    tokens: list[str] | None = None,
    scores: list[float] | None = None,
) -> None:
    """Add the tokenizer as llama.cpp's converter does."""
    numbers = range(processor.vocab_size())
    tokens = tokens or tokens_of(processor)
    scores = scores or [processor.get_score(number) for number in numbers]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    # A row of the embedding without a token.
    writer.add_token_list([*tokens, "[PAD400]"])
    writer.add_token_scores([*scores, -1000.0])
    writer.add_token_types([*(piece_type(processor, number) for number in numbers), UNUSED])
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_unk_token_id(processor.unk_id())


def convert(processor: Any, **changes: Any) -> Any:
    """Convert a file with a tokenizer, and return the tokenizer that transformers loads from an export."""

    def add(writer: Any) -> None:
        write_metadata(writer, processor)
        for key, value in changes.items():
            getattr(writer, key)(value)

    make_gguf(Path("m.gguf"), "llama", add=add)
    prep.save_init("./m.gguf", "init", quantized="dequantize")
    prep.export("init", "exported")
    return transformers.AutoTokenizer.from_pretrained("exported")


@pytest.mark.parametrize("prefix", [True, False])
def test_encodings_equal_sentencepiece(prefix: bool):
    processor = train(prefix=prefix)
    tokenizer = convert(processor, add_add_space_prefix=prefix)
    for text in TEXTS:
        ids = processor.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == processor.decode(ids), text


def test_spaces_and_line_breaks_of_gemma_are_tokens():
    processor = train(prefix=False, symbols=GEMMA_PIECES)
    tokenizer = convert(processor, add_add_space_prefix=False)
    assert processor.piece_to_id("\n\n") in processor.encode("x\n\ny")
    for text in (*TEXTS, "def f():\n\n\n     return  1\n\n"):
        # SentencePiece also finds these tokens in texts with its character for spaces.
        if "\u2581" not in text:
            assert tokenizer.encode(text, add_special_tokens=False) == processor.encode(text), text


def test_only_a_conversion_makes_the_merges(monkeypatch: pytest.MonkeyPatch):
    processor = train()
    make_gguf(Path("m.gguf"), "llama", add=lambda writer: write_metadata(writer, processor))
    options: Any = {"quantized": "dequantize"}
    with monkeypatch.context() as context:
        context.setattr(gguf_tokenizer, "_mergeable_pairs", fail)
        plan = prep.save_init("./m.gguf", "init", dry_run=True, **options)
        # An inspection does not even read the tokens.
        context.setattr(GgufArray, "strings", fail)
        prep.inspect("./m.gguf")
        prep.verify("./m.gguf", quick=True)
    assert prep.save_init("./m.gguf", "init", **options).plan_digest == plan.plan_digest
    assert json.loads(Path("init/hf/tokenizer.json").read_text())["model"]["merges"]


def fail(*_arguments: object) -> None:
    raise AssertionError("it is not needed")


def test_random_texts_have_the_encodings_of_sentencepiece():
    processor = train()
    tokenizer = convert(processor)
    alphabet = [*"the banda\n", "\u2581", "é", "東", "\U0001f600"]
    rng = np.random.default_rng(0)
    for length in rng.integers(1, 60, 500):
        text = "".join(rng.choice(alphabet, length))
        assert tokenizer.encode(text, add_special_tokens=False) == processor.encode(text), text


def test_encodings_equal_the_tokenizer_of_transformers():
    processor = train()
    tokenizer = convert(processor)
    Path("llama").mkdir()
    shutil.copy("tokenizer.model", "llama")
    expected = transformers.LlamaTokenizer.from_pretrained("llama", legacy=True)
    for text in TEXTS:
        # LlamaTokenizer adds no space before another one, unlike SentencePiece.
        if not text.startswith((" ", "\u2581")):
            assert tokenizer.encode(text) == [
                processor.bos_id(),
                *expected.encode(text, add_special_tokens=False),
            ], text


def test_special_tokens_are_found_in_texts():
    processor = train()
    tokenizer = convert(processor)
    text = "<s>the fox</s>the <tool>banana<unk> dog"
    expected: list[int] = []
    # llama.cpp encodes the texts between special tokens one by one.
    for part in SPECIAL.split(text):
        if SPECIAL.fullmatch(part):
            expected.append(processor.piece_to_id(part))
        else:
            expected += processor.encode(part)
    assert tokenizer.encode(text, add_special_tokens=False) == expected
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<s>",
        "</s>",
        "<unk>",
    )


@pytest.mark.parametrize("adds_bos", [None, True, False])
def test_texts_begin_with_bos_by_default(adds_bos: bool | None):
    changes = {} if adds_bos is None else {"add_add_bos_token": adds_bos}
    processor = train()
    tokenizer = convert(processor, **changes, add_add_eos_token=True)
    ids = tokenizer.encode("the fox")
    assert (ids[0] == processor.bos_id()) == (adds_bos is not False)
    assert ids[-1] == processor.eos_id()


def test_special_tokens_without_ids_are_those_of_llama_cpp():
    processor = train()

    def add(writer: Any) -> None:
        write_metadata(writer, processor)
        for key in ("bos", "eos", "unknown"):
            del writer.kv_data[0][f"tokenizer.ggml.{key}_token_id"]
        writer.add_add_eos_token(True)

    make_gguf(Path("m.gguf"), "llama", add=add)
    prep.save_init("./m.gguf", "init", quantized="dequantize")
    prep.export("init", "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")
    ids = tokenizer.encode("the fox")
    assert ids == [1, *processor.encode("the fox"), 2]
    assert tokenizer.unk_token_id == 0


def with_scores(processor: Any, scores: dict[str, float]) -> Any:
    """Return a processor with other scores of some pieces. A piece and its score are fields 1 and 2 of a message."""
    model = processor.serialized_model_proto()
    for piece, score in scores.items():
        text = piece.encode()
        old = struct.pack("<f", processor.get_score(processor.piece_to_id(piece)))
        field = b"\x0a" + bytes([len(text)]) + text + b"\x15"
        assert model.count(field + old) == 1
        model = model.replace(field + old, field + struct.pack("<f", score))
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def test_independent_tokens_of_one_score_are_converted():
    processor = train()
    # No character ends one of these tokens and begins another.
    scores: dict[str, float] = dict.fromkeys(("he", "ab", "ow", "ck"), 1.0)
    processor = with_scores(processor, scores)
    tokenizer = convert(processor)
    rng = np.random.default_rng(0)
    for length in rng.integers(1, 60, 300):
        text = "".join(rng.choice([*"hheeabowck ", "the", "brown"], length))
        assert tokenizer.encode(text, add_special_tokens=False) == processor.encode(text), text


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        # From left to right, "▁ow" becomes ▁o w. In the order of merges it may become ▁ ow.
        ({"▁o": 1.0, "ow": 1.0}, "the order of merges to"),
        ({"he": 1.0, "the": 1.0}, "the order of merges to"),
        ({"he": 1.0, "ow": 1.0, "the": 2.0}, "'the' has a higher score than its parts"),
    ],
)
def test_dependent_tokens_of_one_score_are_not_converted(
    scores: dict[str, float], message: str, capsys: pytest.CaptureFixture[str]
):
    processor = with_scores(train(), scores)
    error = remark_of(capsys, lambda writer: write_metadata(writer, processor))
    assert "the tokenizer is not converted" in error
    assert message in error


def remark_of(capsys: pytest.CaptureFixture[str], add: Any, architecture: str = "llama") -> str:
    """Convert a file without its tokenizer, and return the messages."""
    make_gguf(Path("m.gguf"), architecture, add=add)
    assert main(["save-init", "./m.gguf", "--quantized", "dequantize", "--out", "init"]) == 0
    assert not Path("init/hf/tokenizer.json").exists()
    return capsys.readouterr().err


def test_equal_scores_are_not_converted(capsys: pytest.CaptureFixture[str]):
    processor = train()
    scores = [0.0] * processor.vocab_size()
    error = remark_of(capsys, lambda writer: write_metadata(writer, processor, scores=scores))
    assert "the tokenizer is not converted: the order of merges to" in error


@pytest.mark.parametrize(
    ("architecture", "name"), [("phi3", "tiny"), ("llama", "Phi-3 mini"), ("llama", "my PHI3")]
)
def test_tokenizer_of_phi_3_is_not_converted(
    architecture: str, name: str, capsys: pytest.CaptureFixture[str]
):
    processor = train()

    def add(writer: Any) -> None:
        write_metadata(writer, processor)
        writer.add_name(name)

    error = remark_of(capsys, add, architecture)
    assert "spaces after special tokens of Phi-3 are removed" in error


def test_number_of_merges_is_bounded(capsys: pytest.CaptureFixture[str]):
    processor = train()
    tokens = tokens_of(processor)
    # Each text of k characters "Z" is the concatenation of k - 1 pairs of others.
    for length in range(1, 101):
        tokens[-length] = "Z" * length
    error = remark_of(capsys, lambda writer: write_metadata(writer, processor, tokens=tokens))
    assert "the tokenizer is not converted: its tokens have more than 8 merges each" in error


@pytest.mark.parametrize(
    ("method", "value", "key"),
    [
        ("add_remove_extra_whitespaces", True, "remove_extra_whitespaces"),
        ("add_precompiled_charsmap", b"\x01\x02", "precompiled_charsmap"),
    ],
)
def test_normalized_texts_are_not_converted(
    method: str, value: object, key: str, capsys: pytest.CaptureFixture[str]
):
    processor = train()

    def add(writer: Any) -> None:
        write_metadata(writer, processor)
        getattr(writer, method)(value)

    assert f"`tokenizer.ggml.{key}` is not supported" in remark_of(capsys, add)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<0x41>", "<0xzz>", "it has no token of the byte 0x41"),
        ("<tool>", "\u2581<tool>", "the spaces of '\u2581<tool>' are escaped"),
        ("<tool>", "x" * 129, "a token has 129 characters"),
    ],
)
def test_other_tokens_are_not_converted(
    old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
):
    processor = train()
    tokens = tokens_of(processor)
    tokens[tokens.index(old)] = new
    error = remark_of(capsys, lambda writer: write_metadata(writer, processor, tokens=tokens))
    assert f"the tokenizer is not converted: {message}" in error
