"""Shards of a store: equal tokens for any division and processes, after any deaths, from equal inputs only."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import prepcli
from prepcli.core.errors import PrepError
from tests.helpers.corpus import TEXT, change, make_config, write_json
from tests.helpers.slow_cases import slow_except
from tests.helpers.token_stores import NAME, fill, read_files, write_earlier_layout
from tests.trainer.data.readers.test_token_files import DOCUMENTS, write_dataset
from trainer.data import encode, shards, store_files
from trainer.data import files as data_files
from trainer.data.files import DataFile
from trainer.data.readers import text_files
from trainer.data.records import divide_files
from trainer.data.shards import ShardWriter, dtype_for, writing_shard
from trainer.data.store import (
    DamagedStoreError,
    MappedTokens,
    join_shards,
    read_meta,
    read_shard,
    write_meta,
)
from trainer.data.tokenize import TokenizedShare, open_tokens, tokenize_files, tokenize_share
from trainer.data.tokenize_config import TokenizeConfig

N_FILES = 7


@pytest.fixture
def config(tmp_path: Path) -> TokenizeConfig:
    """Return a config of JSON files of different sizes."""
    write_data(tmp_path / "data")
    return make_config(tmp_path, tmp_path / "data", type="json")


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_NBYTES", 200)


def write_data(folder: Path) -> None:
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for index in range(N_FILES):
        lengths = numbers.integers(0, len(TEXT), 3 * index + 1)
        write_json(folder / f"{index}.jsonl", [TEXT[:length] for length in lengths])


def tokenize(config: TokenizeConfig, process: int = 0, of: int = 1) -> TokenizedShare:
    return tokenize_share(
        config, process, of, progress=lambda *counts: None, note=lambda text: None
    )


def whole_tokens(config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Return the tokens of one process that makes one shard, in another cache."""
    with monkeypatch.context() as patch:
        patch.setattr(shards, "SHARD_NBYTES", 1 << 30)
        share = tokenize(change(config, cache=config.cache.with_name("whole")))
    assert share.n_shards == 1
    return contents(share.tokens)


def contents(tokens: MappedTokens | None) -> dict[str, list[Any]]:
    """Return what does not depend on the division of a store."""
    assert tokens is not None
    weights: list[float] = []
    if tokens.weight_codes is not None:
        weights = tokens.read_weights(0, tokens.n_tokens).tolist()
    return {
        "ids": tokens.ids[:].tolist(),
        "ends": tokens.ends[:].tolist(),
        "weights": weights,
        "loss_weights": [*tokens.loss_weights],
    }


def expected_files(config: TokenizeConfig) -> dict[str, bytes]:
    """Return the files of the store of one process, made in another cache."""
    alone = replace(config, cache=config.cache.with_name("alone"))
    tokens = tokenize_files(alone, progress=lambda *counts: None, note=lambda text: None)
    return read_files(alone.cache / tokens.identity)


def stores(config: TokenizeConfig) -> list[str]:
    return [path.name for path in config.cache.iterdir() if path.is_dir()]


@pytest.mark.parametrize(("max_id", "dtype"), [(0, "uint16"), (65535, "uint16"), (65536, "uint32")])
def test_dtype_for_holds_max_id(max_id: int, dtype: str):
    assert dtype_for(max_id) == dtype


SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=8)


@given(SIZES, st.integers(1, 40), st.integers(1, 9), st.sampled_from(["json", "parquet"]))
def test_layout_has_each_byte_in_one_shard(sizes: list[int], nbytes: int, of: int, file_type: Any):
    files = [DataFile(f"{index}", size, "x") for index, size in enumerate(sizes)]
    layout = divide_files(files, file_type, min_nbytes=nbytes, max_shards=1024)
    places = [
        layout.find(index, end) for index, size in enumerate(sizes) for end in range(1, size + 1)
    ]
    assert places == sorted(places)
    assert sorted({*places}) == [*range(layout.n_shards)]
    assert [places.count(shard) for shard in range(layout.n_shards)] == [*layout.nbytes]
    for index, size in enumerate(sizes):
        for shard in range(layout.find(index, 0), layout.find(index, size) + 1):
            start = layout.start(index, shard)
            assert start == 0 or layout.find(index, start) < shard == layout.find(index, start + 1)
    shares = [layout.share(process, of) for process in range(of)]
    assert [shard for share in shares for shard in share] == [*range(layout.n_shards)]


def test_layout_has_a_limited_number_of_shards():
    files = [DataFile(str(index), 1 + index % 7, "x") for index in range(10_000)]
    assert divide_files(files, "json", min_nbytes=1, max_shards=64).n_shards <= 64


@pytest.mark.parametrize("of", slow_except([1, 2, 4, 9], [1, 4]))
def test_store_has_the_bytes_of_one_process(
    config: TokenizeConfig, of: int, monkeypatch: pytest.MonkeyPatch
):
    results = [tokenize(config, process, of) for process in reversed(range(of))]
    assert [result.meta is not None for result in results] == [False] * (of - 1) + [True]
    assert read_files(results[-1].folder) == expected_files(config)
    assert results[-1].n_shards > 9
    assert contents(results[-1].tokens) == whole_tokens(config, monkeypatch)
    assert stores(config) == [results[-1].folder.name]


@pytest.mark.parametrize("nbytes", slow_except([90, 1000], [90]))
@pytest.mark.parametrize(
    "changes",
    slow_except(
        [
            {"type": "json", "fields": "[text], text"},
            {"type": "json", "max_examples": 9},
            {"type": "json", "bad_lines": 3},
            {"type": "json", "bad_lines": 3, "suffix": "list"},
            {"type": "json", "suffix": ".gz"},
            {"type": "json", "suffix": ".zst"},
            {"type": "csv"},
            {"type": "csv", "bad_lines": 3},
            {"type": "text"},
            {"type": "text", "prepend_text": "the "},
            {"type": "json", "packing": "documents", "overlong": "truncate"},
        ],
        [
            {"type": "json", "bad_lines": 3, "suffix": "list"},
            {"type": "json", "packing": "documents", "overlong": "truncate"},
            {"type": "csv"},
            {"type": "text"},
        ],
    ),
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_division_keeps_the_tokens(
    tmp_path: Path, changes: dict[str, object], nbytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shards, "SHARD_NBYTES", nbytes)
    monkeypatch.setattr(text_files, "TEXT_CHUNK_NBYTES", 40)
    suffix = changes.pop("suffix", "") if "suffix" in changes else ""
    write_data(tmp_path / "data")
    for path in sorted((tmp_path / "data").iterdir()):
        rewrite(path, str(changes["type"]), str(suffix), has_errors="bad_lines" in changes)
    fields = {"fields": "text"} if changes["type"] == "csv" else {}
    config = make_config(tmp_path, tmp_path / "data", **fields, **changes)
    expected = whole_tokens(config, monkeypatch)
    results = [tokenize(config, process, 3) for process in range(3)]
    assert contents(results[-1].tokens) == expected
    files = read_files(results[-1].folder)
    # A process alone, and one that finds every other shard.
    assert expected_files(config) == files
    for name in [*results[-1].meta.shards][::2]:  # type: ignore[union-attr]
        store_files.discard_folder(results[-1].folder / name)
    (results[-1].folder / "store.json").unlink()
    assert contents(tokenize(config).tokens) == expected
    assert read_files(results[-1].folder) == files


def rewrite(path: Path, file_type: str, suffix: str, *, has_errors: bool) -> None:
    """Write the records of a JSON file in another way, with an invalid one in two of the files."""
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    is_invalid = has_errors and path.stem in "35"
    if file_type == "text":
        path.with_suffix(".txt").write_text("".join(texts) * 3)
    elif file_type == "csv":
        with path.with_suffix(".csv").open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["id", "text"])
            rows.writerows(enumerate(texts))
            if is_invalid:
                file.write("1,2,3\n")
            rows.writerow(["x", "the end"])
    else:
        lines = path.read_text().splitlines()
        if is_invalid:
            lines.insert(1, "3")
        data = "\n".join(lines).encode()
        if suffix == "list":
            data = f"[\n{','.join(lines)}\n]\n".encode()
        if suffix == ".gz":
            data = gzip.compress(data)
        if suffix == ".zst":
            data = zstandard.compress(data)
        path.with_name(f"{path.name}{suffix}" if suffix.startswith(".") else path.name).write_bytes(
            data
        )
        if not suffix.startswith("."):
            return
    path.unlink()


def test_later_process_finds_the_complete_store(config: TokenizeConfig):
    for process in range(2):
        tokenize(config, process, 2)
    again = tokenize(config, 1, 2)
    assert again.meta is not None
    assert not again.is_described


def test_another_number_of_processes_continues(config: TokenizeConfig):
    first = tokenize(config, 0, 3)
    assert 0 < first.n_missing < first.n_shards
    assert 0 < tokenize(config, 1, 2).n_missing < first.n_missing
    assert tokenize(config).n_missing == 0
    assert read_files(tokenize(config).folder) == expected_files(config)


def test_one_process_makes_shards_with_skipped_lines(tmp_path: Path):
    write_data(tmp_path / "data")
    config = make_config(tmp_path, tmp_path / "data", type="json", bad_lines=2)
    assert tokenize(config, 1, 2).n_missing > 9
    assert tokenize(config, 0, 2).n_missing == 0


def test_skipped_lines_of_all_shards_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An interrupted run and the next one skip together as many lines as one run."""
    monkeypatch.setattr(encode, "ENCODE_BATCH_NBYTES", 100)
    lines = [json.dumps({"text": TEXT})] * 20
    for number in (3, 9, 15):
        lines[number] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for n_allowed in (2, 3):
        cache = tmp_path / f"cache{n_allowed}"
        config = make_config(tmp_path, tmp_path / "a.jsonl", type="json", bad_lines=n_allowed)
        config = change(config, cache=cache)
        interrupt(config, after=9)
        notes: list[str] = []

        def finish(config: TokenizeConfig = config, notes: list[str] = notes) -> None:
            tokenize_files(config, progress=lambda *counts: None, note=notes.append)

        if n_allowed == 3:
            finish()
            assert "3 invalid lines skipped" in notes
        else:
            with pytest.raises(PrepError, match=r"a\.jsonl:16: not JSON, after 2 invalid lines"):
                finish()


class InterruptionError(BaseException):
    """Ends tokenizing as an interruption by the user does."""


def interrupt(config: TokenizeConfig, after: int) -> int:
    """Interrupt a run at a report of its progress. Return the bytes at the one before."""
    done: list[int] = []

    def progress(nbytes: int, total: int, n_tokens: int) -> None:
        if len(done) == after:
            raise InterruptionError
        done.append(nbytes)

    with pytest.raises(InterruptionError):
        tokenize_files(config, progress=progress, note=lambda text: None)
    return done[-1]


def test_interrupted_run_continues_after_its_shards(
    config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(encode, "ENCODE_BATCH_NBYTES", 100)
    expected = expected_files(config)
    nbytes = 0
    for after in (6, 4, 4, 9):
        before = nbytes
        nbytes = interrupt(config, after)
        assert nbytes >= before
    notes: list[str] = []
    reports: list[tuple[int, int, int]] = []
    tokens = tokenize_files(
        config, progress=lambda *counts: reports.append(counts), note=notes.append
    )
    n_kept = reports[0][2]
    assert 0 < n_kept < tokens.n_tokens
    assert 0 <= nbytes - reports[0][0] <= 200
    assert f"continuing after {n_kept} tokens of an interrupted run" in notes
    assert reports == sorted(reports)
    assert reports[-1] == (reports[-1][1], reports[-1][1], tokens.n_tokens)
    assert read_files(config.cache / tokens.identity) == expected


def test_error_keeps_the_shards_before_it(config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch):
    """E.g. a full disk loses nothing but the shard in work."""
    monkeypatch.setattr(encode, "ENCODE_BATCH_NBYTES", 100)
    expected = expected_files(config)
    append = ShardWriter.append
    n_left = 12

    def fill_disk(writer: ShardWriter, *args: Any, **options: Any) -> None:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(writer, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "append", fill_disk)
        with pytest.raises(PrepError, match="No space left on device"):
            tokenize(config)
    (folder,) = [path for path in config.cache.iterdir() if path.is_dir()]
    kept = read_files(folder)
    assert kept
    assert kept.items() < expected.items()
    assert read_files(tokenize(config).folder) == expected


def test_file_name_outside_utf8_is_supported(config: TokenizeConfig):
    folder = Path(config.paths[0])
    (folder / "3.jsonl").rename(folder / os.fsdecode(b"3\xff.jsonl"))
    results = [tokenize(config, process, 2) for process in range(2)]
    assert read_files(results[-1].folder) == expected_files(config)


def damage(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


def test_temporary_folders_of_killed_processes_are_removed(config: TokenizeConfig):
    folder = tokenize(config, 0, 2).folder
    for name in ("00000.0123456789ab.partial", "00012.0123456789ab.partial"):
        (folder / name).mkdir()
        (folder / name / "tokens.bin").write_bytes(b"x")
    assert read_files(tokenize(config, 1, 2).folder) == expected_files(config)
    assert not [*folder.glob("*.partial")]


@pytest.mark.parametrize("name", ["tokens.bin", "meta.json"])
def test_damaged_shard_is_made_again(config: TokenizeConfig, name: str):
    folder = tokenize(config, 0, 2).folder
    damage(folder / "00001" / name)
    assert read_files(tokenize(config, 1, 2).folder) == expected_files(config)


def test_shards_of_another_division_are_made_again(
    config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch
):
    """E.g. of a version with shards of another size."""
    with monkeypatch.context() as patch:
        patch.setattr(shards, "SHARD_NBYTES", 150)
        assert tokenize(config, 0, 2).n_missing
    assert read_files(tokenize(config).folder) == expected_files(config)


@pytest.mark.parametrize("name", ["00003/tokens.bin", "store.json"])
def test_damaged_store_is_made_again(config: TokenizeConfig, name: str):
    results = [tokenize(config, process, 2) for process in range(2)]
    kept = (results[1].folder / "00001").stat().st_ino
    damage(results[1].folder / name)
    assert read_files(tokenize(config, 0, 2).folder) == expected_files(config)
    # Only the damaged shard is made again.
    assert (results[1].folder / "00001").stat().st_ino == kept


def test_store_of_an_earlier_version_is_used(
    config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shards, "SHARD_NBYTES", 1 << 30)
    first = tokenize(config)
    expected = contents(first.tokens)
    write_earlier_layout(first.folder)
    notes: list[str] = []
    again = tokenize_files(config, progress=fail, note=notes.append)
    assert notes[0] == f"using the tokens of an earlier run: {first.folder}"
    assert contents(again) == expected
    opened = open_tokens(config, first.folder.name, note=print)
    assert contents(opened) == expected
    damage(first.folder / "tokens.bin")
    assert contents(tokenize(config).tokens) == expected
    assert sorted(path.name for path in first.folder.iterdir()) == ["00000", "store.json"]


def fail(*counts: int) -> None:
    raise AssertionError("the data is tokenized")


def change_file(path: Path) -> None:
    path.write_text(path.read_text().replace('"id": 0', '"id": 9'))


def test_changed_file_is_one_error(config: TokenizeConfig):
    """Its shards may have tokens of the changed file."""
    path = Path(config.paths[0]) / "6.jsonl"
    content = path.read_text()
    done: list[int] = []

    def change_at_start(nbytes: int, total: int, n_tokens: int) -> None:
        done.append(nbytes)
        change_file(path)

    with pytest.raises(PrepError, match=r"6\.jsonl changed while it was read"):
        tokenize_files(config, progress=change_at_start, note=lambda text: None)
    assert done[-1] > 200
    assert stores(config) == []
    path.write_text(content)
    assert read_files(tokenize(config).folder) == expected_files(config)


def test_change_of_a_file_not_read_to_its_end_is_noticed(tmp_path: Path):
    """The first process needs only the start of the file."""
    path = write_json(tmp_path / "a.jsonl", [TEXT] * 20)
    config = make_config(tmp_path, path, type="json")
    with pytest.raises(PrepError, match=r"a\.jsonl changed while it was read"):
        tokenize_share(
            config, 0, 2, progress=lambda *counts: change_file(path), note=lambda text: None
        )


def test_change_after_a_shard_gives_another_store(config: TokenizeConfig):
    """The record of the first process must not stand for changed files."""
    first = tokenize(config, 0, 2)
    path = Path(config.paths[0]) / "0.jsonl"
    path.write_text(path.read_text().replace("the", "cat"))
    second = tokenize(config, 1, 2)
    assert second.folder != first.folder
    assert second.meta is None
    opened = tokenize_files(
        replace(config, checks_digests=False),
        progress=lambda *counts: None,
        note=lambda text: None,
    )
    assert opened.identity == second.folder.name
    assert read_files(second.folder) == expected_files(config)


def test_other_processes_read_no_file_for_its_digest(
    config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch
):
    tokenize(config, 0, 2)
    monkeypatch.setattr("trainer.data.files.hash_file", fail)
    assert tokenize(config, 1, 2).meta is not None


def test_processes_read_different_files_for_their_digests(
    config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch
):
    """Each one begins with another file, and uses what the others have recorded."""
    found = [Path(config.paths[0]) / f"{index}.jsonl" for index in range(N_FILES)]
    (found[2]).write_bytes(b"")
    stamps = data_files.file_stamps(found)
    hash_file = data_files.hash_file
    read: list[str] = []

    def record_hash(path: Path) -> DataFile:
        read.append(path.name)
        if len(read) == 4:
            # The other process starts while this one is in its fourth file.
            assert digests(1) == expected
        return hash_file(path)

    def digests(process: int) -> list[str]:
        return data_files.share_digests(found, config.cache, "key", stamps, process=process, of=2)

    expected = [hash_file(path).digest if path.stat().st_size else "" for path in found]
    monkeypatch.setattr(data_files, "hash_file", record_hash)
    assert digests(0) == expected
    # The second process begins in the middle, and reads only the file in work again.
    assert [name.partition(".")[0] for name in read] == ["0", "1", "2", "3", "3", "4", "5", "6"]
    data_files.remove_shared_digests(config.cache, "key")
    assert [*config.cache.iterdir()] == []


def test_index_and_ids_share_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Half of the datasets are the work of each of two processes."""
    monkeypatch.setattr(shards, "SHARD_NBYTES", 1)
    (tmp_path / "data").mkdir()
    for name in "abcd":
        write_dataset(tmp_path / "data" / name, DOCUMENTS)
    config = make_config(tmp_path, tmp_path / "data", type="megatron")
    results: list[TokenizedShare] = []
    counts: list[tuple[int, int, int]] = []
    for process in range(2):
        # Bytes, all bytes and tokens of the process
        progress = [(0, 0, 0)]
        results.append(
            tokenize_share(
                config,
                process,
                2,
                progress=lambda *numbers, progress=progress: progress.append(numbers),
                note=lambda text: None,
            )
        )
        counts.append(progress[-1])
    assert [result.n_missing for result in results] == [2, 0]
    assert counts[0] == counts[1]
    assert read_files(results[1].folder) == expected_files(config)


# The process of the kill test. It prints a line after each batch, and a kill comes after some of them.
PROGRAM = """
import sys
import time
from pathlib import Path
from tests.helpers.corpus import make_config
from trainer.data import encode, shards, tokenize

encode.ENCODE_BATCH_NBYTES = 100
shards.SHARD_NBYTES = 200

def progress(*counts):
    time.sleep(0.03)
    print("progress", flush=True)

folder = Path(sys.argv[1])
config = make_config(folder, folder / "data", type="json")
result = tokenize.tokenize_share(config, int(sys.argv[2]), int(sys.argv[3]), progress=progress, note=print)
print("complete" if result.meta else "incomplete")
"""


def start(config: TokenizeConfig, process: int, of: int) -> subprocess.Popen[str]:
    root = str(Path(prepcli.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(config.cache.parent), str(process), str(of)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )


def test_ids_of_two_dtypes_are_not_joined(tmp_path: Path):
    """The size of the model's vocabulary is not part of the identity of ids."""
    folder = tmp_path / "data"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    files = [numbers.integers(0, 200, 500).astype("<u2") for _ in range(4)]
    for index, ids in enumerate(files):
        np.save(folder / f"{index}.npy", ids)
    config = make_config(tmp_path, folder, type="ids")
    assert tokenize(change(config, vocab=5000), 0, 2).tokens is None
    tokens = tokenize(change(config, vocab=100_000), 1, 2).tokens
    assert tokens is not None
    assert tokens.ids[:].tolist() == np.concatenate(files).tolist()


def test_shard_is_accepted_after_its_folder_is_removed(tmp_path: Path):
    store = tmp_path / NAME
    with writing_shard(store, 0, "uint16") as first:
        fill(first)
    (whole,) = store.iterdir()
    expected = read_files(store)
    new = store_files.new_folder
    with pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def removed(folder: Path) -> Iterator[Path]:
            with new(folder) as temporary:
                temporary.rmdir()
                yield temporary

        patch.setattr(shards, "new_folder", removed)
        with writing_shard(store, 0, "uint16") as second:
            fill(second)
    assert [*store.iterdir()] == [whole]
    assert read_files(store) == expected


KILL_PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.helpers.corpus import make_config
from trainer.data import encode, shards, tokenize

encode.ENCODE_BATCH_NBYTES = 100
shards.SHARD_NBYTES = 200
n_left = int(sys.argv[2])

def kill_later(event, arguments):
    global n_left
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
        n_left -= str(arguments[0]).startswith(str(config.cache))
        if n_left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
config = make_config(folder, folder / "data", type="json")
sys.addaudithook(kill_later)
tokenize.tokenize_files(config, progress=lambda *counts: None, note=print)
"""


@pytest.mark.slow
def test_kill_before_each_change_of_the_cache_continues(config: TokenizeConfig):
    """Each run is killed before a change to a file or folder of the cache, at a later one than the run before."""
    expected = expected_files(config)
    root = str(Path(prepcli.__file__).parents[1])
    code = -signal.SIGKILL
    n_runs = 0
    while code:
        command = [sys.executable, "-c", KILL_PROGRAM, str(config.cache.parent), str(3 + n_runs)]
        code = subprocess.run(
            command, check=False, env=os.environ | {"PYTHONPATH": root}
        ).returncode
        assert code in (0, -signal.SIGKILL)
        n_runs += 1
    assert n_runs > 3
    files = read_files(tokenize(config).folder)
    # A kill before the rename of the list of shards leaves its temporary file.
    assert {name: data for name, data in files.items() if not name.startswith(".")} == expected


def test_store_of_two_dtypes_is_damaged(tmp_path: Path):
    folder = tmp_path / NAME
    for shard, dtype in enumerate(("uint16", "uint32")):
        with writing_shard(folder, shard, dtype) as writer:
            fill(writer)
    names = ("00000", "00001")
    write_meta(folder, join_shards(NAME, {name: read_shard(folder, name) for name in names}))
    with pytest.raises(DamagedStoreError, match="uint16 and uint32"):
        read_meta(folder)
