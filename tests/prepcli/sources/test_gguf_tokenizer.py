"""Tokenizers of GGUF files, compared with the tokenizers that transformers builds from the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.formats.manifest import record_file
from prepcli.sources.gguf_tokenizer import tokenizer_files
from tests.helpers.gguf_files import make_gguf
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.manifests import changed_manifest

gguf = lazy_module("gguf")
tokenizers = lazy_module("tokenizers")
transformers = lazy_module("transformers")
CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? We'LL see 12345 of them.",
    "def f(x):\n\n    return {x: 1}  # naïve café, 東京 and Привет мир\t\r\n",
    "It's 3.14159, isn't it?   THEY'RE \u0065\u0301 here; 1 22 333 4444 \U0001f600!",
] * 4
TEXTS = [
    *CORPUS[:3],
    "",
    " ",
    "\n \n\tx",
    "e\u0301cole \u00e9cole",
    "a<|end|>b <|end|>",
    "<tool>1234567890</tool>",
    "Ǆ ﬀ ½ x² _under_ -- ...",
]
SPECIAL = ["<|begin|>", "<|end|>"]
# Sets of a pre-tokenizer and the class of transformers with the same one.
CLASSES = {"gpt-2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer"}


def train() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the tokens and the merges of a small BPE tokenizer."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def write_metadata(writer: Any, pre: str, vocab: dict[str, int], merges: list[Any]) -> None:
    """Add the tokenizer as llama.cpp's converter does: special tokens, then rows without a token."""
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), *SPECIAL, "<tool>", "[PAD0]"]
    types = [1] * len(vocab) + [3, 3, 4, 5]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(len(vocab))
    writer.add_eos_token_id(len(vocab) + 1)
    writer.add_chat_template("{{ messages }}")


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def convert(pre: str, **changes: Any) -> tuple[Any, dict[str, int], list[tuple[str, str]]]:
    """Convert a file with a tokenizer, and return the one of the output with its tokens and merges."""
    vocab, merges = train()

    def add(writer: Any) -> None:
        write_metadata(writer, pre, vocab, merges)
        for key, value in changes.items():
            getattr(writer, key)(value)

    make_gguf(Path("m.gguf"), "llama", add=add)
    prep.save_init("./m.gguf", "init", quantized="dequantize")
    return tokenizers.Tokenizer.from_file("init/hf/tokenizer.json"), vocab, merges


def assert_equal_encodings(tokenizer: Any, expected: Any) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == expected.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected.decode(
            ids, clean_up_tokenization_spaces=False
        )


def with_added_tokens(tokenizer: Any) -> Any:
    tokenizer.add_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("pre", CLASSES)
def test_encodings_equal_transformers(pre: str):
    tokenizer, vocab, merges = convert(pre)
    make = getattr(transformers, CLASSES[pre])
    specials = {token: len(vocab) + number for number, token in enumerate(SPECIAL)}
    expected = make(
        vocab=vocab | specials,
        merges=merges,
        unk_token=SPECIAL[1],
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[1],
    )
    assert_equal_encodings(tokenizer, with_added_tokens(expected))


def test_encodings_of_llama_3_equal_transformers():
    # The name of this module is also the name of a function of `transformers`.
    from transformers.convert_slow_tokenizer import TikTokenConverter

    tokenizer, vocab, merges = convert("llama-bpe")
    # The pattern of the class is that of the published tokenizer.
    pattern = TikTokenConverter(vocab_file="").pattern
    expected = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, ignore_merges=True))
    pre_tokenizers = tokenizers.pre_tokenizers
    expected.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    expected.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=expected)
    assert_equal_encodings(tokenizer, with_added_tokens(fast))


def test_transformers_loads_the_tokenizer():
    convert("llama-bpe")
    prep.export("init", "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained("exported")
    assert (tokenizer.bos_token, tokenizer.eos_token) == tuple(SPECIAL)
    assert tokenizer.chat_template == "{{ messages }}"
    # Texts of LLaMA 3 begin with BOS.
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id


@pytest.mark.parametrize(("pre", "adds_bos"), [("gpt-2", True), ("llama-bpe", False)])
def test_metadata_decides_on_bos(pre: str, adds_bos: bool):
    tokenizer, vocab, _ = convert(pre, add_add_bos_token=adds_bos, add_add_eos_token=True)
    ids = tokenizer.encode("x").ids
    assert (ids[0] == len(vocab)) == adds_bos
    assert ids[-1] == len(vocab) + 1


def test_chain_compares_the_tokenizer_of_the_metadata():
    convert("gpt-2")
    (link,) = prep.verify_chain("init").links
    # The digests are those of decoded values, which are cast.
    assert (link.status, link.not_shown) == ("not proven", "cast from float32 to bfloat16")
    assert "2 files" in link.proof
    path = Path("init/hf/tokenizer.json")
    path.write_text(path.read_text() + " ")
    with changed_manifest(Path("init")) as manifest:
        manifest["files"]["hf/tokenizer.json"] = record_file(path)
    (link,) = prep.verify_chain("init").links
    assert link.status == "failed"
    assert link.reason == "other content than in m.gguf: tokenizer.json"


def test_unknown_pre_tokenizer_is_named(capsys: pytest.CaptureFixture[str]):
    vocab, merges = train()
    make_gguf(
        Path("m.gguf"), "llama", add=lambda writer: write_metadata(writer, "jais", vocab, merges)
    )
    assert main(["save-init", "./m.gguf", "--quantized", "dequantize", "--out", "init"]) == 0
    assert "the tokenizer is not converted: its pre-tokenizer is 'jais'" in capsys.readouterr().err
    assert not Path("init/hf/tokenizer.json").exists()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "its tokenizer is None"),
        ({"tokenizer.ggml.model": "bert"}, "its tokenizer is 'bert'"),
        ({"tokenizer.ggml.model": "llama"}, "it has no `tokenizer.ggml.tokens`"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"},
            "it has no `tokenizer.ggml.tokens`",
        ),
    ],
)
def test_incomplete_metadata_is_named(metadata: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        tokenizer_files(metadata)
