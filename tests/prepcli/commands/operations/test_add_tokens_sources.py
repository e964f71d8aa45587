"""Tokens are added to each kind of model and removed again, and `prep verify --chain` proves the untouched rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import xxhash

import prepcli as prep
from prepcli.core.errors import FAILED, USAGE
from prepcli.formats.added_tokens import RECORD_FILE
from prepcli.formats.manifest import record_file
from tests.helpers import sentencepiece_models as models
from tests.helpers import towers
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.manifests import changed_manifest
from tests.helpers.quantized_folders import FORMATS, Arrays, make_quantized
from tests.helpers.run_cli import Capture, run_failing, run_failing_unchanged, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, assert_same, make_checkpoint, read_tensors
from tests.helpers.tokenizer_folders import side_files, train_tokenizer, write_json, write_model

CONTENTS = ["<tool>", "<end>"]


@pytest.fixture(autouse=True)
def _lists_of_tokens() -> None:
    write_json(Path("tokens.json"), CONTENTS)
    write_json(Path("pieces.json"), PIECE_TOKENS)
    Path("first.txt").write_text("<tool>\n<end>\n")
    Path("second.txt").write_text("zzz\n")


def write_small_tokenizer(folder: Path) -> int:
    """Write a tokenizer of about 30 words, and return its size."""
    tokenizer = train_tokenizer("wordlevel", 0)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


@pytest.mark.parametrize("model_type", slow_except(towers.TYPES, ["mistral3"]))
def test_tokens_of_multimodal_models_come_back(model_type: str):
    towers.write_model(model_type)
    size = write_small_tokenizer(Path("m"))
    # The other rows up to 128 are padding.
    run_ok("pad-vocab", "./m", "--true-vocab", str(size), "--size", "128", "--out", "start")
    before = read_tensors(Path("start"))
    run_ok("add-tokens", "./start", "--tokens", "tokens.json", "--out", "added")
    resized = 0
    for name, tensor in read_tensors(Path("added")).items():
        if "embed_tokens" in name or "lm_head" in name:
            resized += 1
            assert tensor[:size].tobytes() == before[name][:size].tobytes()
            assert tensor[size : size + 2].any(axis=1).all()
            assert not tensor[size + 2 :].any()
        else:
            assert tensor.tobytes() == before[name].tobytes()
    assert resized >= 1
    text_config = json.loads(Path("added/config.json").read_text())
    text_config = text_config.get("text_config", text_config)
    assert (text_config["vocab_size"], text_config["true_vocab_size"]) == (128, size + 2)
    run_ok("verify", "added", "--chain")
    run_ok("remove-tokens", "./added", "--out", "removed")
    removed = read_tensors(Path("removed"))
    assert_same(
        {name: tensor[:size] if len(tensor) == 128 else tensor for name, tensor in removed.items()},
        {name: tensor[:size] if len(tensor) == 128 else tensor for name, tensor in before.items()},
    )
    assert side_files(Path("removed")) == side_files(Path("m"))
    config = json.loads(Path("removed/config.json").read_text())
    assert config == json.loads(Path("start/config.json").read_text())
    run_ok("verify", "removed", "--chain")


def write_quantized(
    kind: str, *, padding: int = 0, change: Callable[[Arrays], object] = lambda stored: None
) -> int:
    """Write a quantised model with a tokenizer, and return the size of the tokenizer."""
    tokenizer = train_tokenizer("byte-level", 0)
    size = tokenizer.get_vocab_size()
    base = LLAMA | {"vocab_size": size + padding}
    make_quantized(Path("m"), kind, base=base, change=change)
    tokenizer.save("m/tokenizer.json")
    return size


@pytest.mark.parametrize("kind", slow_except(FORMATS, ["fp8"]))
def test_tokens_of_quantized_models_come_back(kind: str):
    size = write_quantized(kind)
    before = read_tensors(Path("m"))
    run_ok("add-tokens", "./m", "--tokens", "tokens.json", "--out", "added")
    added = read_tensors(Path("added"))
    assert added.keys() == before.keys()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert added[name][:size].tobytes() == before[name].tobytes()
        assert added[name][size:].astype(np.float32).any(axis=1).tolist() == [True, True]
        del added[name]
    for name, tensor in added.items():
        assert tensor.tobytes() == before[name].tobytes()
    config = json.loads(Path("added/config.json").read_text())
    assert config.pop("vocab_size") == size + 2
    assert config == {
        key: value
        for key, value in json.loads(Path("m/config.json").read_text()).items()
        if key != "vocab_size"
    }
    run_ok("verify", "added", "--chain")
    run_ok("save-init", "./added", "--quantized", "dequantize", "--out", "init")
    run_ok("remove-tokens", "./added", "--out", "removed")
    assert_same(read_tensors(Path("removed")), before)
    assert side_files(Path("removed")) == side_files(Path("m"))
    run_ok("verify", "removed", "--chain")


def test_padding_of_a_quantized_model_has_room_for_tokens():
    size = write_quantized("fp8", padding=6)
    run_ok(
        *("add-tokens", "./m", "--tokens", "tokens.json", "--out", "added"),
        *("--true-vocab", str(size)),
    )
    config = json.loads(Path("added/config.json").read_text())
    assert (config["vocab_size"], config["true_vocab_size"]) == (size + 6, size + 2)
    assert len(read_tensors(Path("added"))["lm_head.weight"]) == size + 6
    run_ok("verify", "added", "--chain")
    run_ok("remove-tokens", "./added", "--out", "removed")
    assert json.loads(Path("removed/config.json").read_text())["vocab_size"] == size + 6


@pytest.mark.parametrize("is_renamed", [False, True])
def test_quantized_embedding_is_refused(capsys: Capture, *, is_renamed: bool):
    def quantize_head(stored: Arrays) -> None:
        head = stored.pop("lm_head.weight")
        stored["lm_head.qweight" if is_renamed else "lm_head.weight"] = head.view(np.int16)

    write_quantized("gptq", change=quantize_head)
    code, lines = run_failing_unchanged(capsys, "add-tokens", "./m", "--tokens", "tokens.json")
    assert code == USAGE
    assert "the vocabulary of ./m is quantised" in lines[0]
    assert "lm_head" in " ".join(lines)


def test_unknown_model_types_are_refused(capsys: Capture):
    write_quantized("fp8")
    config = json.loads(Path("m/config.json").read_text())
    write_json(Path("m/config.json"), config | {"model_type": "unheard_of"})
    code, lines = run_failing_unchanged(capsys, "add-tokens", "./m", "--tokens", "tokens.json")
    assert code == FAILED
    assert "unheard_of" in " ".join(lines)


def exported(name: str) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint, exported to a Hugging Face folder."""
    folder = f"{name}-exported"
    run_ok("export", name, "--out", folder)
    return read_tensors(Path(folder))


@pytest.mark.parametrize(
    "words",
    slow_except(
        [[], ["--mesh", "1,1,4", "--pad-vocab", "auto"], ["--no-scan"]],
        [["--mesh", "1,1,4", "--pad-vocab", "auto"]],
    ),
)
def test_init_gets_the_rows_that_the_folder_gets(words: list[str]):
    size = write_model(Path("m")).get_vocab_size()
    run_ok("add-tokens", "./m", "--tokens", "tokens.json", "--out", "expected")
    run_ok("save-init", "./m", "--out", "init", *words)
    run_ok("add-tokens", "./init", "--tokens", "tokens.json", "--out", "added")
    manifest = json.loads(Path("added/prep-manifest.json").read_text())
    assert manifest["vocab"]["true"] == size + len(CONTENTS)
    assert manifest["mesh"] == ("1,1,4" if "--mesh" in words else None)
    assert_same(exported("added"), read_tensors(Path("expected")))
    assert side_files(Path("added-exported")) == side_files(Path("expected"))
    run_ok("verify", "added", "--chain")
    run_ok("remove-tokens", "./added", "--out", "removed")
    assert_same(exported("removed"), read_tensors(Path("m")))
    assert side_files(Path("removed/hf")) == side_files(Path("m"))
    run_ok("verify", "removed", "--chain")


def test_rows_of_a_mesh_stay_divisible():
    size = write_model(Path("m")).get_vocab_size()
    run_ok("save-init", "./m", "--out", "init", "--mesh", "1,1,8", "--pad-vocab", "auto")
    write_json(Path("tokens.json"), [f"<t{number}>" for number in range(9)])
    run_ok("add-tokens", "./init", "--tokens", "tokens.json", "--out", "added")
    vocabulary = json.loads(Path("added/prep-manifest.json").read_text())["vocab"]
    assert vocabulary == {"true": size + 9, "padded": -(-(size + 9) // 8) * 8}


# `prep add-tokens` and `prep remove-tokens` for a SentencePiece model without a tokenizer.json


transformers = lazy_module("transformers")
PIECE_TOKENS = ["<tool>", {"content": "<end>", "special": True}, "Ünlike"]
PIECES = ["<tool>", "<end>", "Ünlike"]
TEXTS = [*models.CORPUS[:3], "", "  two  spaces ", "\U0001f600 한국어", "ünlike < tool >"]
KINDS: list[models.Kind] = ["bpe", "unigram"]
EMBEDDINGS = {"bpe": "model.embed_tokens.weight", "unigram": "shared.weight"}
ADD = ("add-tokens", "./m", "--tokens", "pieces.json")


def small_files(folder: str) -> dict[str, bytes]:
    """Return the content of the tokenizer and its settings, by name."""
    names = ("*.model", "*token*.json")
    contents: dict[str, bytes] = {}
    for pattern in names:
        for path in Path(folder).glob(pattern):
            contents[path.name] = path.read_bytes()
    return contents


# Kind of model, and whether its spaces follow words
PIECE_MODELS: list[tuple[models.Kind, bool]] = [
    (kind, suffix) for suffix in (False, True) for kind in KINDS
]


@pytest.mark.parametrize(("kind", "is_suffix"), slow_except(PIECE_MODELS, PIECE_MODELS[:3]))
def test_pieces_are_added_and_removed_exactly(kind: models.Kind, is_suffix: bool):
    data = models.write_model(Path("m"), kind, padding=20 * is_suffix)
    if is_suffix:
        data = models.train(kind, treat_whitespace_as_suffix=True)
        Path("m", models.FILES[kind]).write_bytes(data)
    before = models.load(data)
    size = before.get_piece_size()
    tensors = read_tensors(Path("m"))
    run_ok(*ADD, *(("--true-vocab", str(size)) if is_suffix else ()), "--out", "added")
    new_data = Path("added", models.FILES[kind]).read_bytes()
    assert new_data.startswith(data)
    after = models.load(new_data)
    assert [after.piece_to_id(content) for content in PIECES] == [size, size + 1, size + 2]
    assert after.encode(TEXTS, out_type=int) == before.encode(TEXTS, out_type=int)
    for number, content in enumerate(PIECES):
        ids = after.encode(f"fox{content}dog")
        assert ids.count(size + number) == 1
        assert after.decode(ids) == f"fox{content}dog{' ' * is_suffix}"
    added_ids = json.loads(Path("added/added_tokens.json").read_text())
    assert added_ids.items() >= {content: size + n for n, content in enumerate(PIECES)}.items()
    special = json.loads(Path("added/special_tokens_map.json").read_text())
    assert special["additional_special_tokens"] == ["<end>"]
    name = EMBEDDINGS[kind]
    table = read_tensors(Path("added"))[name]
    assert table[:size].tobytes() == tensors[name][:size].tobytes()
    # The space beside the text is no piece of the token.
    pieces = [n for n in before.encode("<tool>") if n != before.piece_to_id("\u2581")]
    mean = tensors[name][pieces].astype(np.float64).mean(axis=0)
    np.testing.assert_array_equal(table[size], mean.astype(np.float32))
    run_ok("verify", "added", "--chain")
    run_ok("remove-tokens", "./added", "--out", "removed")
    assert small_files("removed") == small_files("m")
    run_ok("verify", "removed", "--chain")
    if not is_suffix:
        assert_same(read_tensors(Path("removed")), tensors)


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
    ids = after.convert_tokens_to_ids(PIECES)
    assert ids == [len(before), len(before) + 1, len(before) + 2]
    for content, token_id in zip(PIECES, ids, strict=True):
        assert after(f"fox{content}dog").input_ids.count(token_id) == 1


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


def write_pieces(tokens: object = PIECE_TOKENS, **settings: object) -> None:
    """Write a model of pieces, a list of tokens, and JSON files of the model."""
    models.write_model(Path("m"), "bpe", padding=20 if settings else 0)
    write_json(Path("pieces.json"), tokens)
    for name, content in settings.items():
        write_json(Path("m", f"{name}.json"), content)


def write_model_of(data: bytes) -> None:
    make_checkpoint(Path("m"), LLAMA)
    Path("m/tokenizer.model").write_bytes(data)


NOT_A_MODEL = "is not a SentencePiece model"
# What is written; the code, and a part of the error
REFUSED_PIECES: list[tuple[Callable[[], object], int, str]] = [
    (lambda: write_pieces(["two words"]), USAGE, "'two words' has a space"),
    (lambda: write_pieces([{"content": "<a>", "lstrip": True}]), USAGE, "has no `lstrip`"),
    (lambda: write_pieces(["</s>"]), USAGE, "has these tokens already: '</s>'"),
    (lambda: write_pieces(["</s>x"]), USAGE, "'</s>x' contains '</s>'"),
    (lambda: write_pieces(["a\0b"]), USAGE, "'a\\x00b' has the character U+0000"),
    (lambda: write_pieces(added_tokens={"<pad>": 400}), USAGE, "the ids from 400 on follow"),
    (
        lambda: write_pieces(tokenizer_config={"tokenizer_class": "T5Tokenizer"}),
        USAGE,
        "puts 100 sentinels after",
    ),
    (lambda: write_model_of(b"x"), FAILED, NOT_A_MODEL),
    (lambda: write_model_of(b"\x0a\xff"), FAILED, NOT_A_MODEL),
    (lambda: write_model_of(b"\x0a\x03\x0a\x05a"), FAILED, NOT_A_MODEL),
    (lambda: write_model_of(b"\x80" * 20), FAILED, NOT_A_MODEL),
]


@pytest.mark.parametrize(("write", "code", "message"), REFUSED_PIECES)
def test_pieces_that_do_not_fit_are_refused(
    write: Callable[[], object], code: int, message: str, capsys: Capture
):
    write()
    actual, lines = run_failing_unchanged(capsys, *ADD)
    assert actual == code
    assert message in " ".join(lines)


def test_unused_piece_is_refused_without_a_hint_for_json(capsys: Capture):
    # A model of whole words finds no pieces within a word.
    models.write_model(Path("m"), "bpe")
    Path("m/tokenizer.model").write_bytes(models.train("word"))
    size = models.load(models.train("word")).get_piece_size()
    err = run_failing(capsys, FAILED, *ADD, "--true-vocab", str(size))
    assert "would not use the new tokens" in " ".join(err.split())
    assert "normalized" not in err


def test_tokens_are_not_removed_from_another_tokenizer(capsys: Capture):
    # transformers reads a tokenizer.json instead of the model with the pieces.
    models.write_model(Path("m"), "bpe")
    run_ok(*ADD, "--out", "added")
    write_json(Path("added/tokenizer.json"), {})
    err = run_failing(capsys, FAILED, "remove-tokens", "./added", "--out", "removed")
    assert "tokenizer.json has no record of added tokens" in " ".join(err.split())
    assert not Path("removed").exists()


# `prep verify --chain` through outputs of `add-tokens` and `remove-tokens`


@pytest.mark.parametrize("init", slow_except(["mean", "zeros", "normal"], ["zeros"]))
@pytest.mark.parametrize("has_padding", slow_except([False, True], [True]))
def test_rows_of_added_tokens_are_not_shown(
    has_padding: bool, init: Literal["mean", "zeros", "normal"]
):
    size = write_model(Path("m")).get_vocab_size()
    prep.pad_vocab("m", "start", size=size + 8 * has_padding)
    prep.add_tokens("start", "once", tokens="first.txt", init=init)
    prep.add_tokens("once", "twice", tokens="second.txt", init=init)
    prep.remove_tokens("twice", "back")
    prep.remove_tokens("back", "removed")
    proof = prep.verify_chain("removed")
    assert proof
    assert [link.status for link in proof.links] == ["holds"] * 4 + ["proven"]
    expected = "edited for tokens" if init == "zeros" else "edited for tokens; new rows"
    assert proof.links[3].not_shown == expected
    for link in proof.links[:4]:
        shutil.rmtree("AGAIN", ignore_errors=True)
        for command in link.check.split(" && "):
            run_ok(*command.removeprefix("prep ").split())


def broken_link(output: str = "out") -> prep.ChainLink:
    link = prep.verify_chain(output).broken_link
    assert link is not None
    return link


def test_changed_tokenizer_of_the_source_breaks_the_link():
    write_model(Path("m"))
    prep.add_tokens("m", "added", tokens="first.txt")
    path = Path("m/tokenizer.json")
    write_json(path, json.loads(path.read_text()) | {"more": 1})
    broken = broken_link("added")
    assert path.name in broken.reason


def forge_row(folder: Path, name: str, row: int) -> None:
    """Change a row of a tensor together with its digests."""
    values = read_tensors(folder)[name].copy()
    before = values.tobytes()
    values[row] += 1
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes().replace(before, values.tobytes()))
    with changed_manifest(folder) as manifest:
        for record in manifest["tensors"][name]["digests"]:
            rows = values[record[0] : record[1]]
            record[2] = xxhash.xxh3_128_hexdigest(rows.tobytes())


@pytest.mark.parametrize("command", slow_except(["add-tokens", "remove-tokens"], ["add-tokens"]))
@pytest.mark.parametrize("place", ["old", "padding"])
def test_forged_rows_break_the_link(command: str, place: str):
    size = write_model(Path("m"), files=1).get_vocab_size()
    prep.pad_vocab("m", "start", size=size + 8)
    prep.add_tokens("start", "out", tokens="first.txt")
    if command == "remove-tokens":
        Path("out").rename("added")
        prep.remove_tokens("added", "out")
    forge_row(Path("out"), EMBEDDINGS["bpe"], 3 if place == "old" else size + 5)
    broken = broken_link()
    assert (broken.command, broken.status) == (command, "failed")
    assert "embed_tokens" in broken.reason


def test_split_digest_of_another_tensor_is_compared():
    size = write_model(Path("m"), files=1, intermediate_size=400).get_vocab_size()
    prep.add_tokens("m", "out", tokens="first.txt")
    name = "model.layers.0.mlp.gate_proj.weight"
    with changed_manifest(Path("out")) as manifest:
        edges = [(0, size), (size, size + 2), (size + 2, 400)]
        manifest["tensors"][name]["digests"] = [[low, high, ""] for low, high in edges]
    forge_row(Path("out"), name, size)
    broken = broken_link()
    assert "mlp.gate_proj" in broken.reason


def rewrite_record(folder: Path, **changes: object) -> None:
    """Change the last addition of a record, and the digests of its files and of the manifest."""
    record = json.loads(Path(folder, RECORD_FILE).read_text())
    record["additions"][-1].update(changes)
    write_json(folder / RECORD_FILE, record)
    with changed_manifest(folder) as manifest:
        for name in (RECORD_FILE, *record["additions"][-1]["files"]):
            manifest["files"][name] = record_file(folder / name)


def test_tokens_in_place_of_old_ones_break_the_link():
    size = write_model(Path("m"), files=1).get_vocab_size()
    prep.add_tokens("m", "out", tokens="first.txt")
    # The record says that the rows of two old tokens are new.
    tokens = [{"id": size - 2, "content": "<tool>"}, {"id": size - 1, "content": "<end>"}]
    rewrite_record(Path("out"), true_vocab_size=size - 2, padded_vocab_size=size, tokens=tokens)
    with changed_manifest(Path("out")) as manifest:
        for record in manifest["tensors"].values():
            if len(record["digests"]) > 1:
                record["digests"] = [[0, size - 2, ""], [size - 2, size, ""], [size, size + 2, ""]]
    for name in (EMBEDDINGS["bpe"], "lm_head.weight"):
        forge_row(Path("out"), name, size - 1)
    broken = broken_link()
    assert broken.reason == "other values than in m: embed_tokens.weight, lm_head.weight"
