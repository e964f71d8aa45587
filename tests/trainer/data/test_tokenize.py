"""From files to tokens: the right ones, once, and never half of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corpus import EOS, TEXT, encode, make_config, make_tokenizer, tokenize_quietly, write_json
from trainer.data import documents
from trainer.data import tokenize as preparing
from trainer.data.documents import TextChunk
from trainer.data.packing import PackedDataset
from trainer.data.tokenize import TokenizeConfig, tokenize_files
from trainer.models.errors import PrepError

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.helpers.corpus import request
from trainer.data import documents, prepare, store

documents.PIECE_NBYTES, prepare.BATCH_NBYTES = 1000, 2000
moment, folder = sys.argv[1], Path(sys.argv[2])

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def progress(done, total):
    if moment == "first" or (moment == "last" and done == total):
        kill()

if moment == "synced":
    store.Path.rename = kill
prepare.prepare(request(folder, folder / "a.txt"), progress, print)
"""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stores(wanted: TokenizeConfig) -> list[Path]:
    return [path for path in wanted.cache.iterdir() if path.is_dir()]


def failure(wanted: TokenizeConfig) -> PrepError:
    with pytest.raises(PrepError) as caught:
        tokenize_quietly(wanted)
    return caught.value


@given(st.lists(st.integers(0, 2 * preparing.ENCODE_BATCH_NBYTES)))
def test_batches_are_all_pieces_in_order_and_bounded(sizes: list[int]):
    found = list(preparing.batch_chunks(TextChunk("", nbytes, True) for nbytes in sizes))
    assert [piece.nbytes for batch in found for piece in batch] == sizes
    assert all(
        len(batch) == 1 or sum(piece.nbytes for piece in batch) <= preparing.ENCODE_BATCH_NBYTES for batch in found
    )
    assert all(found)


@pytest.mark.parametrize("eos_id", [None, EOS])
def test_documents_one_after_another_each_with_an_end(tmp_path: Path, eos_id: int | None):
    texts = [TEXT, "", "the hat\n", "日本" * 5]
    wanted = make_config(tmp_path, write_json(tmp_path / "a.jsonl", texts), type="json", eos_id=eos_id)
    tokens = tokenize_quietly(wanted)
    each = [encode(wanted.tokenizer, text) + [EOS] * (eos_id is not None) for text in texts]
    assert tokens.ids.tolist() == [*chain(*each)]
    assert tokens.ends.tolist() == [sum(map(len, each[: i + 1])) for i in range(4)]
    assert PackedDataset(tokens, 0, tokens.n_blocks).get_batch([1])["tokens"].tolist() == [[*chain(*each)][8:16]]


def test_files_are_documents_in_order(tmp_path: Path):
    for name, text in (("b.txt", "the hat "), ("a.txt", TEXT)):
        (tmp_path / name).write_text(text)
    wanted = make_config(tmp_path, tmp_path)
    ids = [*encode(wanted.tokenizer, TEXT), EOS, *encode(wanted.tokenizer, "the hat "), EOS]
    assert tokenize_quietly(wanted).ids.tolist() == ids


def test_a_long_text_gives_the_tokens_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(documents, "TEXT_CHUNK_NBYTES", 300)
    monkeypatch.setattr(preparing, "ENCODE_BATCH_NBYTES", 1000)
    (tmp_path / "a.txt").write_text(TEXT * 100)
    wanted = make_config(tmp_path, tmp_path / "a.txt")
    seen: list[tuple[int, int]] = []
    tokens = tokenize_files(wanted, lambda done, total: seen.append((done, total)), lambda text: None)
    assert tokens.ids.tolist() == [*encode(wanted.tokenizer, TEXT * 100), EOS]
    assert tokens.ends.tolist() == [tokens.n_tokens]
    assert len(seen) > 5
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {len(TEXT) * 100} == {seen[-1][0]}


def test_the_second_time_nothing_is_tokenised(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    wanted = make_config(tmp_path, tmp_path / "a.txt")
    first = tokenize_quietly(wanted)
    notes, calls = [], []
    again = tokenize_files(replace(wanted, seq_length=5), lambda *at: calls.append(at), notes.append)
    n = first.n_tokens
    assert again.ids.tolist() == first.ids.tolist()
    assert calls == []
    assert notes == [
        f"tokens of an earlier run are used: {wanted.cache / first.identity}",
        f"{n} tokens in 1 document: {n // 5} blocks of 5, {n % 5} token{'s' * (n % 5 != 1)} left over and dropped",
    ]


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "meta.json"])
def test_damaged_tokens_are_made_again(tmp_path: Path, name: str):
    (tmp_path / "a.txt").write_text(TEXT)
    wanted = make_config(tmp_path, tmp_path / "a.txt")
    ids = tokenize_quietly(wanted).ids.tolist()
    (folder,) = stores(wanted)
    before = content(folder)
    (folder / name).write_bytes(bytes([before[name][0] ^ 1]) + before[name][1:])
    notes: list[str] = []
    assert tokenize_files(wanted, lambda *at: None, notes.append).ids.tolist() == ids
    assert content(folder) == before
    assert [path.name for path in wanted.cache.iterdir() if path.is_dir()] == [folder.name]
    assert notes[0].startswith(f"the tokens in {folder} are broken ({name} ")
    assert notes[0].endswith("): they are made again")
    assert len(notes) == 2


def test_a_dry_run_leaves_damaged_tokens_alone(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    wanted = make_config(tmp_path, tmp_path / "a.txt")
    ids = tokenize_quietly(wanted).ids.tolist()
    (folder,) = stores(wanted)
    (folder / "tokens.bin").write_bytes(b"\0" * len((folder / "tokens.bin").read_bytes()))
    before = content(folder)
    assert tokenize_quietly(replace(wanted, scratch_dir=tmp_path / "spare")).ids.tolist() == ids
    assert content(folder) == before


def test_equal_requests_give_equal_bytes_wherever_the_files_are(tmp_path: Path):
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(TEXT)
        wanted = make_config(tmp_path / name, tmp_path / name / "*.txt")
        found.append((tokenize_quietly(wanted).identity, content(stores(wanted)[0])))
    assert found[0] == found[1]


def test_what_the_tokens_depend_on_makes_another_store(tmp_path: Path):
    path = write_json(tmp_path / "a.jsonl", [TEXT, TEXT])
    text = tmp_path / "a.txt"
    text.write_text(TEXT)
    other = make_tokenizer(tmp_path / "other.json", vocab=280)
    wanted = make_config(tmp_path, path, type="json")
    both = tmp_path / "b.jsonl"
    both.write_text(
        '{"text": "the cat sat on the mat, the cat, the hat", "body": "the hat sat on the cat, the mat, the hat"}\n'
    )
    requests = [
        wanted,
        replace(wanted, type="text"),
        replace(wanted, eos_id=None),
        replace(wanted, eos_id=1),
        replace(wanted, tokenizer=other),
        replace(wanted, paths=(str(text),), type="text"),
        replace(wanted, paths=(str(path), str(both))),
        replace(wanted, paths=(str(both), str(path))),
        replace(wanted, paths=(str(both),)),
        replace(wanted, paths=(str(both),), fields="body"),
    ]
    assert len({tokenize_quietly(each).identity for each in requests}) == len(requests)
    same = [replace(wanted, seq_length=3), replace(wanted, vocab=400), replace(wanted, paths=(str(path), str(path)))]
    assert {tokenize_quietly(each).identity for each in same} == {tokenize_quietly(wanted).identity}


def test_a_column_means_nothing_for_text(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    wanted = make_config(tmp_path, tmp_path / "a.txt")
    assert tokenize_quietly(wanted).identity == tokenize_quietly(replace(wanted, fields="")).identity


@pytest.mark.parametrize("moment", ["first", "last", "synced"])
def test_a_killed_preparation_leaves_no_store(tmp_path: Path, moment: str):
    (tmp_path / "a.txt").write_text(TEXT * 100)
    wanted = make_config(tmp_path, tmp_path / "a.txt")
    done = subprocess.run([sys.executable, "-c", KILLED, moment, str(tmp_path)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.suffix for path in stores(wanted)] == [".partial"]
    tokens = tokenize_quietly(wanted)
    assert [path.name for path in stores(wanted)] == [tokens.identity]
    assert tokens.ids.tolist() == [*encode(wanted.tokenizer, TEXT * 100), EOS]


@pytest.mark.parametrize("switch", ["true", "false"])
def test_threads_change_no_byte(tmp_path: Path, switch: str):
    (tmp_path / "a.txt").write_text(TEXT * 100)
    wanted = make_config(tmp_path, tmp_path / "a.txt")
    environment = os.environ | {"TOKENIZERS_PARALLELISM": switch, "RAYON_NUM_THREADS": "3"}
    command = [sys.executable, "-c", KILLED, "never", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=environment)
    other = replace(wanted, cache=tmp_path / "other")
    tokenize_quietly(other)
    assert content(stores(wanted)[0]) == content(stores(other)[0])


def test_ids_that_the_model_lacks(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    wanted = make_config(tmp_path, tmp_path / "a.txt")
    top = max(encode(wanted.tokenizer, TEXT))
    error = failure(replace(wanted, vocab=top))
    assert f"id {top} (" in error.what
    assert f"is {top}; the tokenizer has ids up to 2" in error.why
    assert stores(wanted) == []
    assert tokenize_quietly(replace(wanted, vocab=top + 1)).n_tokens  # ids that the text does not use do not matter
    assert failure(replace(wanted, vocab=top)).what == error.what  # also of a store that is there


def test_an_end_of_text_that_the_model_lacks(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    error = failure(make_config(tmp_path, tmp_path / "a.txt", eos_id=300))
    assert error.what == "end-of-text id 300 is not in the model's vocabulary"
    assert error.why == "the true vocabulary, padding apart, is 300"


@pytest.mark.parametrize(("text", "eos_id", "n"), [("cat", EOS, 2), ("\ufeff", None, 0)])
def test_less_than_a_block(tmp_path: Path, text: str, eos_id: int | None, n: int):
    (tmp_path / "a.txt").write_text(text)
    error = failure(make_config(tmp_path, tmp_path / "a.txt", eos_id=eos_id))
    assert error.what == "the data is shorter than one block"
    assert error.why == f"{n} tokens in 1 document, a block has 8"


def test_an_error_in_the_data_leaves_no_store(tmp_path: Path):
    path = write_json(tmp_path / "a.jsonl", [TEXT] * 3)
    path.write_text(path.read_text() + "{")
    wanted = make_config(tmp_path, path, type="json")
    assert failure(wanted).what == f"{path}:4: not JSON"
    assert stores(wanted) == []


def test_ids_beyond_16_bits(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    tokens = tokenize_quietly(make_config(tmp_path, tmp_path / "a.txt", eos_id=70_000, vocab=70_001))
    assert tokens.ids.dtype == "uint32"
    assert tokens.ids[-1] == 70_000


def test_a_spare_cache_is_for_what_the_cache_lacks(tmp_path: Path):
    (tmp_path / "a.txt").write_text(TEXT)
    wanted = make_config(tmp_path, tmp_path / "a.txt", spare=tmp_path / "spare")
    made = tokenize_quietly(wanted)
    assert not wanted.cache.exists()
    (tmp_path / "spare").rename(wanted.cache)
    assert tokenize_quietly(wanted).identity == made.identity
    assert not (tmp_path / "spare").exists()
