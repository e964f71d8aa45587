"""`prep add-tokens` and `prep remove-tokens` for a SentencePiece model without a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prepcli.core.errors import FAILED, USAGE
from prepcli.formats.tokenizer_files import read_added_texts
from tests.helpers import sentencepiece_models as models
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.run_cli import run_failing, run_failing_unchanged, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, make_checkpoint, read_tensors
from tests.helpers.tokenizer_folders import write_json

transformers = lazy_module("transformers")
TOKENS = ["<tool>", {"content": "<end>", "special": True}, "Ünlike"]
CONTENTS = ["<tool>", "<end>", "Ünlike"]
TEXTS = [*models.CORPUS[:3], "", "  two  spaces ", "\U0001f600 한국어", "ünlike < tool >"]
KINDS: list[models.Kind] = ["bpe", "unigram"]
EMBEDDINGS = {"bpe": "model.embed_tokens.weight", "unigram": "shared.weight"}
ADD = ("add-tokens", "./m", "--tokens", "tokens.json")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_json(Path("tokens.json"), TOKENS)


def small_files(folder: str) -> dict[str, bytes]:
    """Return the content of the tokenizer and its settings, by name."""
    names = ("*.model", "*token*.json")
    contents: dict[str, bytes] = {}
    for pattern in names:
        for path in Path(folder).glob(pattern):
            contents[path.name] = path.read_bytes()
    return contents


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_added_and_removed_exactly(kind: models.Kind):
    data = models.write_model(Path("m"), kind)
    before = models.load(data)
    size = before.get_piece_size()
    tensors = read_tensors(Path("m"))
    run_ok(*ADD, "--out", "added")
    new_data = Path("added", models.FILES[kind]).read_bytes()
    assert new_data.startswith(data)
    after = models.load(new_data)
    assert [after.piece_to_id(content) for content in CONTENTS] == [size, size + 1, size + 2]
    assert after.encode(TEXTS, out_type=int) == before.encode(TEXTS, out_type=int)
    for number, content in enumerate(CONTENTS):
        ids = after.encode(f"fox{content}dog")
        assert ids.count(size + number) == 1
        assert after.decode(ids) == f"fox{content}dog"
    added = read_tensors(Path("added"))
    table = added[EMBEDDINGS[kind]]
    assert table[:size].tobytes() == tensors[EMBEDDINGS[kind]].tobytes()
    pieces = [n for n in before.encode("<tool>") if n != before.piece_to_id("\u2581")]
    mean = tensors[EMBEDDINGS[kind]][pieces].astype(np.float64).mean(axis=0)
    np.testing.assert_array_equal(table[size], mean.astype(np.float32))
    run_ok("verify", "added", "--chain")
    run_ok("remove-tokens", "./added", "--out", "removed")
    assert small_files("removed") == small_files("m")
    assert_same(read_tensors(Path("removed")), tensors)
    run_ok("verify", "removed", "--chain")


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_added_to_a_model_with_spaces_after_words(kind: models.Kind):
    models.write_model(Path("m"), kind, padding=20)
    data = models.train(kind, treat_whitespace_as_suffix=True)
    Path("m", models.FILES[kind]).write_bytes(data)
    before = models.load(data)
    size = before.get_piece_size()
    run_ok(*ADD, "--true-vocab", str(size), "--out", "added")
    after = models.load(Path("added", models.FILES[kind]).read_bytes())
    assert after.encode(TEXTS, out_type=int) == before.encode(TEXTS, out_type=int)
    assert after.encode("fox<tool>dog").count(size) == 1
    # The space after the text is no piece of the token.
    pieces = [n for n in before.encode("<tool>") if n != before.piece_to_id("\u2581")]
    table = read_tensors(Path("m"))[EMBEDDINGS[kind]]
    mean = table[pieces].astype(np.float64).mean(axis=0).astype(np.float32)
    np.testing.assert_array_equal(read_tensors(Path("added"))[EMBEDDINGS[kind]][size], mean)
    run_ok("remove-tokens", "./added", "--out", "removed")
    assert small_files("removed") == small_files("m")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_pieces(kind: models.Kind):
    models.write_model(Path("m"), kind)
    run_ok(*ADD, "--out", "added")
    before = transformers.AutoTokenizer.from_pretrained("m")
    after = transformers.AutoTokenizer.from_pretrained("added")
    assert len(after) == len(before) + 3
    for text in TEXTS:
        assert after(text).input_ids == before(text).input_ids
    ids = after.convert_tokens_to_ids(CONTENTS)
    assert ids == [len(before), len(before) + 1, len(before) + 2]
    for content, token_id in zip(CONTENTS, ids, strict=True):
        assert after(f"fox{content}dog").input_ids.count(token_id) == 1


def test_settings_get_the_pieces():
    data = models.write_model(Path("m"), "bpe")
    size = models.load(data).get_piece_size()
    run_ok(*ADD, "--out", "added")
    ids = json.loads(Path("added/added_tokens.json").read_text())
    assert ids == {"<unk>": 0} | {content: size + n for n, content in enumerate(CONTENTS)}
    special = json.loads(Path("added/special_tokens_map.json").read_text())
    assert special["additional_special_tokens"] == ["<end>"]


def test_second_addition_of_pieces_is_removed_first():
    data = models.write_model(Path("m"), "bpe", padding=20)
    size = str(models.load(data).get_piece_size())
    run_ok(*ADD, "--true-vocab", size, "--out", "once")
    Path("more.txt").write_text("zzz\n")
    run_ok("add-tokens", "./once", "--tokens", "more.txt", "--out", "twice")
    run_ok("remove-tokens", "./twice", "--out", "again")
    assert small_files("again") == small_files("once")
    run_ok("remove-tokens", "./again", "--out", "removed")
    assert small_files("removed") == small_files("m")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["two words"], "'two words' has a space"),
        ([{"content": "<a>", "lstrip": True}], "has no `lstrip`"),
        (["</s>"], "has these tokens already: '</s>'"),
        (["</s>x"], "'</s>x' contains '</s>'"),
        (["a\0b"], "'a\\x00b' has the character U+0000"),
    ],
)
def test_pieces_without_a_meaning_are_refused(
    tokens: list[object], message: str, capsys: pytest.CaptureFixture[str]
):
    models.write_model(Path("m"), "bpe")
    write_json(Path("tokens.json"), tokens)
    code, lines = run_failing_unchanged(capsys, *ADD)
    assert code == USAGE
    assert message in " ".join(lines)


def test_unused_piece_is_refused_without_a_hint_for_json(capsys: pytest.CaptureFixture[str]):
    # A model of whole words finds no pieces within a word.
    models.write_model(Path("m"), "bpe")
    Path("m/tokenizer.model").write_bytes(models.train("word"))
    size = models.load(models.train("word")).get_piece_size()
    err = run_failing(capsys, FAILED, *ADD, "--true-vocab", str(size))
    assert "would not use the new tokens" in " ".join(err.split())
    assert "normalized" not in err


def test_tokens_are_not_removed_from_another_tokenizer(capsys: pytest.CaptureFixture[str]):
    # transformers reads a tokenizer.json instead of the model with the pieces.
    models.write_model(Path("m"), "bpe")
    run_ok(*ADD, "--out", "added")
    write_json(Path("added/tokenizer.json"), {})
    err = run_failing(capsys, FAILED, "remove-tokens", "./added", "--out", "removed")
    assert "tokenizer.json has no record of added tokens" in " ".join(err.split())
    assert not Path("removed").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("added_tokens.json", {"<pad>": 400}, "the ids from 400 on follow"),
        ("tokenizer_config.json", {"tokenizer_class": "T5Tokenizer"}, "puts 100 sentinels after"),
    ],
)
def test_tokens_after_the_pieces_are_refused(
    name: str, content: object, message: str, capsys: pytest.CaptureFixture[str]
):
    models.write_model(Path("m"), "bpe", padding=20)
    write_json(Path("m", name), content)
    err = run_failing(capsys, USAGE, *ADD)
    assert message in " ".join(err.split())


def test_added_texts_are_read_as_the_library_reads_them():
    data = models.train("bpe")
    processor = models.load(data)
    special = [n for n in range(len(processor)) if processor.is_control(n)]
    expected = [processor.id_to_piece(n) for n in sorted([processor.unk_id(), *special])]
    assert read_added_texts(data) == expected


@pytest.mark.parametrize("data", [b"x", b"\x0a\xff", b"\x0a\x03\x0a\x05a", b"\x80" * 20])
def test_broken_model_is_one_error(data: bytes, capsys: pytest.CaptureFixture[str]):
    make_checkpoint(Path("m"), LLAMA)
    Path("m/tokenizer.model").write_bytes(data)
    code, lines = run_failing_unchanged(capsys, *ADD)
    assert code == FAILED
    assert "is not a SentencePiece model" in lines[0]
