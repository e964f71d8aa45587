"""The tokenizer: encoding is deterministic and does not add, truncate or pad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from prepcli.core.errors import PrepError
from tests.helpers.corpus import TEXT, encode, make_tokenizer
from trainer.data.tokenizer import load_tokenizer


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


def test_check_in_vocab_rejects_id_beyond_vocab(path: Path):
    text_tokenizer = load_tokenizer(path)
    max_id = text_tokenizer.max_id
    text_tokenizer.check_in_vocab(max_id, max_id + 1)
    with pytest.raises(PrepError) as caught:
        text_tokenizer.check_in_vocab(max_id, max_id)
    token = Tokenizer.from_file(str(path)).id_to_token(max_id)
    assert (
        caught.value.what == f"id {max_id} ({token!r}) of {path} is not in the model's vocabulary"
    )
    assert (
        caught.value.why
        == f"the vocabulary without padding has {max_id} tokens; the tokenizer has ids up to {max_id}"
    )


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


def test_encode_prompt_adds_special_tokens(path: Path):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<|begin|>"])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|begin|> $A", None, [("<|begin|>", begin)]
    )
    tokenizer.save(str(path))
    text_tokenizer = load_tokenizer(path)
    assert text_tokenizer.encode_prompt("the cat") == [begin, *encode(path, "the cat")]
    assert text_tokenizer.decode(text_tokenizer.encode_prompt("the cat")) == "the cat"


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
