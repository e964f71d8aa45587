"""SentencePiece models and tokenizers of transformers: ids equal those of their libraries."""

from __future__ import annotations

import io
import json
import random
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import xxhash

from prepcli.core.errors import PrepError
from trainer.data.tokenizer import find_tokenizer, load_tokenizer

WORDS = [
    *(
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "near",
        "river",
        "banks",
        "while",
    ),
    *("seven", "wizards", "box", "quietly", "for", "jam"),
]
TEXTS = [
    "the quick fox",
    " the  fox\n\tbox ",
    "日本 é jam",
    "",
    "wizards—box",
    "x" * 50,
    "a </s> b",
]
LLAMA = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
T5 = {"tokenizer_class": "T5Tokenizer", "extra_ids": 10}


OPTIONS: dict[str, dict[str, Any]] = {
    "unigram": {"byte_fallback": True},
    # These are the options of Llama's tokenizer.
    "bpe": {
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "vocab_size": 60},
}


@lru_cache
def trained_model(kind: str) -> bytes:
    """Return a SentencePiece model that is trained with the options of a kind."""
    sentencepiece = pytest.importorskip("sentencepiece")
    generator, model = random.Random(0), io.BytesIO()
    options = {
        "vocab_size": 340,
        "model_type": "bpe" if kind == "bpe" else "unigram",
        **OPTIONS[kind],
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(generator.choices(WORDS, k=12)) for _ in range(400)]),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def write_model(
    folder: Path, kind: str, name: str = "tokenizer.model", settings: Any = None
) -> Path:
    """Write a sentencepiece model, and its settings if there are any."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(trained_model(kind))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def library(kind: str) -> Any:
    """Return the model as sentencepiece itself loads it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_proto=trained_model(kind))


@pytest.mark.parametrize("kind", OPTIONS)
def test_sentencepiece_ids_equal_the_library(tmp_path: Path, kind: str):
    processor = library(kind)
    tokenizer = load_tokenizer(write_model(tmp_path, kind))
    assert [ids.tolist() for ids in tokenizer.encode(TEXTS)] == [
        processor.encode(text) for text in TEXTS
    ]
    assert tokenizer.max_id == processor.get_piece_size() - 1
    assert tokenizer.digest == xxhash.xxh3_128_hexdigest(trained_model(kind))
    assert tokenizer.path == tmp_path / "tokenizer.model"
    with pytest.raises(PrepError, match="is not in the model's vocabulary"):
        tokenizer.check_in_vocab(tokenizer.max_id, 20)


@pytest.mark.parametrize("kind", OPTIONS)
def test_sentencepiece_offsets_are_characters(tmp_path: Path, kind: str):
    tokenizer = load_tokenizer(write_model(tmp_path, kind))
    encoded = tokenizer.encode_with_offsets(TEXTS)
    assert [ids.tolist() for ids, _ in encoded] == [ids.tolist() for ids in tokenizer.encode(TEXTS)]
    for text, (_, offsets) in zip(TEXTS, encoded):
        ends = [0, *offsets[:, 1].tolist()]
        assert all(start <= end <= len(text) for start, end in offsets.tolist())
        assert ends == sorted(ends), "tokens are in the order of the text"
        covered = {i for start, end in offsets.tolist() for i in range(start, end)}
        assert {i for i, character in enumerate(text) if not character.isspace()} <= covered


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_round_trips_text(tmp_path: Path, kind: str):
    tokenizer = load_tokenizer(write_model(tmp_path, kind) / "tokenizer.model")
    ids = tokenizer.encode_prompt("the quick fox 日本")
    assert tokenizer.decode([1, *ids, 2, 999]) == "the quick fox 日本"
    assert (
        tokenizer.decode(ids[2:], ids[:2]) == "the quick fox 日本"[len(tokenizer.decode(ids[:2])) :]
    )


@pytest.mark.parametrize(
    ("settings", "begin", "end"),
    [
        (None, [], []),
        ({}, [], []),
        (LLAMA, [1], []),
        (LLAMA | {"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True}, [1], [2]),
        (LLAMA | {"add_bos_token": False}, [], []),
        ({"tokenizer_class": "CodeLlamaTokenizer"}, [1], []),
        (T5, [], [2]),
        (T5 | {"add_eos_token": False}, [], []),
    ],
)
def test_sentencepiece_prompts_have_the_tokens_of_the_settings(
    tmp_path: Path, settings: Any, begin: list[int], end: list[int]
):
    tokenizer = load_tokenizer(write_model(tmp_path, "bpe", settings=settings))
    ids = library("bpe").encode("the fox")
    assert tokenizer.encode_prompt("the fox") == [*begin, *ids, *end]
    assert tokenizer.encode(["the fox"])[0].tolist() == ids


@pytest.mark.parametrize(
    ("kind", "name", "settings"), [("bpe", "tokenizer.model", LLAMA), ("t5", "spiece.model", T5)]
)
def test_sentencepiece_ids_equal_transformers(tmp_path: Path, kind: str, name: str, settings: Any):
    """The text has no special tokens and no runs of spaces: the two libraries treat them differently."""
    transformers = pytest.importorskip("transformers")
    folder = write_model(tmp_path, kind, name, settings)
    tokenizer, reference = (
        load_tokenizer(folder),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    texts = ["the quick fox", "日本 é jam", "wizards—box", "x" * 50]
    assert [ids.tolist() for ids in tokenizer.encode(texts)] == reference(
        texts, add_special_tokens=False
    )["input_ids"]
    assert tokenizer.encode_prompt(texts[0]) == reference(texts[0])["input_ids"]


def test_tokenizer_json_precedes_other_files(tmp_path: Path):
    write_model(tmp_path, "bpe")
    assert find_tokenizer(tmp_path) == tmp_path / "tokenizer.model"
    (tmp_path / "vocab.json").write_text("{}")
    assert find_tokenizer(tmp_path) == tmp_path / "tokenizer.model"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert find_tokenizer(tmp_path) == tmp_path / "tokenizer.json"


def test_broken_sentencepiece_model_is_an_error(tmp_path: Path):
    pytest.importorskip("sentencepiece")
    # This is a vocabulary of tiktoken.
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(PrepError, match="is not a SentencePiece model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [("sentencepiece", "tokenizer.model", "sentencepiece"), ("transformers", "vocab.txt", "hf")],
)
def test_missing_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, extra: str
):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(PrepError, match=f"{module} is not installed") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.hint == f"`pip install 'prepcli[{extra}]'`"


def write_wordpiece(folder: Path) -> Path:
    """Write a tokenizer without a tokenizer.json: a vocabulary of word pieces and its settings."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, "##s"]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    return folder


def test_files_of_other_tokenizers_are_read_by_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(write_wordpiece(tmp_path))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["the quick fox", "dogs and banks", ""]
    assert [ids.tolist() for ids in tokenizer.encode(texts)] == reference(
        texts, add_special_tokens=False
    )["input_ids"]
    assert tokenizer.encode([]) == []
    prompt = tokenizer.encode_prompt("the fox")
    assert prompt == reference("the fox")["input_ids"]
    assert len(prompt) == 4
    assert tokenizer.decode(prompt) == "the fox"
    digest = tokenizer.digest
    (tmp_path / "vocab.txt").write_text((tmp_path / "vocab.txt").read_text() + "new\n")
    changed = load_tokenizer(tmp_path)
    assert changed.digest != digest
    assert changed.max_id == tokenizer.max_id + 1


def test_code_beside_a_tokenizer_is_not_run(tmp_path: Path):
    pytest.importorskip("transformers")
    write_wordpiece(tmp_path)
    settings = {
        "tokenizer_class": "MyTokenizer",
        "auto_map": {"AutoTokenizer": ["code.MyTokenizer", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass MyTokenizer: pass\n"
    )
    with pytest.raises(PrepError, match="transformers cannot read the tokenizer"):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", OPTIONS)
def test_sentencepiece_special_ids_are_control_symbols(tmp_path: Path, kind: str):
    processor = library(kind)
    tokenizer = load_tokenizer(write_model(tmp_path, kind))
    ids = range(tokenizer.max_id + 3)
    controls = {token for token in ids[:-2] if processor.is_control(token)}
    assert controls
    assert tokenizer.special_ids([*ids]) == controls | {*ids[-2:]}
    assert tokenizer.spelling(max(controls)) == processor.id_to_piece(max(controls))
