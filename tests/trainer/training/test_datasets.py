"""Datasets of a recipe: their settings, several sources, and tokens that processes share."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.registry import family_of
from tests.helpers.corpus import TEXT, encode, make_config, make_tokenizer
from tests.helpers.earlier_tokens import chat_config, make_earlier_tokens
from tests.helpers.processes import finish, start_processes
from tests.helpers.thread_groups import ThreadGroup, run_group, run_together
from tests.helpers.tiny_configs import LLAMA, T5
from trainer.data import shards
from trainer.data.examples import IdentityChange
from trainer.data.packing import ConcatenatedDataset
from trainer.data.tokenize import tokenize_files, tokenize_in_group
from trainer.data.tokenize_config import RecordedTokens, TokenizeConfig
from trainer.distributed import agreement
from trainer.nn.model_spec import build_model
from trainer.recipe import load_recipe
from trainer.training.datasets import DatasetBuilder, Datasets, make_order, tokens_by_source

# Datasets of a recipe: settings that a model cannot follow are errors, the others reach the batches.

RECIPE = """
mesh = "1,1,1"
[model]
path = "x"
[data]
type = "json"
path = "{folder}/a.jsonl"
seq_length = 4
[batch]
size = 1
[optimizer]
lr = 1e-3
[train]
steps = 1
"""

SPANS = (
    "data.objective=span_corruption",
    "data.source_length=10",
    "data.seq_length=6",
    "data.fields=prompt+completion",
)

LINES = """\
{"prompt": "the cat", "completion": "the hat sat", "how": "[prompt+completion], prompt"}
{"prompt": "the mat", "completion": "the cat sat", "how": "prompt"}
"""


def load_datasets(
    folder: Path,
    config: dict[str, Any],
    *overrides: str,
    note: Callable[[str], None] = print,
    **changes: Any,
) -> Datasets:
    """Return the datasets of a recipe for a model with special tokens 1 (bos) and 2 (eos)."""
    (folder / "a.jsonl").write_text(LINES)
    (folder / "x.toml").write_text(RECIPE.replace("{folder}", str(folder)))
    config = {**config, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 304, **changes}
    model = build_model(family_of(config), config, is_tied=False)
    return DatasetBuilder(
        load_recipe(folder / "x.toml", overrides).recipe,
        model,
        model_config=config,
        tokenizer=make_tokenizer(folder / "tokenizer.json"),
        cache=folder / "cache",
        progress=lambda *counts: None,
        note=note,
    ).build()


def read_tokens(datasets: Datasets) -> tuple[list[int], list[float]]:
    """Return inputs and weights of all rows, concatenated."""
    batch = datasets.train.get_batch(range(datasets.train.n_rows))
    return batch["tokens"].ravel().tolist(), batch["weights"].ravel().tolist()


def test_prompts_have_no_loss(tmp_path: Path):
    ids, weights = read_tokens(
        load_datasets(tmp_path, LLAMA, "data.format=prompt_completion", "data.add_bos=true")
    )
    expected: list[tuple[int, int]] = []
    for prompt, completion in (("the cat", "the hat sat"), ("the mat", "the cat sat")):
        expected += [
            (1, 0),
            *((token_id, 0) for token_id in encode(tmp_path / "tokenizer.json", prompt)),
        ]
        expected += [
            (token_id, 1) for token_id in (*encode(tmp_path / "tokenizer.json", completion), 2)
        ]
    n = len(ids)
    assert ids == [token_id for token_id, _ in expected[:n]]
    assert n > len(expected) - 4
    shifted = [weight for _, weight in expected[1:]]
    assert weights == [0 if i % 4 == 3 else shifted[i] for i in range(n)]


def test_always_start_with_bos_reaches_every_row(tmp_path: Path):
    overrides = ("data.fields=completion", "data.holdout=0.5", "data.always_start_with_bos=true")
    datasets = load_datasets(tmp_path, LLAMA, *overrides)
    assert datasets.evaluation is not None
    for dataset in (datasets.train, datasets.evaluation):
        tokens = dataset.get_batch(range(dataset.n_rows))["tokens"]
        assert (tokens[:, 0] == 1).all()
        assert not (tokens[:, 1:] == 1).any()


def test_max_examples_limits_only_the_training_data(tmp_path: Path):
    overrides = (
        "data.fields=completion",
        "data.seq_length=2",
        f"data.eval_path={tmp_path}/a.jsonl",
    )
    limited = load_datasets(tmp_path, LLAMA, *overrides, "data.max_examples=1")
    assert limited.evaluation is not None
    assert limited.train.n_rows < limited.evaluation.n_rows


@pytest.mark.parametrize(
    ("config", "changes", "overrides", "what", "why"),
    [
        (LLAMA, {"bos_token_id": None}, ["data.add_bos=true"], "`data.add_bos` is true", "no bos_token_id"),
        (LLAMA, {"bos_token_id": 304}, ["data.add_bos=true"], "`data.add_bos` is true", "bos_token_id 304, but 304"),
        (LLAMA, {"eos_token_id": None}, ["data.add_eos=true"], "`data.add_eos` is true", "no eos_token_id"),
        (
            *(LLAMA, {"bos_token_id": None}, ["data.always_start_with_bos=true"]),
            *("`data.always_start_with_bos` is true", "no bos_token_id"),
        ),
        (
            *(LLAMA, {}, ["data.fields=[prompt], completion", "data.source_length=4"]),
            *("`data.source_length` is 4", "llama has no encoder"),
        ),
        (LLAMA, {}, ["data.fields=<|304|>, prompt"], '`data.fields` is "<|304|>, prompt"', "<|304|> is not in the"),
        (T5, {}, ["data.fields=prompt"], "t5 has an encoder, but the data has no source column", ""),
        (T5, {}, ["data.format=chat"], "the tokenizer in ", "looked for chat_template.jinja"),
        (T5, {}, ["data.prepend_text=x"], "`data.prepend_text` is 'x'", "t5 has an encoder"),
        (T5, {}, [*SPANS], "has no token <extra_id_0>", "and a sentinel token for each"),
        (
            *(LLAMA, {}, ["data.packing=none", "data.fields=<|1|>", "data.add_eos=false"]),
            *("the data has no token to train on", "each document has one token"),
        ),
        (
            *(LLAMA, {}, ["data.fields_from_example=prompt"]),
            *(':1: no column `the cat`', "its columns: `prompt`, `completion`, `how`"),
        ),
    ],
)  # fmt: skip
def test_settings_that_the_model_cannot_follow_are_rejected(
    tmp_path: Path,
    config: dict[str, Any],
    changes: dict[str, Any],
    overrides: list[str],
    what: str,
    why: str,
):
    with pytest.raises(PrepError) as caught:
        load_datasets(tmp_path, config, *overrides, **changes)
    assert what in caught.value.what
    assert why in caught.value.why
    assert (caught.value.code == USAGE) == caught.value.what.startswith(("`", "t5"))


def test_fields_from_example_differ_by_record(tmp_path: Path):
    ids, weights = read_tokens(
        load_datasets(tmp_path, LLAMA, "data.fields_from_example=how", "data.seq_length=2")
    )
    tokenizer = tmp_path / "tokenizer.json"
    expected = [(token_id, 0) for token_id in encode(tokenizer, "the cat the hat sat")]
    expected += [
        (token_id, 1)
        for text in ("the cat", "the mat")
        for token_id in (*encode(tokenizer, text), 2)
    ]
    assert ids == [token_id for token_id, _ in expected[: len(ids)]]
    assert weights[::2] == [weight for _, weight in expected[1 : len(ids) + 1 : 2]]


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_packing_of_documents_reaches_the_rows(tmp_path: Path, packing: str):
    notes: list[str] = []
    overrides = (
        f"data.packing={packing}",
        "data.fields=completion",
        "data.seq_length=64",
        "data.holdout=0",
    )
    datasets = load_datasets(tmp_path, LLAMA, *overrides, note=notes.append)
    batch = datasets.train.get_batch(range(datasets.train.n_rows))
    expected = [
        [*encode(tmp_path / "tokenizer.json", text), 2] for text in ("the hat sat", "the cat sat")
    ]
    n_tokens = sum(map(len, expected))
    if packing == "none":
        assert [
            row[: len(ids)].tolist() for row, ids in zip(batch["tokens"], expected, strict=True)
        ] == expected
        assert "segment_ids" not in batch
    else:
        assert batch["tokens"][0, :n_tokens].tolist() == [
            token_id for ids in expected for token_id in ids
        ]
        assert batch["segment_ids"][0].max() == 2
    places = f"{100 * n_tokens / batch['tokens'].size:.2f} % of their places have a token"
    assert notes == [
        f"{n_tokens} tokens in 2 documents",
        f"{len(batch['tokens'])} sequences of 64: {places}",
    ]


def test_span_corruption_reaches_the_rows(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(make_tokenizer(tmp_path / "tokenizer.json")))
    tokenizer.add_special_tokens(["<extra_id_0>"])
    tokenizer.save(str(tmp_path / "spans.json"))
    sentinel = tokenizer.token_to_id("<extra_id_0>")
    datasets = load_datasets(
        tmp_path, T5, *SPANS, f"data.tokenizer={tmp_path}/spans.json", vocab_size=310
    )
    batch = datasets.train.get_batch([0])
    text = [
        token_id
        for line in ("the cat the hat sat", "the mat the cat sat")
        for token_id in (*encode(tmp_path / "tokenizer.json", line), 2)
    ]
    # The only span has 2 tokens, and is at the end of the block.
    assert batch["source"].tolist() == [[*text[:8], sentinel, 2]]
    assert batch["targets"].tolist() == [[sentinel, *text[8:10], 2, 0, 0]]
    assert batch["tokens"].tolist() == [[0, sentinel, *text[8:10], 0, 0]]


def test_text_below_a_block_of_span_corruption_names_its_length(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(make_tokenizer(tmp_path / "tokenizer.json")))
    tokenizer.add_special_tokens([f"<extra_id_{number}>" for number in range(20)])
    tokenizer.save(str(tmp_path / "spans.json"))
    longer = ("data.source_length=200", "data.seq_length=64")
    with pytest.raises(PrepError, match="the data is shorter than one block") as caught:
        load_datasets(
            tmp_path, T5, *SPANS, *longer, f"data.tokenizer={tmp_path}/spans.json", vocab_size=330
        )
    assert caught.value.hint == "add more text, or a smaller `data.source_length`"


# Datasets of several sources: mixed by weight, or shuffled together, with the tokens of each counted.

SOURCE_RECIPE = """
[model]
path = "x"
[data]
seq_length = 4
holdout = {holdout}
{keys}
[[data.sources]]
name = "a"
path = "{folder}/a.txt"
{first}
[[data.sources]]
name = "b"
path = "{folder}/b.jsonl"
{second}
[batch]
size = 8
[optimizer]
lr = 1e-3
[train]
steps = 1
"""


def source_load_datasets(
    folder: Path, first: str = "", second: str = "", *, holdout: float = 0.25, keys: str = ""
) -> tuple[Datasets, list[str]]:
    """Return the datasets of two sources, and the notes."""
    (folder / "a.txt").write_text("the cat sat on the mat. " * 30)
    (folder / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"12 hats {i}"}) + "\n" for i in range(40))
    )
    text = (
        SOURCE_RECIPE.replace("{folder}", str(folder))
        .replace("{first}", first)
        .replace("{second}", second)
    )
    text = text.replace("{holdout}", str(holdout)).replace("{keys}", keys)
    (folder / "x.toml").write_text(text)
    config = {**LLAMA, "eos_token_id": 2, "vocab_size": 304}
    notes: list[str] = []
    datasets = DatasetBuilder(
        load_recipe(folder / "x.toml").recipe,
        build_model(family_of(config), config, is_tied=False),
        model_config=config,
        tokenizer=make_tokenizer(folder / "tokenizer.json"),
        cache=folder / "cache",
        progress=lambda *counts: None,
        note=notes.append,
    ).build()
    return datasets, notes


def test_weighted_sources_have_their_shares_and_token_counts(tmp_path: Path):
    datasets, notes = source_load_datasets(tmp_path, "weight = 3", "weight = 1")
    order = make_order(datasets, 8, seed=1, shuffle=True)
    assert isinstance(datasets.train, ConcatenatedDataset)
    n_first = datasets.train.parts["a"].n_rows
    rows = np.concatenate([order.rows(step) for step in range(10)])
    assert (rows < n_first).sum() == 60
    assert tokens_by_source(order, datasets.train, 10, tokens_per_row=4) == {
        "tokens.a": 240,
        "tokens.b": 80,
    }
    assert any(note.startswith("a: 75 % of ") for note in notes)


def test_sources_without_weights_are_shuffled_together(tmp_path: Path):
    datasets, _ = source_load_datasets(tmp_path)
    order = make_order(datasets, 8, seed=1, shuffle=True)
    n_rows = datasets.train.n_rows
    rows = np.concatenate([order.rows(step) for step in range(n_rows // 8 + 1)])
    assert sorted(rows[:n_rows]) == list(range(n_rows))
    assert tokens_by_source(order, datasets.train, 10, tokens_per_row=4) == {}


def test_holdout_is_taken_of_each_source(tmp_path: Path):
    datasets, _ = source_load_datasets(tmp_path)
    assert isinstance(datasets.train, ConcatenatedDataset)
    assert isinstance(datasets.evaluation, ConcatenatedDataset)
    for name, part in datasets.evaluation.parts.items():
        assert part.n_rows == pytest.approx(datasets.train.parts[name].n_rows / 3, abs=1)
    first = datasets.train.get_batch([0])["tokens"]
    assert (first == datasets.train.parts["a"].get_batch([0])["tokens"]).all()


def test_source_may_have_evaluation_files(tmp_path: Path):
    (tmp_path / "v.txt").write_text("the hat " * 20)
    second = f'eval_path = "{tmp_path}/v.txt"'
    datasets, _ = source_load_datasets(tmp_path, "", second, holdout=0.0)
    assert isinstance(datasets.evaluation, ConcatenatedDataset)
    assert [*datasets.evaluation.parts] == ["b"]
    assert len(datasets.identity.split()) == 3


def test_tokens_added_to_texts_are_not_added_to_ids(tmp_path: Path):
    np.save(tmp_path / "c.npy", np.arange(8).repeat(8))
    third = f'[[data.sources]]\nname = "c"\npath = "{tmp_path}/c.npy"'
    datasets, notes = source_load_datasets(tmp_path, second=third, keys="add_eos = true")
    assert isinstance(datasets.train, ConcatenatedDataset)
    assert datasets.train.parts["c"].get_batch([0])["tokens"].tolist() == [[0, 0, 0, 0]]
    assert "c: token ids are stored as they are, without `data.add_eos`" in notes


def test_error_of_a_source_names_it(tmp_path: Path):
    with pytest.raises(PrepError, match=r"^source `b`: .*b.jsonl:1: no column `body`"):
        source_load_datasets(tmp_path, second='fields = "body"')


# Tokens in several processes: made once for each cache, and equal in all.


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
