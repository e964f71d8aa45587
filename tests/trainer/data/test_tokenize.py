"""Tokenizing files: correct tokens, made once, never an incomplete store, and refused if a run began with others."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from tests.helpers.corpus import (
    EOS,
    TEXT,
    change,
    encode,
    make_config,
    make_tokenizer,
    tokenize_quietly,
    write_json,
)
from tests.helpers.earlier_tokens import BOS, chat_config, make_earlier_tokens, recorded_identity
from tests.helpers.slow_cases import slow_except
from tests.helpers.token_stores import read_files
from trainer.data import encode as encode_module
from trainer.data.examples import IdentityChange
from trainer.data.packing import PackedDataset
from trainer.data.readers import text_files
from trainer.data.tokenize import tokenize_files, tokenize_share
from trainer.data.tokenize_config import RecordedTokens, TokenizeConfig

# Tokenizing files: correct tokens, made once, and never an incomplete store.

KILL_SCRIPT = """
import os, signal, sys
from pathlib import Path
from tests.helpers.corpus import make_config
from trainer.data import encode, store_files, tokenize
from trainer.data.readers import text_files

text_files.TEXT_CHUNK_NBYTES, encode.ENCODE_BATCH_NBYTES = 1000, 2000
moment, folder = sys.argv[1], Path(sys.argv[2])

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(done, total, n_tokens):
    if moment == "first" or (moment == "last" and done == total):
        kill()

if moment == "synced":
    store_files._rename = kill
tokenize.tokenize_files(make_config(folder, folder / "a.txt"), progress=progress, note=print)
"""


def stores(config: TokenizeConfig) -> list[Path]:
    """Return the folders in the cache."""
    return [path for path in config.cache.iterdir() if path.is_dir()]


def tokenize_error(config: TokenizeConfig) -> PrepError:
    """Return the error of tokenizing."""
    with pytest.raises(PrepError) as caught:
        tokenize_quietly(config)
    return caught.value


@pytest.mark.parametrize("eos_id", [None, EOS])
def test_tokenize_files_concatenates_documents_with_eos(tmp_path: Path, eos_id: int | None):
    texts = [TEXT, "", "the hat\n", "日本" * 5]
    config = make_config(
        tmp_path, write_json(tmp_path / "a.jsonl", texts), type="json", eos_id=eos_id
    )
    tokens = tokenize_quietly(config)
    documents_ids = [
        encode(config.tokenizer, text) + [EOS] * (eos_id is not None) for text in texts
    ]
    ids = [*chain(*documents_ids)]
    assert tokens.ids[:].tolist() == ids
    assert tokens.ends[:].tolist() == [sum(map(len, documents_ids[: i + 1])) for i in range(4)]
    dataset = PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks)
    assert dataset.get_batch([1])["tokens"].tolist() == [ids[8:16]]


def test_long_text_gives_tokens_of_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_files, "TEXT_CHUNK_NBYTES", 300)
    monkeypatch.setattr(encode_module, "ENCODE_BATCH_NBYTES", 1000)
    (tmp_path / "a.txt").write_text(TEXT * 100)
    config = make_config(tmp_path, tmp_path / "a.txt")
    reports: list[tuple[int, ...]] = []
    tokens = tokenize_files(
        config, progress=lambda *counts: reports.append(counts), note=lambda text: None
    )
    assert tokens.ids[:].tolist() == [*encode(config.tokenizer, TEXT * 100), EOS]
    assert tokens.ends[:].tolist() == [tokens.n_tokens]
    assert len(reports) > 5
    assert reports == sorted(reports)
    assert {total for _, total, _ in reports} == {len(TEXT) * 100} == {reports[-1][0]}
    assert (reports[0], reports[-1][2]) == ((0, len(TEXT) * 100, 0), tokens.n_tokens)


def test_second_run_uses_the_cache(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    config = make_config(tmp_path, tmp_path / "a.txt")
    first = tokenize_quietly(config)
    notes, calls = [], []
    again = tokenize_files(
        change(config, seq_length=5), progress=lambda *sizes: calls.append(sizes), note=notes.append
    )
    n = first.n_tokens
    assert again.ids[:].tolist() == first.ids[:].tolist()
    assert calls == []
    assert notes == [
        f"using the tokens of an earlier run: {config.cache / first.identity}",
        f"{n} tokens in 1 document: {n // 5} blocks of 5, {n % 5} token{'s' * (n % 5 != 1)} left over and dropped",
    ]


@pytest.mark.parametrize("name", ["00000/tokens.bin", "00000/documents.bin", "store.json"])
def test_damaged_store_is_built_again(tmp_path: Path, name: str):
    (tmp_path / "a.txt").write_text(TEXT)
    config = make_config(tmp_path, tmp_path / "a.txt")
    ids = tokenize_quietly(config).ids[:].tolist()
    (folder,) = stores(config)
    before = read_files(folder)
    (folder / name).write_bytes(bytes([before[name][0] ^ 1]) + before[name][1:])
    notes: list[str] = []
    assert (
        tokenize_files(config, progress=lambda *sizes: None, note=notes.append).ids[:].tolist()
        == ids
    )
    assert read_files(folder) == before
    assert stores(config) == [folder]
    assert notes[0].startswith(f"the tokens in {folder} are damaged ({name} ")
    assert notes[0].endswith("): they are rebuilt")
    assert len(notes) == 2


def test_scratch_dir_leaves_damaged_store_alone(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    config = make_config(tmp_path, tmp_path / "a.txt")
    ids = tokenize_quietly(config).ids[:].tolist()
    (folder,) = stores(config)
    path = folder / "00000" / "tokens.bin"
    path.write_bytes(bytes(len(path.read_bytes())))
    before = read_files(folder)
    assert tokenize_quietly(change(config, scratch_dir=tmp_path / "scratch")).ids[:].tolist() == ids
    assert read_files(folder) == before


def test_store_does_not_depend_on_file_paths(tmp_path: Path):
    results = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(TEXT)
        config = make_config(tmp_path / name, tmp_path / name / "*.txt")
        results.append((tokenize_quietly(config).identity, read_files(stores(config)[0])))
    assert results[0] == results[1]


def test_store_identity_depends_on_all_inputs(tmp_path: Path):
    path = write_json(tmp_path / "a.jsonl", [TEXT, TEXT])
    text = tmp_path / "a.txt"
    text.write_text(TEXT)
    other_tokenizer = make_tokenizer(tmp_path / "other.json", vocab=280)
    config = make_config(tmp_path, path, type="json")
    two_columns = tmp_path / "b.jsonl"
    two_columns.write_text(
        '{"text": "the cat sat on the mat, the cat, the hat", "body": "the hat sat on the cat, the mat, the hat"}\n'
    )
    variants = [
        config,
        change(config, type="text", fields=""),
        change(config, eos_id=None),
        change(config, eos_id=1),
        change(config, tokenizer=other_tokenizer),
        change(config, paths=(str(text),), type="text", fields=""),
        change(config, paths=(str(path), str(two_columns))),
        change(config, paths=(str(two_columns), str(path))),
        change(config, paths=(str(two_columns),)),
        change(config, paths=(str(two_columns),), fields="body"),
    ]
    assert len({tokenize_quietly(variant).identity for variant in variants}) == len(variants)
    same = [
        change(config, seq_length=3),
        change(config, vocab=400),
        change(config, paths=(str(path), str(path))),
    ]
    assert {tokenize_quietly(variant).identity for variant in same} == {
        tokenize_quietly(config).identity
    }


@pytest.mark.parametrize("moment", slow_except(["first", "last", "synced"], ["synced"]))
def test_killed_tokenization_leaves_no_store(tmp_path: Path, moment: str):
    (tmp_path / "a.txt").write_text(TEXT * 100)
    config = make_config(tmp_path, tmp_path / "a.txt")
    done = subprocess.run(
        [sys.executable, "-c", KILL_SCRIPT, moment, str(tmp_path)], check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    tokens = tokenize_quietly(config)
    assert [path.name for path in stores(config)] == [tokens.identity]
    assert sorted(read_files(stores(config)[0])) == [
        "00000/documents.bin",
        "00000/meta.json",
        "00000/tokens.bin",
        "store.json",
    ]
    assert tokens.ids[:].tolist() == [*encode(config.tokenizer, TEXT * 100), EOS]


def test_ids_beyond_the_vocabulary_are_rejected(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    config = make_config(tmp_path, tmp_path / "a.txt")
    top = max(encode(config.tokenizer, TEXT))
    error = tokenize_error(change(config, vocab=top))
    assert f"id {top} (" in error.what
    assert f"has {top} tokens; the tokenizer has ids up to 2" in error.why
    assert stores(config) == []
    # The tokenizer may have larger ids if the text does not use them.
    assert tokenize_quietly(change(config, vocab=top + 1)).n_tokens
    # A store in the cache is checked as well.
    assert tokenize_error(change(config, vocab=top)).what == error.what


def test_eos_id_beyond_the_vocabulary_is_rejected(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    error = tokenize_error(make_config(tmp_path, tmp_path / "a.txt", eos_id=300))
    assert error.what == "eos_token_id 300 is out of range"
    assert error.why == "the vocabulary without padding has 300 tokens"


@pytest.mark.parametrize(("text", "eos_id", "n"), [("cat", EOS, 2), ("\ufeff", None, 0)])
def test_data_shorter_than_one_block_is_rejected(
    tmp_path: Path, text: str, eos_id: int | None, n: int
):
    (tmp_path / "a.txt").write_text(text)
    error = tokenize_error(make_config(tmp_path, tmp_path / "a.txt", eos_id=eos_id))
    assert error.what == "the data is shorter than one block"
    assert error.why == f"{n} tokens in 1 document, a block has 8"


def test_invalid_data_leaves_no_store(tmp_path: Path):
    path = write_json(tmp_path / "a.jsonl", [TEXT] * 3)
    path.write_text(path.read_text() + "{")
    config = make_config(tmp_path, path, type="json")
    assert tokenize_error(config).what == f"{path}:4: not JSON"
    assert stores(config) == []


def test_ids_beyond_uint16_use_uint32(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    tokens = tokenize_quietly(
        make_config(tmp_path, tmp_path / "a.txt", eos_id=70_000, vocab=70_001)
    )
    assert tokens.ids[:].dtype == "uint32"
    assert tokens.ids[:][-1] == 70_000


def test_scratch_dir_is_used_only_without_cached_store(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    config = make_config(tmp_path, tmp_path / "a.txt", scratch_dir=tmp_path / "scratch")
    made = tokenize_quietly(config)
    assert not config.cache.exists()
    (tmp_path / "scratch").rename(config.cache)
    assert tokenize_quietly(config).identity == made.identity
    assert not (tmp_path / "scratch").exists()


def test_tokens_in_brackets_have_no_loss(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"ids": [7, 8], "a": "the cat", "b": "the hat"}\n{"ids": [], "a": "cat", "b": "the mat"}\n'
    )
    config = make_config(
        tmp_path,
        path,
        type="json",
        fields="[{ids}, <|9|>, a], b",
        bos_id=1,
        add_bos=True,
        seq_length=2,
    )
    notes: list[str] = []
    tokens = tokenize_files(config, progress=lambda *counts: None, note=notes.append)
    expected: list[tuple[int, int]] = []
    for ids, a, b in (([7, 8], "the cat", "the hat"), ([], "cat", "the mat")):
        expected += [(token_id, 0) for token_id in (1, *ids, 9, *encode(config.tokenizer, a))]
        expected += [(token_id, 1) for token_id in (*encode(config.tokenizer, b), EOS)]
    assert tokens.weight_codes is not None
    assert list(zip(tokens.ids[:].tolist(), tokens.weight_codes[:].tolist())) == expected
    share = 100 * sum(weight for _, weight in expected) / len(expected)
    assert f" in 2 documents, {share:.0f} % with loss: " in notes[-1]


def test_data_without_trainable_tokens_is_rejected(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "the cat sat on the mat, the cat", "b": ""}\n')
    error = tokenize_error(
        make_config(tmp_path, path, type="json", fields="[a], b", eos_id=None, seq_length=2)
    )
    assert error.what == "the data has no token to train on"


@pytest.mark.parametrize(
    ("overlong", "packing", "what", "why"),
    [
        ("drop", "concatenate", "the data is shorter than one block", "1 document is dropped, because of"),
        ("drop", "documents", "the data has no token", "1 document is dropped, because of"),
        ("truncate", "documents", "the data has no token to train on", "1 document is cut to the length"),
    ],
)  # fmt: skip
def test_error_names_long_documents_as_the_cause(
    tmp_path: Path, overlong: str, packing: str, what: str, why: str
):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "the cat sat on the mat, the cat", "b": "cat"}\n')
    settings = {"type": "json", "fields": "[a], b", "overlong": overlong, "packing": packing}
    error = tokenize_error(make_config(tmp_path, path, **settings))
    assert error.what == what
    assert error.why.startswith(why)
    assert "data.seq_length" in str(error)


def test_empty_file_among_others_is_skipped_with_a_note(tmp_path: Path):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("" if name == "b.txt" else TEXT)
    notes: list[str] = []
    config = make_config(tmp_path, tmp_path)
    tokens = tokenize_files(config, progress=lambda *counts: None, note=notes.append)
    assert f"skipped: {tmp_path}/b.txt is empty" in notes
    (tmp_path / "b.txt").unlink()
    assert tokenize_quietly(config).identity == tokens.identity


def test_only_empty_files_are_an_error(tmp_path: Path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    with pytest.raises(PrepError, match=r"a\.txt is empty"):
        tokenize_quietly(make_config(tmp_path, tmp_path))


# A resumed run with other tokens is refused before they are made, and the error names the cause.

VERSION_HINT = "the earlier version finishes the run; `--restart` starts again from step 0"


@pytest.fixture
def config(tmp_path: Path) -> TokenizeConfig:
    """Return settings of text documents."""
    file = write_json(tmp_path / "a.jsonl", ["the cat sat"] * 9)
    return make_config(tmp_path, file, type="json", bos_id=BOS)


def refusal(config: TokenizeConfig, recorded: str, add_bos: bool | None) -> PrepError:
    """Return the error of a run that began with other tokens. No token is made."""
    resumed = replace(config, recorded=RecordedTokens((recorded, "another store"), add_bos))

    def fail(*_: Any) -> None:
        pytest.fail("tokens were made")

    with pytest.raises(PrepError) as caught:
        tokenize_files(resumed, progress=fail, note=lambda line: None)
    with pytest.raises(PrepError) as shared:
        tokenize_share(resumed, 0, 2, progress=fail, note=lambda line: None)
    assert str(shared.value) == str(caught.value)
    # Only digests of the files are recorded.
    assert not [path for path in config.cache.iterdir() if path.is_dir()]
    assert caught.value.what == "the data has changed since the run began"
    return caught.value


def missing_tokens(config: TokenizeConfig, identity: str, *changes: IdentityChange) -> str:
    """Return the cause of an error of tokens that this version does not make."""
    causes = [
        *(change.value for change in changes),
        f"{config.cache / identity} is missing or damaged",
    ]
    return ", and ".join(causes)


def test_tokens_of_other_files_are_refused_before_they_are_made(config: TokenizeConfig):
    error = refusal(config, "recorded", add_bos=None)
    assert error.why.startswith("recorded another store, now ")
    assert error.hint.startswith(
        "use the files with which the run began, on all hosts; `--restart`"
    )


def test_recorded_tokens_are_made_again(config: TokenizeConfig):
    recorded = RecordedTokens((recorded_identity(config),), None)
    resumed = replace(config, recorded=recorded)
    tokens = tokenize_files(resumed, progress=lambda *_: None, note=lambda line: None)
    assert tokens.identity == recorded.identities[0]


@pytest.mark.parametrize("then", [True, pytest.param(None, marks=pytest.mark.slow)])
def test_changed_begin_token_is_named(config: TokenizeConfig, then: bool | None):
    begun = recorded_identity(change(config, add_bos=then))
    error = refusal(change(config, add_bos=not then), begun, add_bos=then)
    value = "true" if then else ""
    assert error.why.startswith("data.add_bos: ")
    assert error.hint.startswith(f"`--set data.add_bos={value}` keeps it; `--restart`")


def test_begin_token_is_not_the_cause_for_chats_without_it(tmp_path: Path):
    # An earlier version recorded `data.add_bos = false`, the default then.
    pytest.importorskip("jinja2")
    error = refusal(chat_config(tmp_path), "recorded", add_bos=False)
    assert "data.add_bos" not in f"{error.why} {error.hint}"


def test_second_begin_token_of_an_earlier_version_is_named(tmp_path: Path):
    config = change(chat_config(tmp_path), add_bos=True)
    begun = recorded_identity(config, IdentityChange.SINGLE_BOS)
    error = refusal(config, begun, add_bos=True)
    assert error.why == missing_tokens(config, begun, IdentityChange.SINGLE_BOS)
    assert error.hint.startswith(VERSION_HINT)


def test_rows_of_tables_of_an_earlier_version_are_named(tmp_path: Path):
    config = chat_config(tmp_path, ".parquet")
    begun = recorded_identity(config, IdentityChange.TABLE_ROWS)
    error = refusal(config, begun, add_bos=False)
    assert error.why == missing_tokens(config, begun, IdentityChange.TABLE_ROWS)
    assert error.hint.startswith(VERSION_HINT)
    # The first version had none of the changes.
    others = (IdentityChange.CONTENT_PARTS, IdentityChange.JSON_LISTS)
    first = [cause for cause in IdentityChange if cause not in others]
    both = recorded_identity(change(config, add_bos=True), *first)
    error = refusal(config, both, add_bos=True)
    causes = missing_tokens(config, both, *first)
    assert error.why == f"data.add_bos: true -> not set, and {causes}"


@pytest.mark.parametrize("change", [IdentityChange.CONTENT_PARTS, IdentityChange.CHAT_RENDERING])
def test_resumed_run_keeps_the_tokens_of_an_earlier_version(tmp_path: Path, change: IdentityChange):
    config = chat_config(tmp_path)
    begun, present = make_earlier_tokens(config, change)
    stores = sorted(path.name for path in config.cache.iterdir() if path.is_dir())
    resumed = replace(config, recorded=RecordedTokens((begun,), None))
    notes: list[str] = []
    tokens = tokenize_files(resumed, progress=lambda *_: None, note=notes.append)
    assert tokens.identity == begun
    assert f"the run keeps the tokens of the earlier version: {change.value}" in notes
    share = tokenize_share(resumed, 0, 2, progress=lambda *_: None, note=lambda line: None)
    assert share.folder == config.cache / begun
    assert sorted(path.name for path in config.cache.iterdir() if path.is_dir()) == stores
    # A new run has the new tokens, also if it trusts the times of the files.
    trusting = replace(config, checks_digests=False)
    again = tokenize_files(trusting, progress=lambda *_: None, note=lambda line: None)
    assert again.identity == present


def test_damaged_tokens_of_an_earlier_version_are_not_made_again(tmp_path: Path):
    config = chat_config(tmp_path)
    begun, _ = make_earlier_tokens(config, IdentityChange.CHAT_RENDERING)
    ids = config.cache / begun / "tokens.bin"
    ids.write_bytes(bytes(ids.stat().st_size))
    resumed = replace(config, recorded=RecordedTokens((begun,), None))
    with pytest.raises(PrepError) as caught:
        tokenize_files(resumed, progress=lambda *_: None, note=lambda line: None)
    assert caught.value.why == missing_tokens(config, begun, IdentityChange.CHAT_RENDERING)
    assert caught.value.hint.startswith(VERSION_HINT)
