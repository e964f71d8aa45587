"""Tokens of several processes: the bytes of one process, after any deaths, from equal inputs only."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli
from prepcli.core.errors import PrepError
from tests.helpers.corpus import TEXT, make_config, write_json
from tests.trainer.data.readers.test_megatron_file import DOCUMENTS, write_dataset
from trainer.data import store_journal, store_writer
from trainer.data.files import DataFile
from trainer.data.shard_plan import MAX_SHARDS, PLAN_FILE, make_plan, read_plan, write_plan
from trainer.data.store import StoreMeta, map_tokens
from trainer.data.token_shards import ShardedTokens, tokenize_share
from trainer.data.tokenize import TokenizeConfig, tokenize_files

N_FILES = 7


@pytest.fixture
def config(tmp_path: Path) -> TokenizeConfig:
    """Return a config of JSON files of different sizes."""
    write_data(tmp_path / "data")
    return make_config(tmp_path, tmp_path / "data", type="json")


def write_data(folder: Path) -> None:
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for index in range(N_FILES):
        lengths = numbers.integers(0, len(TEXT), 3 * index + 1)
        write_json(folder / f"{index}.jsonl", [TEXT[:length] for length in lengths])


def tokenize(config: TokenizeConfig, process: int = 0, of: int = 1) -> ShardedTokens:
    return tokenize_share(
        config, process, of, progress=lambda *counts: None, note=lambda text: None
    )


def expected_files(config: TokenizeConfig) -> dict[str, bytes]:
    """Return the files of the store of one process, made in another cache."""
    alone = replace(config, cache=config.cache.with_name("alone"))
    tokens = tokenize_files(alone, progress=lambda *counts: None, note=lambda text: None)
    return read_files(alone.cache / tokens.identity)


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def plan_folder(config: TokenizeConfig) -> Path:
    (folder,) = config.cache.glob("shards-*")
    return folder


@pytest.mark.parametrize("of", [1, 2, 4, 9])
def test_store_has_the_bytes_of_one_process(config: TokenizeConfig, of: int):
    results = [tokenize(config, process, of) for process in reversed(range(of))]
    assert [result.meta is not None for result in results] == [False] * (of - 1) + [True]
    assert read_files(results[-1].folder) == expected_files(config)
    assert [path.name for path in config.cache.glob("shards-*")] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "json", "fields": "[text], text"},
        {"type": "json", "max_examples": 9},
        {"type": "json", "bad_lines": 2},
        {"type": "text"},
        {"type": "json", "packing": "documents"},
    ],
    ids=["weights", "limit", "bad-lines", "text", "documents"],
)
def test_settings_keep_the_bytes_of_one_process(tmp_path: Path, changes: dict[str, object]):
    write_data(tmp_path / "data")
    with (tmp_path / "data" / "3.jsonl").open("a") as file:
        file.write("{\n" if "bad_lines" in changes else "")
    if changes["type"] == "text":
        for path in (tmp_path / "data").iterdir():
            path.rename(path.with_suffix(".txt"))
    config = make_config(tmp_path, tmp_path / "data", **changes)
    results = [tokenize(config, process, 3) for process in range(3)]
    assert read_files(results[-1].folder) == expected_files(config)


def test_later_process_finds_the_complete_store(config: TokenizeConfig):
    for process in range(2):
        tokenize(config, process, 2)
    again = tokenize(config, 1, 2)
    assert again.meta is not None
    assert [path.name for path in config.cache.glob("shards-*")] == []


def test_another_number_of_processes_continues(config: TokenizeConfig):
    assert tokenize(config, 0, 3).n_missing == 4
    assert tokenize(config, 1, 2).n_missing == 2
    assert tokenize(config).n_missing == 0
    assert read_files(config.cache / tokenize(config).folder.name) == expected_files(config)


def test_file_name_outside_utf8_is_supported(config: TokenizeConfig):
    folder = Path(config.paths[0])
    (folder / "3.jsonl").rename(folder / os.fsdecode(b"3\xff.jsonl"))
    results = [tokenize(config, process, 2) for process in range(2)]
    assert read_files(results[-1].folder) == expected_files(config)


def test_damaged_shard_is_made_again(config: TokenizeConfig):
    tokenize(config, 0, 2)
    path = next(plan_folder(config).glob("*/*/tokens.bin"))
    path.write_bytes(bytes(len(path.read_bytes())))
    assert read_files(tokenize(config, 1, 2).folder) == expected_files(config)


def test_damaged_store_is_made_again(config: TokenizeConfig):
    results = [tokenize(config, process, 2) for process in range(2)]
    path = results[1].folder / "tokens.bin"
    path.write_bytes(bytes(len(path.read_bytes())))
    assert read_files(tokenize(config, 0, 2).folder) == expected_files(config)


def test_changed_file_is_one_error(config: TokenizeConfig, tmp_path: Path):
    tokenize(config, 0, 2)
    path = tmp_path / "data" / "1.jsonl"
    path.write_text(path.read_text().replace("cat", "hat"))
    with pytest.raises(PrepError, match=r"1\.jsonl changed while it was read"):
        tokenize(config, 1, 2)


def test_change_after_a_shard_is_noticed_without_digests(config: TokenizeConfig):
    """The stamps of the last process must not stand for files that were read before the change."""
    tokenize(config, 0, 2)
    path = Path(config.paths[0]) / "0.jsonl"
    content = path.read_text()
    path.write_text(content.replace("the", "cat"))
    old = tokenize(config, 1, 2)
    assert old.meta is not None
    opened = tokenize_files(
        replace(config, checks_digests=False),
        progress=lambda *counts: None,
        note=lambda text: None,
    )
    assert opened.identity != old.meta.identity
    assert read_files(config.cache / opened.identity) == expected_files(config)


def test_grown_file_is_one_error(config: TokenizeConfig, tmp_path: Path):
    tokenize(config, 0, 2)
    with (tmp_path / "data" / "0.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    message = r"0\.jsonl differs from the plan of the other processes - it has \d+ bytes"
    with pytest.raises(PrepError, match=message):
        tokenize(config, 1, 2)


def test_missing_file_is_one_error(config: TokenizeConfig, tmp_path: Path):
    tokenize(config, 0, 2)
    (tmp_path / "data" / "6.jsonl").unlink()
    message = (
        "differs from the plan of the other processes - this process has 6 files, the plan has 7"
    )
    with pytest.raises(PrepError, match=message):
        tokenize(config, 1, 2)


def test_plan_of_another_recipe_is_one_error(config: TokenizeConfig):
    tokenize(config, 0, 2)
    other = replace(config, examples=replace(config.examples, fields="[id], text"))
    with pytest.raises(PrepError, match="are of another recipe - the tokenizer or a setting"):
        tokenize(other, 1, 2)


def test_damaged_plan_is_one_error(config: TokenizeConfig):
    tokenize(config, 0, 2)
    path = plan_folder(config) / PLAN_FILE
    values = json.loads(path.read_bytes())
    values["shard_ends"][0] += 1
    path.write_text(json.dumps(values))
    with pytest.raises(PrepError, match=r"plan\.json is damaged"):
        tokenize(config, 1, 2)


def test_first_writer_of_a_plan_wins(tmp_path: Path):
    files = [DataFile(Path("a"), 3, "x"), DataFile(Path("b"), 4, "y")]
    first = make_plan("settings", "first", files)
    write_plan(tmp_path, first)
    write_plan(tmp_path, make_plan("settings", "second", files))
    assert read_plan(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [PLAN_FILE]


def test_many_files_share_shards():
    files = [DataFile(Path(str(index)), 1 + index % 7, "x") for index in range(10_000)]
    plan = make_plan("settings", "identity", files)
    assert plan.n_shards <= MAX_SHARDS + 1
    ranges = [plan.shard_files(shard) for shard in range(plan.n_shards)]
    assert [index for part in ranges for index in range(part.start, part.stop)] == [*range(10_000)]


def test_index_and_ids_share_a_shard(tmp_path: Path):
    """Half of the datasets are the work of each of two processes."""
    (tmp_path / "data").mkdir()
    for name in "abcd":
        write_dataset(tmp_path / "data" / name, DOCUMENTS)
    config = make_config(tmp_path, tmp_path / "data", type="megatron")
    results: list[ShardedTokens] = []
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
from trainer.data import encode, store_journal, store_writer, token_shards

encode.ENCODE_BATCH_NBYTES = 100
store_journal.INTERVAL_S = 0.0
commit = store_writer.TokenWriter.commit

def commit_slowly(writer, position):
    commit(writer, position)
    time.sleep(0.03)
    print("committed", flush=True)

store_writer.TokenWriter.commit = commit_slowly
folder = Path(sys.argv[1])
config = make_config(folder, folder / "data", type="json")
result = token_shards.tokenize_share(
    config, int(sys.argv[2]), int(sys.argv[3]), progress=lambda *counts: None, note=print
)
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


def read_lines(child: subprocess.Popen[str], n_lines: int) -> str:
    """Return the next lines of a process, or fewer at its end."""
    assert child.stdout is not None
    return "".join(child.stdout.readline() for _ in range(n_lines))


@pytest.mark.waits
@pytest.mark.parametrize(
    "of", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_killed_processes_continue(config: TokenizeConfig, of: int):
    """Kill each process after random batches, several times, until it ends by itself."""
    expected = expected_files(config)
    numbers = random.Random(of)
    running = {process: start(config, process, of) for process in range(of)}
    output = ""
    for n_kills in range(2 * of):
        process = n_kills % of
        output += read_lines(running[process], numbers.randint(1, 6))
        running[process].kill()
        output += running[process].communicate()[0]
        running[process] = start(config, process, of)
    for child in running.values():
        output += child.communicate()[0]
        assert child.returncode == 0
    assert "\ncomplete\n" in output
    assert "continuing after" in output
    assert read_files(tokenize(config).folder) == expected


class KilledError(BaseException):
    """The end of a process. `build_store` leaves its work to the next one, as after a kill."""


def tokenize_until(n_shards: int, config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenize all shards, and end the merge after some of them."""
    append = store_writer.TokenWriter.append_documents
    merged = 0

    def append_some(writer: store_writer.TokenWriter, *args: Any, **options: Any) -> None:
        nonlocal merged
        if merged == n_shards:
            raise KilledError
        append(writer, *args, **options)
        merged += 1

    tokenize(config, 0, 2)
    with monkeypatch.context() as patch:
        patch.setattr(store_writer.TokenWriter, "append_documents", append_some)
        with pytest.raises(KilledError):
            tokenize(config, 1, 2)


@pytest.mark.parametrize("n_shards", range(1, N_FILES))
@pytest.mark.parametrize("is_alone", [False, True])
def test_kill_during_the_merge_continues(
    config: TokenizeConfig, n_shards: int, is_alone: bool, monkeypatch: pytest.MonkeyPatch
):
    """The next process appends the rest, whether it merges or tokenizes the next file."""
    monkeypatch.setattr(store_journal, "INTERVAL_S", 0.0)
    tokenize_until(n_shards, config, monkeypatch)
    of = 2
    if is_alone:
        # Without the plan, only the journal of the merge says which file comes next.
        shutil.rmtree(plan_folder(config))
        of = 1
    assert read_files(tokenize(config, 0, of).folder) == expected_files(config)


def test_empty_stores_are_mapped(tmp_path: Path):
    for name in ("tokens.bin", "documents.bin"):
        (tmp_path / name).write_bytes(b"")
    tokens = map_tokens(tmp_path, StoreMeta(tmp_path.name, "uint16", 0, 0, -1), 8)
    assert (tokens.n_tokens, tokens.n_documents) == (0, 0)
