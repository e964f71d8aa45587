"""`prep add-tokens` and `prep remove-tokens`: tokenizer, rows, records, and the way back."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, USAGE
from prepcli.engine.fills import fill_of
from tests.helpers.adapters import make_adapter
from tests.helpers.damage import flip_bit, tensor_place
from tests.helpers.later_configs import LATER_FAMILIES
from tests.helpers.run_cli import Capture, run_failing, run_failing_unchanged, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GPT2,
    LLAMA,
    assert_same,
    make_checkpoint,
    read_tensors,
)
from tests.helpers.tokenizer_folders import KINDS, random_texts, side_files, write_json, write_model

TOKENS: list[Any] = ["<tool>", {"content": "<end>", "special": True}, "bäd abc", "Ünlike"]
CONTENTS = ["<tool>", "<end>", "bäd abc", "Ünlike"]
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
CASES = [(kind, seed) for seed in range(10) for kind in KINDS]
# Tied and untied heads, a head with a bias, and two stacks.
BASES = {"llama": LLAMA, "gpt2": GPT2, "gptj": FAMILY_CONFIGS["gptj"], "t5": FAMILY_CONFIGS["t5"]}
INIT_CASES = list(
    itertools.product(BASES, ["mean", "zeros", "normal"], ["float32", "bfloat16", "float16"])
)
FAST_INIT_CASES = [
    ("llama", "zeros", "float16"),
    ("gpt2", "normal", "bfloat16"),
    ("t5", "mean", "bfloat16"),
]


@pytest.fixture(autouse=True)
def _folder() -> None:
    write_json(Path("tokens.json"), TOKENS)


def read_json(path: str) -> Any:
    return json.loads(Path(path).read_text())


def add(*words: str) -> None:
    run_ok("add-tokens", "./m", "--tokens", "tokens.json", "--out", "added", *words)


def remove() -> None:
    run_ok("remove-tokens", "./added", "--out", "removed")


def piece_means(tokenizer: Tokenizer, table: np.ndarray) -> np.ndarray:
    """Return the mean of the rows of each new token's pieces, rounded once."""
    rows: list[np.ndarray] = []
    for content in CONTENTS:
        ids = tokenizer.encode(content, add_special_tokens=False).ids
        rows.append(table[ids].astype(np.float64).mean(axis=0))
    return np.stack(rows).astype(np.float32)


def assert_removed(tensors: dict[str, np.ndarray]) -> None:
    """Remove the added tokens, and check that tensors and tokenizer are as in `m`."""
    remove()
    assert_same(read_tensors(Path("removed")), tensors)
    assert side_files(Path("removed")) == side_files(Path("m"))
    assert read_json("removed/config.json") == json.loads(Path("m/config.json").read_text())
    run_ok("verify", "removed")


@pytest.mark.parametrize(("kind", "seed"), slow_except(CASES, CASES[: len(KINDS)]))
def test_tokens_are_added_and_removed_exactly(kind: str, seed: int):
    tokenizer = write_model(Path("m"), kind, seed)
    tensors = read_tensors(Path("m"))
    size = tokenizer.get_vocab_size()
    add()
    added = Tokenizer.from_file("added/tokenizer.json")
    # The library adds the same tokens to the old tokenizer.
    tokenizer_before = Tokenizer.from_file("m/tokenizer.json")
    expected = Tokenizer.from_file("m/tokenizer.json")
    for content in CONTENTS:
        token = AddedToken(content, special=content == "<end>")
        if token.special:
            expected.add_special_tokens([token])
        else:
            expected.add_tokens([token])
    assert [added.token_to_id(content) for content in CONTENTS] == list(range(size, size + 4))
    assert json.loads(added.to_str()) == json.loads(expected.to_str())
    texts = random_texts(seed)
    for text in texts:
        assert added.encode(text).ids == tokenizer_before.encode(text).ids
    mixed = [f"{text} {content} {text}" for text, content in zip(texts, CONTENTS * 10, strict=True)]
    assert [e.ids for e in added.encode_batch(mixed)] == [
        e.ids for e in expected.encode_batch(mixed)
    ]
    actual = read_tensors(Path("added"))
    for name in (EMBEDDING, HEAD):
        assert actual[name][:size].tobytes() == tensors[name].tobytes()
        np.testing.assert_array_equal(actual[name][size:], piece_means(tokenizer, tensors[name]))
    run_ok("verify", "added")
    assert_removed(tensors)


@pytest.mark.parametrize(("family", "init", "dtype"), slow_except(INIT_CASES, FAST_INIT_CASES))
def test_each_init_and_head_comes_back(family: str, init: str, dtype: str):
    tokenizer = write_model(Path("m"), base=BASES[family], dtype=dtype)
    tensors = read_tensors(Path("m"))
    size = tokenizer.get_vocab_size()
    add("--init", init)
    resized = 0
    for name, tensor in read_tensors(Path("added")).items():
        if tensor.shape == tensors[name].shape:
            assert tensor.tobytes() == tensors[name].tobytes()
            continue
        resized += 1
        assert tensor[:size].tobytes() == tensors[name].tobytes()
        assert tensor.shape == (size + 4, *tensors[name].shape[1:])
        is_zero = init == "zeros" or (init == "normal" and tensor.ndim == 1)
        assert (not tensor[size:].astype(np.float32).any()) == is_zero
    assert resized >= 1
    assert read_json("added/config.json")["vocab_size"] == size + 4
    assert_removed(tensors)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_tokenizer(kind: str):
    transformers = pytest.importorskip("transformers")
    write_model(Path("m"), kind)
    add()
    expected = transformers.AutoTokenizer.from_pretrained("m")
    expected.add_tokens([AddedToken(content, special=content == "<end>") for content in CONTENTS])
    actual = transformers.AutoTokenizer.from_pretrained("added")
    texts = [f"{text} {content}" for text in random_texts(0)[:10] for content in CONTENTS]
    assert actual(texts).input_ids == expected(texts).input_ids
    assert len(actual) == len(expected)
    assert actual.decode([len(actual) - 3], skip_special_tokens=True) == ""


def test_settings_manifest_and_json_list_the_tokens(capsys: Capture):
    size = write_model(Path("m")).get_vocab_size()
    report = run_json(capsys, "add-tokens", "./m", "--tokens", "tokens.json", "--out", "added")
    listed = [{"id": size + n, "content": content} for n, content in enumerate(CONTENTS)]
    expected = {"init": "mean", "count": 4, "tokens": listed}
    assert report["added_tokens"] == expected
    assert read_json("added/prep-manifest.json")["added_tokens"] == expected
    tokens = read_json("added/tokenizer_config.json")["added_tokens_decoder"]
    assert [tokens[str(size + n)]["content"] for n in range(4)] == CONTENTS
    assert [tokens[str(size + n)]["special"] for n in range(4)] == [False, True, False, False]
    special = read_json("added/special_tokens_map.json")
    assert special["additional_special_tokens"] == ["<end>"]
    ids = read_json("added/added_tokens.json")
    assert ids == {content: size + n for n, content in enumerate(CONTENTS)}
    report = run_json(capsys, "remove-tokens", "./added", "--out", "removed")
    assert report["removed_tokens"] == {"count": 4, "tokens": listed}


def test_padding_has_room_for_tokens():
    size = write_model(Path("m")).get_vocab_size()
    run_ok("pad-vocab", "./m", "--size", str(size + 10), "--out", "padded")
    padded = read_tensors(Path("padded"))
    run_ok("add-tokens", "./padded", "--tokens", "tokens.json", "--out", "added")
    config = read_json("added/config.json")
    assert (config["vocab_size"], config["true_vocab_size"]) == (size + 10, size + 4)
    table = read_tensors(Path("added"))[EMBEDDING]
    assert table[size : size + 4].any(axis=1).all()
    assert not table[size + 4 :].any()
    remove()
    assert_same(read_tensors(Path("removed")), padded)
    assert side_files(Path("removed")) == side_files(Path("m"))


def test_padding_after_tokens_is_removed_with_them(capsys: Capture):
    write_model(Path("m"))
    tensors = read_tensors(Path("m"))
    add()
    run_ok("pad-vocab", "./added", "--multiple", "64", "--out", "wide")
    for folder in ("./added", "./wide"):
        assert main(["remove-tokens", folder, "--dry-run"]) == 0
        assert "also where training changed them" in capsys.readouterr().err
    shutil.rmtree("added")
    Path("wide").rename("added")
    assert_removed(tensors)


def test_true_vocab_names_the_padding_of_a_published_model():
    tokenizer = write_model(Path("m"), padding=6)
    size = tokenizer.get_vocab_size()
    add("--true-vocab", str(size))
    assert Tokenizer.from_file("added/tokenizer.json").token_to_id("<tool>") == size
    assert read_json("added/config.json")["true_vocab_size"] == size + 4


def test_second_addition_is_removed_first():
    write_model(Path("m"))
    tensors = read_tensors(Path("m"))
    run_ok("add-tokens", "./m", "--tokens", "tokens.json", "--out", "once")
    Path("more.txt").write_text("zzz\n")
    run_ok("add-tokens", "./once", "--tokens", "more.txt", "--out", "twice")
    run_ok("remove-tokens", "./twice", "--out", "added")
    assert side_files(Path("added")) == side_files(Path("once"))
    assert_same(read_tensors(Path("added")), read_tensors(Path("once")))
    assert_removed(tensors)


def flip_bit_of_row(row: int) -> None:
    """Change a bit in a row of the embedding of `added`."""
    path, low, _ = tensor_place(Path("added"), EMBEDDING)
    flip_bit(path, low + row * read_tensors(Path("added"))[EMBEDDING][0].nbytes)


def test_tokens_survive_an_init_unless_rows_are_damaged(capsys: Capture):
    """The rows are read in part."""
    write_model(Path("m"), files=1)
    run_ok("add-tokens", "./m", "--tokens", "tokens.json", "--out", "more")
    run_ok("save-init", "./more", "--mesh", "1,1,4", "--pad-vocab", "auto", "--out", "init")
    run_ok("export", "init", "--out", "added")
    assert_removed(read_tensors(Path("m")))
    shutil.rmtree("removed")
    flip_bit_of_row(3)
    err = run_failing(capsys, FAILED, "remove-tokens", "./added", "--out", "removed")
    assert "is damaged" in err
    assert not Path("removed").exists()


# The manifest of `added` has two digests of a vocabulary tensor: old rows and new rows. The command reads it at once.
def test_damaged_output_is_not_converted(capsys: Capture):
    write_model(Path("m"), files=1)
    add()
    flip_bit_of_row(3)
    words = ("pad-vocab", "./added", "--multiple", "64", "--out", "out")
    err = run_failing(capsys, FAILED, *words)
    assert "is damaged" in err
    assert "make it again: `prep add-tokens ./m --tokens tokens.json`" in " ".join(err.split())
    assert not Path("out").exists()


@pytest.mark.slow
def test_normal_rows_do_not_depend_on_the_budget():
    write_model(Path("m"))
    add("--init", "normal", "--seed", "3", "--memory", "32MiB")
    first = read_tensors(Path("added"))
    add("--init", "normal", "--seed", "3", "--overwrite", "--restart", "--workers", "2")
    assert_same(read_tensors(Path("added")), first)
    add("--init", "normal", "--seed", "4", "--overwrite")
    assert read_tensors(Path("added"))[EMBEDDING].tobytes() != first[EMBEDDING].tobytes()


def test_functions_take_the_same_arguments():
    write_model(Path("m"))
    plan = prep.add_tokens("./m", "added", tokens="tokens.json", dry_run=True).plan
    assert [fill.kind for fill in map(fill_of, plan.streams) if fill] == ["pieces", "pieces"]
    assert not Path("added").exists()
    assert prep.add_tokens("./m", "added", tokens="tokens.json").plan == plan
    assert prep.add_tokens("./m", "added", tokens=Path("tokens.json")).already_done
    assert prep.remove_tokens("./added", "removed").bytes_written
    with pytest.raises(prep.UsageError, match="`tokens` is missing"):
        prep.add_tokens("./m", "added")


def write_inputs(*tokens: str, kind: str = "byte-level", padding: int = 0) -> None:
    """Write a model, and a list of new tokens."""
    write_model(Path("m"), kind, padding=padding)
    write_json(Path("tokens.json"), list(tokens or CONTENTS))


def write_other_tokenizer(name: str) -> None:
    make_checkpoint(Path("m"), LLAMA)
    Path("m", name).write_bytes(b"x")


def name_a_new_token_in_settings(name: str) -> None:
    size = write_model(Path("m")).get_vocab_size()
    path = Path("m", name)
    document = json.loads(path.read_text())
    if name == "added_tokens.json":
        document["<tool>"] = 3
    else:
        document["added_tokens_decoder"][str(size)] = {"content": "old"}
    write_json(path, document)


def break_tokenizer() -> None:
    write_model(Path("m"))
    Path("m/tokenizer.json").write_text('{"added_tokens": [}')


# What is written to `m` and `tokens.json`; the code, and parts of the error.
REFUSED_ADDITIONS: list[tuple[Callable[[], object], int, tuple[str, ...]]] = [
    (lambda: write_inputs("<s>", "new"), USAGE, ("has these tokens already: '<s>'",)),
    (lambda: write_inputs("<s>x"), USAGE, ("'<s>x' contains '<s>'",)),
    (lambda: write_inputs("a", "a"), USAGE, ("it has tokens twice: 'a'",)),
    (lambda: write_inputs(""), USAGE, ("empty tokens: number 1 of the list",)),
    # The normalized texts of these tokens are equal, and one contains the other.
    (
        lambda: write_inputs("Zzz", "zzZ", kind="wordpiece"),
        FAILED,
        ("would not use the new tokens",),
    ),
    (lambda: write_inputs("Zzz", "xzzZ", kind="wordpiece"), USAGE, ("'xzzz' contains 'zzz'",)),
    (lambda: write_inputs(padding=5), USAGE, ("--true-vocab",)),
    (lambda: write_inputs(padding=-5), USAGE, ("use the tokenizer of the model",)),
    (lambda: write_other_tokenizer("sentencepiece.bpe.model"), USAGE, ("is not supported",)),
    (lambda: write_other_tokenizer("vocab.txt"), USAGE, ("is not supported",)),
    (lambda: write_other_tokenizer("README.md"), USAGE, ("has no tokenizer",)),
    (
        lambda: name_a_new_token_in_settings("added_tokens.json"),
        FAILED,
        ("added_tokens.json is not supported", "already"),
    ),
    (
        lambda: name_a_new_token_in_settings("tokenizer_config.json"),
        FAILED,
        ("tokenizer_config.json is not supported", "already"),
    ),
    (break_tokenizer, FAILED, ("is not a valid tokenizer",)),
    (
        lambda: write_model(Path("m"), base=LATER_FAMILIES["gemma4_text"]),
        USAGE,
        ("has embeddings per layer, which is not supported", "embed_tokens_per_layer.weight"),
    ),
]


@pytest.mark.parametrize(("write", "code", "parts"), REFUSED_ADDITIONS)
def test_addition_that_does_not_fit_is_refused(
    write: Callable[[], object], code: int, parts: tuple[str, ...], capsys: Capture
):
    write()
    words = ("add-tokens", "./m", "--tokens", "tokens.json")
    actual, lines = run_failing_unchanged(capsys, *words)
    assert actual == code
    assert all(part in " ".join(lines) for part in parts)


def vocabulary_word(tokenizer: Tokenizer) -> str:
    """Return a token of ASCII letters that is a whole word."""
    words = sorted(tokenizer.get_vocab())
    return next(word for word in words if word.isascii() and word.isalpha() and len(word) > 2)


def test_normalized_token_may_not_hide_an_old_one(capsys: Capture):
    word = vocabulary_word(write_model(Path("m"), "wordpiece"))
    write_json(Path("tokens.json"), [word.upper()])
    code, lines = run_failing_unchanged(capsys, "add-tokens", "./m", "--tokens", "tokens.json")
    assert code == USAGE
    assert f"has these tokens already: {word!r}" in lines[0]
    write_json(Path("tokens.json"), [{"content": word.upper(), "normalized": False}])
    add()
    before = Tokenizer.from_file("m/tokenizer.json")
    assert Tokenizer.from_file("added/tokenizer.json").encode(word).ids == before.encode(word).ids


def test_tokens_without_pieces_need_another_init(capsys: Capture):
    write_model(Path("m"), "byte-level")
    document = read_json("m/tokenizer.json")
    # Without an unknown token and with letters only, BPE drops other characters.
    document["pre_tokenizer"] = None
    Path("m/tokenizer.json").write_text(json.dumps(document))
    write_json(Path("tokens.json"), ["漢"])
    err = run_failing(capsys, USAGE, "add-tokens", "./m", "--tokens", "tokens.json")
    assert "`--init mean` does not fit '漢'" in err
    run_ok("add-tokens", "./m", "--tokens", "tokens.json", "--init", "zeros")


def change_tokenizer() -> None:
    shutil.copy("m/tokenizer.json", "added/tokenizer.json")


def write_record(content: bytes) -> None:
    Path("added/prep-added-tokens.json").write_bytes(content)


def write_ranges(inserted: list[list[int]]) -> None:
    record = read_json("added/prep-added-tokens.json")
    record["additions"][0]["files"]["tokenizer.json"]["inserted"] = inserted
    write_json(Path("added/prep-added-tokens.json"), record)


DAMAGED_RANGES = ("the record of tokenizer.json is damaged", "byte range")
# Changes of the output `added`, and parts of the error.
REFUSED_REMOVALS: list[tuple[Callable[[], object], tuple[str, ...]]] = [
    (change_tokenizer, ("tokenizer.json was changed",)),
    (lambda: write_record(b"{"), ("is not a record of this prep",)),
    (lambda: write_record(b'{"format": 2, "additions": []}'), ("is not a record of this prep",)),
    # A range that ends before its start doubles the text. One after the end removes no byte.
    (lambda: write_ranges([[10**18, 0]] * 40), DAMAGED_RANGES),
    (lambda: write_ranges([[5, 10**18]]), DAMAGED_RANGES),
]


@pytest.mark.parametrize(("change", "parts"), slow_except(REFUSED_REMOVALS, REFUSED_REMOVALS[:2]))
def test_removal_from_a_changed_output_is_refused(
    change: Callable[[], object], parts: tuple[str, ...], capsys: Capture
):
    write_model(Path("m"))
    add()
    Path("added/prep-manifest.json").unlink()
    change()
    capsys.readouterr()
    code, lines = run_failing_unchanged(capsys, "remove-tokens", "./added")
    assert code == FAILED
    assert all(part in " ".join(lines) for part in parts)


def test_folder_without_a_record_is_refused(capsys: Capture):
    write_model(Path("m"))
    code, lines = run_failing_unchanged(capsys, "remove-tokens", "./m")
    assert code == USAGE
    assert "records no added tokens" in lines[0]


def test_adapter_is_refused_and_fits_the_new_base(capsys: Capture):
    write_model(Path("m"))
    make_adapter(Path("adapter"), {"model.layers.0.self_attn.q_proj": (32, 32)})
    words = ("add-tokens", "./adapter", "--tokens", "tokens.json")
    code, lines = run_failing_unchanged(capsys, *words)
    assert code == USAGE
    assert "adapter has only adapters" in lines[0]
    assert "`prep add-tokens BASE`" in lines[2]
    add()
    run_ok("merge", "adapter", "./added", "--out", "merged")
    merged = read_tensors(Path("merged"))
    assert merged[EMBEDDING].tobytes() == read_tensors(Path("added"))[EMBEDDING].tobytes()


def test_tokens_of_a_pipe_are_added(capsys: Capture):
    write_model(Path("m"))
    reader, writer = os.pipe()
    os.write(writer, b"<tool>\n")
    os.close(writer)
    words = ("add-tokens", "./m", "--tokens", f"/dev/fd/{reader}", "--out", "added")
    code, lines = run_failing_unchanged(capsys, *words, "--workers", "2")
    assert code == USAGE
    assert lines[0] == f"error: `--tokens /dev/fd/{reader}` cannot be a pipe"
    run_ok(*words)
    os.close(reader)
    Path("tokens.txt").write_text("<tool>\n")
    run_ok("add-tokens", "./m", "--tokens", "tokens.txt", "--out", "expected")
    assert_same(read_tensors(Path("added")), read_tensors(Path("expected")))
    assert side_files(Path("added")) == side_files(Path("expected"))
