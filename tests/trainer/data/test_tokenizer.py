"""Tokenizers: the ids of their libraries, without tokens that a data file does not have."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from prepcli.core.errors import PrepError
from tests.helpers.corpus import TEXT, encode, make_tokenizer
from trainer.data import tokenizer as tokenizer_module
from trainer.data.tokenizer import (
    LLAMA_3,
    QWEN_2,
    allows_cuts,
    cut_text,
    find_tokenizer,
    load_tokenizer,
)

# The tokenizer: encoding is deterministic and does not add, truncate or pad.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("from_folder", [False, True])
def test_encode_matches_the_library(path: Path, from_folder: bool):
    text_tokenizer = load_tokenizer(path.parent if from_folder else path)
    assert [ids.tolist() for ids in text_tokenizer.encode([TEXT, "", "the"])] == [
        encode(path, t) for t in (TEXT, "", "the")
    ]
    assert text_tokenizer.digest == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert text_tokenizer.max_id == Tokenizer.from_file(str(path)).get_vocab_size() - 1


def test_encode_does_not_add_truncate_or_pad(path: Path):
    expected = encode(path, TEXT)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing("<|end|> $A", None, [("<|end|>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=999)
    tokenizer.save(str(path))
    assert load_tokenizer(path).encode([TEXT])[0].tolist() == expected


def test_max_id_includes_added_tokens(path: Path):
    tokenizer = Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["catmat"])
    tokenizer.save(str(path))
    assert load_tokenizer(path).max_id == size


def test_load_tokenizer_rejects_dropout(path: Path):
    content = json.loads(path.read_text())
    content["model"]["dropout"] = 0.1
    path.write_text(json.dumps(content))
    with pytest.raises(PrepError) as caught:
        load_tokenizer(path)
    assert caught.value.what == f"{path} is not deterministic"
    assert caught.value.why == "its model has dropout 0.1, so that ids would differ from run to run"


def test_load_tokenizer_fails_without_file(tmp_path: Path):
    with pytest.raises(
        PrepError, match=r"no tokenizer at .*none - looked for a tokenizer.json or a Sent"
    ):
        load_tokenizer(tmp_path / "none")


def test_load_tokenizer_lists_similar_files(tmp_path: Path):
    (tmp_path / "tokenizer_config.json").touch()
    with pytest.raises(
        PrepError, match=r"has no tokenizer - looked for .*; found tokenizer_config.json"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"model": 3}'])
def test_load_tokenizer_rejects_invalid_file(tmp_path: Path, data: bytes):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(PrepError, match=r"tokenizer.json is not a valid tokenizer"):
        load_tokenizer(tmp_path)


def test_tokenizer_failure_is_reported(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(PrepError, match=r"tokenizer.json cannot encode the data - .*UNK"):
        load_tokenizer(tmp_path).encode(["a b"])
    with pytest.raises(PrepError, match=r"tokenizer.json cannot encode a prompt - .*UNK"):
        load_tokenizer(tmp_path).encode_prompt("a b")


@pytest.mark.parametrize("template", ["$A", "<a> $A", "<a> <b> $A", "$A <b>", "<a> $A <b>"])
def test_prefix_ids_are_those_of_transformers(path: Path, template: str):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<a>", "<b>"])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<a>", "<b>")]
    tokenizer.post_processor = processors.TemplateProcessing(template, None, ids)
    tokenizer.save(str(path))
    # With a tokenizer.json, transformers ignores this key: the post-processor decides.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<a>"}
    settings_file = path.parent / "tokenizer_config.json"
    settings_file.write_text(
        json.dumps({**settings, "add_bos_token": not template.startswith("<")})
    )
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(path.parent)
    text_tokenizer = load_tokenizer(path)
    expected = reference("the cat")["input_ids"]
    assert text_tokenizer.encode_prompt("the cat") == expected
    prefix = text_tokenizer.prefix_ids()
    assert list(prefix) == expected[: len(template.split("$A")[0].split())]


@pytest.mark.parametrize(("template", "prefix"), [("<s> $A", (0,)), ("$A <s>", ())])
def test_prefix_may_be_the_unknown_token(tmp_path: Path, template: str, prefix: tuple[int, ...]):
    # The tokenizer has no letter: it encodes the first probe as the token that it adds.
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "w1": 1}, unk_token="<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(template, None, [("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("a").ids == [0, 0]
    assert load_tokenizer(tmp_path).prefix_ids() == prefix


def test_special_tokens_of_the_settings_alone_are_named(path: Path):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<a>"])
    tokenizer.save(str(path))
    assert not [*load_tokenizer(path).notes()]
    tokens = {"900": {"content": "<a>"}, "901": {"content": "<b>"}, "902": {"content": "<b>"}}
    settings = {"added_tokens_decoder": tokens, "additional_special_tokens": ["<c>", "<a>"]}
    (path.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    (note,) = load_tokenizer(path).notes()
    assert "lists special tokens that tokenizer.json does not have ('<b>', '<c>')" in note


def test_decode_keeps_space_after_preceding_ids(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2}, unk_token="c"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text_tokenizer = load_tokenizer(tmp_path)
    assert (
        text_tokenizer.decode([1, 2]),
        text_tokenizer.decode([1, 2], preceding_ids=[0]),
        text_tokenizer.decode([2], preceding_ids=[0]),
    ) == ("bc", " bc", "c")


# SentencePiece models and tokenizers of transformers: ids equal those of their libraries.

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


@pytest.mark.slow
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


# Cuts of long texts: the parts have the tokens of the whole text, or the text stays whole.

O200K_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+|\p{L}+|\p{N}+"

CUT_TEXTS = st.text(
    st.sampled_from("ab1.'/\n\n\n  \r\t\u3000\u0085\u0301é日。😀<end>"), max_size=200
)


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits by an expression, and then maps bytes to characters."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def save_tokenizer(path: Path, change: Callable[[Any], object]) -> Path:
    """Save the tokenizer of the test corpus with a change."""
    tokenizer = Tokenizer.from_file(str(make_tokenizer(path)))
    tokenizer.add_special_tokens(["<end>"])
    change(tokenizer)
    tokenizer.save(str(path))
    return path


def set_llama3(tokenizer: Any) -> None:
    """Split as Llama 3 does."""
    tokenizer.pre_tokenizer = split_by(LLAMA_3)


def set_qwen2(tokenizer: Any) -> None:
    """Split and normalize as Qwen 2 does."""
    tokenizer.pre_tokenizer = split_by(QWEN_2)
    tokenizer.normalizer = normalizers.NFC()


SAFE = {"gpt2": lambda tokenizer: None, "llama3": set_llama3, "qwen2": set_qwen2}


@pytest.fixture(scope="module", params=SAFE)
def tokenizer_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return a tokenizer that allows cuts, with parts of 5 characters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "PART_CHARS", 5)
        folder = tmp_path_factory.mktemp(request.param)
        yield save_tokenizer(folder / "tokenizer.json", SAFE[request.param])


@given(text=CUT_TEXTS)
def test_cut_texts_have_the_ids_of_whole_texts(tokenizer_path: Path, text: str):
    tokenizer = load_tokenizer(tokenizer_path)
    assert tokenizer.allows_cuts
    assert tokenizer.encode([text])[0].tolist() == encode(tokenizer_path, text)


def test_corpus_is_cut_and_keeps_its_ids(tokenizer_path: Path):
    text = TEXT.replace(" ", "\n")
    assert len(list(cut_text(text))) > 5
    assert "".join(cut_text(text)) == text
    assert load_tokenizer(tokenizer_path).encode([text, "the"])[0].tolist() == encode(
        tokenizer_path, text
    )


def test_text_without_safe_newline_stays_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer_module, "PART_CHARS", 5)
    text = "a b c d e f g h\n i\n\nj \nk"
    assert list(cut_text(text)) == [text]


UNSAFE = {
    "prefix space": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel()),
    "words": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
    "metaspace": lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace()),
    "no pre-tokenizer": lambda t: setattr(t, "pre_tokenizer", None),
    "o200k": lambda t: setattr(t, "pre_tokenizer", split_by(O200K_PUNCTUATION)),
    "spaces replaced": lambda t: setattr(t, "normalizer", normalizers.Replace("\n", " ")),
    "token with newline": lambda t: t.add_tokens(["a\nb"]),
    "token takes spaces": lambda t: t.add_tokens([AddedToken("<x>", lstrip=True)]),
}


@pytest.mark.parametrize("change", UNSAFE.values(), ids=UNSAFE)
def test_other_tokenizers_do_not_allow_cuts(tmp_path: Path, change: Callable[[Any], object]):
    path = save_tokenizer(tmp_path / "tokenizer.json", change)
    assert not allows_cuts(path.read_bytes())
    assert not load_tokenizer(path).allows_cuts
