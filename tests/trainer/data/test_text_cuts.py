"""Cuts of long texts: the parts have the tokens of the whole text, or the text stays whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from tests.helpers.corpus import TEXT, encode, make_tokenizer
from trainer.data import tokenizer as tokenizer_module
from trainer.data.tokenizer import LLAMA_3, QWEN_2, allows_cuts, cut_text, load_tokenizer

O200K_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+|\p{L}+|\p{N}+"
TEXTS = st.text(st.sampled_from("ab1.'/\n\n\n  \r\t\u3000\u0085\u0301é日。😀<end>"), max_size=200)


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


@given(text=TEXTS)
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


def test_minimal_tokenizer_file_does_not_allow_cuts():
    assert not allows_cuts(json.dumps({"model": {}}).encode())
