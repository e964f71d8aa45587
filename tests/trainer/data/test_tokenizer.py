"""The tokenizers library as it is used here: nothing added to what is learned, nothing cut, nothing random."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.helpers.corpus import TEXT, encode, make_tokenizer
from trainer.data.tokenizer import load_tokenizer
from trainer.models.errors import PrepError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("whole_folder", [False, True])
def test_ids_are_those_of_the_library(path: Path, whole_folder: bool):
    encoder = load_tokenizer(path.parent if whole_folder else path)
    assert [ids.tolist() for ids in encoder.encode([TEXT, "", "the"])] == [encode(path, t) for t in (TEXT, "", "the")]
    assert encoder.digest == xxhash.xxh3_128_hexdigest(path.read_bytes())
    assert encoder.max_id == Tokenizer.from_file(str(path)).get_vocab_size() - 1


def test_nothing_is_added_cut_or_filled_up(path: Path):
    wanted = encode(path, TEXT)
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing("<|end|> $A", None, [("<|end|>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=999)
    tokenizer.save(str(path))
    assert load_tokenizer(path).encode([TEXT])[0].tolist() == wanted


def test_ids_of_added_tokens_count(path: Path):
    tokenizer = Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["catmat"])
    tokenizer.save(str(path))
    assert load_tokenizer(path).max_id == size


def test_a_random_tokenizer(path: Path):
    found = json.loads(path.read_text())
    found["model"]["dropout"] = 0.1
    path.write_text(json.dumps(found))
    with pytest.raises(PrepError) as caught:
        load_tokenizer(path)
    assert caught.value.what == f"{path} encodes at random"
    assert caught.value.why == "its model has dropout 0.1, so that ids would differ from run to run"


def test_an_id_that_is_not_in_the_vocabulary(path: Path):
    encoder = load_tokenizer(path)
    top = encoder.max_id
    encoder.check_in_vocab(top, top + 1)
    with pytest.raises(PrepError) as caught:
        encoder.check_in_vocab(top, top)
    token = Tokenizer.from_file(str(path)).id_to_token(top)
    assert caught.value.what == f"id {top} ({token!r}) of {path} is not in the model's vocabulary"
    assert caught.value.why == f"the true vocabulary, padding apart, is {top}; the tokenizer has ids up to {top}"


def test_no_tokenizer(tmp_path: Path):
    with pytest.raises(PrepError, match=r"no tokenizer at .*none - looked for a tokenizer.json, or a folder"):
        load_tokenizer(tmp_path / "none")


def test_a_folder_with_another_tokenizer(tmp_path: Path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(PrepError, match=r"has no tokenizer.json - looked for tokenizer.json; found tokenizer.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"model": 3}'])
def test_a_broken_tokenizer(tmp_path: Path, data: bytes):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(PrepError, match=r"tokenizer.json is no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_gives_up(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(PrepError, match=r"tokenizer.json cannot encode the data - .*UNK"):
        load_tokenizer(tmp_path).encode(["a b"])
    with pytest.raises(PrepError, match=r"tokenizer.json cannot encode a prompt - .*UNK"):
        load_tokenizer(tmp_path).encode_prompt("a b")


def test_a_prompt_has_what_the_tokenizer_puts_around_it(path: Path):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(["<|begin|>"])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", begin)])
    tokenizer.save(str(path))
    encoder = load_tokenizer(path)
    assert encoder.encode_prompt("the cat") == [begin, *encode(path, "the cat")]
    assert encoder.decode(encoder.encode_prompt("the cat")) == "the cat"


def test_a_text_that_goes_on_keeps_its_space(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "c": 2}, unk_token="c"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = load_tokenizer(tmp_path)
    assert (
        encoder.decode([1, 2]),
        encoder.decode([1, 2], preceding_ids=[0]),
        encoder.decode([2], preceding_ids=[0]),
    ) == ("bc", " bc", "c")
