"""Tokens in several processes: made once for each cache, and equal in all."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.core.process_group import SingleProcess
from tests.helpers.corpus import TEXT, make_config
from tests.helpers.earlier_tokens import chat_config, make_earlier_tokens
from tests.helpers.processes import finish, start_processes
from tests.helpers.thread_groups import ThreadGroup, run_group, run_together
from trainer.data import shards
from trainer.data.examples import IdentityChange
from trainer.data.store import DamagedStoreError
from trainer.data.tokenize import open_tokens, tokenize_files, tokenize_in_group, tokenize_share
from trainer.data.tokenize_config import RecordedTokens, TokenizeConfig
from trainer.distributed import agreement


@pytest.fixture
def config(tmp_path: Path) -> TokenizeConfig:
    (tmp_path / "a.txt").write_text(TEXT)
    return make_config(tmp_path, tmp_path / "a.txt")


def tokenize(
    process: ThreadGroup, config: TokenizeConfig
) -> tuple[list[int], list[str], list[int]]:
    """Return the tokens, the notes, and the tokenized bytes of the process."""
    notes: list[str] = []
    progress: list[int] = []
    tokens = tokenize_in_group(
        config, process, progress=lambda *counts: progress.append(counts[0]), note=notes.append
    )
    return tokens.ids[:].tolist(), notes, progress


def test_process_0_makes_the_tokens_of_a_shared_cache(config: TokenizeConfig):
    first, *others = run_group(3, lambda process: tokenize(process, config))
    assert first[2] == [0, len(TEXT)]
    assert others == [(first[0], first[1], [])] * 2
    again = run_group(3, lambda process: tokenize(process, config))
    assert [result[2] for result in again] == [[], [], []]
    assert [path.name for path in config.cache.iterdir() if path.is_dir()] == [
        open_identity(config)
    ]


def open_identity(config: TokenizeConfig) -> str:
    """Return the identity of the only store in the cache."""
    (store,) = [path for path in config.cache.iterdir() if path.is_dir()]
    return store.name


def test_processes_without_the_files_open_the_tokens(config: TokenizeConfig):
    """A process without a share of the work reads no data file."""

    def tokenize_own_files(process: ThreadGroup) -> list[int]:
        return tokenize(
            process, config if process.index == 0 else replace(config, paths=("missing.txt",))
        )[0]

    results = run_group(2, tokenize_own_files)
    assert results[0] == results[1]


def test_processes_with_own_caches_make_own_tokens(config: TokenizeConfig, tmp_path: Path):
    def tokenize_own_cache(process: ThreadGroup) -> tuple[list[int], list[int]]:
        ids, _, progress = tokenize(
            process, replace(config, cache=tmp_path / f"cache{process.index}")
        )
        return ids, progress

    results = run_group(2, tokenize_own_cache)
    assert results[0] == results[1]
    assert results[0][1] == [0, len(TEXT)]


def test_other_data_on_another_host_is_an_error(config: TokenizeConfig, tmp_path: Path):
    (tmp_path / "b.txt").write_text(TEXT * 2)

    def tokenize_own_files(process: ThreadGroup) -> None:
        path = str(tmp_path / f"{'ab'[process.index]}.txt")
        tokenize(process, replace(config, cache=tmp_path / f"cache{process.index}", paths=(path,)))

    with pytest.raises(
        PrepError,
        match="the data of process 1 differs from the data of process 0 - its tokens are ",
    ):
        run_group(2, tokenize_own_files)


@pytest.fixture
def earlier_hosts(tmp_path: Path) -> str:
    """Make the tokens of an earlier version on two hosts. Return their identity."""
    identities: list[str] = []
    for host in ("host0", "host1"):
        (tmp_path / host).mkdir()
        config = chat_config(tmp_path / host)
        identities.append(make_earlier_tokens(config, IdentityChange.CHAT_RENDERING)[0])
    assert identities[0] == identities[1]
    return identities[0]


def test_processes_with_own_caches_keep_recorded_tokens(tmp_path: Path, earlier_hosts: str):
    """Only process 0 sees the run, whose tokens an earlier version has made."""
    results = finish(
        start_processes(
            *(str(tmp_path), earlier_hosts),
            count=2,
            devices=1,
            module="tests.helpers.recorded_tokens_process",
        )
    )
    assert [code for code, _, _ in results] == [0, 0], results
    assert [out.split()[-1] for _, out, _ in results] == [earlier_hosts] * 2


def resume_on_hosts(
    folder: Path, recorded: str, conversations: tuple[int, int] = (9, 9)
) -> PrepError:
    """Resume on two hosts, and return the error of process 1. Process 0 alone has the recorded tokens."""

    def tokenize_on_host(process: ThreadGroup) -> None:
        index = process.index
        config = chat_config(folder / f"host{index}", conversations=conversations[index])
        if process.index == 0:
            config = replace(config, recorded=RecordedTokens((recorded,), None))
        tokenize(process, config)

    error = run_together(2, tokenize_on_host)[1]
    assert isinstance(error, PrepError)
    return error


def test_host_without_the_recorded_tokens_names_them(tmp_path: Path, earlier_hosts: str):
    missing = chat_config(tmp_path / "host1").cache / earlier_hosts
    shutil.rmtree(missing)
    error = resume_on_hosts(tmp_path, earlier_hosts)
    assert error.why.startswith(IdentityChange.CHAT_RENDERING.value)
    assert error.why.endswith(f", and {missing} is missing or damaged")


def test_host_with_changed_data_refuses_a_resumed_run(tmp_path: Path, earlier_hosts: str):
    error = resume_on_hosts(tmp_path, earlier_hosts, conversations=(9, 8))
    assert error.what == "the data has changed since the run began"
    assert error.hint.startswith("use the files with which the run began, on all hosts; ")


def test_open_tokens_checks_sizes(config: TokenizeConfig):
    run_group(1, lambda process: tokenize(process, config))
    identity = open_identity(config)
    path = config.cache / identity / "00000" / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedStoreError, match=r"tokens\.bin has"):
        open_tokens(config, identity, note=print)


@pytest.fixture
def hosts_by_thread(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Return hosts by thread. All other threads are on one host."""
    names: dict[int, str] = {}
    monkeypatch.setattr(
        agreement, "machine_id", lambda: names.get(threading.get_ident(), "one host for all")
    )
    return names


@pytest.fixture
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_NBYTES", 200)


def write_files(config: TokenizeConfig, folder: Path) -> TokenizeConfig:
    """Write data files of different sizes, and return a config of them."""
    folder.mkdir()
    for index in range(7):
        (folder / f"{index}.txt").write_text(TEXT * (index + 1))
    return replace(config, paths=(str(folder),))


@pytest.mark.usefixtures("_small_shards")
@pytest.mark.parametrize("processes_per_host", [1, 2])
def test_each_host_makes_a_share(
    config: TokenizeConfig,
    tmp_path: Path,
    hosts_by_thread: dict[int, str],
    processes_per_host: int,
):
    config = write_files(config, tmp_path / "data")

    def tokenize_on_host(process: ThreadGroup) -> tuple[list[int], list[int]]:
        hosts_by_thread[threading.get_ident()] = f"host {process.index // processes_per_host}"
        ids, _, progress = tokenize(process, config)
        return ids, progress

    results = run_group(2 * processes_per_host, tokenize_on_host)
    alone = tokenize_files(
        replace(config, cache=tmp_path / "alone"),
        progress=lambda *counts: None,
        note=lambda text: None,
    )
    assert {tuple(ids) for ids, _ in results} == {tuple(alone.ids[:].tolist())}
    has_share = [max(progress, default=0) > 0 for _, progress in results]
    assert has_share == [index % processes_per_host == 0 for index in range(len(results))]
    # Complete tokens are no work for anyone.
    again = run_group(2, lambda process: tokenize(process, config))
    assert [result[2] for result in again] == [[], []]


@pytest.mark.usefixtures("_small_shards")
def test_host_without_the_files_makes_no_share(
    config: TokenizeConfig, tmp_path: Path, hosts_by_thread: dict[int, str]
):
    config = write_files(config, tmp_path / "data")

    def tokenize_on_host(process: ThreadGroup) -> list[int]:
        hosts_by_thread[threading.get_ident()] = f"host {process.index}"
        paths = config.paths if process.index == 0 else ("missing.txt",)
        return tokenize(process, replace(config, paths=paths))[0]

    results = run_group(2, tokenize_on_host)
    assert results[0] == results[1]


@pytest.mark.usefixtures("_small_shards")
def test_hosts_make_damaged_tokens_again(
    config: TokenizeConfig, tmp_path: Path, hosts_by_thread: dict[int, str]
):
    config = write_files(config, tmp_path / "data")

    def tokenize_on_host(process: ThreadGroup) -> list[int]:
        hosts_by_thread[threading.get_ident()] = f"host {process.index}"
        return tokenize(process, config)[0]

    before = run_group(2, tokenize_on_host)
    path = config.cache / open_identity(config) / "00000" / "tokens.bin"
    path.write_bytes(bytes(len(path.read_bytes())))
    assert run_group(2, tokenize_on_host) == before


@pytest.mark.usefixtures("_small_shards")
def test_one_process_continues_the_shards_of_others(config: TokenizeConfig, tmp_path: Path):
    config = write_files(config, tmp_path / "data")
    tokenize_share(config, 0, 2, progress=lambda *counts: None, note=lambda text: None)
    notes: list[str] = []
    tokens = tokenize_in_group(
        config, SingleProcess(), progress=lambda *counts: None, note=notes.append
    )
    assert notes[0].startswith("continuing after ")
    alone = replace(config, cache=tmp_path / "alone")
    expected = tokenize_files(alone, progress=lambda *counts: None, note=lambda text: None)
    assert tokens.ids[:].tolist() == expected.ids[:].tolist()
